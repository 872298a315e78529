"""The gradient of one step, with the Gram from the same backward pass wherever the step is on-policy."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from scoregram.gram import Gram, backward_with_gram, measure_gram
from scoregram.policy import Rollouts, group_log_probs, token_log_probs
from scoregram.training.collecting import Collected, rollouts_at
from scoregram.training.credit import advantages_of, loss_coefficients, loss_value, needs, rollout_weights
from scoregram.training.methods import Method
from scoregram.types import Advantages, PerPrompt

VECTOR_BYTES = 1 << 30
"""Most memory for the weighted gradients of an optimal baseline that comes out of the same backward pass."""


@dataclass(frozen=True)
class Measured:
    """The Gram of a step; `nan` between rollouts of different passes."""

    matrix: Tensor
    """`(N, N)` float64."""
    by_layer: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gradient:
    """What a step left besides `.grad`."""

    advantages: Advantages
    weights: Tensor
    """`(N,)` weight of each score in the on-policy update `Σ_i w_i ψ_i`."""
    log_probs: Tensor
    """`(N, T)` under the policy before the update."""
    loss: float
    measured: Measured | None


@dataclass(frozen=True)
class Updater:
    """How the gradients of a run are made; the same for all its steps."""

    model: Any
    method: Method
    temperature: float
    length: int
    """Most tokens of a completion: the constant by which Dr.GRPO divides."""
    rollouts_per_pass: int
    """0 for all at once."""
    computing: Callable[[], AbstractContextManager[Any]]
    """The precision that the policy computes in."""
    beta: float
    kl: str
    group_size: int | None = None
    """Measure only the blocks within groups of so many rollouts; None for all."""

    def first(
        self, collected: Collected, *, measure: bool, greedy: PerPrompt | None, reference: Tensor | None
    ) -> Gradient:
        """Gradient at the policy that the rollouts came from, added to `.grad`.

        Args:
            collected: The rollouts of the step.
            measure: Whether the Gram is wanted.
            greedy: `(P,)` greedy rewards, for the estimator that needs them.
            reference: `(N, T)` log-probabilities of the reference, None without a KL term.
        """
        if "score_energies" in needs(self.method.estimator):
            return self._with_energies(collected, reference)
        advantages = advantages_of(self.method.estimator, collected, greedy=greedy)
        return self._known_advantages(collected, advantages, measure=measure, reference=reference)

    def again(self, collected: Collected, before: Gradient, *, reference: Tensor | None) -> float:
        """Loss of a further update on the same rollouts; its gradient is added to `.grad`."""
        mask = collected.rollouts.completion_mask
        return self._backward_of_loss(collected, before.advantages, before.log_probs, mask, reference)[0]

    def _known_advantages(
        self, collected: Collected, advantages: Advantages, *, measure: bool, reference: Tensor | None
    ) -> Gradient:
        rollouts, mask = collected.rollouts, collected.rollouts.completion_mask
        weights = rollout_weights(self.method.objective, advantages, mask, length=self.length)
        if reference is not None:
            measured = self._measure(collected) if measure else None
            loss, log_probs = self._backward_of_loss(collected, advantages, None, mask, reference)
            return Gradient(advantages, weights.cpu(), log_probs, loss, measured)
        grams: list[Gram] = []
        if measure:
            for here in self.passes(collected):
                with self.computing():
                    gram = backward_with_gram(
                        self.model, *inputs(rollouts, here), weights=-weights[here], **self.measuring
                    )
                    grams.append(gram)
            log_probs = torch.cat([gram.log_probs for gram in grams])
        else:
            log_probs = self._backward_of_pulling(collected, weights)
        return Gradient(
            advantages=advantages,
            weights=weights.cpu(),
            log_probs=log_probs,
            loss=self._loss(log_probs, log_probs, advantages, mask),
            measured=assembled(grams) if measure else None,
        )

    def _backward_of_pulling(self, collected: Collected, weights: Tensor) -> Tensor:
        """Log-probabilities `(N, T)`; only rollouts that pull go through the model, others keep what the sampler found.

        In a group whose rewards are all alike nobody pulls: nothing of it would reach the gradient.
        """
        wide = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        log_probs = collected.rollouts.log_probs.to(wide, copy=True)
        pulling = (weights != 0).nonzero().squeeze(1)
        if len(pulling) == 0:
            for parameter in self.model.parameters():  # a zero gradient, not an absent one: momentum goes on
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            return log_probs
        rollouts = rollouts_at(collected.rollouts, weights != 0)
        size = self.rollouts_per_pass or len(pulling)
        for start in range(0, len(pulling), size):
            here = slice(start, start + size)
            ids, completion, attention = inputs(rollouts, here)
            with self.computing():
                found = group_log_probs(self.model, ids, attention, completion, temperature=self.temperature)
            (found * -weights[pulling[here], None]).sum().backward()
            log_probs[pulling[here], : found.shape[1]] = found.detach()
        return log_probs

    def _with_energies(self, collected: Collected, reference: Tensor | None) -> Gradient:
        """For baselines that depend on the Gram: one backward pass where a baseline is one number a group."""
        vectors = 1 + len(collected.problems)
        size = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        is_single = len(list(self.passes(collected))) == 1 and bool(collected.observed.all())
        if reference is None and self.method.estimator == "optimal" and is_single and vectors * size <= VECTOR_BYTES:
            return self._one_baseline_a_group(collected)
        measured = self._measure(collected)
        advantages = self._advantages_from(measured.matrix, collected)
        return replace(
            self._known_advantages(collected, advantages, measure=False, reference=reference), measured=measured
        )

    def _one_baseline_a_group(self, collected: Collected) -> Gradient:
        rollouts, mask = collected.rollouts, collected.rollouts.completion_mask
        rewards = collected.rewards

        def weights_for(advantages: Advantages) -> Tensor:
            return rollout_weights(self.method.objective, advantages, mask, length=self.length)

        ones = torch.eye(len(rewards), dtype=rewards.dtype).unsqueeze(-1).expand(-1, -1, rewards.shape[1])
        vectors = torch.stack([weights_for(rewards), *(weights_for(one) for one in ones)])  # (1 + P, N)

        def factors(gram: Gram) -> Tensor:
            baselines = (rewards - self._advantages_from(gram.matrix, collected))[:, 0]
            return torch.cat([torch.ones(1, dtype=torch.float64), -baselines])

        everything = slice(0, len(rollouts.input_ids))
        with self.computing():
            gram = backward_with_gram(
                self.model,
                *inputs(rollouts, everything),
                weights=-vectors,
                combine=factors,
                **self.measuring,
            )
        advantages = self._advantages_from(gram.matrix, collected)
        return Gradient(
            advantages=advantages,
            weights=weights_for(advantages).cpu(),
            log_probs=gram.log_probs,
            loss=self._loss(gram.log_probs, gram.log_probs, advantages, mask),
            measured=assembled([gram]),
        )

    def _advantages_from(self, matrix: Tensor, collected: Collected) -> Advantages:
        energies = matrix.diagonal().view_as(collected.rewards)
        return advantages_of(self.method.estimator, collected, energies=energies)

    def _measure(self, collected: Collected) -> Measured:
        grams = []
        for here in self.passes(collected):
            with self.computing():
                grams.append(measure_gram(self.model, *inputs(collected.rollouts, here), **self.measuring))
        return assembled(grams)

    @property
    def measuring(self) -> dict[str, Any]:
        """What every measurement of the run is told."""
        return {"temperature": self.temperature, "group_size": self.group_size}

    def _loss(self, log_probs: Tensor, old: Tensor, advantages: Advantages, mask: Tensor) -> float:
        return float(loss_value(self.method.objective, log_probs, old, advantages, mask, length=self.length))

    def _backward_of_loss(
        self, collected: Collected, advantages: Advantages, old: Tensor | None, mask: Tensor, reference: Tensor | None
    ) -> tuple[float, Tensor]:
        """Loss and log-probabilities `(N, T)`; without `old` the policy is the one that the rollouts came from.

        The loss sees all rollouts at once, whatever a pass holds: its coefficients are taken first, and the passes
        add up `Σ_it c_it ∇log π_it`.
        """
        passes = list(self.passes(collected))
        kept = None
        if len(passes) == 1:
            kept = self.log_probs(collected.rollouts, passes[0])
            log_probs = kept.detach()
        else:
            with torch.no_grad():
                log_probs = torch.cat([self.log_probs(collected.rollouts, here) for here in passes])
        before = log_probs if old is None else old

        def loss(leaf: Tensor) -> Tensor:
            return loss_value(self.method.objective, leaf, before, advantages, mask, length=self.length)

        value, coefficients = loss_coefficients(log_probs, mask, loss, beta=self.beta, kl=self.kl, reference=reference)
        for here in passes:
            found = self.log_probs(collected.rollouts, here) if kept is None else kept
            found.backward(coefficients[here])
        return value, log_probs

    def log_probs(self, rollouts: Rollouts, here: slice) -> Tensor:
        """`(n, T)` log-probabilities of the rollouts of one pass."""
        ids, completion, attention = inputs(rollouts, here)
        with self.computing():
            return token_log_probs(self.model, ids, attention, completion, temperature=self.temperature)

    def passes(self, collected: Collected) -> Iterator[slice]:
        """Whole groups that go through the model together."""
        count = len(collected.rollouts.input_ids)
        size = self.rollouts_per_pass or count
        yield from (slice(start, min(start + size, count)) for start in range(0, count, size))


def inputs(rollouts: Rollouts, here: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, completion mask and attention mask of some rollouts, as `measure_gram` takes them."""
    return rollouts.input_ids[here], rollouts.completion_mask[here], rollouts.attention_mask[here]


def assembled(grams: list[Gram]) -> Measured:
    """The Grams of several passes as one, `nan` between passes."""
    notes = tuple(dict.fromkeys(note for gram in grams for note in gram.notes))
    if len(grams) == 1:
        return Measured(grams[0].matrix, grams[0].by_layer, notes)
    layers = dict.fromkeys(layer for gram in grams for layer in gram.by_layer)
    absent = [torch.zeros_like(gram.matrix) for gram in grams]
    by_layer = {
        layer: block_diagonal([gram.by_layer.get(layer, zero) for gram, zero in zip(grams, absent, strict=True)])
        for layer in layers
    }
    return Measured(block_diagonal([gram.matrix for gram in grams]), by_layer, notes)


def block_diagonal(blocks: list[Tensor]) -> Tensor:
    """Square blocks on the diagonal of one matrix, `nan` elsewhere."""
    whole = blocks[0].new_full((sum(map(len, blocks)),) * 2, torch.nan)
    start = 0
    for block in blocks:
        here = slice(start, start + len(block))
        whole[here, here] = block
        start += len(block)
    return whole
