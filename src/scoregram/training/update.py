"""The update of one step, and its Gram from the same backward pass if the step is on-policy and has no KL term."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from scoregram.checks import fail, not_finite
from scoregram.gram import Gram, backward_with_gram, measure_gram
from scoregram.policy import group_log_probs, token_log_probs
from scoregram.reading import Step, gram_of_passes
from scoregram.rollouts import Rollouts, group_passes, micro_batches
from scoregram.training.config import TrainConfig
from scoregram.training.credit import (
    advantages_of,
    compares_with_reference,
    credited_step,
    loss_coefficients,
    loss_value,
    reference_step,
    score_weights,
    takes_exact_gram,
)
from scoregram.training.methods import Method
from scoregram.types import LogProbs

VECTOR_BYTES = 1 << 30
"""Memory limit, in bytes, of the `1 + P` gradients that `Updater._one_baseline_a_group` keeps."""


@dataclass(frozen=True)
class Updater:
    """Computes the gradients of a run, with the same settings for all steps."""

    model: Any
    method: Method
    temperature: float
    """Divides the logits, as it did when the rollouts were sampled."""
    length: int
    """Longest completion, in tokens: the constant by which Dr.GRPO divides."""
    rollouts_per_pass: int
    """Rollouts that go through the model together; 0 for all at once. Gradients are accumulated."""
    computing: Callable[[], AbstractContextManager[Any]]
    """Returns the context manager of the policy's compute precision, such as autocast."""
    beta: float
    """Coefficient of the KL term, or the strength of the reference in a loss that compares with it; 0 for neither."""
    kl: str
    """Estimator of the KL term, a key of `KL_TERMS`."""
    group_size: int | None = None
    """Measure only the blocks within groups of this size; None for the whole Gram."""

    def first(
        self,
        number: int,
        rollouts: Rollouts,
        *,
        measure: bool,
        inputs: Mapping[str, Tensor] | None = None,
        reference: Tensor | None = None,
    ) -> tuple[Step, float]:
        """The step and its loss under the policy that sampled the rollouts; the gradient is added to `.grad`.

        Args:
            number: Number of the step.
            rollouts: Its rollouts.
            measure: Whether to measure the Gram.
            inputs: What the estimator needs besides the rollouts, from `scoregram.training.inputs`.
            reference: `(N, T)` log-probabilities of the reference, None without a KL term.
        """
        if compares_with_reference(self.method.objective):
            assert reference is not None
            log_probs = self.all_log_probs(rollouts)
            step = reference_step(self.method, number, rollouts, log_probs, reference, beta=self.beta)
            return self._backward(step, measure=measure, reference=reference)
        gram = None
        if takes_exact_gram(self.method):
            if reference is None and not inputs and self._fits_one_pass(rollouts):
                return self._one_baseline_a_group(number, rollouts)
            gram, measure = self._measure(rollouts), False
        step = credited_step(self.method, number, rollouts, length=self.length, gram=gram, inputs=inputs)
        return self._backward(step, measure=measure, reference=reference)

    def further_update(self, step: Step, *, reference: Tensor | None) -> tuple[float, float]:
        """Loss of a further update on the same rollouts, and the share of their tokens that it clips.

        The gradient is added to `.grad`. A token is clipped if it has an advantage and its coefficient is 0; `nan` with
        a KL term, which gives every token a coefficient.
        """
        loss, _, coefficients = self._backward_of_loss(step, step.log_probs, reference)
        if reference is not None and not compares_with_reference(self.method.objective):
            return loss, math.nan
        credited = step.rollouts.completion_mask.cpu() & (step.credit != 0)
        return loss, float((coefficients.cpu()[credited] == 0).double().mean())

    def _backward(self, step: Step, *, measure: bool, reference: Tensor | None) -> tuple[Step, float]:
        """A step with known weights, after its backward pass, and its loss."""
        if reference is not None and not compares_with_reference(self.method.objective):  # a KL term, token by token
            gram = self._measure(step.rollouts, step.token_weights) if measure else step.gram
            loss, log_probs, _ = self._backward_of_loss(step, None, reference)
            return replace(step, gram=gram, log_probs=log_probs), loss
        if measure:
            gram = self._backward_with_gram(step)
            log_probs = gram.log_probs
        else:
            gram, log_probs = step.gram, self._backward_of_nonzero_weights(step)
        loss = float(loss_value(self.method, step, log_probs, **self._loss_options(reference)))
        return replace(step, gram=gram, log_probs=log_probs), loss

    def _backward_with_gram(self, step: Step) -> Gram:
        """The Gram of a step, after the backward pass that gives both: `-Σ_i w_i ψ_i` is added to `.grad`.

        With weights per token, rows are `Σ_t w_it ∇log π_it`, and each counts once.
        """
        weights = step.weights if step.token_weights is None else torch.ones_like(step.weights)
        weights, grams = weights.to(step.rollouts.input_ids.device), []
        for here in self.passes(step.rollouts):
            given: dict[str, Any] = {"weights": -weights[here], **self.gram_options}
            if step.token_weights is not None:
                given["coefficients"] = step.token_weights[here]
            with self.computing():
                grams.append(backward_with_gram(self.model, *gram_inputs(step.rollouts, here), **given))
        return gram_of_passes(grams)

    def _backward_of_nonzero_weights(self, step: Step) -> Tensor:
        """Log-probabilities `(N, T)`, after a backward pass over the rollouts whose weight is not zero.

        The others, such as those of a dead group, add nothing to the gradient: they skip the model and keep the
        log-probabilities of the sampler.
        """
        rollouts = step.rollouts
        assert rollouts.log_probs is not None
        wide = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        log_probs = rollouts.log_probs.to(wide, copy=True)
        weights = (step.weights[:, None] if step.token_weights is None else step.token_weights).to(log_probs.device)
        is_used = (weights != 0).any(1)
        places = is_used.nonzero().squeeze(1)
        if len(places) == 0:
            # zero instead of None, so that the optimiser still applies its momentum
            for parameter in self.model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            return log_probs
        chosen = rollouts.select(is_used)
        for here in micro_batches(len(places), self.rollouts_per_pass):
            ids, completion, attention = gram_inputs(chosen, here)
            with self.computing():
                current = group_log_probs(self.model, ids, attention, completion, temperature=self.temperature)
            (current * -weights[places[here], : current.shape[1]]).sum().backward()
            log_probs[places[here], : current.shape[1]] = current.detach()
        return log_probs

    def _fits_one_pass(self, rollouts: Rollouts) -> bool:
        """Whether one backward pass can give both the Gram and the gradient with a baseline that needs the Gram."""
        vectors = 1 + len(rollouts.group_sizes)
        size = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        is_single = len(list(self.passes(rollouts))) == 1 and not bool(rollouts.reward_grid.isnan().any())
        return self.method.estimator == "optimal" and is_single and vectors * size <= VECTOR_BYTES

    def _one_baseline_a_group(self, number: int, rollouts: Rollouts) -> tuple[Step, float]:
        """Step and loss for one baseline per group, from one backward pass.

        The gradient is linear in the baselines, which are known only after the Gram. So the backward pass sums `1 + P`
        gradients, one weighted with the rewards and one for each group weighted with ones. `factors` combines them once
        the Gram has given the baselines.
        """
        rewards, mask = rollouts.reward_grid, rollouts.completion_mask
        ones = torch.eye(len(rewards), dtype=rewards.dtype).unsqueeze(-1).expand(-1, -1, rewards.shape[1])
        each = [table.flatten() for table in (rewards, *ones)]
        weights = [score_weights(self.method.objective, one, mask, length=self.length) for one in each]

        def factors(gram: Gram) -> Tensor:
            baselines = (rewards - advantages_of(self.method.estimator, rollouts, gram=gram))[:, 0]
            return torch.cat([torch.ones(1, dtype=torch.float64), -baselines])

        with self.computing():
            gram = backward_with_gram(
                self.model,
                *gram_inputs(rollouts),
                weights=-torch.stack(weights),  # (1 + P, N)
                combine=factors,
                **self.gram_options,
            )
        step = credited_step(self.method, number, rollouts, length=self.length, gram=gram)
        loss = float(loss_value(self.method, step, gram.log_probs, length=self.length))
        return replace(step, log_probs=gram.log_probs), loss

    def _measure(self, rollouts: Rollouts, coefficients: Tensor | None = None) -> Gram:
        """The Gram of the scores, or of the rows `Σ_t c_it ∇log π_it` with coefficients `c` `(N, T)`."""
        grams = []
        for here in self.passes(rollouts):
            given: dict[str, Any] = dict(self.gram_options)
            if coefficients is not None:
                given["coefficients"] = coefficients[here]
            with self.computing():
                grams.append(measure_gram(self.model, *gram_inputs(rollouts, here), **given))
        return gram_of_passes(grams)

    def _loss_options(self, reference: Tensor | None) -> dict[str, Any]:
        """Options of `loss_value`; it gets the reference only if the loss itself compares the policy with it."""
        own = reference if compares_with_reference(self.method.objective) else None
        return {"length": self.length, "reference": own, "beta": self.beta}

    @property
    def gram_options(self) -> dict[str, Any]:
        """Arguments that every measurement of the run shares."""
        return {"temperature": self.temperature, "group_size": self.group_size}

    def _backward_of_loss(
        self, step: Step, old: Tensor | None, reference: Tensor | None
    ) -> tuple[float, Tensor, Tensor]:
        """Loss, log-probabilities `(N, T)` and coefficients `(N, T)`.

        `old` is None if the policy is still the one that sampled the rollouts.

        The loss is computed over all rollouts at once, even if they go through the model in several passes: first its
        coefficients `c_it`, then `Σ_it c_it ∇log π_it`, accumulated pass by pass.
        """
        rollouts = step.rollouts
        passes = list(self.passes(rollouts))
        kept = None
        if len(passes) == 1:
            kept = self.log_probs(rollouts, passes[0])
            log_probs = kept.detach()
        else:
            log_probs = self.all_log_probs(rollouts)
        before = log_probs if old is None else old

        options = self._loss_options(reference)

        def loss(leaf: Tensor) -> Tensor:
            return loss_value(self.method, step, leaf, before, **options)

        mask, penalised = rollouts.completion_mask, reference if options["reference"] is None else None
        value, coefficients = loss_coefficients(log_probs, mask, loss, beta=self.beta, kl=self.kl, reference=penalised)
        for here in passes:
            current = self.log_probs(rollouts, here) if kept is None else kept
            current.backward(coefficients[here])
        return value, log_probs, coefficients

    def log_probs(self, rollouts: Rollouts, here: slice) -> Tensor:
        """`(n, T)` log-probabilities of the rollouts of one pass."""
        ids, completion, attention = gram_inputs(rollouts, here)
        with self.computing():
            return token_log_probs(self.model, ids, attention, completion, temperature=self.temperature)

    @torch.no_grad()
    def all_log_probs(self, rollouts: Rollouts) -> Tensor:
        """`(N, T)` log-probabilities of all rollouts, without gradients."""
        return torch.cat([self.log_probs(rollouts, here) for here in self.passes(rollouts)])

    def passes(self, rollouts: Rollouts) -> Iterator[slice]:
        """Rows of whole groups that go through the model together."""
        return group_passes(rollouts.group_sizes, self.rollouts_per_pass)


