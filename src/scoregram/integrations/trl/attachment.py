"""`attach`: wraps the methods of a trainer, measures its steps while it trains, and restores everything at the end."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scoregram.advantages import ESTIMATORS
from scoregram.advice import SEVERITIES, Diagnosis, RunFinding, Severity, advise, advise_log, run_log
from scoregram.checks import fail
from scoregram.distributed import ALONE, Processes
from scoregram.exhibits import Cell, Table
from scoregram.integrations.trl.generation import (
    Generation,
    OwnEstimator,
    RewardCall,
    generation_of,
    merged_generation,
    own_advantages,
    require_trl_estimator,
    show_advantages,
)
from scoregram.integrations.trl.separate_pass import score_energies
from scoregram.integrations.trl.step import (
    HEADLINE_SCALARS,
    Folder,
    MeasuredStep,
    SkippedStep,
    add_to_log,
    measure_step,
    printed_cell,
    require_folder_options,
)
from scoregram.integrations.trl.step_fusion import FusedSteps
from scoregram.integrations.trl.support import (
    WRAPPED_METHODS,
    Mode,
    Settings,
    default_tolerance,
    is_rloo,
    low_precision_causes,
    processes_of,
    require_supported,
    run_config,
    uneven_term,
)
from scoregram.integrations.trl.window import ROW_KEY, MicroBatch, Window, row_keys
from scoregram.reading import CHECK_ROLLOUTS, STEP_NAMES, RunNoise, Trust, run_noise
from scoregram.runs import CONFIG_FILE, OWN_PREFIX, LayerPrecision, needs_gram
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
        halt_on: Stop the training, with a warning that states the finding, when the trainer's log shows one that is at
            least this severe: `critical`, `warning` or `note`. The rules are those of `scoregram advise` on a log; they
            run whenever the trainer logs. None never stops it.

    Raises:
        ScoregramError: For a trainer, version or setting that is not supported; nothing has been changed then.
    """
    version = require_supported(trainer)
    processes = processes_of(trainer)
    if getattr(vars(trainer).get("training_step"), "__scoregram__", None) is not None:
        fail("attach", "the trainer must not be attached yet", "a second call", "Detach the first attachment.")
    require_folder_options(out, layers, overwrite=overwrite, resume=resume)
    least: Severity | None = next((one for one in SEVERITIES if one == halt_on), None)
    if halt_on is not None and least is None:
        fail("attach", f"halt_on must be one of {', '.join(SEVERITIES)}", repr(halt_on), "None never stops a training.")
    if estimator is not None:
        require_trl_estimator(estimator, int(trainer.num_generations))
    low_precision = low_precision_causes(trainer)
    settings = Settings(
        every=every,
        mode=mode,
        estimator=estimator,
        tolerance=default_tolerance(bool(low_precision)) if tolerance is None else float(tolerance),
        memory_gb=memory_gb,
        keep_rollouts=keep_rollouts and out is not None,
        keep_sketches=out is not None,
        between_prompts=between_prompts,
        fused=fused,
        cuda_graphs=cuda_graphs,
        low_precision=low_precision,
        uneven_term=uneven_term(trainer),
    )
    if cuda_graphs and trainer.accelerator.device.type != "cuda" and processes.is_first:
        text = f"scoregram: cuda_graphs=True has no effect on the device {trainer.accelerator.device}: it needs a GPU."
        warnings.warn(text, stacklevel=2)
    elif cuda_graphs and processes.count > 1 and processes.is_first:
        warnings.warn("scoregram: cuda_graphs=True has no effect with several processes.", stacklevel=2)
    if mode == "scores" and settings.uneven_term is not None and processes.is_first:
        warnings.warn(
            f"scoregram: the loss has {settings.uneven_term}, which weights the tokens of a rollout differently: the "
            "update is not a weighted sum of scores. Steps at which it matters fail the self-check, and no mean "
            "includes their numbers. Use mode='loss', which is exact there.",
            stacklevel=2,
        )
    folders: list[Folder] = []

    def make_folder() -> None:
        if out is not None:
            config = run_config(trainer, settings, version, processes)
            folders.append(Folder(Path(out), config, layers=layers, overwrite=overwrite, resume=resume))
            print_view_command(out)  # in the first process alone

    processes.from_first(make_folder)
    return Attachment(trainer, settings, folders[0] if folders else None, processes, halt_on=least)


