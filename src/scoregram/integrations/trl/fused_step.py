"""One fused step: Gram and gradient from one backward pass of the Gram engine.

The trainer asks for log-probabilities and gets those of a forward pass that the Gram engine recorded. The trainer's own
backward pass stops at these log-probabilities, with `c = ∂L/∂log π`. The engine's backward pass continues from `c`: it
measures the Gram, and writes to `.grad` what the trainer's pass would have written. If a condition does not hold, the
trainer's own pass runs after all, with the same `c`: the step takes longer, but its gradient is the trainer's.

Under gradient accumulation the engine's forward pass runs once, over all micro-batches of the step, if they fit into
memory together. Each micro-batch gets its part of the log-probabilities, and the engine's backward pass follows the
last one. So the Gram includes rollouts of different micro-batches.

With several processes (`DistributedDataParallel`) each one runs the engine over its own rollouts, on the model inside
the wrapper. The gradients are then averaged as the wrapper would have done it.
"""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scoregram.checks import fail, listed
from scoregram.distributed import ALONE, Processes
from scoregram.gram import CudaGraphGram, DeferredGram, Undo, gradients
from scoregram.integrations.trl.generation import Generation
from scoregram.integrations.trl.gradient_checks import fused_row_error, norm_error
from scoregram.integrations.trl.separate_pass import CheckedGram, rescaled_gram
from scoregram.integrations.trl.support import Settings, loss_scale
from scoregram.integrations.trl.window import EVENNESS_TOLERANCE, MicroBatch, rollout_weights

KNOWN_ARGUMENTS = ("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy")
"""Arguments of TRL's method for log-probabilities that a fused step supports; a call that sets another is declined."""


@dataclass(frozen=True)
class LogProbsFormat:
    """What TRL's method for log-probabilities returns, so that a fused step can return the same."""

    parts: int
    """Length of the tuple: log-probabilities, entropies and, in newer versions, an auxiliary loss."""
    dtypes: tuple[torch.dtype, torch.dtype | None]
    """Of log-probabilities and of entropies; None if entropies were not asked for."""
    entropies_in_autograd: bool
    """Whether the loss may have a gradient through the entropies."""

    @classmethod
    def of(cls, returned: Any) -> "LogProbsFormat | None":
        """The format of what was returned; None if a fused step cannot return the same."""
        if not isinstance(returned, tuple) or len(returned) < 2 or not all(part is None for part in returned[2:]):
            return None
        log_probs, entropies = returned[:2]
        dtype = None if entropies is None else entropies.dtype
        return cls(len(returned), (log_probs.dtype, dtype), entropies is not None and entropies.requires_grad)


@dataclass
class FusedPart:
    """One micro-batch of a fused step."""

    inputs: Mapping[str, Any]
    """Inputs of the trainer's loss."""
    batch: MicroBatch
    """Records the derivative of the loss."""
    call: dict[str, Any] | None = None
    """Arguments of the trainer's call for log-probabilities; None before it."""
    entropy_gradients: list[Tensor] = field(default_factory=list)
    """`(B, C)` derivatives of the loss with respect to the entropies; empty if it does not depend on them."""

    @property
    def counted(self) -> Tensor:
        """`(B, C)`: completion tokens that the loss counts."""
        mask = self.inputs["completion_mask"]
        return mask * self.inputs["tool_mask"] if "tool_mask" in self.inputs else mask


@dataclass(frozen=True)
class FusedGradient:
    """What the engine's backward pass gave in one process."""

    checked: CheckedGram
    gradient: dict[Tensor, Tensor]
    """For each parameter that the pass used, what the trainer's own pass would have left in its `.grad`."""


