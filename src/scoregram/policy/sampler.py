"""Draw rollouts from a language model, many at a time, with the exact log-probability of every token.

Every prompt goes through the model once. Its keys and values are then shared by all its rollouts, which advance
together, one token a step; rollouts that have drawn a stop token leave the batch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scoregram.checks import fail
from scoregram.policy.bias import warn_of_bias
from scoregram.policy.choice import fastest_way
from scoregram.policy.config import SamplingConfig
from scoregram.policy.draw import draw, uniform_numbers
from scoregram.policy.graph import advance_captured
from scoregram.policy.modes import context_of, evaluating
from scoregram.policy.record import Completions, Record, assembled, merged
from scoregram.policy.ways import Shared, Way
from scoregram.rollouts import Rollouts

LOOK_EVERY = 4
"""Steps between two looks at which rollouts have ended, where the host has to wait for a device to see it."""
WORTH_DROPPING = 0.25
"""Share of rows that must have ended before the rest is copied into a smaller batch."""


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

    Prompts are any token ids, so a rollout may go on from any prefix. Every token takes one number from `generator`,
    and all of them are taken at the start, `(max_new_tokens, N)`, so that what a rollout draws does not depend on which
    others have ended. The same seed gives the same tokens, bit for bit on a CPU. The model is left as it was.

    Args:
        model: A causal language model of transformers, or a PEFT model around one, in any mode.
        prompts: Token ids of every prompt, of any lengths.
        rollouts_per_prompt: `R`.
        sampling: Length, temperature, truncation.
        stop_ids: Tokens that end a rollout; none: every rollout has `max_new_tokens` tokens.
        pad_id: Fills the right of shorter rollouts.
        generator: Source of all randomness; torch's global one if not given. Not read at temperature 0.

    Returns:
        `P·R` rollouts on the model's device, those of one prompt next to each other.

    Raises:
        ScoregramError: No prompt, an empty prompt, an id that the model does not know, a text that would outgrow the
            model's context, all before any work; logits that are not finite, after it.
    """
    refuse_request(model, prompts, rollouts_per_prompt, sampling)
    warn_of_bias(sampling)
    device = next(model.parameters()).device
    count, most = len(prompts) * rollouts_per_prompt, sampling.max_new_tokens
    if sampling.temperature == 0:
        uniforms = torch.zeros(most, count, dtype=torch.float64, device=device)
    else:
        uniforms = uniform_numbers(most, count, generator=generator, device=device)
    stops = torch.tensor(sorted(set(stop_ids)), dtype=torch.int64, device=device)
    with evaluating(model):
        capacity = max(map(len, prompts)) + most
        way = fastest_way(model, capacity)
        parts: list[tuple[Tensor, Completions]] = []
        for chosen in batches(prompts, way):
            first = torch.tensor(chosen, device=device)[:, None] * rollouts_per_prompt
            rows = (first + torch.arange(rollouts_per_prompt, device=device)).flatten()
            record = Record(len(rows), most, stops, has_behaviour=sampling.truncates or sampling.temperature == 0)
            request = [prompts[index] for index in chosen], rollouts_per_prompt
            advance(way(model, capacity), *request, record, uniforms[:, rows], sampling)
            parts.append((rows, record.finish()))
    return assembled(prompts, merged(parts, count), stops, pad_id)


def refuse_request(
    model: Any, prompts: Sequence[Sequence[int]], rollouts_per_prompt: int, sampling: SamplingConfig
) -> None:
    """Raise for the first thing that cannot be sampled."""
    if rollouts_per_prompt < 1:
        fail("sample", "rollouts_per_prompt must be at least 1", rollouts_per_prompt, "Ask for a rollout.")
    if len(prompts) == 0:
        fail("sample", "needs at least one prompt", "none", "Pass token ids of prompts.")
    context, known = context_of(model), model.get_input_embeddings().num_embeddings
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            fail("sample", "a prompt must not be empty", f"no token in prompt {index}", "Start it with a token.")
        if not 0 <= min(prompt) <= max(prompt) < known:
            wrong = min(prompt) if min(prompt) < 0 else max(prompt)
            remedy = "Use the tokenizer of this model."
            fail("sample", f"token ids must lie in [0, {known - 1}]", f"{wrong} in prompt {index}", remedy)
        if len(prompt) + sampling.max_new_tokens > context:
            got = f"{len(prompt)} + {sampling.max_new_tokens} tokens at prompt {index}"
            remedy = "Shorten the prompt or lower max_new_tokens."
            fail("sample", f"prompt and completion must fit into the model's {context} positions", got, remedy)


def batches(prompts: Sequence[Sequence[int]], way: type[Way]) -> list[list[int]]:
    """Prompts that may go together, by index."""
    if way.any_lengths:
        return [list(range(len(prompts)))]
    lengths: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        lengths.setdefault(len(prompt), []).append(index)
    return list(lengths.values())


def advance(
    run: Way,
    prompts: Sequence[Sequence[int]],
    repeats: int,
    record: Record,
    uniforms: Tensor,
    sampling: SamplingConfig,
) -> None:
    """Draw until every rollout has ended."""
    logits = run.start(prompts, repeats)
    look_every = 1 if logits.device.type == "cpu" else LOOK_EVERY
    with run.decoding():
        while True:
            drawn = draw(logits, uniforms[record.steps], sampling)
            record.write(drawn)
            if record.steps == record.most:
                return
            token = drawn.token
            if token.is_cuda and isinstance(run, Shared):
                advance_captured(run, token, record, uniforms, sampling)
                return
            if record.steps % look_every == 0:
                still_open = record.open_places()
                if not still_open:
                    return
                if len(still_open) <= (1 - WORTH_DROPPING) * len(token):
                    places = torch.tensor(still_open, device=token.device)
                    record.keep(places)
                    run.keep(places)
                    token, uniforms = token[places], uniforms[:, places]
            logits = run.step(token)
