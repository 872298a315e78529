"""Log-probabilities of whole groups in which every prompt goes through the model once, with gradient.

The rollouts of a group are written behind one copy of their prompt, in one row. A mask lets every completion see the
prompt and itself alone, and each begins at the position where the prompt ends, so that the numbers are those of one row
per rollout, and so is their gradient. With half of the tokens in prompts and groups of eight, a pass has 44 % fewer
tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from scoregram.policy.choice import FLOORS, FORCED, IMPOSSIBLE, PROBES, is_plain_attention, largest, rounding_of, spread
from scoregram.policy.log_probs import token_log_probs
from scoregram.policy.modes import base_of, evaluating, hides_precision, without_autocast
from scoregram.types import LogProbs, Mask, TokenIds

PROMPT, PADDING = -1, -2
"""Owners of tokens that belong to no completion."""

_agrees: WeakKeyDictionary[nn.Module, dict[bool, bool]] = WeakKeyDictionary()
_sizes: WeakKeyDictionary[nn.Module, tuple[int, int]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Packed:
    """Groups as rows: `G` of them, `W` tokens wide."""

    ids: Tensor
    """`(G, W)`"""
    positions: Tensor
    """`(G, W)`"""
    owners: Tensor
    """`(G, W)`. Rollout within the group, or `PROMPT`, or `PADDING`."""
    predictors: Tensor
    """`(n,)` places in the flattened rows whose hidden states predict the `n` completion tokens; a prompt's last place
    stands there once for every rollout."""
    places: Tensor
    """`(n,)` places of these tokens in the flattened `(N, T)` batch that they came from."""

    @property
    def visible(self) -> Tensor:
        """`(G, 1, W, W)`: whether a token (third axis) sees another (fourth axis)."""
        width = self.ids.shape[1]
        before = torch.ones(width, width, dtype=torch.bool, device=self.ids.device).tril()
        seen, seer = self.owners[:, None, :], self.owners[:, :, None]
        return (((seen == PROMPT) | (seen == seer)) & before)[:, None]  # padding sees padding: it must see something


def packed(input_ids: TokenIds, completion_mask: Mask) -> Packed | None:
    """Neighbouring rollouts of one prompt behind a single copy of it; None if there are none to join.

    Rows must be prompt, completion and padding on the right, every completion in one piece, after at least one token.
    """
    rows, width = input_ids.tolist(), input_ids.shape[1]
    starts = completion_mask.int().argmax(1).tolist()
    lengths = completion_mask.sum(1).tolist()
    named = [(tuple(row[:start]), place) for place, (row, start) in enumerate(zip(rows, starts, strict=True))]
    groups = [(prompt, [place for _, place in same]) for prompt, same in groupby(named, key=lambda pair: pair[0])]
    if len(groups) == len(rows) or min(starts) == 0:
        return None
    wide = max(len(prompt) + sum(max(lengths[place] - 1, 0) for place in members) for prompt, members in groups)
    ids, positions, owners, predictors, places = [], [], [], [], []
    for number, (prompt, members) in enumerate(groups):
        row, at, owned = list(prompt), list(range(len(prompt))), [PROMPT] * len(prompt)
        for member, place in enumerate(members):
            start, length = starts[place], lengths[place]
            first, read = number * wide + len(row), max(length - 1, 0)  # the last token predicts nothing
            predictors += [number * wide + len(prompt) - 1, *range(first, first + read)][:length]
            places += range(place * width + start, place * width + start + length)
            row += rows[place][start : start + read]
            at += range(len(prompt), len(prompt) + read)
            owned += [member] * read
        spare = wide - len(row)
        ids.append(row + [0] * spare)
        positions.append(at + [0] * spare)
        owners.append(owned + [PADDING] * spare)
    tensors = (torch.tensor(each, device=input_ids.device) for each in (ids, positions, owners, predictors, places))
    return Packed(*tensors)


def group_log_probs(
    model: Any, input_ids: TokenIds, attention_mask: Mask, completion_mask: Mask, *, temperature: float = 1.0
) -> LogProbs:
    """As `token_log_probs`, with every prompt read once for neighbouring rollouts, where that is possible and pays."""
    together = packed(input_ids, completion_mask) if is_contiguous(attention_mask, completion_mask) else None
    if together is None or not pays(model, input_ids, attention_mask, together) or not is_right(model):
        return token_log_probs(model, input_ids, attention_mask, completion_mask, temperature=temperature)
    return packed_log_probs(model, together, input_ids, temperature)


def packed_log_probs(model: Any, together: Packed, input_ids: Tensor, temperature: float) -> Tensor:
    """`(N, T)` log-probabilities of the completion tokens, 0 elsewhere, from one pass over the packed rows."""
    with head_at_places(model.get_output_embeddings(), together.predictors):
        out = model(
            input_ids=together.ids,
            attention_mask=together.visible,
            position_ids=together.positions,
            use_cache=False,
        )
    logits = out.logits.to(torch.promote_types(out.logits.dtype, torch.float32))
    logits = logits / temperature if temperature != 1 else logits
    tokens = input_ids.flatten()[together.places]
    found = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(1)
    return found.new_zeros(input_ids.numel()).index_put((together.places,), found).view(input_ids.shape)


@contextmanager
def head_at_places(head: nn.Module, places: Tensor) -> Iterator[None]:
    """Inside, the head sees the hidden states at these places of the flattened batch, as rows of a matrix."""
    handle = head.register_forward_pre_hook(lambda _, given: (given[0].flatten(0, 1)[places], *given[1:]))
    try:
        yield
    finally:
        handle.remove()


def is_contiguous(attention_mask: Mask, completion_mask: Mask) -> bool:
    """Whether all padding is on the right and every completion is one piece that ends its row."""
    real = attention_mask.bool()
    gaps = (real[:, 1:] & ~real[:, :-1]).any() | (completion_mask[:, :-1] & ~completion_mask[:, 1:] & real[:, 1:]).any()
    return not bool(gaps) and bool((completion_mask <= real).all())


def pays(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, together: Packed) -> bool:
    """Whether the pass is shorter: fewer tokens through the weights outweigh the wider attention, masked pairs counted.

    A token costs two operations per weight outside the embeddings; a pair of tokens four per hidden unit and layer.
    """
    if model not in _sizes:
        _sizes[model] = sizes_of(model)
    weights, units = _sizes[model]
    apart, joined = input_ids.numel(), together.ids.numel()
    pairs = together.ids.shape[1] * joined - input_ids.shape[1] * apart
    return 2 * weights * (apart - joined) > 4 * units * pairs


def sizes_of(model: nn.Module) -> tuple[int, int]:
    """Weights outside the embeddings, and hidden units of all layers."""
    config = base_of(model).config.get_text_config()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    vocabulary = int(base_of(model).get_input_embeddings().weight.numel())  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    weights = max(sum(parameter.numel() for parameter in model.parameters()) - vocabulary, 1)
    return weights, int(config.hidden_size) * int(config.num_hidden_layers)


def is_right(model: nn.Module) -> bool:
    """Whether a model keeps packed completions apart: found once for each, by comparing log-probabilities."""
    is_cast = torch.is_autocast_enabled(next(model.parameters()).device.type)
    known = _agrees.setdefault(model, {})
    if is_cast not in known:
        base: Any = base_of(model)
        likely = base.config._attn_implementation == "sdpa" and base.get_output_embeddings() is not None
        known[is_cast] = likely and is_plain_attention(model, 32) and trial_agrees(model)
    return known[is_cast]


def trial_agrees(model: Any) -> bool:
    """Whether a few short texts have the same log-probabilities packed and apart."""
    vocabulary = int(base_of(model).get_input_embeddings().num_embeddings)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    device = next(model.parameters()).device
    endings = (FORCED, FORCED[::-1], FORCED[:1])
    texts = [(spread(prompt, vocabulary), spread(ending, vocabulary)) for prompt in PROBES for ending in endings]
    width = max(len(prompt) + len(ending) for prompt, ending in texts)
    place = torch.arange(width)
    sizes = torch.tensor([[len(prompt), len(prompt) + len(ending)] for prompt, ending in texts])
    ids = torch.tensor([[*prompt, *ending, *[0] * (width - len(prompt) - len(ending))] for prompt, ending in texts])
    attention, completion = place < sizes[:, 1:], (place >= sizes[:, :1]) & (place < sizes[:, 1:])
    ids, attention, completion = ids.to(device), attention.to(device), completion.to(device)
    together = packed(ids, completion)
    assert together is not None
    with evaluating(model), without_autocast(model) if hides_precision(model) else nullcontext():
        try:
            found = packed_log_probs(model, together, ids, 1.0)
        except IMPOSSIBLE:
            return False
        expected = token_log_probs(model, ids, attention, completion)
        alone = torch.cat(
            [token_log_probs(model, ids[[row]], attention[[row]], completion[[row]]) for row in range(len(ids))]
        )
    rounding = rounding_of(next(model.parameters())) * max(largest(expected), 1.0)
    return largest(found - expected) <= max(rounding, FLOORS * largest(alone - expected))
