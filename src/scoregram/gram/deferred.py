"""A measurement in two halves: the forward pass now, the backward pass when a loss has said what it is for.

`backward_with_gram` has to be told beforehand what the log-probabilities are multiplied with. A trainer that is
somebody else's takes the log-probabilities first, and what its loss makes of them is known when its own backward pass
arrives there. In between the graph of the model is held, as in any training step.
"""

from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor, nn

from scoregram.checks import fail
from scoregram.gram.batch import make_batch, token_entropies, token_log_probs
from scoregram.gram.distinct import apart
from scoregram.gram.head import first_look, targets_of
from scoregram.gram.measurement import NEEDS_WIDE, Captured, Measurement
from scoregram.gram.result import Gram
from scoregram.gram.sharding import is_spread


class DeferredGram(Measurement):
    """A forward pass over rollouts, and later one backward pass that gives the Gram and weighted sums of its rows.

    Nothing about the model changes, not even `.grad`: what to do with the sums is left to the caller.

    Args:
        model: As for `measure_gram`, like all that follow; in one process.
        input_ids: `(N, T)`.
        completion_mask: `(N, T)`.
        attention_mask: `(N, T)` or None.
        temperature: Divides the logits.
    """

    log_probs: Tensor
    """`(N, T)` log-probability of every completion token, 0 elsewhere; no gradient."""
    entropies: Tensor
    """`(N, T)` entropy of the distribution that each of them was drawn from, 0 elsewhere; no gradient."""

    def __init__(
        self,
        model: nn.Module,
        input_ids: Tensor,
        completion_mask: Tensor,
        attention_mask: Tensor | None = None,
        *,
        temperature: float = 1.0,
    ) -> None:
        if is_spread(model):
            got = "one whose gradients are averaged over processes"
            fail("DeferredGram", "the model must lie whole in one process", got, "Use measure_gram.")
        batch = make_batch(input_ids, completion_mask, attention_mask, temperature=temperature)
        super().__init__(model, apart(batch), weights=None)  # equal texts may be given different coefficients
        self.is_narrow = self.model not in NEEDS_WIDE
        self.held: Captured | Tensor | None
        with self.as_it_was(), torch.enable_grad():
            before = self.random_state()
            with self.watching():
                logits, captured = self.forward_to_the_head()
                self.held = self.seen_without_head(logits) if captured is None else self.seen_at_head(captured)
            self.drawn = self.has_drawn(before)

    def watching(self) -> AbstractContextManager[object]:
        """Around whatever runs the model, checkpointed layers in the backward pass included."""
        return self.narrowly() if self.is_narrow else self.interceptor

    def seen_at_head(self, captured: Captured) -> Captured:
        """Log-probabilities and entropies from the states that the head was given."""
        hidden, _, bias = captured
        weight = self.interceptor.head
        assert weight is not None
        with torch.no_grad():
            operands = self.at_the_head(hidden, weight, bias)
            self.look = look = first_look(*operands, self.targets, temperature=self.batch.temperature)
            self.log_probs, self.entropies = (self.in_place(value) for value in (look.log_probs, look.entropies))
        return captured

    def seen_without_head(self, logits: Tensor) -> Tensor:
        """Log-probabilities in autograd, of a model that does more with its head than return the product."""
        log_probs = token_log_probs(logits, self.batch)
        self.log_probs, self.entropies = log_probs.detach(), token_entropies(logits.detach(), self.batch)
        return log_probs

    def finish(self, coefficients: Tensor, weights: Tensor) -> tuple[Gram, dict[Tensor, Tensor]]:
        """The Gram of `ψ_i = Σ_t c_it ∇ log π(y_it)`, and for every parameter `(M, …)` the sums `Σ_i w_mi ψ_i`.

        Can be called once. A parameter that took no part has no sums.

        Args:
            coefficients: `(N, T)` factors `c`; read at completion tokens only.
            weights: `(M, N)`.

        Raises:
            ScoregramError: If anything is not finite.
        """
        given = self.batch
        made = make_batch(
            given.input_ids, given.completion_mask, given.attention_mask, coefficients=coefficients
        )  # for its questions
        self.batch = replace(given, coefficients=made.coefficients)
        self.targets = targets_of(given.input_ids, given.completion_mask, made.coefficients)
        self.weights = weights.to(given.input_ids.device)
        self.collector.weigh(self.weights)
        with self.as_it_was(), torch.enable_grad():
            before = self.random_state()
            with self.watching():
                self.backward_from_here()
            if self.is_narrow and (self.drawn or self.has_drawn(before) or self.not_seen()):
                self.begin_again()
                NEEDS_WIDE.add(self.model)
                self.wide_pass()
            self.account_for_all()
        self.tell_of_dropout()
        gram = self.result()
        sums = {p: made for p in self.parameters.values() if (made := self.collector.sums.pop(id(p), None)) is not None}
        return gram, sums

    def backward_from_here(self) -> None:
        """The backward pass through what the forward pass has left."""
        held, self.held = self.held, None
        assert held is not None, "a graph can be gone through once"
        if isinstance(held, Tensor):
            self.backward_through_log_probs(held)
        else:
            self.backward_through_head(*held)
