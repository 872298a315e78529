"""Rollouts drawn from a language model, many at a time, with the exact log-probability of every token.

`sample` hands the request to the backend that `SamplingConfig.sampler` names. A backend is a function with the
arguments of `sample` that returns its rollouts; `BACKENDS` lists them.

`auto`, `transformers` and `fast` share one loop (`generation`) and differ in the decoders they may use (`decoders`,
`fused_decoders`). A decoder is chosen if the model's config supports it and, in a short trial made once per model, its
logits match those of plain forward passes.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from scoregram.checks import fail
from scoregram.policy import models
from scoregram.policy.config import SamplerName, SamplingConfig
from scoregram.policy.draw import uniform_numbers, warn_of_bias
from scoregram.policy.generation import CompletionRecord, assemble_rollouts, generate
from scoregram.rollouts import Rollouts

if TYPE_CHECKING:
    from scoregram.policy.decoders import Decoder
    from scoregram.policy.load import Policy


def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    rollouts_per_prompt: int,
    sampling: SamplingConfig,
    stop_ids: Sequence[int],
    pad_id: int,
    generator: torch.Generator | None = None,
) -> Rollouts:
    """`R` completions of every prompt, with the exact log-probability of every token.

    Prompts are any token ids, so a rollout may continue any prefix. Every token takes one number from `generator`, and
    all of them are drawn at the start, `(max_new_tokens, N)`: the tokens of a rollout do not depend on when the others
    end. The same seed gives the same tokens, bit for bit on a CPU. The model is left as it was.

    Args:
        model: A causal language model of transformers, or a PEFT model around one, in any mode.
        prompts: Token ids of every prompt, of any lengths.
        rollouts_per_prompt: `R`.
        sampling: Length, temperature, truncation, backend.
        stop_ids: Tokens that end a rollout; if empty, every rollout has `max_new_tokens` tokens.
        pad_id: Fills the right of shorter rollouts.
        generator: Source of all randomness; torch's global one if not given. Not read at temperature 0.

    Returns:
        `P·R` rollouts on the model's device, those of one prompt next to each other.

    Raises:
        ScoregramError: Before any work: no prompt, an empty prompt, an id outside the vocabulary, a text longer than
            the model's context, a backend that does not support the model. After it: logits that are not finite.
    """
    _require_request(model, prompts, rollouts_per_prompt, sampling)
    warn_of_bias(sampling)
    return BACKENDS[sampling.sampler](
        model,
        prompts,
        rollouts_per_prompt=rollouts_per_prompt,
        sampling=sampling,
        stop_ids=stop_ids,
        pad_id=pad_id,
        generator=generator,
    )


def sample_policy(
    policy: "Policy",
    prompts: Sequence[Sequence[int]],
    *,
    rollouts_per_prompt: int,
    sampling: SamplingConfig,
    generator: torch.Generator | None,
) -> Rollouts:
    """`sample` in the precision that the policy computes in, with its stop tokens and padding."""
    with policy.computing():
        return sample(
            policy.model,
            prompts,
            rollouts_per_prompt=rollouts_per_prompt,
            sampling=sampling,
            stop_ids=policy.stop_ids,
            pad_id=policy.pad_id,
            generator=generator,
        )


Backend = Callable[..., Rollouts]
"""Draws the rollouts of a checked request from the weights that the model has now; arguments as for `sample`."""


def _decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    rollouts_per_prompt: int,
    sampling: SamplingConfig,
    stop_ids: Sequence[int],
    pad_id: int,
    generator: torch.Generator | None,
) -> Rollouts:
    """Backends `auto`, `transformers` and `fast`: the fastest decoder that each allows for the model."""
    device = next(model.parameters()).device
    count, most = len(prompts) * rollouts_per_prompt, sampling.max_new_tokens
    if sampling.temperature == 0:
        uniforms = torch.zeros(most, count, dtype=torch.float64, device=device)
    else:
        uniforms = uniform_numbers(most, count, generator=generator, device=device)
    stops = torch.tensor(sorted(set(stop_ids)), dtype=torch.int64, device=device)
    has_behaviour = sampling.truncates or sampling.temperature == 0
    record = CompletionRecord(count, most, stops, has_behaviour=has_behaviour)
    with models.evaluating(model):
        capacity = max(map(len, prompts)) + most
        decoder = fastest_decoder(model, capacity, sampling.sampler)
        for batch in _batches(prompts, mixes_lengths=decoder.mixes_lengths):
            first = torch.tensor(batch, device=device)[:, None] * rollouts_per_prompt
            rows = (first + torch.arange(rollouts_per_prompt, device=device)).flatten()
            record.start_batch(rows)
            request = [prompts[index] for index in batch], rollouts_per_prompt
            generate(decoder(model, capacity), *request, record, uniforms[:, rows], sampling)
    return assemble_rollouts(prompts, record.finish(), stops, pad_id)


def _draw_with_vllm(model: Any, prompts: Sequence[Sequence[int]], **request: Any) -> Rollouts:
    """Backend `vllm`: an engine of the model's own, built when it is first used."""
    from scoregram.policy.vllm import engine_of, sample_with_vllm

    return sample_with_vllm(engine_of(model), model, prompts, **request)