class Attachment:
    """A trainer whose steps are measured. As a context manager it detaches at the end of the block."""

    def __init__(
        self,
        trainer: Any,
        settings: Settings,
        folder: Folder | None,
        processes: Processes = ALONE,
        *,
        halt_on: Severity | None = None,
    ) -> None:
        self.trainer = trainer
        self.settings = settings
        self.folder = folder
        """The run folder; None in every process but the first."""
        self.processes = processes
        self.readings: list[MeasuredStep] = []
        """The measured steps: scalars, the error of the self-check, notes."""
        self.skipped: list[SkippedStep] = []
        """Steps at which a measurement was due and could not be made, each with the reason."""
        self.failures: list[str] = []
        """Errors in measurements, which did not stop the training."""
        self.halt_on: Severity | None = halt_on
        self.halted: RunFinding | None = None
        """The finding that stopped the training; None if none did."""
        self.log_lines: list[dict[str, Any]] = []
        """What the trainer logged, a mapping with `step` for each time."""
        self._generations: dict[int, Generation] = {}
        self._generation_count = 0
        self._reward_call: RewardCall | None = None
        self._generation_log_probs: list[Tensor] = []
        """Log-probabilities that the trainer computed without gradient since the generation began."""
        self._window: Window | None = None
        """The step that is being observed; None at steps that are not measured."""
        self._loss_log_probs: list[Tensor] | None = None
        """Log-probabilities returned to the loss that is being observed; None while no loss is."""
        self._is_due = True
        self._inner: dict[str, Callable[..., Any]] = {}
        self._instance_methods: dict[str, Any] = {}
        self._outer: dict[str, Callable[..., Any]] = {}
        for name, wrapper in {
            "_calculate_rewards": self._rewards,
            "_generate_and_score_completions": self._generate,
            "_get_per_token_logps_and_entropies": self._log_probs,
            "_compute_loss": self._loss,
            "training_step": self._training_step,
        }.items():
            self._wrap(name, wrapper)
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
        return f"Attachment({type(self.trainer).__name__}, {asked}, {state}, measured steps: {self._measured_steps})"

    @property
    def _measured_steps(self) -> str:
        return ", ".join(str(reading.step) for reading in self.readings) or "none"

    def detach(self) -> None:
        """Restore the trainer's methods and close the run folder; calling it again does nothing."""
        if self._outer:
            self.trainer.remove_callback(self._callback)
        self._end()

    def _begin(self, step: int) -> None:
        """Begin to write the run folder after `step`; if that is not possible, all processes raise the error."""
        try:
            self.processes.from_first(lambda: self.folder.begin(step) if self.folder is not None else None)
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        for name, outer in self._outer.items():
            if vars(self.trainer).get(name) is not outer:
                continue  # other code wrapped it after us; our wrapper stays inside and only passes calls on
            if name in self._instance_methods:
                setattr(self.trainer, name, self._instance_methods[name])
            else:
                delattr(self.trainer, name)
        self._outer, self._generations = {}, {}
        self._window = None
        if self.folder is not None:
            with self._errors_as_warnings():
                self.folder.close()

    @property
    def is_attached(self) -> bool:
        """Whether steps of the trainer are measured."""
        return bool(self._outer)

    @property
    def not_fused(self) -> str | None:
        """Why the last step was not fused (Gram and gradient from one backward pass); None if the next one may be."""
        reason = self._fused.reason or self._fused.obstacle or self._fused.disagreement
        return None if reason is None else f"{reason}; steps are measured in a separate pass"

    @property
    def trust(self) -> Trust:
        """How far the measured numbers can be trusted: how many self-checks passed, and the worst error."""
        return Trust(
            measured=len(self.readings),
            errors={reading.step: reading.error for reading in self.readings},
            failed=frozenset(reading.step for reading in self.readings if not reading.passed),
            norm_only=frozenset(reading.step for reading in self.readings if not reading.scalars[CHECK_ROLLOUTS]),
        )

    def noise(self) -> RunNoise:
        """Signal, noise scale, best group size and what the best baseline would save, pooled over measured steps."""
        lines = [{"step": reading.step, **reading.scalars} for reading in self.readings]
        return run_noise(lines, int(self.trainer.num_generations), failed=self.trust.failed)

    def advice(self) -> Diagnosis:
        """What is wrong with the training so far, worst first, and what to change.

        From the run folder if there is one, Grams included; otherwise from the trainer's log.
        """
        if self.folder is not None and (self.folder.path / CONFIG_FILE).exists():
            return advise(self.folder.path)
        return self._log_advice()

    def _log_advice(self) -> Diagnosis:
        settings = {"num_iterations": getattr(self.trainer, "num_iterations", None)}
        return advise_log(run_log(type(self.trainer).__name__, self.log_lines, settings))

    def _halt_if_asked(self, control: Any) -> None:
        """Ask the trainer to stop if its log shows a finding that is severe enough."""
        if self.halt_on is None or self.halted is not None:
            return
        found = None
        with self._errors_as_warnings():
            # one answer for all: a process that stopped alone would leave the others waiting
            found = self.processes.from_first(self._log_advice)
        if found is not None and found.reaches(self.halt_on):
            self.halted = found.findings[0]
            control.should_training_stop = True
            warnings.warn(f"scoregram: the training is stopped. {' '.join(self.halted.lines())}", stacklevel=4)

    def summary(self) -> Table:
        """The measured scalars: first, last, and the mean where every measured step defines them.

        Signal to noise, noise scale, best group size and saving have `noise()` in place of a mean: ratios are pooled.

        Numbers from the Gram of a step whose self-check failed are withheld; `readings` has them, with `passed`.
        """
        names = dict.fromkeys(name for reading in self.readings for name in reading.scalars)
        pooled = self.noise()
        rows: list[tuple[Cell, ...]] = []
        for name in names:
            values = [
                math.nan if needs_gram(name) and not reading.passed else float(reading.scalars.get(name, math.nan))
                for reading in self.readings
            ]
            # a mean over only the steps that define a number would be biased by that selection
            mean = sum(values) / len(values) if all(map(math.isfinite, values)) else math.nan
            over_run = getattr(pooled, STEP_NAMES[name]) if name in STEP_NAMES else mean
            rows.append((name, values[0], values[-1], over_run))
        return Table(
            id="trl",
            title=f"Measured steps of {type(self.trainer).__name__}",
            caption=f"Steps {self._measured_steps}. {' '.join(self.trust.sentences())} A number is undefined where "
            "every advantage is zero, or where a step has too few rollouts for it; a mean is given only where every "
            "step defines the number and no self-check failed. Signal to noise, noise scale, best group size and the "
            "saving of a baseline are ratios of means over the last third of the measured steps.",
            columns=("scalar", "first", "last", "mean"),
            rows=tuple(rows),
        )

    def __str__(self) -> str:
        """The main rows of `summary()` as text."""
        if not self.readings:
            return "\n".join([f"{type(self.trainer).__name__}: no step was measured", *self._reasons_not_measured()])
        rows = {str(row[0]): row[1:] for row in self.summary().rows}
        lines = [
            f"{type(self.trainer).__name__}, measured steps {self._measured_steps}",
            *self.trust.sentences(),
            *self._reasons_not_measured(),
            f"{'':<36}" + "".join(f"{name:>10}" for name in ("first", "last", "mean")),
        ]
        passed = (self.readings[0].passed, self.readings[-1].passed, True)
        for name in [name for name in HEADLINE_SCALARS if name in rows]:
            withheld = [needs_gram(name) and not is_passed for is_passed in passed]
            cells = map(printed_cell, rows[name], withheld)
            lines.append(f"{HEADLINE_SCALARS[name]:<36}" + "".join(f"{cell:>10}" for cell in cells))
        if self.folder is not None:
            lines.append(f"report: scoregram report {self.folder.path}")
        return "\n".join(lines)

    def _reasons_not_measured(self) -> Iterator[str]:
        """Sentences on steps that were skipped or whose measurement failed; none if there was no such step."""
        if self.skipped:
            last = self.skipped[-1]
            yield f"Steps not measured: {len(self.skipped)}. The last one is step {last.step}, because {last.reason}."
        if self.failures:
            yield f"Measurements that failed: {len(self.failures)}. The last error is {self.failures[-1]}"

    # wrappers: what the trainer calls

    def _rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids: Any, *args: Any, **kw: Any) -> Any:
        rewards = self._inner["_calculate_rewards"](inputs, prompts, completions, completion_ids, *args, **kw)
        self._reward_call = RewardCall(inputs, completion_ids, rewards, tuple(self._generation_log_probs))
        return rewards

    def _generate(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._reward_call, self._generation_log_probs = None, []
        output = self._inner["_generate_and_score_completions"](inputs, *args, **kwargs)
        if not self.is_attached or not self.trainer.model.training:
            return output
        if self.settings.estimator is not None:  # an error here must end the training, so nothing catches it
            output = {**output, "advantages": self._own_advantages(output)}
        serial = self._generation_count
        self._generation_count += 1  # even if the next lines fail here: serial numbers must agree between processes
        with self._errors_as_warnings():
            generation = self._generation_of(output, serial)
            self._generations[serial] = generation
            return {**output, ROW_KEY: row_keys(generation)}
        return output

    def _log_probs(self, *args: Any, **kwargs: Any) -> Any:
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
        rows = inputs.get(ROW_KEY)
        given = {name: value for name, value in inputs.items() if name != ROW_KEY}
        if self._window is None or not torch.is_grad_enabled():
            return self._inner["_compute_loss"](model, given, *args, **kwargs)
        batch = None if rows is None else MicroBatch(rows)
        with self._errors_as_warnings():
            self._begin_fused_step(model, given, batch, self._window)
        if batch is None:
            return self._inner["_compute_loss"](model, given, *args, **kwargs)
        try:
            loss, log_probs = self._observed_loss(model, given, *args, **kwargs)
        except Exception as error:
            if not self._fused.recovers_from(error):
                raise
            loss, log_probs = self._observed_loss(model, given, *args, **kwargs)
        with self._errors_as_warnings():
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
        if self.is_attached:
            self._open_window()
        with self._fused.around_training_step() if self._window is not None else nullcontext():
            loss = self._inner["training_step"](*args, **kwargs)
        if self._fused.failure is not None:
            self._warn_of_fused_failure()
        if self._window is not None and self.trainer.accelerator.sync_gradients:
            with self._errors_as_warnings():
                self._measure(self._window)
            self._window = self._fused.step = None
        if self.is_attached and self.trainer.accelerator.sync_gradients:  # later steps may reuse the newest generation
            self._generations = {s: g for s, g in self._generations.items() if s == self._generation_count - 1}
        return loss

    # what the wrappers do

    def _open_window(self) -> None:
        """Begin to observe a step if a measurement is due, or was postponed to it."""
        step = int(self.trainer.state.global_step) + 1
        self._is_due = self._is_due or step % self.settings.every == 0
        if self._is_due and (self._window is None or self._window.step != step):
            self._window = Window(step)

    def _generation_of(self, output: Mapping[str, Any], serial: int) -> Generation:
        return generation_of(self.trainer, output, self._reward_call, serial, self.processes)

    def _own_advantages(self, output: Mapping[str, Any]) -> Tensor:
        """Advantages of the rollouts of this process; every process computes all of them from all rollouts."""
        estimator = self.settings.estimator
        assert estimator is not None

        def own_slice() -> Generation:
            generation = self._generation_of(output, self._generation_count)
            return generation if self.processes.count == 1 else generation.to("cpu")

        whole = merged_generation(self.processes.gather(own_slice)).to(self.trainer.accelerator.device)
        needs_energies = isinstance(estimator, str) and "score_energies" in ESTIMATORS[estimator].needs
        energies = score_energies(self.trainer, whole, self.settings, self.processes) if needs_energies else None
        advantages = own_advantages(estimator, whole, energies, per_token=not is_rloo(self.trainer))
        show_advantages(self.trainer, advantages)
        size, tokens = output["completion_ids"].shape
        own = advantages[size * self.processes.rank : size * (self.processes.rank + 1)]
        return own if own.ndim == 1 else own[:, :tokens]

    def _measure(self, window: Window) -> None:
        if self.settings.mode == "scores" and not all(self.processes.gather(lambda: self._is_on_policy(window))):
            return  # postponed to the next step that is on-policy
        self._is_due = False
        measured = measure_step(self.trainer, window, self._generations_of, self.settings, self.processes, self._fused)
        if isinstance(measured, SkippedStep):
            self.skipped.append(measured)
            return
        self.readings.append(measured.bare)
        metrics = self.trainer._metrics["train"]
        foreign_names = [name for name in metrics if not name.startswith(OWN_PREFIX)]
        add_to_log(metrics, measured, self.noise())
        if self.folder is not None:
            self.folder.write(measured, keep_rollouts=self.settings.keep_rollouts, foreign_names=foreign_names)

    def _begin_fused_step(self, model: Any, inputs: Any, batch: MicroBatch | None, window: Window) -> None:
        """Try to fuse the step that begins with this micro-batch, or add the micro-batch to a step that is fused.

        All processes decide together, also one whose rollouts are unknown (`batch` is None).
        """
        if not window.is_decided:
            window.is_decided = True
            self._fused.begin(model, inputs, batch, self._generation_to_fuse(batch, window))
        elif batch is not None:
            self._fused.add_part(inputs, batch)

    def _generation_to_fuse(self, batch: MicroBatch | None, window: Window) -> Generation | None:
        """The generation of a micro-batch, if it is one, of text, and under the policy that the mode measures."""
        serials = [] if batch is None else sorted(set(batch.rows[:, 0].tolist()))
        generation = self._generations.get(serials[0]) if len(serials) == 1 else None
        if generation is None or generation.has_images:
            return None
        return generation if self.settings.mode == "loss" or generation.policy_step == window.step - 1 else None

    def _warn_of_fused_failure(self) -> None:
        message, self._fused.failure = str(self._fused.reason), None
        self.failures.append(message)
        warnings.warn(
            "scoregram: a step could not be fused. The trainer's own pass replaced it, and further steps are measured "
            f"in a separate pass. {message}",
            stacklevel=4,
        )

    def _is_on_policy(self, window: Window) -> bool:
        return all(one.policy_step == window.step - 1 for one in self._generations_of(window))

    def _generations_of(self, window: Window) -> list[Generation]:
        """Generations whose rollouts the loss got; if the loss was not observed, those generated for the step."""
        if window.batches:
            return [self._generations[serial] for serial in window.serials]
        fresh = [one for one in self._generations.values() if one.policy_step == window.step - 1]
        return fresh or list(self._generations.values())

    def _wrap(self, name: str, wrapper: Callable[..., Any]) -> None:
        assert name in WRAPPED_METHODS
        inner = getattr(self.trainer, name)

        @wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            return wrapper(*args, **kwargs)

        if name in vars(self.trainer):
            self._instance_methods[name] = vars(self.trainer)[name]
        self._inner[name], self._outer[name] = inner, outer
        outer.__scoregram__ = self  # type: ignore[attr-defined]
        setattr(self.trainer, name, outer)

    @contextmanager
    def _errors_as_warnings(self) -> Iterator[None]:
        """Turn errors in a measurement into warnings, each given once, so that the training goes on."""
        try:
            yield
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            is_new = message not in self.failures
            self.failures.append(message)
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
            if is_new:
                text = f"scoregram: a measurement failed and was skipped; the training goes on. {message}"
                warnings.warn(text, stacklevel=4)


def _callback_for(attachment: Attachment) -> Any:
    """A callback of transformers that passes the trainer's logs on to the run folder, and detaches at the end."""
    from transformers import TrainerCallback

    class ScoregramCallback(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if attachment.is_attached:
                attachment._begin(int(state.global_step))

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            with attachment._errors_as_warnings():
                if attachment.is_attached and attachment.folder is not None:
                    attachment.folder.flush()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            with attachment._errors_as_warnings():
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
