"""Fused steps: Gram and gradient from one backward pass of the Gram engine. `FusedSteps` decides which steps are fused.

The trainer asks for log-probabilities and gets those of a forward pass that the Gram engine recorded. The trainer's own
backward pass stops at these log-probabilities, with `c = ∂L/∂log π`. The engine's backward pass continues from `c`: it
measures the Gram, and writes to `.grad` what the trainer's pass would have written. If a condition does not hold, the
trainer's own pass runs after all, with the same `c`: the step takes longer, but its gradient is the trainer's.
"""

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from scoregram.checks import fail, listed
from scoregram.distributed import Processes
from scoregram.gram import (
    DeferredGram,
    Undo,
    gradients,
    model_inside,
    survey,
)
from scoregram.integrations.trl.separate_pass import (
    CheckedGram,
    added_up,
    bytes_of_pass,
    gradient_bytes,
    relative_error,
    rescaled_gram,
    squared_norm,
)
from scoregram.integrations.trl.support import Settings, loss_scale
from scoregram.integrations.trl.window import MicroBatch, ObservedStep

EVEN = 1e-6
"""Unevenness up to which a loss counts as weighting the tokens of a rollout alike: float32 rounding."""
KNOWN_ARGUMENTS = ("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy")
"""Arguments of TRL's method for log-probabilities that a fused step supports; a call that sets another is declined."""
FULL_CHECK_EVERY = 50
"""One in this many measured steps is measured in a separate pass, so that the whole gradient is compared."""
CHECK_SHARE = 0.03
"""Largest share of the time of fused steps that comparisons of one rollout's gradient may take, after the first."""
REPLACED_METHODS = ("_get_per_token_logps_and_entropies", "training_step")
"""Methods that a fused step replaces; they must be TRL's own. The loss may be overridden or wrapped."""


@dataclass(frozen=True)
class LogProbsFormat:
    """What TRL's method for log-probabilities returns, so that a fused step can return the same."""

    parts: int
    """Length of the tuple: log-probabilities, entropies and, in newer versions, an auxiliary loss."""
    dtypes: tuple[torch.dtype, torch.dtype | None]
    entropies_in_autograd: bool

    @classmethod
    def of(cls, returned: Any) -> "LogProbsFormat | None":
        """The format of what was returned; None if a fused step cannot return the same."""
        if not isinstance(returned, tuple) or len(returned) < 2 or not all(part is None for part in returned[2:]):
            return None
        log_probs, entropies = returned[:2]
        dtype = None if entropies is None else entropies.dtype
        return cls(len(returned), (log_probs.dtype, dtype), entropies is not None and entropies.requires_grad)


