"""`attach`: the methods of a trainer wrapped, its steps measured as they go by, and everything put back at the end."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scoregram.checks import fail
from scoregram.exhibits import Table
from scoregram.integrations.trl.estimating import (
    OwnEstimator,
    needs_energies,
    own_advantages,
    require_estimator,
    show_advantages,
)
from scoregram.integrations.trl.folder import Folder
from scoregram.integrations.trl.fusing import Fusing
from scoregram.integrations.trl.gathering import merged
from scoregram.integrations.trl.generation import Generation, RewardCall, generation_of
from scoregram.integrations.trl.names import METHODS, require_supported
from scoregram.integrations.trl.processes import ALONE, Processes, processes_of
from scoregram.integrations.trl.settings import (
    Mode,
    Settings,
    computes_in_low_precision,
    config_of,
    default_tolerance,
)
from scoregram.integrations.trl.step import StepReading, energies_of, measure_step, memory_limit
from scoregram.integrations.trl.window import ROWS, MicroBatch, Window, rows_of
from scoregram.runs import LayerPrecision

PREFIX = "scoregram/"
"""Before the names of our scalars among the trainer's."""


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
) -> "Attachment":
    """Measure the steps of a TRL trainer from now on, until the end of its training or `detach()`.

    Call it once before `trainer.train()`; in every process, if there are several. The first step and every `every`-th
    one are measured, after the trainer's backward pass and before its update, or in one backward pass with it; its
    gradient (in one pass: but for rounding), its random numbers and all other steps are left alone. Scalars join the
    trainer's own metrics under `scoregram/…`, and so reach whatever `report_to` names.

    Args:
        trainer: A `GRPOTrainer` or `RLOOTrainer`, subclasses included.
        every: Steps from one measurement to the next.
        out: New folder for a run that everything else here can read; None for scalars only.
        mode: `scores`: rows are the scores of all rollouts of the generation, at the policy that sampled them; a step
            that comes later puts its measurement off to the next one that is on-policy. `loss`: rows are the gradients
            of the trainer's own loss, exact for every loss, KL term, clipping and inner step.
        estimator: Advantages to train with in the place of the trainer's: a group-level row of `ESTIMATORS`, or a
            function from a `Generation` to `(N,)` or per-token `(N, C)` advantages.
        tolerance: Largest relative error of the self-check that is accepted without a warning. By default 1e-3, and
            5e-2 where the trainer computes in a lower precision than float32.
        memory_gb: Most gigabytes that a measurement may take, by estimate; groups are measured in several passes if
            they must, and a step of which not one group fits is passed over with a word. By default 80 % of what is
            free at the time.
        layers: Precision of the per-layer Grams in the run folder.
        keep_rollouts: Write the rollouts of measured steps, token by token.
        overwrite: Replace an older run in `out`.
        resume: Go on with the run in `out`, for `trainer.train(resume_from_checkpoint=…)`.
        between_prompts: Where several processes train, let one of them measure all groups, so that the Gram between
            prompts is known, and all that follows from it. Otherwise each measures its share of the groups, which is
            faster. One process knows it anyway, if all groups fit into one pass.
        fused: Take Gram and gradient from one backward pass wherever that gives the trainer's gradient but for
            rounding: in one process, where one micro-batch is the whole step, and after a step at which the whole
            gradient was seen to agree. False leaves every gradient to the trainer, bit for bit.

    Raises:
        ScoregramError: For a trainer, version or setting with which it cannot work; nothing has been changed then.
    """
    version = require_supported(trainer)
    processes = processes_of(trainer)
    require_unattached(trainer)
    if every < 1:
        fail("attach", "every must be at least 1", every, "1 measures every step.")
    if mode not in ("scores", "loss"):
        fail("attach", "mode must be one of loss, scores", repr(mode), "Check the spelling.")
    if memory_gb is not None and not memory_gb > 0:
        fail("attach", "memory_gb must be positive", memory_gb, "Leave it out to use what is free.")
    if not isinstance(fused, bool):
        fail("attach", "fused must be True or False", repr(fused), "False leaves every gradient to the trainer.")
    if estimator is not None:
        require_estimator(estimator, int(trainer.num_generations))
    low = computes_in_low_precision(trainer)
    settings = Settings(
        every=every,
        mode=mode,
        estimator=estimator,
        tolerance=default_tolerance(low) if tolerance is None else float(tolerance),
        memory_gb=memory_gb,
        keep_rollouts=keep_rollouts and out is not None,
        between_prompts=between_prompts,
        fused=fused,
        is_low_precision=low,
    )
    folders: list[Folder] = []

    def make_folder() -> None:
        if out is not None:
            config = config_of(trainer, settings, version, processes)
            folders.append(Folder(Path(out), config, layers=layers, overwrite=overwrite, resume=resume))

    processes.from_first(make_folder)
    return Attachment(trainer, settings, folders[0] if folders else None, processes)


