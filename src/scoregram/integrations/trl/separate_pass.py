"""Measures the Gram of a step in separate passes, and compares the sum of its rows with the trainer's gradient.

These passes run after the trainer's backward pass and leave its gradient in `.grad` unchanged. Each process measures
whole groups, whichever process generated their rollouts.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from scoregram.checks import fail
from scoregram.distributed import ALONE, Processes
from scoregram.gram import (
    ChangedLayers,
    Gram,
    Sketch,
    Sketcher,
    Undo,
    backward_with_gram,
    bytes_of_pass,
    is_distributed,
    measure_gram,
    model_inside,
    sharded_modules,
    survey,
    trainable_parameters,
)
from scoregram.integrations.trl.generation import Generation
from scoregram.integrations.trl.gradient_checks import relative_error, squared_norm
from scoregram.integrations.trl.support import (
    Settings,
    has_relative_positions,
    loss_scale,
    memory_limit,
    unwrapped_model,
)
from scoregram.integrations.trl.window import ObservedStep
from scoregram.reading import gram_of_passes
from scoregram.rollouts import Rollouts


@dataclass(frozen=True)
class CheckedGram:
    """The Gram of a step and the result of its self-check."""

    gram: Gram
    error: float
    """`|g − ĝ| / |g|` of the trainer's gradient `g` and the sum `ĝ` of the weighted rows; `nan` without `g`. At a fused
    step the larger one of `norm_error` and, if a rollout was compared, `fused_row_error`."""
    rollouts: int
    """Number of rollouts whose gradient was compared."""
    seconds: float = 0.0
    """Time that the check of a fused step took inside the trainer's backward pass."""


@dataclass(frozen=True, eq=False)
class PassInputs:
    """`n` rollouts as the model gets them in a measuring pass, and a coefficient for every token."""

    model: nn.Module
    """The trainer's model, unwrapped."""
    keep_padding: bool
    """Whether TRL's left padding is kept: TRL passes no positions, so absolute positions count the padding."""
    input_ids: Tensor
    """`(n, T)`"""
    completion_mask: Tensor
    """`(n, T)` bool."""
    attention_mask: Tensor
    """`(n, T)` bool."""
    coefficients: Tensor
    """`(n, T)` float64: the row of rollout `i` is `Σ_t c_it ∇log π_it`."""
    temperature: float
    """Divides the logits."""

    def arguments(self, here: slice) -> dict[str, Any]:
        """Some rows as arguments of `measure_gram` and `backward_with_gram`."""
        return {
            "model": self.model,
            "keep_padding": self.keep_padding,
            "input_ids": self.input_ids[here],
            "completion_mask": self.completion_mask[here],
            "attention_mask": self.attention_mask[here],
            "coefficients": self.coefficients[here],
            "temperature": self.temperature,
        }


def pass_inputs(
    trainer: Any, rollouts: Rollouts, coefficients: Tensor | None = None, *, chosen: Tensor | None = None
) -> PassInputs:
    """Rollouts as TRL feeds them to its model: the completion of a rollout that is masked out is padding.

    Args:
        trainer: Has the model, its device and its temperature.
        rollouts: `N` rollouts.
        coefficients: `(N, T)`, or None for scores: 1 for every completion token.
        chosen: `(N,)` bool: the rollouts to measure; None for all.
    """
    model = unwrapped_model(trainer)
    is_relative = has_relative_positions(model)
    is_credited = rollouts.completion_mask.any(1, keepdim=True)
    is_prompt = rollouts.attention_mask.cumsum(1) <= rollouts.prompt_lengths[:, None]
    attention = rollouts.attention_mask & (is_credited | is_prompt)
    # rows that keep TRL's left padding keep its right padding too: shapes as in the trainer's own pass
    width = int(attention.any(0).nonzero()[-1]) + 1 if is_relative else attention.shape[1]
    ones = rollouts.completion_mask.double()
    rows = slice(None) if chosen is None else chosen.to(attention.device)

    def cut(value: Tensor) -> Tensor:
        return value[:, :width][rows].to(trainer.accelerator.device)

    return PassInputs(
        model=model,
        keep_padding=not is_relative,
        input_ids=cut(rollouts.input_ids),
        completion_mask=cut(rollouts.completion_mask),
        attention_mask=cut(attention),
        coefficients=cut(ones if coefficients is None else coefficients.double()),
        temperature=float(trainer.temperature),
    )


