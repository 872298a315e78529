"""Decides which measured steps of a trainer are fused, and runs them.

With several processes they decide together: before the loss, after the engine's forward pass, and after its backward
pass. So either all of them write a fused gradient, or all of them run the trainer's own pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from scoregram.checks import listed
from scoregram.distributed import Processes
from scoregram.gram import (
    ChangedLayers,
    CudaGraphGram,
    Undo,
    bytes_of_pass,
    gradient_bytes,
    trainable_parameters,
)
from scoregram.integrations.trl.fused_step import FusedPart, FusedStep, LogProbsFormat
from scoregram.integrations.trl.generation import Generation
from scoregram.integrations.trl.separate_pass import CheckedGram
from scoregram.integrations.trl.support import Settings, memory_limit, reason_not_fused, unwrapped_model
from scoregram.integrations.trl.window import EVENNESS_TOLERANCE, MicroBatch, StepSlice
from scoregram.reading import gram_of_passes

FULL_CHECK_EVERY = 50
"""One in this many measured steps is measured in a separate pass, so that the whole gradient is compared."""
CHECK_SHARE = 0.03
"""Largest share of the time of fused steps that comparisons of one rollout's gradient may take, after the first."""
REPLACED_METHODS = ("_get_per_token_logps_and_entropies", "training_step")
"""Methods that a fused step replaces; they must be TRL's own. The loss may be overridden or wrapped."""


@dataclass(frozen=True)
class Readiness:
    """Whether one process could fuse a step."""

    reason: str | None = None
    """Why neither this step nor a later one can be fused."""
    obstacle: str | None = None
    """Why this step cannot be fused."""
    has_rollouts: bool = True
    """Whether the rollouts are known and of one generation that the mode measures."""
    compares_rollout: bool = False
    """Whether a comparison of one rollout's gradient is due."""


