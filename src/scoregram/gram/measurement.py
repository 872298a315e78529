"""The passes of one measurement, in order.

A narrow pass runs first. If it missed a use of a parameter, or if the model drew random numbers or failed, a wide pass
follows, and later measurements of this model start with it. A model that fails in both is measured without
interception, by one backward pass per rollout. All of this happens in evaluation mode; a model that fails in all of it
is measured in training mode, if the caller had it in training mode. Before the first pass of each kind, two probe
passes find the activations whose first axis runs over the rollouts (`axis`). `passes` defines *narrow* and *wide*.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from scoregram.checks import ScoregramError
from scoregram.gram.axis import PROBE_ROLLOUTS, merged_axes, observed_axes, probe_batch
from scoregram.gram.batch import DistinctRollouts
from scoregram.gram.collect import Collector
from scoregram.gram.kept import KeptRows
from scoregram.gram.model import MeasuredModel
from scoregram.gram.passes import Pass
from scoregram.gram.plain_passes import DropoutOff, batch_log_probs, logits_of, padding_dependence
from scoregram.gram.preconditioner import Diagonal
from scoregram.gram.result import CollectedScores
from scoregram.gram.sketch import Sketch, Sketcher

Found = TypeVar("Found")


class Measurement:
    """The passes over one batch. Its methods must be called inside `MeasuredModel.in_use`."""

    current: Pass
    """The latest pass; its collector has the result."""

    def __init__(
        self,
        measured: MeasuredModel,
        rollouts: DistinctRollouts,
        *,
        weights: Tensor | None = None,
        sketch: Sketch | None = None,
        kept: KeptRows | None = None,
        diagonal: Diagonal | None = None,
    ) -> None:
        """Take the model, the rollouts, `(M, N)` weights of the caller's rollouts or None, and a sketch or None.

        With `kept`, gradients go there and the scores have no Gram. With the diagonal of a preconditioner, the Gram is
        `⟨ψ_i, D ψ_j⟩`; weights and sketch must be None.
        """
        self.measured = measured
        self.rollouts = rollouts
        self.weights = None if weights is None else rollouts.row_weights(weights)
        self.sketch = sketch
        self.kept = kept
        self.diagonal = diagonal
        self.failure: Exception | None = None
        """The model's first error."""
        self.wide_failure: Exception | None = None
        """The model's first error in a wide pass."""
        self.notes: list[str] = []

    def run(self, *, check_padding: bool = True) -> CollectedScores:
        """The scores, from the first kind of pass that suffices.

        Args:
            check_padding: Raise if the model's output depends on padding. Not needed with `verify`, which checks more.
        """
        found = self.in_a_mode_that_works(self.passes)
        if found is None:
            self.raise_failure()
        log_probs, replayed = found
        if check_padding and not self.measured.survey.shards.modules:  # a pass of a sharded model needs every process
            note = padding_dependence(self.measured, self.rollouts.batch, log_probs)
            self.notes += [] if note is None else [note]
        return self.collected(log_probs, replayed)

    def run_once(self) -> CollectedScores:
        """The scores from one pass of the kind that sufficed for earlier measurements, without waiting for the device.

        Raises:
            RuntimeError: If the pass did not suffice.
        """
        facts = self.measured.facts
        log_probs = self.new_pass(narrow=not facts.needs_wide_pass).run()
        if self.current.interceptor.unknown or self.current.drew_random:
            raise RuntimeError("the pass met operations that earlier ones did not")
        scores = self.collected(log_probs, [])
        if scores.replayed:
            raise RuntimeError("parameters must be replayed by rollout")
        return scores

    # The kinds of passes; all return None if they do not suffice

    def in_a_mode_that_works(self, run: Callable[[], Found | None]) -> Found | None:
        """The result of `run`; where that is None in evaluation mode, the result in the caller's training mode.

        Some models compute gradients in training mode only.
        """
        facts = self.measured.facts
        found = run()
        if found is None and self.may_need_training():
            self.measured.set_training(True)
            found = run()
            facts.needs_training = found is not None
            self.measured.set_training(facts.needs_training)
        return found

    def may_need_training(self) -> bool:
        """Whether the model failed in evaluation mode, and the caller had it in training mode."""
        return bool(self.measured.survey.in_training) and not self.measured.facts.needs_training

    def is_training(self) -> bool:
        """Whether the passes run in training mode. Then they are wide: such models run layers again inside autograd."""
        return any(module.training for module in self.measured.survey.in_training)

    def raise_failure(self) -> NoReturn:
        """Raise the model's first error: the model itself fails."""
        assert self.failure is not None
        if not self.measured.survey.in_training:
            note = "The model was in evaluation mode. If it needs training mode, call model.train() first."
            self.failure.add_note(f"scoregram: {note} Dropout is off during a measurement.")
        raise self.failure from None

    def passes(self) -> tuple[Tensor, list[str]] | None:
        """Log-probabilities and the names of the parameters that were replayed; None if the model failed."""
        log_probs = None if self.measured.facts.needs_plain_passes else self.intercepted_passes()
        return self.plain_passes() if log_probs is None else (log_probs, [])

    def intercepted_passes(self) -> Tensor | None:
        """Log-probabilities from a narrow pass, or else from a wide one; None if the model failed in both."""
        facts = self.measured.facts
        log_probs = None if facts.needs_wide_pass or self.is_training() else self.narrow_pass()
        if log_probs is None:
            log_probs = self.wide_pass()
            facts.needs_wide_pass |= log_probs is not None
        return log_probs

    def narrow_pass(self) -> Tensor | None:
        """Log-probabilities from a pass that intercepts only the modules that own parameters.

        None if the model used a parameter outside its module, drew random numbers, or failed: it may need training
        mode, or the shape of a tensor that the interceptor replaced.
        """
        log_probs = None
        with self.failure_kept():
            log_probs = self.with_known_axes(Pass.run, narrow=True)
        return None if log_probs is None or self.current.missed_something() else log_probs

    def wide_pass(self) -> Tensor | None:
        """Log-probabilities from a pass that intercepts every operation of the model; None if the model failed."""
        with self.failure_kept(wide=True):
            return self.with_known_axes(Pass.run, narrow=False)
        return None

    @contextmanager
    def failure_kept(self, *, wide: bool = False) -> Iterator[None]:
        """A block that an error of the model ends without being raised: it is kept in `failure`.

        Our own errors, lack of memory and interrupts are raised, also an interrupt that the error hides.

        Args:
            wide: Keep the error in `wide_failure` too.
        """
        try:
            yield
        except (ScoregramError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self.measured.undo.raise_interrupt_behind(error)
            self.failure = self.failure or error
            if wide:
                self.wide_failure = self.wide_failure or error

    def plain_passes(self) -> tuple[Tensor, list[str]] | None:
        """Log-probabilities from a pass without interception; None if the model failed.

        Replays all parameters; returns their names.
        """
        parameters = list(self.measured.parameters.values())
        try:
            plain = self.new_pass(narrow=True)
            with torch.no_grad(), DropoutOff():
                log_probs = batch_log_probs(logits_of(self.measured.model, plain.batch), plain.batch)
            replayed = plain.replay(parameters)
        except Exception as error:
            self.measured.undo.raise_interrupt_behind(error)
            self.failure = self.failure or error
            return None
        if (error := self.wide_failure) is not None:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]  # the message itself may be empty
            self.notes.append(f"measured without interception: {reason}")
        self.measured.facts.needs_plain_passes = True
        return log_probs, replayed

    def new_pass(self, *, narrow: bool) -> Pass:
        """A pass with an empty collector; discards the gradients of an earlier pass."""
        parameters, batch = self.measured.parameters, self.rollouts.batch
        for parameter in parameters.values():
            parameter.grad = None
        sketcher = None if self.sketch is None else Sketcher(self.sketch, parameters, batch.rollouts)
        if self.kept is not None:
            self.kept.restart_pass()
        collector = Collector(batch.rollouts, self.rollouts.groups, self.weights, sketcher, self.kept, self.diagonal)
        self.current = Pass(self.measured, batch, collector, narrow=narrow)
        return self.current

    # First axes

    def with_known_axes(self, run: Callable[[Pass], Found], *, narrow: bool) -> Found:
        """The result of `run` for a new pass whose rollout axes are known.

        If the pass meets operations that no probe pass has seen, two probe passes follow, and `run` is repeated.
        """
        facts = self.measured.facts
        if narrow not in facts.probed:
            self.learn_axes(narrow=narrow)
        result = run(self.new_pass(narrow=narrow))
        if not self.measured.survey.shards.in_any_process(bool(self.current.interceptor.unknown)):
            return result
        self.learn_axes(narrow=narrow)
        result = run(self.new_pass(narrow=narrow))
        # Operations that are still unknown are not probed again: they count as ones without a rollout axis.
        facts.axes.update(dict.fromkeys(self.current.interceptor.unknown, frozenset()))
        return result

    def learn_axes(self, *, narrow: bool) -> None:
        """Learn which first axes run over the rollouts, from probe passes over two and over three rollouts."""
        batch, facts = self.rollouts.batch, self.measured.facts
        few, many = (
            Pass(self.measured, probe_batch(batch, count), Collector(count, 1, None), narrow=narrow).first_axes()
            for count in PROBE_ROLLOUTS
        )
        facts.axes = merged_axes(facts.axes, observed_axes(few, many, batch.input_ids.shape[1]))
        facts.probed.add(narrow)

    # Forward now, backward later

    def forward(self) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies `(N, T)`; `backward` continues from here."""
        found = self.in_a_mode_that_works(self.forward_or_none)
        if found is None:
            self.raise_failure()
        return found

    def forward_or_none(self) -> tuple[Tensor, Tensor] | None:
        """As `forward`, from a narrow pass, or else from a wide one; None if the model failed in both."""
        for narrow in (True, False):
            if narrow and (self.measured.facts.needs_wide_pass or self.is_training()):
                continue
            with self.failure_kept():
                return self.with_known_axes(Pass.forward, narrow=narrow)
        return None

    def backward(self, rollouts: DistinctRollouts, weights: Tensor) -> CollectedScores:
        """The backward pass after `forward`, for the same rollouts with their final coefficients."""
        self.rollouts, self.weights = rollouts, rollouts.row_weights(weights)
        try:
            log_probs = self.current.backward(rollouts.batch, self.weights)
        except (ScoregramError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # in evaluation mode; the forward pass above did not show it
            self.measured.undo.raise_interrupt_behind(error)
            self.failure = self.failure or error
            if not self.may_need_training():
                raise
            self.measured.set_training(True)
            log_probs = self.intercepted_passes()
            if log_probs is None:
                raise
            self.measured.facts.needs_training = True
        if self.current.is_narrow and self.current.missed_something():
            self.measured.facts.needs_wide_pass = True
            log_probs = self.with_known_axes(Pass.run, narrow=False)
        return self.collected(log_probs, [])

    # Result

    def collected(self, log_probs: Tensor, replayed: list[str]) -> CollectedScores:
        """The scores from the latest pass. Replays parameters that it missed, and warns if dropout was active."""
        replayed = replayed + self.current.collect_rest()
        if replayed:
            shown = ", ".join(replayed[:3]) + (", …" if len(replayed) > 3 else "")
            self.notes.append(f"rows of {shown} came from one backward pass per rollout")
        if changed := self.measured.changed_buffers():
            shown = ", ".join(changed[:3]) + (", …" if len(changed) > 3 else "")
            self.notes.append(f"the model changed {shown}; the values of buffers over 4 MiB are not restored")
            warnings.warn("scoregram: " + self.notes[-1], stacklevel=4)
        if self.measured.facts.needs_training and self.measured.survey.in_training:
            self.notes.append("measured in training mode: the model fails in evaluation mode")
        if self.current.interceptor.dropped:
            self.notes.append("active dropout was switched off for the measurement")
            warnings.warn("scoregram: " + self.notes[-1], stacklevel=4)
        scores = CollectedScores.of(self.measured, self.rollouts, self.current.collector, log_probs)
        return replace(scores, replayed=tuple(replayed), notes=tuple(self.notes))
