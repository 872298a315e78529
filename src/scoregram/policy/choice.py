"""Which way of decoding is right for a model: found once for every model, by comparing logits."""

import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from scoregram.policy.fused import Fused, is_fusible
from scoregram.policy.launched import Launched, is_launchable
from scoregram.policy.modes import UNBOUNDED, PolicyWarning, base_of, hides_precision, without_autocast
from scoregram.policy.ways import Grown, Recomputed, Shared, Way, takes

PROBES = ((1, 2, 3), (4, 5, 6, 7, 8, 9, 1, 2), (9, 8, 7, 6, 5))
"""Prompts of unequal lengths to compare on, as numbers of tokens; `spread` says which tokens they are."""
FORCED = (3, 1, 2)
"""Tokens put behind each of them."""
GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, taken modulo 1, lie all over the unit interval."""
ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Differences between logits, relative to the largest, that rounding explains; many models round to float32 inside."""
SHORT_PRODUCTS = 1e-2
"""The same for float32 on a GPU whose matrix products are allowed to round to fewer digits (TF32)."""
FLOORS = 4
"""Differences that rounding explains in a model that rounds worse, as a multiple of what another batch changes."""

IMPOSSIBLE = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What a model raises that cannot go a way."""

REFUSED = {
    Launched: "the kernels for decoding give other logits than this model; it decodes without them, which is slower",
    Fused: "the short forward pass gives other logits than this model; its own is used, which is slower",
    Shared: "this model's logits change when prompts of unequal lengths share a batch; "
    "each length is drawn on its own, which is slower",
}
"""What is said when a model may not go a way that its description admits."""

_misfits: WeakKeyDictionary[nn.Module, dict[tuple[type, bool], float]] = WeakKeyDictionary()
_reaches: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def fastest_way(model: nn.Module, capacity: int) -> type[Way]:
    """The first of the ways that this model can go, for texts of up to `capacity` tokens.

    A way is gone if nothing in the model's description speaks against it and, in a trial of a few tokens that is made
    once for every model, its logits agree with those of a plain forward pass over each text alone.
    """
    known = _misfits.setdefault(model, {})
    is_cast = torch.is_autocast_enabled(next(model.parameters()).device.type)
    for way in candidates(model, capacity):
        if (way, is_cast) not in known:
            misfit = misfit_of(way, model)
            if misfit is None:
                return way  # nothing can be told of a broken model; the sampler will name it
            known[way, is_cast] = misfit
            if misfit > 1 and way in REFUSED:
                seen = (
                    f"off by {misfit:,.1f} times what rounding explains"
                    if math.isfinite(misfit)
                    else "no finite logits"
                )
                warnings.warn(f"sample: {REFUSED[way]} ({seen})", PolicyWarning, stacklevel=3)
        if known[way, is_cast] <= 1:
            return way
    if (Recomputed, is_cast) not in known:
        known[Recomputed, is_cast] = 0.0
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


def misfit_of(way: type[Way], model: nn.Module) -> float | None:
    """The largest difference between the logits of `way` and of a plain forward pass, over what rounding explains.

    At most 1 for a way that is right; infinite for one that raises or whose logits are not finite; None if those of the
    model itself are not. Under autocast it is the larger of those with it and without, where rounding hides less.
    """
    if hides_precision(model):
        with without_autocast(model), suppress(*IMPOSSIBLE):
            wide = misfit_of(way, model)
            if wide is not None and wide > 1:
                return wide
    vocabulary = int(base_of(model).get_input_embeddings().num_embeddings)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    prompts, forced = [spread(prompt, vocabulary) for prompt in PROBES], spread(FORCED, vocabulary)
    texts = [[*prompt, *forced] for prompt in prompts]
    expected = torch.cat([plain_logits(model, [text], len(forced) + 1) for text in texts])
    if not bool(expected.isfinite().all()):
        return None
    try:
        found = trial(way, model, prompts, forced)
    except IMPOSSIBLE:
        return math.inf
    together = plain_logits(model, texts, len(forced) + 1)
    allowed = max(rounding_of(expected) * largest(expected), FLOORS * largest(together - expected))
    if not allowed:  # every logit is 0
        return math.inf if found.any() else 0.0
    misfit = largest(found - expected) / allowed
    return misfit if math.isfinite(misfit) else math.inf


def spread(numbers: Sequence[int], vocabulary: int) -> list[int]:
    """Ids of tokens from all over a vocabulary, one for each number.

    The first ids of many vocabularies mark files and turns, and a text of such marks is none that a model has learned.
    Rounding alone decides what it answers: where every product is off by up to a thousandth, less than bfloat16 rounds,
    a logit behind SmolLM2's id 6, `<filename>`, changes by 10, and by 0.3 or less behind tokens from all over.
    """
    return [int(number * GOLDEN % 1 * vocabulary) for number in numbers]


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