class FusedSteps:
    """Decides which measured steps of a trainer are fused, and runs them."""

    def __init__(
        self, trainer: Any, settings: Settings, processes: Processes, methods: Mapping[str, Callable[..., Any]]
    ) -> None:
        self.trainer = trainer
        self.settings = settings
        self.processes = processes
        self.trainers_log_probs = methods["_get_per_token_logps_and_entropies"]
        self.reason: str | None = None
        """Why no step of this trainer is fused from now on; None if steps may be."""
        self.disagreement: str | None = None
        """Why the whole gradient of the last step that compared it does not allow the next step to be fused."""
        self.obstacle: str | None = None
        """Why the last step that could have been fused was not; later steps may be."""
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
        self.graphs: CudaGraphGram | None = None
        """Made at the first fused step, if the settings ask for CUDA graphs."""
        self.pieces = int(trainer.args.gradient_accumulation_steps)
        parts = int(getattr(trainer.args, "steps_per_generation", None) or self.pieces)
        inner = int(getattr(trainer, "num_iterations", 1))
        if not settings.fused:
            self.reason = "attach was called with fused=False"
        elif others := [name for name in REPLACED_METHODS if not _is_of_trl(methods[name])]:
            self.reason = f"{listed(others)} of the trainer is overridden or wrapped"
        elif processes.count > 1:
            self.reason = reason_of_processes(trainer, settings, parts)
        if self.reason is not None:
            return
        if self.pieces > 1 and parts != self.pieces:
            self.reason = f"{self.pieces} micro-batches are accumulated, and a generation has {parts}"
        elif self.pieces > 1 and inner > 1:
            self.reason = f"{self.pieces} micro-batches are accumulated, and a generation is used for {inner} steps"
        elif settings.mode == "scores" and parts > self.pieces:
            self.reason = f"a generation is split over {parts} steps, and mode='scores' measures it whole"

    # facts from steps that are not fused

    def note_format(self, returned: Any) -> None:
        """Note what the trainer's own method for log-probabilities returns."""
        self.format = LogProbsFormat.of(returned)

    def note_full_check(
        self, error: float, unevenness: float, *, has_gradient: bool, causes: Sequence[str] = ()
    ) -> None:
        """Note whether the whole gradient of a step agreed with the weighted sum of its rows; if not, likely causes."""
        agrees = has_gradient and error <= self.settings.rounding_error
        is_even = self.settings.mode == "loss" or unevenness <= EVENNESS_TOLERANCE
        self.since_full_check = 0 if agrees and is_even else None
        self.disagreement = None
        if not has_gradient:
            self.disagreement = "every weight of the last checked step was 0, so no gradient could be compared"
        elif self.since_full_check is None:
            why = f". Likely cause: {'; '.join(causes)}" if causes else ""
            limit = f"fused steps need at most {self.settings.rounding_error:g} and even weights within rollouts"
            self.disagreement = f"the sum of the rows differed from the gradient by {error:.2g}, and {limit}{why}"

    # the current step

    def begin(
        self, model: Any, inputs: Mapping[str, Any], batch: MicroBatch | None, generation: Generation | None
    ) -> None:
        """Fuse the step whose loss the trainer is about to compute from `model` and `inputs`, if all conditions hold.

        All processes call it together. `batch` must hold all rollouts of `generation`, or be the first of several
        micro-batches that do; in mode `loss` a single one may hold a part. Without them no process fuses the step.
        """
        self.step = self.obstacle = None
        since = self.since_full_check  # this and the reason are the same in all processes
        if self.reason is not None or since is None or since >= FULL_CHECK_EVERY - 1:
            return
        found = self.processes.gather(lambda: self.readiness(model, inputs, batch, generation))
        self.reason = next((one.reason for one in found if one.reason is not None), None)
        self.obstacle = next((one.obstacle for one in found if one.obstacle is not None), None)
        if self.reason or self.obstacle or not all(one.has_rollouts for one in found):
            return
        assert batch is not None and self.format is not None
        inside = unwrapped_model(self.trainer)
        # not tried with NCCL, whose watchdog thread calls CUDA while a graph is recorded
        if self.settings.cuda_graphs and self.graphs is None and self.processes.count == 1:
            self.graphs = CudaGraphGram(inside, temperature=float(self.trainer.temperature), keep_padding=True)
        self.step = FusedStep(
            trainer=self.trainer,
            settings=self.settings,
            trainers_log_probs=self.trainers_log_probs,
            model=inside,
            parameters=trainable_parameters(inside),
            format=self.format,
            generator=self.generator,
            compares_rollout=any(one.compares_rollout for one in found),
            parts=[FusedPart(inputs, batch)],
            processes=self.processes,
            pieces=self.pieces,
            generation=generation if self.pieces > 1 else None,
            graphs=self.graphs,
        )

    def readiness(
        self, model: Any, inputs: Mapping[str, Any], batch: MicroBatch | None, generation: Generation | None
    ) -> Readiness:
        """Whether this process could fuse the step that begins with a micro-batch; arguments as in `begin`."""
        if batch is None or generation is None:
            return Readiness(has_rollouts=False)
        if self.format is None:
            return Readiness(obstacle="the trainer's method for log-probabilities returned an unsupported format")
        is_part = self.pieces == 1 and self.settings.mode == "loss"
        rollouts = len(batch.rows) if is_part else generation.size
        is_whole = len(batch.rows) * self.pieces == rollouts and self.is_whole_step()
        if not is_whole or generation.size % generation.group_size:
            return Readiness(obstacle="the micro-batches of the step are not one whole generation")
        inside = unwrapped_model(self.trainer)
        parameters = trainable_parameters(inside)
        tokens = inputs["prompt_ids"].shape[1] + inputs["completion_ids"].shape[1]
        # a separate pass holds one gradient besides the trainer's, a fused one two: the sum, and the checked row
        needed = bytes_of_pass(inside, rollouts, tokens, parameters=parameters) + gradient_bytes(parameters)
        limit = memory_limit(self.trainer.model, self.settings, self.processes)
        if needed > limit:
            sizes = f"{needed / 1e9:.3g} GB by estimate, and the limit is {limit / 1e9:.3g} GB"
            return Readiness(obstacle=f"memory is short: all rollouts of the step together take {sizes}")
        if getattr(self.trainer.accelerator, "has_lomo_optimizer", False):
            return Readiness(reason="the LOMO optimiser updates parameters inside the backward pass")
        reason = reason_not_fused(model, inside, self.processes.count)
        return Readiness(reason=reason, compares_rollout=self.check_seconds <= CHECK_SHARE * self.seconds)

    def is_whole_step(self) -> bool:
        """Whether the micro-batches of the running step are as many as the arguments say, and none has run yet."""
        pieces = getattr(self.trainer, "current_gradient_accumulation_steps", self.pieces)
        return int(pieces) == self.pieces and (self.pieces > 1 or bool(self.trainer.accelerator.sync_gradients))

    def add_part(self, inputs: Mapping[str, Any], batch: MicroBatch) -> None:
        """Add the next micro-batch to an accumulated step that is fused."""
        if self.step is not None and self.step.is_pending:
            self.step.parts.append(FusedPart(inputs, batch))

    def log_probs(self, *args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
        """Log-probabilities for the trainer, if the current step is fused; None to let the trainer compute them."""
        if self.step is None or self.step.is_over or self.step.is_begun:
            return None
        step = self.step
        try:
            found = self.processes.each(lambda: step.log_probs(*args, **kwargs))
        except Exception as error:
            self.disable(error)
            return None
        declined = [one for one in self.processes.gather(lambda: step.declined) if one is not None]
        if not declined:
            return found
        self.reason = declined[0]
        self.leave_to_trainer()
        return None

    def recovers_from(self, error: Exception) -> bool:
        """Whether to repeat, without fusing, a loss that raised an error: true if it used fused log-probabilities.

        Not with several processes: the others may wait inside this loss for the process that would repeat it.
        """
        if self.step is None or self.step.is_over or not self.step.is_begun:
            return False
        if self.processes.count > 1:
            error.add_note("The loss had log-probabilities from scoregram. attach(…, fused=False) leaves TRL's own.")
            return False
        self.disable(error)
        return True

    def disable(self, error: Exception) -> None:
        """Stop fusing steps after an unexpected error."""
        self.failure, self.reason = error.with_traceback(None), f"{type(error).__name__}: {error}"
        self.leave_to_trainer()

    def leave_to_trainer(self) -> None:
        """Let the trainer compute the current micro-batch, after its own passes for those that the engine answered."""
        step, self.step = self.step, None
        if step is not None and not step.is_over:
            step.abandon(step.parts[:-1])

    @contextmanager
    def around_training_step(self) -> Iterator[None]:
        """Wraps the trainer's `training_step`, so that `accelerator.backward` returns with the complete gradient."""
        self.failure = None
        if self.step is not None and not self.step.is_pending:
            self.step = None
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
            if self.step is not None and self.step.is_pending and accelerator.sync_gradients:
                self.step.abandon(self.step.parts, averages=True)  # the step ends early
                self.step = None
        except BaseException:
            self.step = None
            raise

    def finish(self) -> None:
        """Run the backward pass of the current step, if it is fused."""
        step = self.step
        if step is None or step.is_over or not step.is_begun:
            return
        step.finish()
        if not step.is_over:
            return  # further micro-batches follow
        if step.failure is not None:
            self.disable(step.failure)
        if step.result is None:
            self.since_full_check = None  # compare the whole gradient before the next attempt
        elif self.since_full_check is not None:
            self.since_full_check += 1
            self.seconds += step.seconds
            self.check_seconds += step.result.seconds

    def measured(self, own: StepSlice) -> CheckedGram | None:
        """Gram and check of the current step, in the order of its observed rollouts; None if it was not fused.

        All processes call it together, each with what it saw of the step, and return the same. The Gram between
        rollouts of different processes is `nan`.
        """
        step = self.step
        if step is None or step.result is None:
            return None
        results = self.processes.gather(lambda: self.own_measurement(step, own))
        if len(results) == 1:
            return results[0]
        width = max(result.gram.log_probs.shape[1] for result in results)
        grams = [
            replace(gram, log_probs=F.pad(gram.log_probs, (0, width - gram.log_probs.shape[1])))
            for gram in (result.gram for result in results)
        ]
        return CheckedGram(
            gram_of_passes(grams),
            max(result.error for result in results),
            rollouts=sum(result.rollouts for result in results),
            seconds=max(result.seconds for result in results),
        )

    def own_measurement(self, step: FusedStep, own: StepSlice) -> CheckedGram:
        """Gram and check of this process's rollouts, in the order in which it observed them."""
        assert step.result is not None
        result, rows = step.result, step.rows
        (generation,) = own.generations
        order, gram = rows.argsort().cpu(), result.gram
        tokens = generation.completion_ids.shape[1]
        log_probs = gram.log_probs.new_zeros(generation.size, tokens)
        log_probs[rows.cpu()] = gram.log_probs[:, -tokens:]
        in_order = replace(
            gram,
            matrix=gram.matrix[order][:, order],
            by_layer=ChangedLayers(gram.by_layer, lambda layer: layer[order][:, order]),
            log_probs=generation.to("cpu").in_rows(log_probs)[own.chosen[0]],
        )
        return replace(result, gram=in_order)


def reason_of_processes(trainer: Any, settings: Settings, parts: int) -> str | None:
    """Why steps of several processes cannot be fused; None if each process has whole groups and the whole model.

    `parts` is the number of micro-batches of a generation.
    """
    kind = str(trainer.accelerator.distributed_type).rpartition(".")[2].upper()
    if not kind.startswith("MULTI_"):
        return f"the model is sharded over several processes ({kind})"
    if settings.between_prompts:
        return "with between_prompts=True the first process measures the rollouts of all processes"
    size, group = int(trainer.args.per_device_train_batch_size) * parts, int(trainer.num_generations)
    if size % group == 0:
        return None
    remedy = f"Set per_device_train_batch_size to a multiple of num_generations={group}"
    return f"a group is cut between processes, because each has {size} rollouts of a generation. {remedy}"


def _is_of_trl(method: Callable[..., Any]) -> bool:
    """Whether a method is TRL's own, not that of a subclass or a wrapper."""
    return str(getattr(method, "__module__", "")).startswith("trl.")