@dataclass
class FusedStep:
    """One step, from the trainer's call for log-probabilities to the gradient in `.grad`."""

    trainer: Any
    settings: Settings
    trainers_log_probs: Callable[..., Any]
    """The trainer's own method for log-probabilities."""
    model: nn.Module
    """The trainer's model, unwrapped."""
    parameters: Sequence[Tensor]
    """The trainable parameters of the model."""
    format: LogProbsFormat
    generator: torch.Generator
    """Draws the rollout that is checked."""
    compares_rollout: bool
    """Whether one rollout's gradient is compared with the trainer's own."""
    parts: list[FusedPart]
    """The micro-batches so far."""
    processes: Processes = ALONE
    pieces: int = 1
    """Micro-batches of the whole step."""
    generation: Generation | None = None
    """All rollouts of an accumulated step, which go through the engine together; None for a single micro-batch."""
    graphs: CudaGraphGram | None = None
    """Replays passes of repeated shapes; None: every pass runs as usual."""
    deferred: Any = None
    """The engine's forward pass, a `DeferredGram` or one that is replayed."""
    declined: str | None = None
    """Why the call was declined and left to the trainer's own method."""
    result: CheckedGram | None = None
    """Gram and check, rollouts in the order of `rows`; None if the trainer's own pass had to run. Its log-probabilities
    are in TRL's layout."""
    failure: Exception | None = None
    """An unexpected error in this or another process, after which the trainer's own pass ran."""
    is_over: bool = False
    """Whether the gradient is in `.grad`, from the engine or from the trainer's own passes."""
    seconds: float = 0.0
    """Time of the engine's forward and backward pass, without the comparison."""

    @property
    def is_begun(self) -> bool:
        """Whether the trainer got the log-probabilities of the current micro-batch from the Gram engine."""
        return self.parts[-1].call is not None

    @property
    def is_pending(self) -> bool:
        """Whether further micro-batches of this step follow."""
        return not self.is_over and len(self.parts) < self.pieces

    @property
    def rows(self) -> Tensor:
        """`(N,)`: the row of each of the engine's rollouts in its generation."""
        keys = self.parts[0].batch.rows[:, 1]
        return keys if self.generation is None else torch.arange(self.generation.size, device=keys.device)

    def places(self, part: FusedPart) -> Tensor:
        """`(B,)`: the places of a micro-batch's rollouts among the engine's."""
        keys = part.batch.rows[:, 1]
        return torch.arange(len(keys), device=keys.device) if self.generation is None else keys

    def assembled(self, values: Sequence[Tensor]) -> Tensor:
        """`(N, C)` in the order of the engine's rollouts, from values `(B, C)` of each micro-batch."""
        whole = values[0].new_zeros(len(self.rows), values[0].shape[1])
        for part, own in zip(self.parts, values, strict=True):
            whole[self.places(part)] = own
        return whole

    def log_probs(self, *args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
        """Log-probabilities and entropies `(B, C)` of the engine's forward pass, in TRL's format.

        None if the call is unusual; `declined` then says why.
        """
        part = self.parts[-1]
        bound = inspect.signature(self.trainers_log_probs).bind(*args, **kwargs)
        bound.apply_defaults()
        call = dict(bound.arguments)
        self.declined = self.reason_to_decline(call)
        if self.declined is not None:
            return None
        if self.deferred is None:
            self.run_forward(call)
        assert self.deferred is not None
        tokens, here = int(call["logits_to_keep"]), self.places(part)
        part.call = call
        dtype, entropy_dtype = self.format.dtypes
        found = self.deferred.log_probs[here, -tokens:].to(dtype).clone().requires_grad_()
        entropies = None
        if call.get("compute_entropy"):
            entropies = self.deferred.entropies[here, -tokens:].to(entropy_dtype).clone()
            if self.format.entropies_in_autograd:
                entropies.requires_grad_().register_hook(part.entropy_gradients.append)
                entropies = entropies.view_as(entropies)
        # Views, because a loss may write to them in place, which autograd forbids for a leaf; TRL returns no leaves.
        return (found.view_as(found), entropies, *[None] * (self.format.parts - 2))

    def run_forward(self, call: Mapping[str, Any]) -> None:
        """The engine's forward pass over all rollouts of the step."""
        ids, attention = self.whole_batch() or (call["input_ids"], call["attention_mask"])
        completion = attention.bool().clone()
        completion[:, : -int(call["logits_to_keep"])] = False
        began = time.perf_counter()
        with self.trainer.accelerator.autocast():
            if self.graphs is not None and not self.compares_rollout:
                self.deferred = self.graphs.deferred(ids, completion, attention)
            else:
                options = {"temperature": float(self.trainer.temperature), "keep_padding": True}
                self.deferred = DeferredGram(self.model, ids, completion, attention, **options)
        self.seconds = time.perf_counter() - began

    def whole_batch(self) -> tuple[Tensor, Tensor] | None:
        """`(N, P + C)` ids and attention mask of an accumulated step, in TRL's layout; None for one micro-batch."""
        one = self.generation
        if one is None:
            return None
        ids = torch.cat([one.prompt_ids, one.completion_ids], 1)
        return ids, torch.cat([one.prompt_mask, one.completion_mask], 1)

    def reason_to_decline(self, call: Mapping[str, Any]) -> str | None:
        """Why the engine cannot answer this call; None if it can. It must ask for all rollouts of the loss at once."""
        part = self.parts[-1]
        others = {name: value for name, value in call.items() if name not in KNOWN_ARGUMENTS}
        if odd := [name for name, value in others.items() if value is not None and value is not False]:
            return f"the log-probabilities depend on {listed(odd)}"
        ids, asked = part.inputs["completion_ids"], call["input_ids"]
        at_once = call.get("batch_size") in (None, len(ids)) and call["logits_to_keep"] == ids.shape[1]
        if not at_once or len(asked) != len(ids) or not torch.equal(asked[:, -ids.shape[1] :], ids):
            return "the loss asks for log-probabilities of other rollouts than its own"
        if call.get("compute_entropy") and self.format.dtypes[1] is None:
            return "the loss asks for entropies at some steps only"
        whole = self.whole_batch()
        if whole is not None:
            pairs = zip(whole, (asked, call["attention_mask"]), strict=True)
            here = self.places(part)
            if not all(torch.equal(every[here], own.to(every.dtype)) for every, own in pairs):
                return "a micro-batch has other tokens or padding than its generation"
        return None

    def finish(self) -> None:
        """After the last micro-batch, continue the trainer's backward passes, which ended at the log-probabilities."""
        if self.is_over or not self.is_begun or self.is_pending:
            return
        self.is_over = True
        made = None
        try:
            made = self.processes.each(self.measured)
        except Exception as error:
            self.failure = error.with_traceback(None)  # the traceback would keep the tensors of the pass alive
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
        self.deferred = None
        if self.failure is None and self.write_gradient(made):
            assert made is not None
            self.result = made.checked
            return
        made = None
        self.run_trainers_passes(self.parts, averages=True)

    def write_gradient(self, made: FusedGradient | None) -> bool:
        """Write the mean of all processes' gradients to `.grad`; False, with nothing written, if one has none.

        A parameter that only other processes used has the gradient 0 here. One that no process used keeps its `.grad`,
        as with `DistributedDataParallel`.
        """
        everywhere = self.processes.gather(
            lambda: None if made is None else [p in made.gradient for p in self.parameters]
        )
        known = [used for used in everywhere if used is not None]
        if made is None or len(known) < len(everywhere):
            return False
        used = [p for p, *flags in zip(self.parameters, *known, strict=True) if any(flags)]
        grads = [made.gradient[p] if p in made.gradient else torch.zeros_like(p) for p in used]
        self.processes.average(grads)
        for parameter, grad in zip(used, grads, strict=True):  # last, when nothing can fail any more
            parameter.grad = grad
        return True

    def derivative(self) -> Tensor | None:
        """`(N, C)` derivative of the loss for the engine's rollouts; None if no micro-batch has one."""
        known = [part.batch.coefficients for part in self.parts]
        first = next((own for own in known if own is not None), None)
        if first is None:
            return None
        if self.generation is None:
            return first
        return self.assembled([torch.zeros_like(first) if own is None else own for own in known])

    @property
    def has_other_gradients(self) -> bool:
        """Whether the loss has gradients that bypass the log-probabilities; they are not in the sum of rows."""
        arrived = (parameter.grad for parameter in self.parameters)
        return any(part.entropy_gradients for part in self.parts) or any(
            grad is not None and bool(grad.any()) for grad in arrived
        )

    def abandon(self, answered: Sequence[FusedPart], *, averages: bool = False) -> None:
        """Leave the step to the trainer: its own passes for the micro-batches that the engine has answered."""
        self.is_over, self.deferred = True, None
        self.run_trainers_passes(answered, averages=averages)

    def run_trainers_passes(self, parts: Sequence[FusedPart], *, averages: bool) -> None:
        """Run the trainer's own forward passes again, and their backward passes from the derivatives of its losses.

        With several processes, gradients accumulate in each, and the last pass averages their sum if `averages` is set.
        """
        answered = [(part, part.call) for part in parts if part.call is not None]
        for index, (part, call) in enumerate(answered, 1):
            model, is_averaged = call["model"], averages and index == len(answered)
            accumulates = isinstance(model, nn.parallel.DistributedDataParallel) and not is_averaged
            with model.no_sync() if accumulates else nullcontext():
                found = self.trainers_log_probs(**call)
                ends = [] if part.batch.coefficients is None else [(found[0], part.batch.coefficients)]
                ends += [(found[1], grad) for grad in part.entropy_gradients]
                if not ends and self.processes.count > 1:  # the others' backward passes wait for one here
                    ends = [(found[0], torch.zeros_like(found[0]))]
                if ends:
                    torch.autograd.backward([end for end, _ in ends], [grad for _, grad in ends])

    def measured(self) -> FusedGradient | None:
        """Gram and gradient of this process; None if the gradient is not a weighted sum of the mode's rows.

        Raises:
            ScoregramError: If the check fails.
        """
        assert self.deferred is not None
        derivative = self.derivative()
        rows = None if derivative is None or self.has_other_gradients else self.weighted_rows(derivative)
        if derivative is None or rows is None:
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
        error = norm_error([both[0] for both in sums.values()], gram.matrix, weights)
        self.seconds += time.perf_counter() - began
        seconds = 0.0
        if compared is not None:
            began = time.perf_counter()
            theirs = self.gradient_of_rollout(compared, derivative)
            own = [sums.get(parameter) for parameter in self.parameters]
            error = max(error, fused_row_error(own, theirs, gram.matrix, weights, compared))
            del theirs, own
            seconds = time.perf_counter() - began
        if not error <= self.settings.rounding_error:
            requirement = f"must agree with the trainer's own pass to {self.settings.rounding_error:g}"
            got = f"a relative error of {error:.2g}"
            fail("a fused step", requirement, got, "The trainer's own pass replaced it.")
        made = {}
        for parameter in [p for p in self.parameters if p in sums]:  # each sum is freed as soon as it is converted
            made[parameter] = sums.pop(parameter)[0].to(parameter.dtype, copy=compared is not None)
        is_loss = self.settings.mode == "loss"
        divisor = loss_scale(self.trainer) * self.processes.count  # the trainer takes the mean over processes
        sizes = weights / divisor if is_loss else torch.ones_like(weights)
        scaled = rescaled_gram(gram, sizes.double().cpu())
        rollouts = int(compared is not None)
        checked = CheckedGram(replace(scaled, log_probs=log_probs), error, rollouts=rollouts, seconds=seconds)
        return FusedGradient(checked, made)

    def weighted_rows(self, derivative: Tensor) -> tuple[Tensor, Tensor] | None:
        """Coefficients `(B, C)` of rows, and weights `(B,)` that sum them to the gradient; None if no weights do."""
        c = derivative.double()
        counted = self.assembled([part.counted for part in self.parts]).bool()
        is_sum = c.isfinite().all() & ~c.masked_fill(counted, 0).any()  # the trainer handles an overflow
        if self.settings.mode == "loss":  # rows scaled to the size of scores: the smallest would underflow in float32
            weights = c.abs().amax(1)
            rows = c / torch.where(weights > 0, weights, 1.0)[:, None]
        else:
            rows = counted.double()
            weights, unevenness = rollout_weights(c, counted)
            is_sum &= unevenness <= EVENNESS_TOLERANCE
        return (rows, weights) if bool(is_sum) else None  # the one wait for the device

    def random_rollout(self, weights: Tensor) -> int | None:
        """A random rollout whose weight is at least a hundredth of the largest; None if all weights are 0.

        A smaller weight is often a difference of nearly equal numbers, such as two KL terms; its row is then rounding.
        """
        least = weights.abs().max() / 100
        weighted = ((weights != 0) & (weights.abs() >= least)).nonzero().squeeze(1).tolist()
        return weighted[int(torch.randint(len(weighted), (1,), generator=self.generator))] if weighted else None

    def gradient_of_rollout(self, index: int, derivative: Tensor) -> list[Tensor]:
        """The part of the gradient that comes from one rollout, by the trainer's own forward pass and autograd."""
        places = [(part, self.places(part).tolist()) for part in self.parts]
        part, own = next((part, rows.index(index)) for part, rows in places if index in rows)
        assert part.call is not None
        here = slice(own, own + 1)
        one = {name: part.call[name][here] for name in ("input_ids", "attention_mask")}
        with Undo() as undo, undo, torch.enable_grad():
            undo.keep_random_state(derivative.device)
            undo.put_gradients_aside(self.parameters)
            # not through DistributedDataParallel, which would wait for the other processes
            call = part.call | one | {"model": self.model, "compute_entropy": False}
            found = self.trainers_log_probs(**call)[0]
            return gradients((found * derivative[index : index + 1].to(found.dtype)).sum(), self.parameters)