@dataclass
class FusedStep:
    """One step, from the trainer's call for log-probabilities to the gradient in `.grad`."""

    trainer: Any
    settings: Settings
    trainers_log_probs: Callable[..., Any]
    """The trainer's own method for log-probabilities."""
    model: nn.Module
    format: LogProbsFormat
    inputs: Mapping[str, Any]
    """Inputs of the trainer's loss."""
    batch: MicroBatch
    """Records the derivative of the loss."""
    generator: torch.Generator
    """Draws the rollout that is checked."""
    compares_rollout: bool
    """Whether one rollout's gradient is compared with the trainer's own."""
    call: dict[str, Any] | None = None
    """Arguments of the trainer's call for log-probabilities; None before it."""
    deferred: DeferredGram | None = None
    declined: str | None = None
    """Why the call was declined and left to the trainer's own method."""
    entropy_gradients: list[Tensor] = field(default_factory=list)
    result: CheckedGram | None = None
    """Gram and check, rollouts in the order of the micro-batch; None if the trainer's own pass had to run. Its
    log-probabilities are in TRL's layout."""
    failure: Exception | None = None
    """An unexpected error, after which the trainer's own pass ran."""
    is_over: bool = False
    seconds: float = 0.0
    """Time of the engine's forward and backward pass, without the comparison."""

    @property
    def is_begun(self) -> bool:
        """Whether the trainer got its log-probabilities from the Gram engine."""
        return self.deferred is not None

    def log_probs(self, *args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
        """Log-probabilities and entropies `(B, C)` of the engine's forward pass, in TRL's format.

        None if the call is unusual; `declined` then says why.
        """
        bound = inspect.signature(self.trainers_log_probs).bind(*args, **kwargs)
        bound.apply_defaults()
        call = dict(bound.arguments)
        self.declined = self.reason_to_decline(call)
        if self.declined is not None:
            return None
        ids, attention, tokens = call["input_ids"], call["attention_mask"], int(call["logits_to_keep"])
        completion = attention.bool().clone()
        completion[:, :-tokens] = False
        began = time.perf_counter()
        with self.trainer.accelerator.autocast():
            temperature = float(self.trainer.temperature)
            deferred = DeferredGram(self.model, ids, completion, attention, temperature=temperature, keep_padding=True)
        self.call, self.deferred, self.seconds = call, deferred, time.perf_counter() - began
        dtype, entropy_dtype = self.format.dtypes
        found = deferred.log_probs[:, -tokens:].to(dtype).clone().requires_grad_()
        entropies = None
        if call.get("compute_entropy"):
            entropies = deferred.entropies[:, -tokens:].to(entropy_dtype).clone()
            if self.format.entropies_in_autograd:
                entropies.requires_grad_().register_hook(self.entropy_gradients.append)
                entropies = entropies.view_as(entropies)
        # Views, because a loss may write to them in place, which autograd forbids for a leaf; TRL returns no leaves.
        return (found.view_as(found), entropies, *[None] * (self.format.parts - 2))

    def reason_to_decline(self, call: Mapping[str, Any]) -> str | None:
        """Why the engine cannot answer this call; None if it can. It must ask for all rollouts of the loss at once."""
        others = {name: value for name, value in call.items() if name not in KNOWN_ARGUMENTS}
        if odd := [name for name, value in others.items() if value is not None and value is not False]:
            return f"the log-probabilities depend on {listed(odd)}"
        ids, whole = self.inputs["completion_ids"], call["input_ids"]
        at_once = call.get("batch_size") in (None, len(ids)) and call["logits_to_keep"] == ids.shape[1]
        if not at_once or len(whole) != len(ids) or not torch.equal(whole[:, -ids.shape[1] :], ids):
            return "the loss asks for log-probabilities of other rollouts than its own"
        if call.get("compute_entropy") and self.format.dtypes[1] is None:
            return "the loss asks for entropies at some steps only"
        return None

    def finish(self) -> None:
        """Continue the trainer's backward pass, which ended at the log-probabilities."""
        if self.is_over or not self.is_begun:
            return
        self.is_over = True
        derivative = self.batch.coefficients
        if derivative is None and not self.entropy_gradients:
            self.deferred = None
            return  # the loss does not depend on the policy
        try:
            if derivative is not None and not self.has_other_gradients:
                self.result = self.measured(derivative)
        except Exception as error:
            self.failure = error.with_traceback(None)  # the traceback would keep the tensors of the pass alive
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
        self.deferred = None
        if self.result is None:
            self.run_trainers_pass(derivative)

    @property
    def has_other_gradients(self) -> bool:
        """Whether the loss has gradients that bypass the log-probabilities; they are not in the sum of rows."""
        arrived = (parameter.grad for parameter in self.model.parameters())
        return bool(self.entropy_gradients) or any(grad is not None and bool(grad.any()) for grad in arrived)

    def run_trainers_pass(self, derivative: Tensor | None) -> None:
        """Run the trainer's own forward pass again, and its backward pass from the derivatives that its loss gave."""
        assert self.call is not None
        found = self.trainers_log_probs(**self.call)
        ends = [] if derivative is None else [(found[0], derivative)]
        ends += [(found[1], grad) for grad in self.entropy_gradients]
        torch.autograd.backward([end for end, _ in ends], [grad for _, grad in ends])

    def measured(self, derivative: Tensor) -> CheckedGram | None:
        """Measure the Gram and write the gradient; None if the gradient is not a weighted sum of the mode's rows.

        Raises:
            ScoregramError: If the check fails; `.grad` is not written then.
        """
        assert self.deferred is not None and self.call is not None
        rows = self.rows(derivative)
        if rows is None:
            return None
        coefficients, weights = rows
        before = self.deferred.log_probs.shape[1] - derivative.shape[1]
        compared = self.random_rollout(weights) if self.compares_rollout else None
        vectors = weights.unsqueeze(0)
        if compared is not None:  # a second sum over rows: the row that is compared
            vectors = torch.stack([weights, torch.zeros_like(weights)])
            vectors[1, compared] = 1.0
        began = time.perf_counter()
        with self.trainer.accelerator.autocast():
            gram, sums = self.deferred.finish(F.pad(coefficients, (before, 0)), vectors)
        log_probs = self.deferred.log_probs.cpu()
        self.deferred = None
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        error = norm_error([both[0] for both in sums.values()], gram.matrix, weights)
        self.seconds += time.perf_counter() - began
        seconds = 0.0
        if compared is not None:
            began = time.perf_counter()
            theirs = self.gradient_of_rollout(compared, derivative, parameters)
            own = [sums.get(parameter) for parameter in parameters]
            error = max(error, fused_row_error(own, theirs, gram.matrix, weights, compared))
            del theirs, own
            seconds = time.perf_counter() - began
        if not error <= self.settings.rounding_error:
            requirement = f"must agree with the trainer's own pass to {self.settings.rounding_error:g}"
            got = f"a relative error of {error:.2g}"
            fail("a fused step", requirement, got, "The trainer's own pass replaced it.")
        made = {}
        for parameter in [p for p in parameters if p in sums]:  # each sum is freed as soon as it is converted
            made[parameter] = sums.pop(parameter)[0].to(parameter.dtype, copy=compared is not None)
        for parameter, grad in made.items():  # last, when nothing can fail any more
            parameter.grad = grad
        is_loss = self.settings.mode == "loss"
        sizes = weights / loss_scale(self.trainer) if is_loss else torch.ones_like(weights)
        scaled = rescaled_gram(gram, sizes.double().cpu())
        rollouts = int(compared is not None)
        return CheckedGram(replace(scaled, log_probs=log_probs), error, rollouts=rollouts, seconds=seconds)

    def rows(self, derivative: Tensor) -> tuple[Tensor, Tensor] | None:
        """Coefficients `(B, C)` of rows, and weights `(B,)` that sum them to the gradient; None if no weights do."""
        c = derivative.double()
        counted = self.inputs["completion_mask"]
        if "tool_mask" in self.inputs:
            counted = counted * self.inputs["tool_mask"]
        ones = counted.double()
        if not bool(c.isfinite().all()):
            return None  # the trainer handles the overflow
        if self.settings.mode == "loss":  # rows scaled to the size of scores: the smallest would underflow in float32
            sizes = c.abs().amax(1)
            rows = c / torch.where(sizes > 0, sizes, 1.0)[:, None]
            return None if bool((rows * (1 - ones)).any()) else (rows, sizes)
        weights = (c * ones).sum(1) / ones.sum(1).clamp(min=1)
        apart = (c - weights[:, None] * ones).norm()
        return (ones, weights) if bool(apart <= EVEN * c.norm()) else None

    def random_rollout(self, weights: Tensor) -> int | None:
        """A random rollout among those with a nonzero weight; None if there is none."""
        weighted = weights.nonzero().squeeze(1).tolist()
        return weighted[int(torch.randint(len(weighted), (1,), generator=self.generator))] if weighted else None

    def gradient_of_rollout(self, index: int, derivative: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The part of the gradient that comes from one rollout, by the trainer's own forward pass and autograd."""
        assert self.call is not None
        here = slice(index, index + 1)
        one = {"input_ids": self.call["input_ids"][here], "attention_mask": self.call["attention_mask"][here]}
        with Undo() as undo, undo, torch.enable_grad():
            undo.keep_random_state(derivative.device)
            undo.put_gradients_aside(parameters)
            found = self.trainers_log_probs(**(self.call | one | {"compute_entropy": False}))[0]
            return gradients((found * derivative[here].to(found.dtype)).sum(), parameters)


def norm_error(gradient: Sequence[Tensor], gram: Tensor, weights: Tensor) -> float:
    """`|ĝ|²` of a fused gradient `ĝ = Σ_j w_j ψ_j` against `wᵀKw`, relative to the sum of the terms' absolute values.

    Args:
        gradient: `ĝ`, one tensor for each parameter that the pass used.
        gram: `(N, N)`.
        weights: `(N,)`.
    """
    terms = update_terms(gram, weights)
    size = float(terms.abs().sum())
    return abs(squared_norm(gradient) - float(terms.sum())) / size if size else 0.0


def fused_row_error(
    sums: Sequence[Tensor | None], theirs: Sequence[Tensor], gram: Tensor, weights: Tensor, index: int
) -> float:
    """Error of one row of a fused gradient `ĝ = Σ_j w_j ψ_j`, given the part `g_i` of the trainer's own gradient.

    The larger of two: `|w_i ψ_i − g_i| / |g_i|` over all parameters; and `⟨ĝ, g_i⟩` against `Σ_j w_i w_j K_ij`,
    relative to the sum of the terms' absolute values. So the row is compared with the trainer's own pass, and the whole
    gradient with row and Gram.

    Args:
        sums: For each parameter `(2, …)`: the sum with weights `w`, and `ψ_i`; None if the pass did not use it.
        theirs: For each parameter its part of `g_i`.
        gram: `(N, N)`.
        weights: `(N,)`.
        index: The rollout `i`.
    """
    scale = float(weights[index])
    apart = relative_error([None if both is None else both[1] * scale for both in sums], theirs)
    pairs = [(both[0], grad) for both, grad in zip(sums, theirs, strict=True) if both is not None]
    products = [torch.sum(own * their.to(own.dtype), dtype=torch.float64) for own, their in pairs]
    terms = update_terms(gram, weights)[index]
    return max(apart, abs(added_up(products) - float(terms.sum())) / float(terms.abs().sum()))


def update_terms(gram: Tensor, weights: Tensor) -> Tensor:
    """`w_i K_ij w_j`, float64 on the CPU."""
    w = weights.double().cpu()
    return w[:, None] * gram * w


class FusedSteps:
    """Decides which measured steps of a trainer are fused, and runs them."""

    def __init__(
        self, trainer: Any, settings: Settings, processes: Processes, methods: Mapping[str, Callable[..., Any]]
    ) -> None:
        self.trainer = trainer
        self.settings = settings
        self.trainers_log_probs = methods["_get_per_token_logps_and_entropies"]
        self.reason: str | None = None
        """Why no step of this trainer is fused from now on; None if steps may be."""
        self.format: LogProbsFormat | None = None
        self.since_full_check: int | None = None
        """Fused steps since the whole gradient was compared; None if it never was, or did not agree."""
        self.seconds = self.check_seconds = 0.0
        """Time of all fused steps so far, and of the comparisons in them."""
        self.step: FusedStep | None = None
        """The current step, if it is fused."""
        self.failure: Exception | None = None
        """An unexpected error at the last step."""
        self.generator = torch.Generator().manual_seed(0)
        if not settings.fused:
            self.reason = "attach was called with fused=False"
        elif processes.count > 1:
            self.reason = "the training runs in several processes"
        elif others := [name for name in REPLACED_METHODS if not _is_of_trl(methods[name])]:
            self.reason = f"{listed(others)} of the trainer is overridden or wrapped"
        elif (pieces := int(trainer.args.gradient_accumulation_steps)) > 1:
            self.reason = f"gradients are accumulated over {pieces} micro-batches"
        elif settings.mode == "scores" and (parts := int(getattr(trainer.args, "steps_per_generation", 1) or 1)) > 1:
            self.reason = f"a generation is split over {parts} steps, and mode='scores' measures it whole"

    # facts from steps that are not fused

    def note_format(self, returned: Any) -> None:
        """Note what the trainer's own method for log-probabilities returns."""
        self.format = LogProbsFormat.of(returned)

    def note_full_check(self, error: float, unevenness: float, *, has_gradient: bool) -> None:
        """Note whether the whole gradient of a step agreed with the weighted sum of its rows."""
        agrees = has_gradient and error <= self.settings.rounding_error
        is_even = self.settings.mode == "loss" or unevenness <= EVEN
        self.since_full_check = 0 if agrees and is_even else None

    # the current step

    def begin(self, model: Any, inputs: Mapping[str, Any], batch: MicroBatch, rollouts: int, limit: float) -> None:
        """Fuse the step whose loss the trainer is about to compute from `model` and `inputs`, if all conditions hold.

        `rollouts` is the number of rollouts that `batch` must hold, `limit` the bytes that a measurement may take.
        """
        self.step = None
        since = self.since_full_check
        if self.reason is not None or self.format is None or since is None or since >= FULL_CHECK_EVERY - 1:
            return
        inside = self.trainer.accelerator.unwrap_model(self.trainer.model)
        tokens = inputs["prompt_ids"].shape[1] + inputs["completion_ids"].shape[1]
        # a separate pass holds one gradient besides the trainer's, a fused one two: the sum, and the checked row
        needed = bytes_of_pass(inside, rollouts, tokens) + gradient_bytes(inside)
        if len(batch.rows) != rollouts or not _is_whole_step(self.trainer) or needed > limit:
            return
        if getattr(self.trainer.accelerator, "has_lomo_optimizer", False):
            self.reason = "the LOMO optimiser updates parameters inside the backward pass"
        self.reason = self.reason or reason_not_fused(model, inside)
        if self.reason is not None:
            return
        self.step = FusedStep(
            trainer=self.trainer,
            settings=self.settings,
            trainers_log_probs=self.trainers_log_probs,
            model=inside,
            format=self.format,
            inputs=inputs,
            batch=batch,
            generator=self.generator,
            compares_rollout=self.check_seconds <= CHECK_SHARE * self.seconds,
        )

    def log_probs(self, *args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
        """Log-probabilities for the trainer, if the current step is fused; None to let the trainer compute them."""
        if self.step is None or self.step.is_begun:
            return None
        try:
            found = self.step.log_probs(*args, **kwargs)
        except Exception as error:
            self.disable(error)
            return None
        if found is None:
            self.reason, self.step = self.step.declined, None
        return found

    def recovers_from(self, error: Exception) -> bool:
        """Whether to repeat, without fusing, a loss that raised an error: true if it used fused log-probabilities."""
        if self.step is None or not self.step.is_begun:
            return False
        self.disable(error)
        return True

    def disable(self, error: Exception) -> None:
        """Stop fusing steps after an unexpected error."""
        self.failure, self.reason = error.with_traceback(None), f"{type(error).__name__}: {error}"
        self.step = None

    @contextmanager
    def around_training_step(self) -> Iterator[None]:
        """Wraps the trainer's `training_step`, so that `accelerator.backward` returns with the complete gradient."""
        self.step = self.failure = None

        accelerator = self.trainer.accelerator
        inner = accelerator.backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            self.finish()
            return result

        try:
            with Undo() as undo, undo:
                undo.set_attribute(accelerator, "backward", backward)
                yield
            self.finish()  # for a trainer that does not call accelerator.backward
        except BaseException:
            self.step = None
            raise

    def finish(self) -> None:
        """Run the backward pass of the current step, if it is fused."""
        step = self.step
        if step is None or step.is_over or not step.is_begun:
            return
        step.finish()
        if step.failure is not None:
            self.disable(step.failure)
        if step.result is None:
            self.since_full_check = None  # compare the whole gradient before the next attempt
        elif self.since_full_check is not None:
            self.since_full_check += 1
            self.seconds += step.seconds
            self.check_seconds += step.result.seconds

    def measured(self, observed: ObservedStep) -> CheckedGram | None:
        """Gram and check of the current step, in the order of its observed rollouts; None if it was not fused."""
        if self.step is None or self.step.result is None:
            return None
        result, rows = self.step.result, self.step.batch.rows[:, 1]
        (generation,) = observed.generations
        order, gram = rows.argsort().cpu(), result.gram
        tokens = generation.completion_ids.shape[1]
        log_probs = gram.log_probs.new_zeros(generation.size, tokens)
        log_probs[rows.cpu()] = gram.log_probs[:, -tokens:]
        in_order = replace(
            gram,
            matrix=gram.matrix[order][:, order],
            by_layer={name: layer[order][:, order] for name, layer in gram.by_layer.items()},
            log_probs=generation.to("cpu").in_rows(log_probs)[observed.chosen],
        )
        return replace(result, gram=in_order)


def _is_of_trl(method: Callable[..., Any]) -> bool:
    """Whether a method is TRL's own, not that of a subclass or a wrapper."""
    return str(getattr(method, "__module__", "")).startswith("trl.")


def _is_whole_step(trainer: Any) -> bool:
    """Whether the loss is that of a whole step, not of one of several micro-batches."""
    pieces = getattr(trainer, "current_gradient_accumulation_steps", trainer.args.gradient_accumulation_steps)
    return int(pieces) == 1 and bool(trainer.accelerator.sync_gradients)


def reason_not_fused(model: nn.Module, inside: nn.Module) -> str | None:
    """Why no step with this model can be fused, whatever its loss; None if steps can be.

    `model` is what the trainer's loss gets, `inside` the same model unwrapped.
    """
    if model is not inside or model_inside(inside) is not inside:
        return f"the model is wrapped in {type(model).__name__}"
    for name, module in inside.named_modules():
        place = f"`{name}`" if name else "the model"
        if getattr(module, "_compiled_call_impl", None) is not None:
            return f"{place} is compiled"
        if module._backward_hooks or module._backward_pre_hooks:
            return f"a backward hook is registered on {place}"
    if dropping := survey(inside).dropping:
        names = {id(module): name for name, module in inside.named_modules()}
        return f"dropout is active in `{names.get(id(dropping[0]), type(dropping[0]).__name__)}`"
    if torch_modules._global_backward_hooks or torch_modules._global_backward_pre_hooks:
        return "a backward hook is registered on all modules"
    for name, parameter in inside.named_parameters():
        if parameter.requires_grad and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            return f"a gradient hook is registered on parameter `{name}`"
    return None
