"""`attach`: wraps the methods of a trainer, measures its steps while it trains, and restores everything at the end."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scoregram.checks import fail
from scoregram.distributed import ALONE, Processes
from scoregram.exhibits import Table
from scoregram.integrations.trl.custom_advantages import OwnEstimator, advantages_of_process, require_trl_estimator
from scoregram.integrations.trl.generation import Generation, RewardCall, generation_of
from scoregram.integrations.trl.recommendations import (
    evidence_scalars,
    log_scalars,
    print_to_stderr,
    recommendation,
    recommendation_line,
)
from scoregram.integrations.trl.recording import (
    Diagnosis,
    RunFinding,
    RunFolder,
    Severity,
    TrainerLog,
    add_to_log,
    halting_severity,
    require_folder_options,
)
from scoregram.integrations.trl.step import MeasuredStep, SkippedStep, measure_step
from scoregram.integrations.trl.step_fusion import FusedSteps
from scoregram.integrations.trl.summary import MeasuredSteps
from scoregram.integrations.trl.support import (
    Mode,
    Settings,
    WrappedMethods,
    default_tolerance,
    is_wrapped,
    low_precision_causes,
    processes_of,
    require_supported,
    run_config,
    uneven_term,
)
from scoregram.integrations.trl.window import ROW_KEY, MicroBatch, RecentGenerations, Window, row_keys
from scoregram.reading import Recommendation, RunNoise, Trust, replayed_components
from scoregram.runs import OWN_PREFIX, LayerPrecision, open_run
from scoregram.statistics import NoiseComponents
from scoregram.terminal import print_view_command


def attach(
    trainer: Any,
    every: int = 10,
    out: str | Path | None = None,
    *,
    mode: Mode = "scores",
    estimator: str | OwnEstimator | None = None,
    tolerance: float | None = None,
    memory_gb: float | int | None = None,
    layers: LayerPrecision = "float32",
    keep_rollouts: bool = True,
    overwrite: bool = False,
    resume: bool = False,
    between_prompts: bool = False,
    fused: bool = True,
    cuda_graphs: bool = False,
    advise_every: int | None = None,
    halt_on: str | None = None,
) -> "Attachment":
    """Measure the steps of a TRL trainer from now on, until its training ends or `detach()` is called.

    Call it once before `trainer.train()`; with several processes, in every one. It measures the first step and every
    `every`-th one, either in the same backward pass as the trainer's gradient or in a separate pass between the
    trainer's backward pass and its update. A separate pass leaves gradient, random state and weights bit for bit as
    they are; a shared pass gives the trainer's gradient up to rounding. Other steps are not touched. The scalars appear
    among the trainer's own metrics as `scoregram/…`, and so in every logger that `report_to` names.

    Args:
        trainer: A `GRPOTrainer` or `RLOOTrainer`, subclasses included.
        every: Steps from one measurement to the next.
        out: New run folder, for `scoregram report` and everything else that reads runs; None for scalars only.
        mode: `scores`: rows of the Gram are the scores of all rollouts of the generation, under the policy that sampled
            them; a step that reuses older rollouts is not measured, the next one with fresh rollouts is. `loss`: rows
            are the gradients of the trainer's own loss, exact for every loss, KL term, clipping and inner step.
        estimator: Advantages to train with instead of the trainer's: a group-level row of `ESTIMATORS`, or a function
            from a `Generation` to `(N,)` or per-token `(N, C)` advantages.
        tolerance: Largest relative error of the self-check without a warning. By default 1e-3, and 5e-2 where the
            trainer computes in lower precision than float32.
        memory_gb: Gigabytes that a measurement may take, by estimate. Groups are measured in several passes if they do
            not fit into one; a step is skipped with a warning if one group alone does not fit. By default 80 % of what
            is free at the time.
        layers: Precision of the per-layer Grams in the run folder.
        keep_rollouts: Write the rollouts of measured steps, with all tokens, to the run folder.
        overwrite: Replace an older run in `out`.
        resume: Continue the run in `out`, for `trainer.train(resume_from_checkpoint=…)`. A training from the beginning
            raises an error if the run has steps: it would remove them. So do another `mode`, `estimator`, group size,
            temperature, seed or set of reward functions; the config of the run gets the new `every` and `tolerance`.
        between_prompts: With several processes, let the first one measure all groups, to get the Gram between prompts
            and the metrics that need it. Otherwise each process measures its share of the groups, which is faster. A
            single process gets that Gram anyway, if all groups fit into one pass.
        fused: Take Gram and gradient from one backward pass wherever that gives the trainer's gradient up to rounding:
            in one process, or data parallel with whole groups in each, where the step fits into memory, after a step
            whose whole gradient agreed. `attachment.not_fused` says why steps are not fused. False never does it.
        cuda_graphs: On a GPU, record fused passes as CUDA graphs and replay them where prompts and completions are
            padded to the same lengths again. This removes the time that Python takes to launch kernels, and keeps the
            memory of one pass for the whole training (`scoregram.gram.CudaGraphGram`). Only in one process.
        advise_every: Every so many steps, say which group size and number of rollouts the measured noise asks for, and
            the worst finding of `advice()`: one printed line, scalars `scoregram/control/…` in the trainer's log, and
            the line of that step in the run folder. Nothing is applied. None never does it.
        halt_on: Stop the training, with a warning that states the finding, when the trainer's log shows one that is at
            least this severe: `critical`, `warning` or `note`. The rules are those of `scoregram advise` on a log; they
            run whenever the trainer logs. None never stops it.

    Raises:
        ScoregramError: For a trainer, version or setting that is not supported; nothing has been changed then.
    """
    version = require_supported(trainer)
    processes = processes_of(trainer)
    if is_wrapped(trainer):
        fail("attach", "the trainer must not be attached yet", "a second call", "Detach the first attachment.")
    require_folder_options(out, layers, overwrite=overwrite, resume=resume)
    severity = halting_severity(halt_on)
    if estimator is not None:
        require_trl_estimator(estimator, int(trainer.num_generations))
    low_precision = low_precision_causes(trainer)
    settings = Settings(
        every=every,
        mode=mode,
        estimator=estimator,
        tolerance=default_tolerance(bool(low_precision)) if tolerance is None else tolerance,
        memory_gb=memory_gb,
        keep_rollouts=keep_rollouts and out is not None,
        keep_sketches=out is not None,
        between_prompts=between_prompts,
        fused=fused,
        cuda_graphs=cuda_graphs,
        advise_every=advise_every,
        low_precision=low_precision,
        uneven_term=uneven_term(trainer),
    )
    for text in settings.warning_texts(trainer.accelerator.device, processes.count) if processes.is_first else ():
        warnings.warn(f"scoregram: {text}", stacklevel=2)
    folders: list[RunFolder] = []

    def make_folder() -> None:
        if out is not None:
            config = run_config(trainer, settings, version, processes)
            folders.append(RunFolder(Path(out), config, layers=layers, overwrite=overwrite, resume=resume))
            print_view_command(out)  # in the first process alone

    processes.from_first(make_folder)
    return Attachment(trainer, settings, folders[0] if folders else None, processes, halt_on=severity)


class Attachment:
    """A trainer whose steps are measured. As a context manager it detaches at the end of the block."""

    def __init__(
        self,
        trainer: Any,
        settings: Settings,
        folder: RunFolder | None,
        processes: Processes = ALONE,
        *,
        halt_on: Severity | None = None,
    ) -> None:
        self.trainer = trainer
        self.settings = settings
        self.folder = folder
        """The run folder; None in every process but the first."""
        self.processes = processes
        self._steps = MeasuredSteps(trainer)
        self.readings: list[MeasuredStep] = self._steps.readings
        """The measured steps: scalars, the error of the self-check, notes."""
        self.skipped: list[SkippedStep] = self._steps.skipped
        """Steps at which a measurement was due and could not be made, each with the reason."""
        self.failures: list[str] = self._steps.failures
        """Errors in measurements, which did not stop the training."""
        self._log = TrainerLog(trainer)
        self.log_lines: list[dict[str, Any]] = self._log.lines
        """What the trainer logged, a mapping with `step` for each time."""
        self.halt_on: Severity | None = halt_on
        self.halted: RunFinding | None = None
        """The finding that stopped the training; None if none did."""
        self.recommendations: list[Recommendation] = []
        """What was recommended every `advise_every` steps, and not applied."""
        self._earlier_noise: list[NoiseComponents] = []
        """Noise of the steps that were measured before this training was resumed; in the first process alone."""
        self._generations = RecentGenerations()
        self._reward_call: RewardCall | None = None
        """The call of the reward functions in the latest generation; None before it."""
        self._generation_log_probs: list[Tensor] = []
        """Log-probabilities that the trainer computed without gradient since the generation began."""
        self._window: Window | None = None
        """The step that is being observed; None at steps that are not measured."""
        self._loss_log_probs: list[Tensor] | None = None
        """Log-probabilities returned to the loss that is being observed; None while no loss is."""
        self._is_due = True
        """Whether a measurement is due; it stays so until a step can be measured or is skipped."""
        wrappers: dict[str, Callable[..., Any]] = {
            "_calculate_rewards": self._rewards,
            "_generate_and_score_completions": self._generate,
            "_get_per_token_logps_and_entropies": self._log_probs,
            "_compute_loss": self._loss,
            "training_step": self._training_step,
        }
        self._methods = WrappedMethods(trainer, wrappers)
        self._inner = self._methods.inner
        self._fused = FusedSteps(trainer, settings, processes, self._inner)
        self._callback = _callback_for(self)
        trainer.add_callback(self._callback)

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        asked = f"every={self.settings.every}, mode={self.settings.mode!r}"
        state = "attached" if self.is_attached else "detached"
        return f"Attachment({type(self.trainer).__name__}, {asked}, {state}, measured steps: {self._steps.numbers})"

    def __str__(self) -> str:
        """The main rows of `summary()` as text."""
        if self.folder is None or not self.readings:
            return self._steps.text()
        return f"{self._steps.text()}\nreport: scoregram report {self.folder.path}"

    def detach(self) -> None:
        """Restore the trainer's methods and close the run folder; calling it again does nothing."""
        if self.is_attached:
            self.trainer.remove_callback(self._callback)
        self._end()

    def _begin(self, step: int) -> None:
        """Begin to write the run folder after `step`; if that is not possible, all processes raise the error."""

        def begin() -> None:
            if self.folder is None:
                return
            self.folder.begin(step)
            noises = map(replayed_components, open_run(self.folder.path).metrics() if step else ())
            self._earlier_noise = [one for one in noises if one is not None]

        try:
            self.processes.from_first(begin)
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        """Stop measuring: restore the trainer's methods, drop its rollouts, close the run folder."""
        self._methods.restore()
        self._generations.forget()
        self._window = None
        if self.folder is not None:
            with self._steps.errors_as_warnings():
                self.folder.close()

    @property
    def is_attached(self) -> bool:
        """Whether steps of the trainer are measured."""
        return self._methods.are_wrapped

    @property
    def not_fused(self) -> str | None:
        """Why the last step was not fused (Gram and gradient from one backward pass); None if the next one may be."""
        reason = self._fused.reason or self._fused.obstacle or self._fused.disagreement
        return None if reason is None else f"{reason}; steps are measured in a separate pass"

    @property
    def trust(self) -> Trust:
        """How far the measured numbers can be trusted: how many self-checks passed, and the worst error."""
        return self._steps.trust

    def noise(self) -> RunNoise:
        """Signal, noise scale, best group size and what `optimal-loo` would save, pooled over measured steps."""
        return self._steps.noise()

    def summary(self) -> Table:
        """The measured scalars: first, last, and the mean where every measured step defines them.

        Signal to noise, noise scale, best group size and saving have `noise()` in place of a mean: ratios are pooled.

        Numbers from the Gram of a step whose self-check failed are withheld; `readings` has them, with `passed`.
        """
        return self._steps.summary()

    def advice(self) -> Diagnosis:
        """What is wrong with the training so far, worst first, and what to change.

        From the run folder if there is one, Grams included; otherwise from the trainer's log.
        """
        return self._log.advice(self.folder)

    def _recommend(self, step: int) -> None:
        """Recommend sizes after a step at which that is due; all processes call it together."""
        if self.settings.advise_every is None or step % self.settings.advise_every:
            return
        with self._steps.errors_as_warnings():
            made = self.processes.from_first(lambda: self._recommendation(step))
            self.recommendations.append(made)
            self.trainer._metrics["train"].update(log_scalars(made))
            if self.folder is not None:
                self.folder.add_scalars(step, made.scalars())
            if self.processes.is_first:
                print_to_stderr(recommendation_line(made))

    def _recommendation(self, step: int) -> Recommendation:
        """The recommendation after a step."""
        size, seed = int(self.trainer.num_generations), int(self.trainer.args.seed)
        readings, earlier = self.readings, self._earlier_noise
        return recommendation(step, self.advice(), readings, self.noise(), earlier=earlier, group_size=size, seed=seed)

    def _halt_if_asked(self, control: Any) -> None:
        """Ask the trainer to stop if its log shows a finding that is severe enough."""
        severity = self.halt_on
        if severity is None or self.halted is not None:
            return
        with self._steps.errors_as_warnings():
            # one answer for all: a process that stopped alone would leave the others waiting
            self.halted = self.processes.from_first(lambda: self._log.halting_finding(severity))
        if self.halted is not None:
            control.should_training_stop = True
            warnings.warn(f"scoregram: the training is stopped. {' '.join(self.halted.lines())}", stacklevel=4)

    # wrappers: what the trainer calls

    def _rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids: Any, *args: Any, **kw: Any) -> Any:
        """Keeps the rewards of each function, which the trainer does not pass on."""
        rewards = self._inner["_calculate_rewards"](inputs, prompts, completions, completion_ids, *args, **kw)
        self._reward_call = RewardCall(inputs, completion_ids, rewards, tuple(self._generation_log_probs))
        return rewards

    def _generate(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Keeps the generation and gives every rollout a key; replaces the advantages if the user chose others."""
        self._reward_call, self._generation_log_probs = None, []
        output = self._inner["_generate_and_score_completions"](inputs, *args, **kwargs)
        if not self.is_attached or not self.trainer.model.training:
            return output
        if self.settings.estimator is not None:  # an error here must end the training, so nothing catches it
            output = {**output, "advantages": self._own_advantages(output)}
        serial = self._generations.next_serial()
        with self._steps.errors_as_warnings():
            generation = self._generation_of(output, serial)
            self._generations.add(generation)
            return {**output, ROW_KEY: row_keys(generation)}
        return output

    def _log_probs(self, *args: Any, **kwargs: Any) -> Any:
        """Answers from the Gram engine at a fused step; notes what the loss, or the generation, got."""
        found = None
        if self._loss_log_probs == [] and torch.is_grad_enabled():
            found = self._fused.log_probs(*args, **kwargs)
        is_fused = found is not None
        if not is_fused:
            found = self._inner["_get_per_token_logps_and_entropies"](*args, **kwargs)
        if self._loss_log_probs is None and not torch.is_grad_enabled():
            self._generation_log_probs.append(found[0])
        if self._loss_log_probs is not None and found[0].requires_grad:
            self._loss_log_probs.append(found[0])
            if not is_fused and len(self._loss_log_probs) == 1:
                self._fused.note_format(found)
        return found

    def _loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Adds the micro-batch to the step that is observed, and records the derivative of its loss.

        The trainer's loss never sees the keys of rollouts.
        """
        rows = inputs.get(ROW_KEY)
        given = {name: value for name, value in inputs.items() if name != ROW_KEY}
        if self._window is None or not torch.is_grad_enabled():
            return self._inner["_compute_loss"](model, given, *args, **kwargs)
        batch = None if rows is None else MicroBatch(rows)
        with self._steps.errors_as_warnings():
            self._begin_fused_step(model, given, batch, self._window)
        if batch is None:
            return self._inner["_compute_loss"](model, given, *args, **kwargs)
        try:
            loss, log_probs = self._observed_loss(model, given, *args, **kwargs)
        except Exception as error:
            if not self._fused.recovers_from(error):
                raise
            loss, log_probs = self._observed_loss(model, given, *args, **kwargs)
        with self._steps.errors_as_warnings():
            self._window.batches.append(batch)
            for one in log_probs:
                if one.shape == given["completion_ids"].shape:
                    one.register_hook(batch.add_gradient)
        return loss

    def _observed_loss(self, *args: Any, **kwargs: Any) -> tuple[Any, list[Tensor]]:
        """The trainer's loss, and the log-probabilities that it asked for."""
        self._loss_log_probs = log_probs = []
        try:
            return self._inner["_compute_loss"](*args, **kwargs), log_probs
        finally:
            self._loss_log_probs = None

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Measures the step after the backward pass of its last micro-batch, before the update."""
        if self.is_attached:
            self._open_window()
        with self._fused.around_training_step() if self._window is not None else nullcontext():
            loss = self._inner["training_step"](*args, **kwargs)
        if self._fused.failure is not None:
            self._warn_of_fused_failure()
        if self._window is not None and self.trainer.accelerator.sync_gradients:
            with self._steps.errors_as_warnings():
                self._measure(self._window)
            self._window = self._fused.step = None
        if self.is_attached and self.trainer.accelerator.sync_gradients:  # later steps may reuse the newest generation
            self._generations.forget(but_newest=True)
        return loss

    # what the wrappers do

    def _open_window(self) -> None:
        """Begin to observe a step if a measurement is due, or was postponed to it."""
        step = int(self.trainer.state.global_step) + 1
        self._is_due = self._is_due or step % self.settings.every == 0
        if self._is_due and (self._window is None or self._window.step != step):
            self._window = Window(step)

    def _generation_of(self, output: Mapping[str, Any], serial: int) -> Generation:
        """The slice of a generation in this process, from what TRL's method returned."""
        return generation_of(self.trainer, output, self._reward_call, serial, self.processes)

    def _own_advantages(self, output: Mapping[str, Any]) -> Tensor:
        """Advantages by the estimator of the settings, for the rollouts of this process."""
        serial, shape = self._generations.count, tuple(output["completion_ids"].shape)
        return advantages_of_process(
            self.trainer, lambda: self._generation_of(output, serial), shape, self.settings, self.processes
        )

    def _measure(self, window: Window) -> None:
        """Measure a step whose gradient is complete, and pass its numbers on; all processes call it together."""
        generations = self._generations
        if self.settings.mode == "scores" and not all(self.processes.gather(lambda: generations.are_fresh(window))):
            return  # postponed to the next step that is on-policy
        self._is_due = False
        measured = measure_step(self.trainer, window, generations.used_in, self.settings, self.processes, self._fused)
        if isinstance(measured, SkippedStep):
            self.skipped.append(measured)
            return
        self.readings.append(measured.bare)
        metrics = self.trainer._metrics["train"]
        foreign_names = [name for name in metrics if not name.startswith(OWN_PREFIX)]
        add_to_log(metrics, measured, self.noise())
        if self.folder is not None:
            self.folder.write(measured, keep_rollouts=self.settings.keep_rollouts, foreign_names=foreign_names)
            if self.settings.advise_every is not None:
                evidence = evidence_scalars(measured, int(self.trainer.num_generations))
                self.folder.add_scalars(measured.step, evidence)

    def _begin_fused_step(self, model: Any, inputs: Any, batch: MicroBatch | None, window: Window) -> None:
        """Try to fuse the step that begins with this micro-batch, or add the micro-batch to a step that is fused.

        All processes decide together, also one whose rollouts are unknown (`batch` is None).
        """
        if not window.is_decided:
            window.is_decided = True
            generation = self._generations.to_fuse(batch, window, is_loss=self.settings.mode == "loss")
            self._fused.begin(model, inputs, batch, generation)
        elif batch is not None:
            self._fused.add_part(inputs, batch)

    def _warn_of_fused_failure(self) -> None:
        """Warn that no further step is fused, with the error."""
        message, self._fused.failure = str(self._fused.reason), None
        self.failures.append(message)
        warnings.warn(
            "scoregram: a step could not be fused. The trainer's own pass replaced it, and further steps are measured "
            f"in a separate pass. {message}",
            stacklevel=4,
        )


def _callback_for(attachment: Attachment) -> Any:
    """A callback of transformers that passes the trainer's logs on to the run folder, and detaches at the end."""
    from transformers import TrainerCallback

    class ScoregramCallback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if attachment.is_attached:
                attachment._begin(int(state.global_step))

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            with attachment._steps.errors_as_warnings():
                if attachment.is_attached and attachment.folder is not None:
                    attachment.folder.flush()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if attachment.is_attached:
                attachment._recommend(int(state.global_step))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            with attachment._steps.errors_as_warnings():
                if not attachment.is_attached or not logs:
                    return
                others = {name: value for name, value in logs.items() if not name.startswith(OWN_PREFIX)}
                if attachment.folder is not None:
                    attachment.folder.add_logs(int(state.global_step), others)
                attachment.log_lines.append({"step": int(state.global_step), **logs})
            attachment._halt_if_asked(control)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            # not detach(): the trainer is iterating over its callbacks, and removing one would make it skip the next
            attachment._end()

    return ScoregramCallback()
