"""The run folder of an attached trainer: one line of metrics a step, ours and the trainer's together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scoregram.integrations.trl.step import StepReading
from scoregram.runs import LayerPrecision, RunWriter, open_run


class Folder:
    """Writes what is measured; a line of metrics waits until the trainer has logged the same step."""

    def __init__(
        self, path: Path, config: Mapping[str, Any], *, layers: LayerPrecision, overwrite: bool, resume: bool
    ) -> None:
        self.path = path
        self.layers: LayerPrecision = layers
        self._writer: RunWriter | None = None
        self._waiting: tuple[int, dict[str, Any]] | None = None
        self._last = -1
        if resume:
            open_run(path)  # raises now if there is none; where to go on is known when the training begins
        else:
            self._writer = RunWriter.create(path, config, overwrite=overwrite, layers=layers)

    def begin(self, step: int) -> None:
        """The training begins after `step`: later steps of a run that is resumed are removed."""
        if self._writer is None:
            self._writer = RunWriter.resume(self.path, step, layers=self.layers)
        self._last = max(self._last, step)

    def write(self, reading: StepReading) -> None:
        """Write a measured step."""
        if self._writer is None:
            return
        self._writer.write_groups(reading.step, reading.groups)
        self._writer.write_batches(reading.step, reading.batches)
        self._writer.write_rollouts(reading.step, reading.rollouts)
        self.note(reading.step, reading.scalars)

    def note(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Scalars of a step; what is known already stays."""
        numbers = {
            name: value
            for name, value in scalars.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
        }
        if self._waiting is not None and self._waiting[0] != step:
            self.flush()
        known = self._waiting[1] if self._waiting is not None else {}
        if step > self._last:
            self._waiting = (step, {**numbers, **known})

    def flush(self) -> None:
        """Write the line that waits."""
        if self._waiting is None or self._writer is None:
            return
        (step, scalars), self._waiting = self._waiting, None
        self._last = step
        self._writer.write_metrics(step, scalars)

    def close(self) -> None:
        """Write what waits and give the folder up."""
        try:
            self.flush()
        finally:
            if self._writer is not None:
                self._writer.close()
