"""One step of the trainer whose Gram and gradient come from one backward pass, ours.

The trainer asks for log-probabilities and is given those of a forward pass that the Gram engine has seen. Its own loss
and its own backward pass say what becomes of them, `c = ∂L/∂log π`. From there the engine's backward pass goes on: it
leaves the Gram, and in `.grad` what the trainer's would have left. If anything is not as it must be, the trainer's own
pass is made after all, with the same `c`, and the step has cost time but is what it would have been.
"""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scoregram.checks import fail, listed
from scoregram.gram import DeferredGram, Gram, gradients, gradients_put_aside, random_state_kept
from scoregram.integrations.trl.generation import Laid
from scoregram.integrations.trl.measuring import Beside, relative_error, squared_norm
from scoregram.integrations.trl.settings import Mode
from scoregram.integrations.trl.window import MicroBatch
from scoregram.training import Measured

EVEN = 1e-6
"""Largest `|c − w| / |c|` with which the tokens of a rollout count as weighted alike: rounding of float32."""
SWITCHES = ("self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy")
"""Arguments of the trainer's log-probabilities that a fused step knows; others must be left at None or False."""


@dataclass(frozen=True)
class Answer:
    """What the trainer's own log-probabilities look like when they are returned."""

    parts: int
    """Length of the tuple: log-probabilities, entropies and, in newer versions, an auxiliary loss."""
    dtypes: tuple[torch.dtype, torch.dtype | None]
    entropies_in_autograd: bool

    @classmethod
    def of(cls, found: Any) -> "Answer | None":
        """None for an answer that a fused step could not give."""
        if not isinstance(found, tuple) or len(found) < 2 or not all(part is None for part in found[2:]):
            return None
        log_probs, entropies = found[:2]
        dtype = None if entropies is None else entropies.dtype
        return cls(len(found), (log_probs.dtype, dtype), entropies is not None and entropies.requires_grad)


@dataclass(frozen=True)
class Ours:
    """What a fused step measured, rollouts as they lay in the micro-batch."""

    gram: Gram
    sizes: Tensor
    """`(B,)` the rows of the step are those of `gram` times these."""
    log_probs: Tensor
    """`(B, C)`"""
    error: float
    """By `distance`; 0 if no rollout has a share of the gradient."""
    seconds: float
    """What the comparison took."""

    def beside(self, order: Tensor, counted: Tensor, laid: Laid) -> Beside:
        """The same in the order of the records.

        Args:
            order: `(n,)` place in the micro-batch of every row.
            counted: `(n, C)` bool: tokens that count.
            laid: The rows as one batch, in which log-probabilities find their places.
        """
        sizes = self.sizes.double().cpu()
        by_size = (sizes[:, None] * sizes)[order][:, order]
        grams = {name.removeprefix("model."): gram for name, gram in self.gram.by_layer.items()}
        by_layer = {name: gram[order][:, order] * by_size for name, gram in grams.items()}
        matrix = self.gram.matrix[order][:, order] * by_size
        log_probs = torch.zeros(laid.completion_mask.shape, dtype=self.log_probs.dtype)
        log_probs[laid.completion_mask.cpu()] = self.log_probs.cpu()[order][counted.cpu()]
        return Beside(Measured(matrix, by_layer, self.gram.notes), log_probs, self.error, rollouts=1)