def gram_inputs(rollouts: Rollouts, here: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, completion mask and attention mask of some rollouts, in the order that `measure_gram` takes them."""
    return rollouts.input_ids[here], rollouts.completion_mask[here], rollouts.attention_mask[here]


class Reference:
    """Log-probabilities under the initial policy of a run: a frozen copy, or the model without its new adapters."""

    def __init__(self, updater: Updater, *, new_adapters: bool) -> None:
        """Compute log-probabilities the way `updater` does.

        `new_adapters`: the run added the adapters. They start at zero, so the model without them is the initial policy.
        """
        self._new_adapters = new_adapters
        self._model: Any = updater.model if self._new_adapters else copy.deepcopy(updater.model).requires_grad_(False)
        self._updater = updater

    def log_probs(self, rollouts: Rollouts) -> LogProbs:
        """`(N, T)` log-probabilities of the completion tokens, 0 elsewhere."""
        own = replace(self._updater, model=self._model)
        without = self._model.disable_adapter() if self._new_adapters else nullcontext()
        with without:
            return own.all_log_probs(rollouts)


def make_optimizer(model: Any, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimiser of all parameters that require gradients."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    shared: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    try:
        if config.optimizer == "sgd":
            return torch.optim.SGD(parameters, momentum=config.momentum, **shared)
        return torch.optim.AdamW(parameters, betas=config.adam_betas, fused=True, **shared)
    except ValueError as error:
        fail("train --optimizer", f"{config.optimizer} must accept its settings", error, "Choose others.")


def learning_rate(step: int, config: TrainConfig) -> float:
    """Learning rate of step `1 … steps`: a linear rise over the warm-up, then constant or falling to 0.

    In the warm-up of `w` steps it is `η n / (w + 1)` at step `n`. After it, `η` (constant), `η (1 − x)` (linear) or
    `η (1 + cos πx) / 2` (cosine), with `x` the share of the steps after the warm-up that are done: 0 at the first of
    them, below 1 at the last. It is 0 while only the critic learns; the warm-up begins after that.
    """
    number = step - config.critic_warmup
    if number <= 0:
        return 0.0
    if number <= config.warmup_steps:
        return config.learning_rate * number / (config.warmup_steps + 1)
    after = config.steps - config.critic_warmup - config.warmup_steps
    done = (number - config.warmup_steps - 1) / max(after, 1)
    shape = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
    return config.learning_rate * shape[config.lr_schedule]


def apply_gradient(optimizer: torch.optim.Optimizer, model: Any, rate: float, max_norm: float) -> float:
    """Update the policy with its gradient, clipped to `max_norm` if positive; returns the norm before clipping.

    Raises:
        NotFiniteError: If the gradient is not finite; nothing is updated then, and the error names the parameters.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in trained])
    length = float(norm)
    if not math.isfinite(length):
        refuse_gradient(model)
    if 0 < max_norm < length:
        torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return length


def refuse_gradient(model: Any) -> None:
    """Raise with the names of the parameters whose gradient is not finite."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    broken = [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]
    shown = ", ".join(broken[:3]) + (f" and {len(broken) - 3} more" if len(broken) > 3 else "")
    not_finite(
        "train", "gradients must be finite", f"nan or inf in {shown or 'their norm'}", "Lower the learning rate."
    )