class Attachment:
    """A trainer that is being measured; also a context that detaches at its end."""

    def __init__(self, trainer: Any, settings: Settings, folder: Folder | None, processes: Processes = ALONE) -> None:
        self.trainer = trainer
        self.settings = settings
        self.folder = folder
        """Where the run is written; None in every process but the first."""
        self.processes = processes
        self.readings: list[StepReading] = []
        """What was measured, step by step: scalars, the error of the self-check, notes."""
        self.failures: list[str] = []
        """What went wrong in measurements; the training went on."""
        self._generations: dict[int, Generation] = {}
        self._made = 0
        self._reward_call: RewardCall | None = None
        self._window: Window | None = None
        self._seen: list[Tensor] | None = None
        self._is_owed = True
        self._inner: dict[str, Callable[..., Any]] = {}
        self._had: dict[str, Any] = {}
        self._outer: dict[str, Callable[..., Any]] = {}
        for name, wrapper in {
            "_calculate_rewards": self._rewards,
            "_generate_and_score_completions": self._generate,
            "_get_per_token_logps_and_entropies": self._log_probs,
            "_compute_loss": self._loss,
            "training_step": self._training_step,
        }.items():
            self._wrap(name, wrapper)
        self._fusing = Fusing(trainer, settings, processes, self._inner)
        self._callback = callback_for(self)
        trainer.add_callback(self._callback)

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Give the trainer its methods back and close the run folder; more than once does no harm."""
        if self._outer:
            self.trainer.remove_callback(self._callback)
        self._end()

    def _end(self) -> None:
        for name, outer in self._outer.items():
            if vars(self.trainer).get(name) is not outer:
                continue  # wrapped again by somebody else: what is ours hands everything on from now on
            if name in self._had:
                setattr(self.trainer, name, self._had[name])
            else:
                delattr(self.trainer, name)
        self._outer = {}
        self._generations = {}
        self._window = None
        if self.folder is not None:
            with self._without_harm():
                self.folder.close()

    @property
    def is_attached(self) -> bool:
        """Whether the trainer is being measured."""
        return bool(self._outer)

    @property
    def not_fused(self) -> str | None:
        """Why no measured step will have its Gram and gradient from one backward pass; None if some may."""
        return self._fusing.reason

    def summary(self) -> Table:
        """The measured scalars: first, last and mean over measured steps."""
        names = dict.fromkeys(name for reading in self.readings for name in reading.scalars)
        rows = []
        for name in names:
            values = [float(reading.scalars.get(name, math.nan)) for reading in self.readings]
            defined = [value for value in values if math.isfinite(value)]
            mean = sum(defined) / len(defined) if defined else math.nan
            rows.append((name, values[0], values[-1], mean))
        steps = ", ".join(str(reading.step) for reading in self.readings) or "none"
        return Table(
            id="trl",
            title=f"Measured steps of {type(self.trainer).__name__}",
            caption=f"Steps {steps}. Undefined where no group pulls, or a step has too few rollouts for it.",
            columns=("scalar", "first", "last", "mean"),
            rows=tuple(rows),
        )

    # what the trainer calls

    def _rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids: Any, *args: Any, **kw: Any) -> Any:
        rewards = self._inner["_calculate_rewards"](inputs, prompts, completions, completion_ids, *args, **kw)
        self._reward_call = RewardCall(inputs, completion_ids, rewards)
        return rewards

    def _generate(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._reward_call = None
        output = self._inner["_generate_and_score_completions"](inputs, *args, **kwargs)
        if not self.is_attached or not self.trainer.model.training:
            return output
        if self.settings.estimator is not None:  # whatever fails here must end the training
            output = {**output, "advantages": self._own_advantages(output)}
        serial, self._made = self._made, self._made + 1  # also where this fails: all processes count alike
        with self._without_harm():
            generation = self._seen_in(output, serial)
            self._generations[serial] = generation
            return {**output, ROWS: rows_of(generation)}
        return output

    def _log_probs(self, *args: Any, **kwargs: Any) -> Any:
        found = self._fusing.answered(*args, **kwargs) if self._seen == [] and torch.is_grad_enabled() else None
        is_own = found is None
        if is_own:
            found = self._inner["_get_per_token_logps_and_entropies"](*args, **kwargs)
        if self._seen is not None and found[0].requires_grad:
            self._seen.append(found[0])
            if is_own and len(self._seen) == 1:
                self._fusing.heard(found)
        return found

    def _loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows = inputs.get(ROWS)
        given = {name: value for name, value in inputs.items() if name != ROWS}
        if rows is None or self._window is None or not torch.is_grad_enabled():
            return self._inner["_compute_loss"](model, given, *args, **kwargs)
        batch = MicroBatch(rows)
        with self._without_harm():
            self._begin_to_fuse(model, given, batch, self._window)
        try:
            loss, seen = self._seen_loss(model, given, *args, **kwargs)
        except Exception as error:
            if not self._fusing.gave_up(error):
                raise
            loss, seen = self._seen_loss(model, given, *args, **kwargs)
        with self._without_harm():
            self._window.batches.append(batch)
            for log_probs in seen:
                if log_probs.shape == given["completion_ids"].shape:
                    log_probs.register_hook(batch.catch)
        return loss

    def _seen_loss(self, *args: Any, **kwargs: Any) -> tuple[Any, list[Tensor]]:
        """The trainer's loss, and the log-probabilities that it asked for."""
        self._seen = seen = []
        try:
            return self._inner["_compute_loss"](*args, **kwargs), seen
        finally:
            self._seen = None

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_attached:
            self._look_at_clock()
        with self._fusing.around() if self._window is not None else nullcontext():
            loss = self._inner["training_step"](*args, **kwargs)
        if self._fusing.failure is not None:
            self._tell_of_failure()
        if self._window is not None and self.trainer.accelerator.sync_gradients:
            with self._without_harm():
                self._measure(self._window)
            self._window = self._fusing.step = None
        if self.is_attached and self.trainer.accelerator.sync_gradients:
            self._generations = {s: g for s, g in self._generations.items() if s == self._made - 1}
        return loss

    # what is done about it

    def _look_at_clock(self) -> None:
        """Begin to watch a step that is due, or to which a measurement was put off."""
        step = int(self.trainer.state.global_step) + 1
        self._is_owed = self._is_owed or step % self.settings.every == 0
        if self._is_owed and (self._window is None or self._window.step != step):
            self._window = Window(step)

    def _seen_in(self, output: Mapping[str, Any], serial: int) -> Generation:
        return generation_of(self.trainer, output, self._reward_call, serial, self.processes)

    def _own_advantages(self, output: Mapping[str, Any]) -> Tensor:
        """Those of this process: every process makes all of them from the rollouts of all."""
        estimator = self.settings.estimator
        assert estimator is not None
        slices = self.processes.everyones(lambda: self._sendable(self._seen_in(output, self._made)))
        whole = merged(slices).on(self.trainer.accelerator.device)
        energies = energies_of(self.trainer, whole, slices, self.processes) if needs_energies(estimator) else None
        is_rloo = any(base.__name__ == "RLOOTrainer" for base in type(self.trainer).__mro__)
        made = own_advantages(estimator, whole, energies, per_token=not is_rloo)
        show_advantages(self.trainer, made)
        size, tokens = output["completion_ids"].shape
        own = made[size * self.processes.rank : size * (self.processes.rank + 1)]
        return own if own.ndim == 1 else own[:, :tokens]

    def _sendable(self, generation: Generation) -> Generation:
        return generation if self.processes.count == 1 else generation.on(torch.device("cpu"))

    def _measure(self, window: Window) -> None:
        if self.settings.mode == "scores" and not all(self.processes.everyones(lambda: self._is_on_policy(window))):
            return  # put off to the next step that is
        self._is_owed = False
        reading = measure_step(self.trainer, window, self._generations_of, self.settings, self.processes, self._fusing)
        if reading is None:
            return
        self.readings.append(reading.bare)
        metrics = self.trainer._metrics["train"]
        for name, value in reading.scalars.items():
            if math.isfinite(value):
                metrics[PREFIX + name].append(float(value))
        if self.folder is not None:
            self.folder.write(reading)

    def _begin_to_fuse(self, model: Any, inputs: Mapping[str, Any], batch: MicroBatch, window: Window) -> None:
        """Let a step be fused of which this loss is all: in `scores` with all rollouts of its generation."""
        serials = set(batch.rows[:, 0].tolist())
        generation = self._generations.get(serials.pop())
        if generation is None or generation.has_pictures or serials or window.batches:
            return
        is_loss = self.settings.mode == "loss"
        if is_loss or generation.policy_step == window.step - 1:
            limit = memory_limit(self.trainer.model, self.settings, self.processes)
            whole = len(batch.rows) if is_loss else generation.size
            self._fusing.begin(model, inputs, batch, whole, limit)

    def _tell_of_failure(self) -> None:
        message, self._fusing.failure = str(self._fusing.reason), None
        self.failures.append(message)
        text = (
            "a step could not be fused; the trainer's own pass was made in its place, and no more steps will be fused"
        )
        warnings.warn(f"scoregram: {text}. {message}", stacklevel=4)

    def _is_on_policy(self, window: Window) -> bool:
        return all(one.policy_step == window.step - 1 for one in self._generations_of(window))

    def _generations_of(self, window: Window) -> list[Generation]:
        """Those that the loss saw; for a loss that cannot be seen into, those that were made for the step."""
        if window.batches:
            return [self._generations[serial] for serial in window.serials]
        made = [one for one in self._generations.values() if one.policy_step == window.step - 1]
        return made or list(self._generations.values())

    def _wrap(self, name: str, wrapper: Callable[..., Any]) -> None:
        assert name in METHODS
        inner = getattr(self.trainer, name)

        @wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            return wrapper(*args, **kwargs)

        if name in vars(self.trainer):
            self._had[name] = vars(self.trainer)[name]
        self._inner[name], self._outer[name] = inner, outer
        outer.__scoregram__ = self  # type: ignore[attr-defined]
        setattr(self.trainer, name, outer)

    @contextmanager
    def _without_harm(self) -> Iterator[None]:
        """Whatever goes wrong in a measurement is told once, and the training goes on."""
        try:
            yield
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            is_new = message not in self.failures
            self.failures.append(message)
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
            if is_new:
                text = f"scoregram: a measurement failed and was passed over, the training goes on. {message}"
                warnings.warn(text, stacklevel=4)


def require_unattached(trainer: Any) -> None:
    """Raise if the trainer is being measured already."""
    method = vars(trainer).get("training_step")
    if getattr(method, "__scoregram__", None) is not None:
        fail("attach", "the trainer must not be attached yet", "a second call", "Call detach() on the first one.")


def callback_for(attachment: Attachment) -> Any:
    """A callback of transformers by which the attachment hears of logs, and of the end."""
    from transformers import TrainerCallback

    class Listener(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if attachment.is_attached and attachment.folder is not None:
                attachment.folder.begin(int(state.global_step))

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            with attachment._without_harm():
                if attachment.is_attached and attachment.folder is not None:
                    attachment.folder.flush()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            with attachment._without_harm():
                if attachment.is_attached and attachment.folder is not None and logs:
                    others = {name: value for name, value in logs.items() if not name.startswith(PREFIX)}
                    attachment.folder.note(int(state.global_step), others)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            attachment._end()  # who removes itself from a list that is being walked takes the next one along

    return Listener()