@dataclass
class FusedStep:
    """One step, from the trainer's question for log-probabilities to the gradient in `.grad`."""

    ask: Callable[..., Any]
    """The trainer's own method for log-probabilities."""
    model: nn.Module
    """The model, called as the trainer calls it."""
    answer: Answer
    mode: Mode
    inputs: Mapping[str, Any]
    """Of the trainer's loss."""
    batch: MicroBatch
    """Where the derivative of the loss is caught."""
    temperature: float
    precision: Callable[[], Any]
    """The autocast that the trainer computes under."""
    draw: torch.Generator
    """Which rollout is checked."""
    scale: float
    """What the loss is multiplied with before its backward pass."""
    close: float
    """Error of the check up to which our gradient is the trainer's."""
    told: dict[str, Any] | None = None
    """Arguments of the trainer's question; None before it was asked."""
    deferred: DeferredGram | None = None
    declined: str | None = None
    """Why the trainer's question was left to the trainer."""
    entropy_gradients: list[Tensor] = field(default_factory=list)
    ours: Ours | None = None
    """What was measured; None before, and if the trainer's own pass had to be made."""
    failure: Exception | None = None
    """Why that was so, if it was unforeseen."""
    is_over: bool = False

    @property
    def is_begun(self) -> bool:
        """Whether the trainer was given our log-probabilities."""
        return self.deferred is not None

    def log_probs(self, *args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
        """The answer to the trainer: log-probabilities and entropies `(B, C)` of our own forward pass.

        None if the question is not the usual one: `declined` says why.
        """
        told = inspect.signature(self.ask).bind(*args, **kwargs)
        told.apply_defaults()
        asked = dict(told.arguments)
        self.declined = self.unusual(asked)
        if self.declined is not None:
            return None
        ids, attention, tokens = asked["input_ids"], asked["attention_mask"], int(asked["logits_to_keep"])
        completion = attention.bool().clone()
        completion[:, :-tokens] = False
        with self.precision():
            deferred = DeferredGram(self.model, ids, completion, attention, temperature=self.temperature)
        self.told, self.deferred = asked, deferred
        dtype, entropy_dtype = self.answer.dtypes
        found = deferred.log_probs[:, -tokens:].to(dtype).clone().requires_grad_()
        entropies = None
        if asked.get("compute_entropy"):
            entropies = deferred.entropies[:, -tokens:].to(entropy_dtype).clone()
            if self.answer.entropies_in_autograd:
                entropies.requires_grad_().register_hook(self.entropy_gradients.append)
                entropies = entropies.view_as(entropies)
        # views, for what is asked for in autograd need not be a leaf that nobody may write to
        return (found.view_as(found), entropies, *[None] * (self.answer.parts - 2))

    def unusual(self, asked: Mapping[str, Any]) -> str | None:
        """What is asked beyond the log-probabilities of all rollouts of the loss at once; None if nothing is."""
        others = {name: value for name, value in asked.items() if name not in SWITCHES}
        if odd := [name for name, value in others.items() if value is not None and value is not False]:
            return f"log-probabilities depend on {listed(odd)}"
        ids, whole = self.inputs["completion_ids"], asked["input_ids"]
        at_once = asked.get("batch_size") in (None, len(ids)) and asked["logits_to_keep"] == ids.shape[1]
        if not at_once or len(whole) != len(ids) or not torch.equal(whole[:, -ids.shape[1] :], ids):
            return "the loss asks for log-probabilities of other rollouts than its own"
        if asked.get("compute_entropy") and self.answer.dtypes[1] is None:
            return "the loss asks for entropies now and then"
        return None

    def finish(self) -> None:
        """After the trainer's backward pass, which ended at our log-probabilities: the rest of it."""
        if self.is_over or not self.is_begun:
            return
        self.is_over = True
        derivative = self.batch.coefficients
        if derivative is None and not self.entropy_gradients:
            self.deferred = None
            return  # nothing was asked of the policy
        try:
            if derivative is not None and not self.has_other_gradients:
                self.ours = self.measured(derivative)
        except Exception as error:
            self.failure = error.with_traceback(None)  # or it would hold what there may be no room for
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
        self.deferred = None
        if self.ours is None:
            self.go_the_trainers_way(derivative)

    @property
    def has_other_gradients(self) -> bool:
        """Whether the loss depends on the parameters by other ways than log-probabilities, and is no sum of rows."""
        arrived = (parameter.grad for parameter in self.model.parameters())
        return bool(self.entropy_gradients) or any(grad is not None and bool(grad.any()) for grad in arrived)

    def go_the_trainers_way(self, derivative: Tensor | None) -> None:
        """Its own forward pass once more, and its own backward pass from the derivatives that it found."""
        assert self.told is not None
        found = self.ask(**self.told)
        ends = [] if derivative is None else [(found[0], derivative)]
        ends += [(found[1], grad) for grad in self.entropy_gradients]
        torch.autograd.backward([end for end, _ in ends], [grad for _, grad in ends])

    def measured(self, derivative: Tensor) -> Ours | None:
        """Gram and gradient; None if the gradient is no sum of weighted rows of the kind that is asked for."""
        assert self.deferred is not None and self.told is not None
        rows = self.rows(derivative)
        if rows is None:
            return None
        coefficients, weights = rows
        before = self.deferred.batch.input_ids.shape[1] - derivative.shape[1]
        chosen = self.drawn(weights)
        vectors = torch.stack([weights, torch.zeros_like(weights)])
        if chosen is not None:
            vectors[1, chosen] = 1.0
        with self.precision():
            gram, sums = self.deferred.finish(F.pad(coefficients, (before, 0)), vectors)
        log_probs = self.deferred.log_probs[:, before:]
        self.deferred = None
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        began = time.perf_counter()
        error = 0.0
        if chosen is not None:
            theirs = self.gradient_of_one(chosen, derivative, parameters)
            error = distance([sums.get(parameter) for parameter in parameters], theirs, gram.matrix, weights, chosen)
            del theirs
        seconds = time.perf_counter() - began
        if not error <= self.close:
            remedy = "The trainer's own pass was made in its place."
            fail("a fused step", f"must agree with the trainer's own pass to {self.close:g}", f"{error:.2g}", remedy)
        made = {}
        for parameter in [p for p in parameters if p in sums]:  # its row is let go, one after the other
            made[parameter] = sums.pop(parameter)[0].to(parameter.dtype, copy=True)
        for parameter, grad in made.items():  # nothing can go wrong any more
            parameter.grad = grad
        sizes = weights / self.scale if self.mode == "loss" else torch.ones_like(weights)
        return Ours(gram, sizes, log_probs, error, seconds)

    def rows(self, derivative: Tensor) -> tuple[Tensor, Tensor] | None:
        """Coefficients `(B, C)` of rows, and weights `(B,)` with which they give the gradient; None if none do."""
        c = derivative.double()
        counted = self.inputs["completion_mask"]
        if "tool_mask" in self.inputs:
            counted = counted * self.inputs["tool_mask"]
        ones = counted.double()
        if not bool(c.isfinite().all()):
            return None  # the trainer knows what to do about that
        if self.mode == "loss":  # rows of the size of scores: the smallest weights are beyond float32
            sizes = c.abs().amax(1)
            rows = c / torch.where(sizes > 0, sizes, 1.0)[:, None]
            return None if bool((rows * (1 - ones)).any()) else (rows, sizes)
        weights = (c * ones).sum(1) / ones.sum(1).clamp(min=1)
        apart = (c - weights[:, None] * ones).norm()
        return (ones, weights) if bool(apart <= EVEN * c.norm()) else None

    def drawn(self, weights: Tensor) -> int | None:
        """A rollout that pulls, drawn at random; None if none does."""
        pulling = weights.nonzero().squeeze(1).tolist()
        return pulling[int(torch.randint(len(pulling), (1,), generator=self.draw))] if pulling else None

    def gradient_of_one(self, index: int, derivative: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
        """What one rollout adds to the gradient, by the trainer's own forward pass and plain autograd."""
        assert self.told is not None
        here = slice(index, index + 1)
        one = {"input_ids": self.told["input_ids"][here], "attention_mask": self.told["attention_mask"][here]}
        with random_state_kept(derivative.device), gradients_put_aside(parameters), torch.enable_grad():
            found = self.ask(**(self.told | one | {"compute_entropy": False}))[0]
            return gradients((found * derivative[here].to(found.dtype)).sum(), parameters)


def distance(
    sums: Sequence[Tensor | None], theirs: Sequence[Tensor], gram: Tensor, weights: Tensor, chosen: int
) -> float:
    """How far a fused gradient `ĝ = Σ_j w_j ψ_j` is from the trainer's, of which one rollout's share `g_i` is known.

    The largest of three: `|w_i ψ_i − g_i| / |g_i|` over all parameters; `⟨ĝ, g_i⟩` against `Σ_j w_i w_j K_ij`; and
    `|ĝ|²` against `wᵀKw`. The last two are relative to the sums of the absolute values of their terms, which may
    cancel. So the row is held against the trainer's own pass, and the whole gradient against row and Gram.

    Args:
        sums: For each parameter `(2, …)`, the sums with weights `w` and `ψ_i`; None if it took no part.
        theirs: For each parameter its part of `g_i`.
        gram: `(N, N)`.
        weights: `(N,)`.
        chosen: The rollout `i`.
    """
    scale = float(weights[chosen])
    apart = relative_error([None if both is None else both[1] * scale for both in sums], theirs)
    pairs = [(both[0], grad) for both, grad in zip(sums, theirs, strict=True) if both is not None]
    along = sum(float(torch.sum(own * their.to(own.dtype), dtype=torch.float64)) for own, their in pairs)
    size = sum(squared_norm(own) for own, _ in pairs)
    w = weights.double().cpu()
    terms = w[:, None] * gram * w
    return max(
        apart,
        abs(along - float(terms[chosen].sum())) / float(terms[chosen].abs().sum()),
        abs(size - float(terms.sum())) / float(terms.abs().sum()),
    )
