"""Which steps are fused: where nothing speaks against it, and the whole gradient was seen to agree before."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules

from scoregram.checks import listed
from scoregram.gram import attributes, model_inside, survey
from scoregram.integrations.trl.fused import EVEN, Answer, FusedStep
from scoregram.integrations.trl.measuring import AsTheTrainerCalls
from scoregram.integrations.trl.memory import bytes_of_pass
from scoregram.integrations.trl.processes import Processes
from scoregram.integrations.trl.settings import Settings
from scoregram.integrations.trl.window import MicroBatch

WHOLE_EVERY = 10
"""Of so many measured steps one is not fused, so that the whole gradient is compared."""
TRLS_OWN = ("_get_per_token_logps_and_entropies", "training_step")
"""Methods between the model and its gradient that a fused step stands in for; the loss in between may be anybody's."""


class Fusing:
    """What is known about a trainer that decides whether its next measured step is fused."""

    def __init__(
        self, trainer: Any, settings: Settings, processes: Processes, methods: Mapping[str, Callable[..., Any]]
    ) -> None:
        self.trainer = trainer
        self.settings = settings
        self.ask = methods["_get_per_token_logps_and_entropies"]
        self.reason: str | None = None
        """Why no step of this trainer will be fused; None if one may."""
        self.answer: Answer | None = None
        self.since: int | None = None
        """Fused steps since the whole gradient was compared; None if it was not, or did not agree."""
        self.step: FusedStep | None = None
        """The step that is being fused."""
        self.failure: Exception | None = None
        """What went wrong at the last step, though nothing spoke against fusing it."""
        self.draw = torch.Generator().manual_seed(0)
        self.counted: AsTheTrainerCalls | None = None
        if not settings.fused:
            self.reason = "it was not asked for"
        elif processes.count > 1:
            self.reason = "several processes train"
        elif others := [name for name in TRLS_OWN if not is_of_trl(methods[name])]:
            self.reason = f"{listed(others)} of the trainer is not that of TRL"

    # what a step that was not fused tells

    def heard(self, found: Any) -> None:
        """Note how the trainer's own method answers."""
        self.answer = Answer.of(found)

    def compared(self, error: float, unevenness: float, *, pulls: bool) -> None:
        """Note how the whole gradient compared with the rows at a step that was not fused."""
        agrees = pulls and error <= self.settings.close
        even = self.settings.mode == "loss" or unevenness <= EVEN
        self.since = 0 if agrees and even else None

    # the next step

    def begin(self, model: Any, inputs: Mapping[str, Any], batch: MicroBatch, whole: int, limit: float) -> None:
        """Fuse the step whose loss is about to be taken, if that is right.

        Args:
            model: What the trainer's loss was given.
            inputs: Likewise.
            batch: The rollouts of the loss.
            whole: Number of rollouts that must be among them.
            limit: Bytes that a measurement may take.
        """
        self.step = None
        if self.reason is not None or self.answer is None or self.since is None or self.since >= WHOLE_EVERY - 1:
            return
        inside = self.trainer.accelerator.unwrap_model(self.trainer.model)
        tokens = inputs["prompt_ids"].shape[1] + inputs["completion_ids"].shape[1]
        if len(batch.rows) != whole or not is_one_step(self.trainer) or bytes_of(inside, whole, tokens) > limit:
            return
        if getattr(self.trainer.accelerator, "has_lomo_optimizer", False):
            self.reason = "the optimiser makes its update within the backward pass"
        self.reason = self.reason or reason_against(model, inside)
        if self.reason is not None:
            return
        if self.counted is None or self.counted.model is not inside:
            self.counted = AsTheTrainerCalls(inside)
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        self.step = FusedStep(
            ask=self.ask,
            model=self.counted,
            answer=self.answer,
            mode=self.settings.mode,
            inputs=inputs,
            batch=batch,
            temperature=float(self.trainer.temperature),
            precision=self.trainer.accelerator.autocast,
            draw=self.draw,
            scale=1.0 if scaler is None else float(scaler.get_scale()),
            close=self.settings.close,
        )

    def answered(self, *args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
        """The answer of a step that is being fused to the trainer's question; None for the trainer's own."""
        if self.step is None or self.step.is_begun:
            return None
        try:
            found = self.step.log_probs(*args, **kwargs)
        except Exception as error:
            self.stop(error)
            return None
        if found is None:
            self.reason, self.step = self.step.declined, None
        return found

    def gave_up(self, error: Exception) -> bool:
        """Whether a loss that failed is to be tried again, because it was given our log-probabilities."""
        if self.step is None or not self.step.is_begun:
            return False
        self.stop(error)
        return True

    def stop(self, error: Exception) -> None:
        """Fuse no more: something went wrong though nothing spoke against it."""
        self.failure, self.reason = error.with_traceback(None), f"{type(error).__name__}: {error}"
        self.step = None

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around a step of the trainer: what follows its backward pass finds the gradient complete."""
        accelerator = self.trainer.accelerator
        self.step = self.failure = None

        def backward(of: Any) -> Callable[..., Any]:
            inner = of.backward

            def whole(*args: Any, **kwargs: Any) -> Any:
                result = inner(*args, **kwargs)
                self.finish()
                return result

            return whole

        try:
            with attributes([accelerator], "backward", backward):
                yield
            self.finish()  # of a trainer that has another way to go back
        except BaseException:
            self.step = None
            raise

    def finish(self) -> None:
        """The backward pass of a step that is being fused."""
        step = self.step
        if step is None or step.is_over or not step.is_begun:
            return
        step.finish()
        if step.failure is not None:
            self.stop(step.failure)
        if step.ours is None:
            self.since = None  # the whole gradient is compared before this is tried again
        elif self.since is not None:
            self.since += 1


def bytes_of(model: nn.Module, rollouts: int, tokens: int) -> int:
    """Estimate of what a fused pass allocates: any pass, and two gradients more than the trainer's, not one."""
    gradient = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return bytes_of_pass(model, rollouts, tokens) + gradient


def is_of_trl(method: Callable[..., Any]) -> bool:
    """Whether a method is as TRL has it, and not that of a subclass or of somebody who has put something around it."""
    return str(getattr(method, "__module__", "")).startswith("trl.")


def is_one_step(trainer: Any) -> bool:
    """Whether a loss is that of a whole step, and not of one of several micro-batches."""
    pieces = getattr(trainer, "current_gradient_accumulation_steps", trainer.args.gradient_accumulation_steps)
    return int(pieces) == 1 and bool(trainer.accelerator.sync_gradients)


def reason_against(model: Any, inside: nn.Module) -> str | None:
    """Why a step with this model cannot be fused whatever its loss; None if nothing speaks against it."""
    if model is not inside or model_inside(inside) is not inside:
        return "something is put around the model"
    every = list(inside.modules())
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in every):
        return "parts of the model are compiled"
    if survey(inside).dropping:
        return "dropout is active"
    if any(module._backward_hooks or module._backward_pre_hooks for module in every):
        return "somebody listens to the backward pass"
    if modules._global_backward_hooks or modules._global_backward_pre_hooks:
        return "somebody listens to every backward pass"
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in inside.parameters() if p.requires_grad):
        return "somebody waits for single gradients"
    return None
