"""Log-probabilities of whole groups in which nothing goes through the model twice, with gradient.

The rollouts of a group are written as a tree in one row: behind one copy of their prompt, and where several of them
begin alike, that beginning once. A mask lets every token see those that it follows, and each has the position that it
has in its own text, so that the numbers are those of one row per rollout, and so is their gradient. With half of the
tokens in prompts and groups of eight, a pass has 44 % fewer tokens; fewer still where rollouts repeat each other.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from scoregram.policy.choice import FLOORS, FORCED, IMPOSSIBLE, PROBES, is_plain_attention, largest, rounding_of, spread
from scoregram.policy.log_probs import token_log_probs
from scoregram.policy.modes import base_of, evaluating, hides_precision, without_autocast
from scoregram.types import LogProbs, Mask, TokenIds

_agrees: WeakKeyDictionary[nn.Module, dict[bool, bool]] = WeakKeyDictionary()
_sizes: WeakKeyDictionary[nn.Module, tuple[int, int]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Packed:
    """Groups as rows: `G` of them, `W` tokens wide."""

    ids: Tensor
    """`(G, W)`"""
    positions: Tensor
    """`(G, W)`"""
    ends: Tensor
    """`(G, W)`. The first place in the row behind all that follows a token; padding is followed by nothing."""
    predictors: Tensor
    """`(u,)` places in the flattened rows whose hidden states predict completion tokens."""
    chosen: Tensor
    """`(n,)` which of them predicts each of the `n` completion tokens."""
    places: Tensor
    """`(n,)` places of these tokens in the flattened `(N, T)` batch that they came from."""

    @property
    def visible(self) -> Tensor:
        """`(G, 1, W, W)`: whether a token (third axis) sees another (fourth axis): one that it follows, or itself."""
        place = torch.arange(self.ids.shape[1], device=self.ids.device)
        return ((place[:, None] >= place) & (place[:, None] < self.ends[:, None, :]))[:, None]


@dataclass(frozen=True)
class Tree:
    """Texts behind one prompt, every common beginning written once; all that follows a token comes right behind it."""

    tokens: np.ndarray
    positions: np.ndarray
    ends: np.ndarray
    """The first place behind all that follows a token."""
    paths: list[np.ndarray]
    """Of every text: the places that predict its tokens."""


def tree_of(prompt: np.ndarray, texts: Sequence[np.ndarray]) -> Tree:
    """Texts behind a prompt of at least one token. The last token of a text predicts nothing, and is not read."""
    reads = [text[:-1] for text in texts]
    tokens, positions, size = [prompt], [np.arange(len(prompt))], len(prompt)
    ends = np.zeros(size + sum(map(len, reads)), dtype=np.int64)
    paths = [prompt[:0]] * len(texts)
    before = branch = prompt[:0]  # the text before, and the places of its tokens
    for index in sorted(range(len(texts)), key=lambda index: reads[index].tolist()):
        read = reads[index]
        same = common_length(before, read)
        ends[branch[same:]] = size
        branch = np.concatenate([branch[:same], np.arange(size, size + len(read) - same)])
        tokens.append(read[same:])
        positions.append(np.arange(len(prompt) + same, len(prompt) + len(read)))
        size += len(read) - same
        paths[index] = np.concatenate([[len(prompt) - 1], branch])[: len(texts[index])]
        before = read
    ends[: len(prompt)] = ends[branch] = size
    return Tree(np.concatenate(tokens), np.concatenate(positions), ends[:size], paths)


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """How many elements two begin with alike."""
    shorter = min(len(one), len(other))
    differing = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differing[0]) if len(differing) else shorter


def packed(input_ids: TokenIds, completion_mask: Mask) -> Packed | None:
    """Neighbouring rollouts of one prompt as a tree behind a single copy of it; None if there are none to join.

    Rows must be prompt, completion and padding on the right, every completion in one piece, after at least one token.
    """
    rows, mask = input_ids.cpu().numpy(), completion_mask.cpu().numpy()
    starts, lengths = mask.argmax(1), mask.sum(1)
    prompts = [row[:start] for row, start in zip(rows, starts, strict=True)]
    groups = [list(same) for _, same in groupby(range(len(rows)), key=lambda row: prompts[row].tobytes())]
    if len(groups) == len(rows) or starts.min() == 0:
        return None
    texts = [row[start : start + length] for row, start, length in zip(rows, starts, lengths, strict=True)]
    trees = [tree_of(prompts[members[0]], [texts[row] for row in members]) for members in groups]
    wide = max(len(tree.tokens) for tree in trees)
    ids, positions = np.zeros((2, len(trees), wide), dtype=np.int64)
    ends = np.tile(np.arange(1, wide + 1), (len(trees), 1))
    for number, tree in enumerate(trees):
        here = slice(len(tree.tokens))
        ids[number, here], positions[number, here], ends[number, here] = tree.tokens, tree.positions, tree.ends
    paths = np.concatenate([number * wide + path for number, tree in enumerate(trees) for path in tree.paths])
    predicts = np.zeros(ids.size, dtype=bool)
    predicts[paths] = True
    chosen = (predicts.cumsum() - 1)[paths]
    made = ids, positions, ends, predicts.nonzero()[0], chosen, mask.reshape(-1).nonzero()[0]
    return Packed(*(torch.from_numpy(array).to(input_ids.device) for array in made))


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
    found = logits[together.chosen, tokens] - logits.logsumexp(1)[together.chosen]
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
