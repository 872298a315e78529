"""Which way of decoding is right for a model: found once for every model, by comparing logits."""

import warnings
from contextlib import suppress
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from scoregram.policy.fused import Fused, is_fusible
from scoregram.policy.launched import Launched, is_launchable
from scoregram.policy.modes import UNBOUNDED, PolicyWarning, base_of, hides_precision, without_autocast
from scoregram.policy.ways import Grown, Recomputed, Shared, Way, takes

PROBES = ((1, 2, 3), (4, 5, 6, 7, 8, 9, 1, 2), (9, 8, 7, 6, 5))
"""Prompts of unequal lengths to compare on; ids are taken modulo the vocabulary."""
FORCED = (3, 1, 2)
"""Tokens put behind each of them."""
ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Differences between logits, relative to the largest, that rounding explains; many models round to float32 inside."""
SHORT_PRODUCTS = 1e-2
"""The same for float32 on a GPU whose matrix products are allowed to round to fewer digits (TF32)."""
FLOORS = 4
"""Differences that rounding explains in a model that rounds worse, as a multiple of what another batch changes."""

IMPOSSIBLE = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What a model raises that cannot go a way."""

_agrees: WeakKeyDictionary[nn.Module, dict[tuple[type, bool], bool]] = WeakKeyDictionary()
_reaches: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def fastest_way(model: nn.Module, capacity: int) -> type[Way]:
    """The first of the ways that this model can go, for texts of up to `capacity` tokens.

    A way is gone if nothing in the model's description speaks against it and, in a trial of a few tokens that is made
    once for every model, its logits agree with those of a plain forward pass over each text alone.
    """
    known = _agrees.setdefault(model, {})
    is_cast = torch.is_autocast_enabled(next(model.parameters()).device.type)
    for way in candidates(model, capacity):
        if (way, is_cast) not in known:
            verdict = agrees(way, model)
            if verdict is None:
                return way  # nothing can be told of a broken model; the sampler will name it
            known[way, is_cast] = verdict
            if way is Shared and not verdict:
                warnings.warn(
                    "sample: this model's logits change when prompts of unequal lengths share a batch; "
                    "each length is drawn on its own, which is slower",
                    PolicyWarning,
                    stacklevel=3,
                )
        if known[way, is_cast]:
            return way
    if (Recomputed, is_cast) not in known:
        known[Recomputed, is_cast] = True
        warnings.warn(
            "sample: no way that keeps keys and values gives this model's logits; every token reads its text again",
            PolicyWarning,
            stacklevel=3,
        )
    return Recomputed


def candidates(model: nn.Module, capacity: int) -> list[type[Way]]:
    """Ways that the model's description admits, fastest first."""
    if not is_plain_attention(model, capacity):
        return [Grown]
    own = [Launched] if is_launchable(model) else []
    return [*own, Fused, Shared, Grown] if is_fusible(model) else [Shared, Grown]


def is_plain_attention(model: nn.Module, capacity: int) -> bool:
    """Whether every layer attends to all tokens of a text this long, keeps its own keys and values, and no more."""
    if model not in _reaches:
        _reaches[model] = reach_of(model)
    return capacity <= _reaches[model]


def reach_of(model: nn.Module) -> int:
    """Tokens that the narrowest layer attends to; 0 for a model whose layers keep anything but keys and values."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    config = base_of(model).config
    if not takes(model, "position_ids") or not takes(model, "past_key_values"):
        return 0
    text = config.get_text_config()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    if getattr(text, "alibi", False) or getattr(text, "num_kv_shared_layers", 0):
        return 0
    layers = DynamicCache(config=config).layers  # pyright: ignore[reportArgumentType]
    reaches = {DynamicLayer: lambda _: UNBOUNDED, DynamicSlidingWindowLayer: window_of}
    return min((reaches.get(type(layer), lambda _: 0)(layer) for layer in layers), default=UNBOUNDED)


def window_of(layer: object) -> int:
    """Tokens that a sliding layer sees."""
    return int(getattr(layer, "sliding_window", 0))


def agrees(way: type[Way], model: nn.Module) -> bool | None:
    """Whether the logits of `way` are those of a plain forward pass, up to rounding; None if those are not finite.

    Under autocast they must also be without it, where rounding hides less.
    """
    if hides_precision(model):
        with without_autocast(model), suppress(*IMPOSSIBLE):
            if agrees(way, model) is False:
                return False
    vocabulary = int(base_of(model).get_input_embeddings().num_embeddings)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    prompts = [[token % vocabulary for token in prompt] for prompt in PROBES]
    forced = [token % vocabulary for token in FORCED]
    texts = [[*prompt, *forced] for prompt in prompts]
    expected = torch.cat([plain_logits(model, [text], len(forced) + 1) for text in texts])
    if not bool(expected.isfinite().all()):
        return None
    try:
        found = trial(way, model, prompts, forced)
    except IMPOSSIBLE:
        return False
    together = plain_logits(model, texts, len(forced) + 1)
    allowed = max(rounding_of(expected) * float(expected.abs().max()), FLOORS * largest(together - expected))
    return largest(found - expected) <= allowed


def largest(differences: Tensor) -> float:
    """The largest of them, whatever their sign."""
    return float(differences.abs().max())


def rounding_of(logits: Tensor) -> float:
    """Relative differences between logits that rounding explains, where they are and as products are taken now."""
    rounds_short = logits.is_cuda and torch.get_float32_matmul_precision() != "highest"
    return SHORT_PRODUCTS if rounds_short and logits.dtype is torch.float32 else ROUNDING[logits.dtype]


def plain_logits(model: nn.Module, texts: list[list[int]], count: int) -> Tensor:
    """`(texts, count, V)` logits at the last positions of every text, all in one forward pass.

    Shorter texts are filled on the right, where no token of theirs looks.
    """
    device, longest = next(model.parameters()).device, max(map(len, texts))
    ids = torch.tensor([text + text[:1] * (longest - len(text)) for text in texts], device=device)
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.stack([row[len(text) - count : len(text)] for row, text in zip(logits, texts, strict=True)])


def trial(way: type[Way], model: nn.Module, prompts: list[list[int]], forced: list[int]) -> Tensor:
    """`(prompts, forced + 1, V)` logits as the way computes them."""
    batches = [prompts] if way.any_lengths else [[prompt] for prompt in prompts]
    parts = []
    for batch in batches:
        run = way(model, max(map(len, batch)) + len(forced))
        logits = [run.start(batch, 2)]
        with run.decoding():
            logits += [run.step(torch.full((2 * len(batch),), token, device=logits[0].device)) for token in forced]
        parts.append(torch.stack(logits, 1)[1::2])
    return torch.cat(parts)