BACKENDS: Mapping[SamplerName, Backend] = MappingProxyType(
    {"auto": _decode, "transformers": _decode, "fast": _decode, "vllm": _draw_with_vllm}
)
"""Sampling backends by name."""


def _require_request(
    model: Any, prompts: Sequence[Sequence[int]], rollouts_per_prompt: int, sampling: SamplingConfig
) -> None:
    """Raise for the first part of a request that cannot be sampled."""
    if rollouts_per_prompt < 1:
        fail("sample", "rollouts_per_prompt must be at least 1", rollouts_per_prompt, "Pass 1 or more.")
    if len(prompts) == 0:
        fail("sample", "needs at least one prompt", "none", "Pass token ids of prompts.")
    context, known = models.context_of(model), model.get_input_embeddings().num_embeddings
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            fail("sample", "a prompt must not be empty", f"no token in prompt {index}", "Start it with a token.")
        if isinstance(prompt, str) or isinstance(prompt[0], str):
            fail("sample", "a prompt must be token ids", f"text in prompt {index}", "Encode it with the tokenizer.")
        if not 0 <= min(prompt) <= max(prompt) < known:
            wrong = min(prompt) if min(prompt) < 0 else max(prompt)
            remedy = "Use the tokenizer of this model."
            fail("sample", f"token ids must lie in [0, {known - 1}]", f"{wrong} in prompt {index}", remedy)
        if len(prompt) + sampling.max_new_tokens > context:
            got = f"{len(prompt)} + {sampling.max_new_tokens} tokens at prompt {index}"
            remedy = "Shorten the prompt or lower max_new_tokens."
            fail("sample", f"prompt and completion must fit into the model's {context} positions", got, remedy)


def _batches(prompts: Sequence[Sequence[int]], *, mixes_lengths: bool) -> list[list[int]]:
    """Indices of the prompts that are decoded in one batch: all of them, or those of each length."""
    if mixes_lengths:
        return [list(range(len(prompts)))]
    lengths: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        lengths.setdefault(len(prompt), []).append(index)
    return list(lengths.values())


