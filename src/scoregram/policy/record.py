"""Tokens as they are drawn, step by step, and the rollouts they become."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scoregram.checks import not_finite
from scoregram.policy.draw import Drawn
from scoregram.rollouts import Rollouts


@dataclass(frozen=True)
class Completions:
    """`(N, M)` drawn tokens, rubbish behind the first stop token of each row."""

    tokens: Tensor
    log_probs: Tensor
    behaviour: Tensor


class Record:
    """`(M, N)` tokens with their log-probabilities, of which some columns are still being written.

    Rollouts are written on whether finished or not: what follows a stop token is cut off in the end, which spares every
    step the question. `rows` says which rollouts the next step writes, in order.
    """

    def __init__(self, rollouts: int, most: int, stop_ids: Tensor, *, has_behaviour: bool) -> None:
        device = stop_ids.device
        self.most = most
        self.rows = torch.arange(rollouts, device=device)
        self.steps = 0
        dtypes = (torch.int64, torch.float32, torch.float32)[: 2 + has_behaviour]
        self._all = [torch.zeros(most, rollouts, device=device, dtype=dtype) for dtype in dtypes]
        self._live = self._all
        self._stops = frozenset(stop_ids.tolist())
        self._ended: set[int] = set()
        self._looked_at = 0

    def write(self, drawn: Drawn) -> None:
        """One token more for every row that is written."""
        for block, values in zip(self._live, (drawn.token, drawn.log_prob, drawn.behaviour), strict=False):
            block[self.steps] = values
        self.steps += 1

    def write_at(self, step: Tensor, drawn: Drawn) -> None:
        """The same at a step that only the device knows; who replays it counts `steps`."""
        for block, values in zip(self._live, (drawn.token, drawn.log_prob, drawn.behaviour), strict=False):
            block.index_copy_(0, step, values.to(block.dtype)[None])

    def open_places(self) -> list[int]:
        """Places among `rows` of the rollouts that have drawn no stop token."""
        since, self._looked_at = self._looked_at, self.steps
        for tokens in self._live[0][since : self.steps].tolist():
            self._ended.update(place for place, token in enumerate(tokens) if token in self._stops)
        return [place for place in range(len(self.rows)) if place not in self._ended]

    def keep(self, places: Tensor) -> None:
        """From now on write only the rollouts at these places among `rows`, all of them open."""
        self._store()
        self.rows = self.rows[places]
        self._live = [block[:, places] for block in self._live]
        self._ended = set()

    def _store(self) -> None:
        if self._live is not self._all:
            for whole, block in zip(self._all, self._live, strict=True):
                whole[:, self.rows] = block

    def finish(self) -> Completions:
        """Everything written."""
        self._store()
        blocks = [block.T for block in self._all]
        return Completions(blocks[0], blocks[1], blocks[-1])


def merged(parts: Sequence[tuple[Tensor, Completions]], rollouts: int) -> Completions:
    """Completions of several batches, each given with the rollouts it holds, in one."""

    def scattered(name: str) -> Tensor:
        first = getattr(parts[0][1], name)
        whole = first.new_empty(rollouts, first.shape[1])
        for rows, part in parts:
            whole[rows] = getattr(part, name)
        return whole

    log_probs = scattered("log_probs")
    same = all(part.behaviour is part.log_probs for _, part in parts)
    return Completions(scattered("tokens"), log_probs, log_probs if same else scattered("behaviour"))


def assembled(prompts: Sequence[Sequence[int]], drawn: Completions, stop_ids: Tensor, pad_id: int) -> Rollouts:
    """Each prompt with each of its completions behind it, cut at the first stop token, padded on the right."""
    tokens, device = drawn.tokens, drawn.tokens.device
    repeats = len(tokens) // len(prompts)
    stops = torch.isin(tokens, stop_ids)
    finished = stops.any(1)
    lengths = torch.where(finished, stops.int().argmax(1) + 1, tokens.shape[1])
    starts = torch.tensor([len(prompt) for prompt in prompts], device=device).repeat_interleave(repeats)
    total = int((starts + lengths).max())
    padded = torch.tensor([[*prompt, *[pad_id] * (total - len(prompt))] for prompt in prompts], device=device)
    place = torch.arange(total, device=device) - starts[:, None]  # of every column in the completion
    attention = place < lengths[:, None]
    completion = attention & (place >= 0)
    place = place.clamp(0, tokens.shape[1] - 1)
    log_probs = torch.where(completion, drawn.log_probs.gather(1, place), 0.0)
    refuse_not_finite(log_probs, starts)
    same = drawn.behaviour is drawn.log_probs
    return Rollouts(
        input_ids=torch.where(completion, tokens.gather(1, place), padded.repeat_interleave(repeats, 0)),
        attention_mask=attention,
        completion_mask=completion,
        log_probs=log_probs,
        behaviour_log_probs=log_probs if same else torch.where(completion, drawn.behaviour.gather(1, place), 0.0),
        prompt_lengths=starts,
        group_ids=torch.arange(len(prompts)).repeat_interleave(repeats),
        finished=finished,
    )


def refuse_not_finite(log_probs: Tensor, prompt_lengths: Tensor) -> None:
    """Raise if a token was drawn from logits that are no numbers."""
    wrong = (~log_probs.isfinite()).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        at = f"{log_probs[row, column].item()} at rollout {row}, token {column - int(prompt_lengths[row])}"
        remedy = "Look for infinite weights, or for a dtype too narrow for this model."
        not_finite("sample", "the log-probabilities of sampled tokens must be finite", at, remedy)