def process_bounds(bounds: Sequence[int], processes: int, *, between_prompts: bool) -> list[list[int]]:
    """The group bounds of each process: shares of consecutive groups, or all groups for the first process.

    Example:
        >>> process_bounds([0, 4, 8, 12], 2, between_prompts=False)
        [[0, 4], [4, 8, 12]]
        >>> process_bounds([0, 4, 8, 12], 2, between_prompts=True)
        [[0, 4, 8, 12], [0]]
    """
    if between_prompts:
        return [list(bounds), *([bounds[0]] for _ in range(processes - 1))]
    groups = len(bounds) - 1
    return [
        list(bounds[groups * rank // processes : groups * (rank + 1) // processes + 1]) for rank in range(processes)
    ]


# memory of a pass


def passes_within(limit: float, model: nn.Module, bounds: Sequence[int], tokens: int) -> list[slice] | None:
    """The rows of each pass: as many whole groups as fit into memory; None if one group alone does not fit.

    Args:
        limit: Bytes.
        model: The model.
        bounds: First row of every group, then the end of the last one: `0, 8, 16`; one number if there is no group.
        tokens: Length of the rows.
    """
    passes: list[slice] = []
    start, parameters = bounds[0], trainable_parameters(model)
    for before, here in pairwise(bounds):
        if bytes_of_pass(model, here - before, tokens, parameters=parameters) > limit:
            return None
        if bytes_of_pass(model, here - start, tokens, parameters=parameters) > limit:
            passes.append(slice(start, before))
            start = before
    return [*passes, slice(start, bounds[-1])] if bounds[-1] > start else passes


def passes_of_process(plans: Sequence[Sequence[slice]], rank: int) -> list[slice]:
    """The rows of each pass of one process, as many passes as the process with the most.

    A pass over a sharded model gathers parameters from all processes, so all of them make the same number of passes. A
    process with fewer repeats rows at the end; what these measure is to be dropped.

    Example:
        >>> passes_of_process([[slice(0, 4), slice(4, 8)], [slice(8, 12)]], rank=1)
        [slice(8, 12, None), slice(0, 4, None)]
    """
    spare = next(plan[0] for plan in plans if plan)
    return [*plans[rank], *[spare] * (max(map(len, plans)) - len(plans[rank]))]


# the passes


def measure_separately(
    trainer: Any, observed: ObservedStep, settings: Settings, processes: Processes = ALONE
) -> CheckedGram | None:
    """The Gram of the rows of a step, and their weighted sum compared with `.grad`; None if memory does not suffice.

    The trainer's backward pass is done, its update is not. All processes call this together and return the same.
    """
    model = unwrapped_model(trainer)
    inputs = pass_inputs(trainer, observed.whole, observed.coefficients, chosen=observed.chosen)
    shares = process_bounds(observed.group_bounds, processes.count, between_prompts=settings.between_prompts)
    tokens = inputs.input_ids.shape[1]
    fitting = [passes_within(observed.memory_limit, model, share, tokens) for share in shares]
    plans = [plan for plan in fitting if plan is not None]
    if len(plans) < len(fitting):
        return None
    # Rows are measured at the size of scores and rescaled in float64: the smallest weights of a loss would underflow
    # when squared in float32.
    sizes = inputs.coefficients.abs().amax(1).double().cpu()
    divisors = torch.where(sizes > 0, sizes, 1.0).to(inputs.coefficients)
    unit = replace(inputs, coefficients=inputs.coefficients / divisors[:, None])
    weights = (torch.ones_like(observed.weights) if settings.mode == "loss" else observed.weights) * sizes
    measure = _measure_sharded_model if sharded_modules(model) else _measure_whole_model
    grams, error = measure(trainer, unit, weights, plans, processes)
    if not observed.has_derivatives:  # the weights are a guess, and the error would be one too
        error = math.nan
    return CheckedGram(rescaled_gram(gram_of_passes(grams), sizes), error, rollouts=len(weights))


def rescaled_gram(gram: Gram, sizes: Tensor) -> Gram:
    """The Gram of rows `s_i ψ_i` from that of `ψ_i`, for `(n,)` float64 `sizes` on the CPU."""
    by_size = sizes[:, None] * sizes
    layers = ChangedLayers(gram.by_layer, lambda layer: layer * by_size)
    return replace(gram, matrix=gram.matrix * by_size, by_layer=layers)


def _measure_whole_model(
    trainer: Any, inputs: PassInputs, weights: Tensor, plans: Sequence[Sequence[slice]], processes: Processes
) -> tuple[list[Gram], float]:
    """Grams of all passes of all processes, and the error of the sum of weighted rows, from whole gradients."""
    parameters = [parameter for parameter in inputs.model.parameters() if parameter.requires_grad]
    theirs = [parameter.grad for parameter in parameters]

    def own_passes() -> list[Gram]:
        with trainer.accelerator.autocast():
            return [
                _on_cpu(backward_with_gram(**inputs.arguments(here), weights=weights[here]))
                for here in plans[processes.rank]
            ]

    with Undo() as undo, undo:
        undo.put_gradients_aside(parameters)  # the weighted rows are summed in `.grad`
        grams = processes.gather(own_passes)
        error = relative_error(_summed_gradients(parameters, processes), theirs, loss_scale(trainer))
    return [gram for own in grams for gram in own], error


def _summed_gradients(parameters: Sequence[Tensor], processes: Processes) -> Iterator[Tensor | None]:
    """The sum of each `.grad` over all processes, one parameter after the other to save memory."""
    for parameter in parameters:
        if processes.count == 1:
            yield parameter.grad
            continue
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        yield processes.sum(own.detach().to(torch.promote_types(own.dtype, torch.float32)))


def _measure_sharded_model(
    trainer: Any, inputs: PassInputs, weights: Tensor, plans: Sequence[Sequence[slice]], processes: Processes
) -> tuple[list[Gram], float]:
    """Grams of all passes of all processes, and the error of the sum of weighted rows, from sketches.

    No process has room for a whole gradient. But a sketch is linear: the sketch of `g − Σ_i w_i ψ_i` is that of the
    trainer's gradient minus the weighted sketches of the rows, and its norm equals the difference's to a few percent.
    """
    sketch = Sketch()

    def own_passes() -> list[Gram]:
        with trainer.accelerator.autocast():
            rows = passes_of_process(plans, processes.rank)
            grams = [_on_cpu(measure_gram(**inputs.arguments(here), sketch=sketch)) for here in rows]
        return grams[: len(plans[processes.rank])]

    grams = [gram for from_one in processes.gather(own_passes) for gram in from_one]
    rows = torch.cat([gram.sketch for gram in grams if gram.sketch is not None]).double()
    theirs, size = _sketched_gradient(inputs.model, sketch)
    scale = loss_scale(trainer)
    if theirs is None:
        return grams, math.nan
    apart = float((weights.double() @ rows - theirs / scale).norm())
    if size == 0:
        return grams, 0.0 if apart == 0 else math.inf
    return grams, apart / (size / scale)


def _sketched_gradient(model: nn.Module, sketch: Sketch) -> tuple[Tensor | None, float]:
    """`(m,)` sketch of `.grad` of a sharded model (None without one), and its norm; gathers one parameter at a time."""
    parameters = survey(model_inside(model)).shards.sharded
    sketcher = Sketcher(sketch, parameters, 1)
    squares = 0.0
    for parameter in parameters.values():
        if parameter.grad is None:
            continue
        grad: Any = parameter.grad.detach()
        whole = grad.full_tensor() if is_distributed(grad) else grad
        squares += squared_norm([whole])
        sketcher.add_rows(parameter, whole.reshape(1, -1))
    return (sketcher.total()[0].double() if sketcher.made else None), math.sqrt(squares)


def _on_cpu(gram: Gram) -> Gram:
    """A Gram with all tensors on the CPU, to be sent to other processes."""
    return replace(gram, log_probs=gram.log_probs.cpu())


def score_energies(trainer: Any, generation: Generation, settings: Settings, processes: Processes = ALONE) -> Tensor:
    """`(N,)` squared norms of the scores of a generation, for the baselines that need them, in separate passes.

    Each process measures its share of the rollouts, as many in a pass as fit into memory.

    Raises:
        ScoregramError: If one rollout alone does not fit into memory, by estimate.
    """
    inputs = pass_inputs(trainer, generation.rollouts)
    limit = min(processes.gather(lambda: memory_limit(inputs.model, settings, processes)))
    shares = process_bounds(range(generation.size + 1), processes.count, between_prompts=False)
    fitting = [passes_within(limit, inputs.model, share, inputs.input_ids.shape[1]) for share in shares]
    plans = [plan for plan in fitting if plan is not None]
    if len(plans) < len(fitting):
        remedy = "Raise memory_gb, or choose an estimator without score norms, such as rloo."
        got = f"a rollout that takes more than {limit / 1e9:.3g} GB by estimate"
        fail(f"attach(estimator={settings.estimator!r})", "each rollout must fit into memory alone", got, remedy)

    def own_energies() -> Tensor:
        with trainer.accelerator.autocast():
            rows = passes_of_process(plans, processes.rank)
            found = [measure_gram(**inputs.arguments(here), group_size=1).matrix.diagonal() for here in rows]
        return torch.cat([torch.zeros(0, dtype=torch.float64), *found[: len(plans[processes.rank])]])

    return torch.cat(processes.gather(own_energies))