def fastest_decoder(model: nn.Module, capacity: int, sampler: SamplerName = "auto") -> "type[Decoder]":
    """The fastest decoder of a backend whose logits are the model's, for texts of up to `capacity` tokens.

    Raises:
        ScoregramError: If `sampler` is `fast` and no fast decoder supports the model; the message says why.
    """
    from scoregram.policy.decoders import ModelCacheDecoder, SharedCacheDecoder, UncachedDecoder
    from scoregram.policy.fused_decoders import FusedDecoder, TritonDecoder, is_fusible, supports_kernels

    shared: list[type[Decoder]] = []
    if sampler != "transformers" and capacity <= models.attention_reach(model):
        shared += [TritonDecoder] if supports_kernels(model) else []
        shared += [FusedDecoder] if is_fusible(model) else []
        shared += [SharedCacheDecoder]
    candidates = shared if sampler == "fast" else [*shared, ModelCacheDecoder]
    is_cast, misfits = models.is_autocast(model), models.policy_facts(model).decoder_misfits
    for decoder in candidates:
        if (decoder, is_cast) not in misfits:
            misfit = logit_misfit(decoder, model)
            if misfit is None:
                return decoder  # the model's own logits are not finite: sampling will raise
            misfits[decoder, is_cast] = misfit
            if misfit > 1 and decoder is not candidates[-1]:
                warnings.warn(f"sample: {decoder.refusal} ({_misfit_text(misfit)})", models.PolicyWarning, stacklevel=4)
        if misfits[decoder, is_cast] <= 1:
            return decoder
    if sampler == "fast":
        reach = models.attention_reach(model)
        if candidates:
            got = _misfit_text(misfits[candidates[-1], is_cast])
        else:
            got = f"a layer that sees {reach} of {capacity} tokens" if reach else "a cache of more than keys and values"
        remedy = "Choose sampler auto or transformers."
        fail("sample", "sampler fast needs plain attention with logits that padding does not change", got, remedy)
    if (UncachedDecoder, is_cast) not in misfits:
        misfits[UncachedDecoder, is_cast] = 0.0
        warnings.warn(
            "sample: a KV cache changes this model's logits; every token takes a forward pass over the whole text",
            models.PolicyWarning,
            stacklevel=4,
        )
    return UncachedDecoder


def _misfit_text(misfit: float) -> str:
    return f"logits off by {misfit:,.1f} times what rounding explains" if math.isfinite(misfit) else "no finite logits"


def logit_misfit(decoder: "type[Decoder]", model: nn.Module) -> float | None:
    """Largest difference between the logits of a decoder and of plain forward passes, over what rounding explains.

    At most 1 for a correct decoder; infinite for one that raises or whose logits are not finite; None if the
    model's own logits are not finite. Under autocast it is also measured without autocast, where rounding hides less.
    """
    if models.hides_precision(model):
        with models.without_autocast(model), suppress(*models.UNSUPPORTED):
            wide = logit_misfit(decoder, model)
            if wide is not None and wide > 1:
                return wide
    vocabulary = models.vocabulary_of(model)
    prompts = [models.probe_tokens(prompt, vocabulary) for prompt in models.PROBE_PROMPTS]
    completion = models.probe_tokens(models.PROBE_COMPLETION, vocabulary)
    texts = [[*prompt, *completion] for prompt in prompts]
    expected = torch.cat([plain_logits(model, [text], len(completion) + 1) for text in texts])
    if not bool(expected.isfinite().all()):
        return None
    try:
        found = decoder_logits(decoder, model, prompts, completion)
    except models.UNSUPPORTED:
        return math.inf
    batched = plain_logits(model, texts, len(completion) + 1)
    rounding = models.logit_rounding(expected) * models.largest_magnitude(expected)
    allowed = max(rounding, models.BATCH_NOISE_FACTOR * models.largest_magnitude(batched - expected))
    if not allowed:  # every logit is 0
        return math.inf if found.any() else 0.0
    misfit = models.largest_magnitude(found - expected) / allowed
    return misfit if math.isfinite(misfit) else math.inf


def plain_logits(model: nn.Module, texts: list[list[int]], count: int) -> Tensor:
    """`(texts, count, V)` logits at the last positions of every text, from one forward pass.

    Shorter texts are padded on the right, which causal attention does not see.
    """
    device, longest = next(model.parameters()).device, max(map(len, texts))
    ids = torch.tensor([text + text[:1] * (longest - len(text)) for text in texts], device=device)
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.stack([row[len(text) - count : len(text)] for row, text in zip(logits, texts, strict=True)])


def decoder_logits(
    decoder: "type[Decoder]", model: nn.Module, prompts: list[list[int]], completion: list[int]
) -> Tensor:
    """`(prompts, completion + 1, V)` logits of a decoder, every prompt being followed by the same completion."""
    parts = []
    for batch in [prompts] if decoder.mixes_lengths else [[prompt] for prompt in prompts]:
        run = decoder(model, max(map(len, batch)) + len(completion))
        logits = [run.start(batch, 2)]
        with run.decoding():
            logits += [run.step(torch.full((2 * len(batch),), token, device=logits[0].device)) for token in completion]
        parts.append(torch.stack(logits, 1)[1::2])
    return torch.cat(parts)
