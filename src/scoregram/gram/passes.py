"""Stages 3 and 4, one pass: forward under interception, backward into the collector.

A *narrow* pass intercepts only the modules that own parameters, a *wide* pass every operation of the model. If the
model returns the product of its output head unchanged, the head is *captured*: the model computes only the logits of
the first position, `fused_head` computes the log-probabilities and their gradient, and the backward pass starts at the
hidden states.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from scoregram.checks import fail
from scoregram.gram.axis import Observations
from scoregram.gram.batch import Batch
from scoregram.gram.collect import Collector, under_autocast
from scoregram.gram.head import HeadForward, HeadUse, Targets, fused_head, head_forward
from scoregram.gram.intercept import CapturedHead, Interceptor
from scoregram.gram.model import MeasuredModel
from scoregram.gram.plain_passes import batch_entropies, batch_log_probs, logits_of, replayed_rows, run_backward
from scoregram.gram.undo import Undo, is_recording, random_state


class Pass:
    """One forward and one backward pass over a batch, with an interceptor and a collector of its own."""

    def __init__(self, measured: MeasuredModel, batch: Batch, collector: Collector, *, narrow: bool) -> None:
        self.measured = measured
        self.batch = batch
        self.collector = collector
        self.is_narrow = narrow
        self.targets = Targets.of(batch)  # computed before the pass: it waits for the device
        self.interceptor = Interceptor(measured.parameters, batch, collector, measured.facts.axes)
        # Modules with dropout are in evaluation mode by now, so the interceptor will not see their dropout.
        self.interceptor.dropped = bool(measured.survey.dropping)
        self.drew_random = False
        """Whether the model drew random numbers, for example for dropout outside a module."""
        self._start: CapturedHead | Tensor | None = None
        """Where the backward pass starts: at the captured head, or at log-probabilities that have a graph."""
        self._head_forward: HeadForward | None = None

    def run(self) -> Tensor:
        """Log-probabilities `(N, T)` from a forward and a backward pass."""
        with self.intercepted():
            logits, captured = self.forward_to_head()
            if captured is not None:
                del logits
                return self.backward_through_head(captured)
            log_probs = batch_log_probs(logits, self.batch)
            self.backward_through_log_probs(log_probs)
            return log_probs

    @contextmanager
    def intercepted(self) -> Iterator[None]:
        """A block in which the model runs under interception; checkpointed layers also run in the backward pass."""
        device = self.batch.input_ids.device
        before = random_state(device)
        if self.is_narrow:
            with Undo() as undo, undo:
                self.measured.undo.operations.append((undo.__exit__,))  # an interrupt may skip the end of this block
                owners, head = self.measured.survey.owners, self.measured.head()
                if head is not None and not any(module is head for module in owners):
                    owners = [*owners, head]
                self.interceptor.intercept_modules(owners, undo)
                yield
        else:
            with self.interceptor:
                yield
        self.drew_random |= any(not torch.equal(a, b) for a, b in zip(before, random_state(device), strict=True))

    # Forward

    def forward_to_head(self) -> tuple[Tensor, CapturedHead | None]:
        """Logits with a graph, and None; or the logits of the first position, and the captured head."""
        self.interceptor.head = self.measured.capturable_head()
        logits, captured = self.forward_with_capture()
        # The head ran twice, or the model does not return its product unchanged: the model needs all logits.
        needs_logits = captured is not None and (
            self.interceptor.captures > 1
            or not is_same(logits, captured.first_logits)
            or captured.hidden.shape[:2] != self.batch.input_ids.shape
        )
        if self.measured.survey.shards.in_any_process(needs_logits):
            logits, captured = self.forward_without_capture()
        if captured is None and logits.shape[:2] != self.batch.input_ids.shape:
            requirement = f"the model must return logits for {self.batch.input_ids.shape[1]} tokens"
            fail("measure_gram", requirement, logits.shape[1], "Wrap it in a module that returns logits per token.")
        self.interceptor.announcing = captured is not None
        self.interceptor.captured = None  # else the graph would keep itself alive through the interceptor
        return logits, captured

    def forward_with_capture(self) -> tuple[Tensor, CapturedHead | None]:
        """Logits, and the captured head; all logits if the model fails with those of the first position."""
        try:
            return logits_of(self.measured.model, self.batch), self.interceptor.captured
        except Exception as error:
            self.measured.undo.raise_interrupt_behind(error)
            if not self.interceptor.captures:
                raise
            self.measured.survey.shards.reset_pass()
        return self.forward_without_capture()  # the model needs all logits, not those of the first position

    def forward_without_capture(self) -> tuple[Tensor, None]:
        """Logits with a graph, for a model that does more with its head's product than return it."""
        self.interceptor.head = self.interceptor.captured = None
        self.interceptor.captures = 0
        self.collector.states.clear()  # announcements of the discarded forward pass
        self.interceptor.leaves.leaf_of.clear()
        return logits_of(self.measured.model, self.batch), None

    def first_axes(self) -> Observations:
        """First axes of the activations, from a forward pass with gradients enabled that saves no tensors."""
        self.interceptor.observations = observations = {}
        shards = self.measured.survey.shards
        # The user's hooks on the model do not run in a probe pass, except on a sharded model: FSDP's are among them.
        hooked_modules = [] if shards.modules else [self.measured.model]
        nothing_saved = saved_tensors_hooks(lambda _: torch.empty(0), lambda saved: saved)
        with Undo() as undo, undo, nothing_saved, self.intercepted():
            undo.keep_random_state(self.batch.input_ids.device)
            for module in hooked_modules:
                undo.set_attribute(module, "_forward_pre_hooks", OrderedDict())
                undo.set_attribute(module, "_forward_hooks", OrderedDict())
            self.forward_to_head()
        shards.discard_pass()
        return observations

    # Backward

    def backward_through_log_probs(self, log_probs: Tensor) -> None:
        """The backward pass of `Σ c log π`, for log-probabilities that have a graph."""
        total = (log_probs * self.batch.coefficients.to(log_probs.dtype)).sum()
        if total.requires_grad:
            run_backward(total, torch.ones_like(total), list(self.measured.parameters.values()))

    def backward_through_head(self, captured: CapturedHead) -> Tensor:
        """Log-probabilities `(N, T)` from the fused head; then runs the rest of the backward pass."""
        hidden, bias, weight, targets = captured.hidden, captured.bias, self.interceptor.head, self.targets
        assert weight is not None
        self.measured.survey.shards.gather_around(self.measured.head())
        with torch.no_grad():
            head = fused_head(
                *self.head_operands(captured),
                targets,
                temperature=self.batch.temperature,
                keep=weight.requires_grad or (bias is not None and bias.requires_grad),
                forward=self._head_forward,
            )
            if bias is not None and bias.requires_grad:
                self.collector.rows_arrived(bias, head.use.bias_rows())
            if weight.requires_grad:  # last, because it overwrites the logit gradients
                self.collect_head(weight, head.use)
            grad = targets.at_positions(head.grad_hidden).to(hidden.dtype)
            log_probs = targets.at_tokens(head.log_probs)
        del head  # frees its logits before the rest of the backward pass
        self._head_forward = None
        self.interceptor.announcing = False
        if hidden.requires_grad:
            run_backward(hidden, grad, list(self.measured.parameters.values()))
        return log_probs

    def head_operands(self, captured: CapturedHead) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states `(N, C, h)` that predict completion tokens, weight and bias, in the dtype of the product."""
        weight = self.interceptor.head
        assert weight is not None
        every = torch.arange(len(captured.hidden), device=captured.hidden.device).unsqueeze(1)
        return under_autocast(captured.hidden.detach()[every, self.targets.position], weight, captured.bias)

    def collect_head(self, weight: Tensor, use: HeadUse) -> None:
        """Give the use of the head's weight to the collector.

        If the weight is tied to the embedding, its Gram has cross terms in the rows that the embedding looked up, so
        these rows wait for the embedding. All others are contracted now: waiting would keep `N · T · V` logit gradients
        alive.
        """
        state = self.collector.state(weight)
        lookups = state.lookups
        if not lookups or len(lookups) != state.announced:  # a use in a product touches all rows
            self.collector.use_arrived(self.collector.expect(weight, weight), use)
            return
        rest, shared = use.split(lookups[0] if len(lookups) == 1 else torch.cat(lookups).unique())
        self.collector.contract(weight, weight, [rest])
        self.collector.use_arrived(self.collector.expect(weight, weight), shared)

    # Forward now, backward later

    def forward(self) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies `(N, T)`; the graph is kept for `backward`."""
        with self.intercepted():
            logits, captured = self.forward_to_head()
        if captured is None:
            self._start = log_probs = batch_log_probs(logits, self.batch)
            return log_probs.detach(), batch_entropies(logits.detach(), self.batch)
        self._start = captured
        with torch.no_grad():
            operands = self.head_operands(captured)
            self._head_forward = head = head_forward(*operands, self.targets, temperature=self.batch.temperature)
            return self.targets.at_tokens(head.log_probs), self.targets.at_tokens(head.entropies)

    def backward(self, batch: Batch, weights: Tensor) -> Tensor:
        """Log-probabilities as in `run`, from the backward pass that follows `forward`.

        `batch` is the batch of the forward pass with its final coefficients; `weights` is `(M, N)`, for its rows.
        """
        start, self._start = self._start, None
        assert start is not None, "the backward pass can run only once"
        self.batch, self.targets = batch, Targets.of(batch)
        self.collector.set_weights(weights)
        with self.intercepted():
            if isinstance(start, Tensor):
                self.backward_through_log_probs(start)
                return start
            return self.backward_through_head(start)

    # After the backward pass

    def missed_something(self) -> bool:
        """Whether the model used a parameter outside its module, or drew random numbers, in any process."""
        missed = self.drew_random or bool(self.parameters_with_grad())
        return self.measured.survey.shards.in_any_process(missed)

    def parameters_with_grad(self) -> list[Tensor]:
        """Parameters with a `.grad`: autograd computed it for a use that was not split by rollout."""
        return [parameter for parameter in self.measured.parameters.values() if parameter.grad is not None]

    def collect_rest(self) -> list[str]:
        """Collect the rows of the leaves, replay missed parameters (returns their names), and contract the rest."""
        for tensor, rows in self.interceptor.leaves.rows():
            self.collector.rows_arrived(tensor, rows)
        replayed = self.replay(self.parameters_with_grad() + self.collector.incomplete())
        self.collector.finish()
        return replayed

    def replay(self, parameters: Sequence[Tensor]) -> list[str]:
        """Collect rows of parameters that no rule covered, from one backward pass per rollout; returns their names."""
        left = list({id(parameter): parameter for parameter in parameters}.values())
        if not self.measured.survey.shards.in_any_process(bool(left)):
            return []
        for parameter in left:  # part of its gradient may have been collected; replay gives all of it
            self.collector.forget(parameter)
        for parameter in self.measured.parameters.values():
            parameter.grad = None
        for parameter, rows in zip(left, replayed_rows(self.measured, self.batch, left), strict=True):
            self.collector.rows_arrived(parameter, rows)
        names = {id(parameter): name for name, parameter in self.measured.parameters.items()}
        return [names[id(parameter)] for parameter in left]


def is_same(logits: Tensor, product: Tensor) -> bool:
    """Whether the model returned the head's product unchanged, except for its dtype.

    While a CUDA graph is recorded, the values cannot be read; the pass before the recording has compared them.
    """
    if logits is product or logits.shape != product.shape:
        return logits is product
    return is_recording() or bool(torch.equal(logits.detach().to(product.dtype), product))
