"""One measurement from end to end: forward pass, backward pass, contraction, result.

`Measurement.run` runs the stages in order. It tries a *narrow* pass first, which intercepts only the modules that own
parameters. If that missed a use of a parameter, or if the model drew random numbers (dropout outside a module), it
starts again with a *wide* pass that intercepts every operation, and the model is remembered as one that needs it.
"""

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from scoregram.checks import ScoregramError, fail, not_finite
from scoregram.gram.axis import PROBE_ROLLOUTS, Observations, merged_axes, observed_axes, probe_batch
from scoregram.gram.batch import Batch, DistinctRollouts, all_rollouts
from scoregram.gram.collect import Collector, under_autocast
from scoregram.gram.head import HeadForward, HeadUse, Targets, fused_head
from scoregram.gram.intercept import CapturedHead, Interceptor
from scoregram.gram.model import (
    Survey,
    Undo,
    claimed_modules,
    facts_of,
    local_part,
    model_inside,
    prepare_model,
    random_state,
    run_operations,
    survey,
)
from scoregram.gram.plain_passes import (
    DropoutOff,
    batch_log_probs,
    logits_of,
    refuse_padding_dependence,
    replayed_rows,
    run_backward,
)
from scoregram.gram.sketch import Sketch, Sketcher

LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings with which a model changes its logits after the head's product."""


@dataclass(frozen=True)
class Gram:
    """Inner products of per-rollout scores over all trainable parameters."""

    matrix: Float[Tensor, "rollouts rollouts"]
    """`K_ij = ⟨ψ_i, ψ_j⟩`, float64, on the CPU; `nan` between groups if only blocks within groups were asked for."""
    by_layer: Mapping[str, Float[Tensor, "rollouts rollouts"]]
    """The same for every module that owns trainable parameters; they add up to `matrix`.

    A tied parameter counts for the first module that owns it, cross terms between its uses included.
    """
    log_probs: Float[Tensor, "sequences tokens"]
    """Log-probability of every completion token of `input_ids`, 0 elsewhere."""
    replayed: tuple[str, ...] = ()
    """Parameters whose rows came from one backward pass per rollout."""
    notes: tuple[str, ...] = ()
    """Remarks for the reader of the numbers: dropout that was switched off, parameters that were replayed."""
    sketch: Float[Tensor, "rollouts features"] | None = None
    """A seeded sketch of each score, if asked for; see `scoregram.gram.sketch`."""


class Measurement:
    """One forward and backward pass over a batch, and everything that it collects."""

    survey: Survey
    """Of the model, from when it was first prepared: until then another measurement may have changed it."""
    parameters: dict[str, Tensor]
    """The trained ones, by name."""

    def __init__(
        self, model: nn.Module, rollouts: DistinctRollouts, *, weights: Tensor | None, sketch: Sketch | None = None
    ) -> None:
        self.model = model_inside(model)
        self.rollouts = rollouts
        self.take_batch(rollouts.batch)
        self.device = self.batch.input_ids.device
        self.groups = 1 if rollouts.group_size is None else self.batch.rollouts // rollouts.group_size
        self.take_weights(weights)
        self.sketch = sketch
        self.failure: Exception | None = None
        """The first error of the model while its operations were intercepted."""
        self.notes: list[str] = []
        self.replayed: list[str] = []

    @contextmanager
    def prepared(self, undo: Undo) -> Iterator[None]:
        """Inside, no other measurement uses the model, and it is prepared for this one; `undo` puts it back."""
        self.undo = undo
        modules = claimed_modules(self.model, undo)
        if not hasattr(self, "survey"):
            self.survey = survey(self.model)
            self.parameters = self.survey.parameters
            if not self.parameters:
                fail(
                    "measure_gram",
                    "the model needs trainable parameters",
                    "none that requires gradients",
                    "Set requires_grad on the parameters that are trained.",
                )
            self.begin()
        with self.survey.shards.resharded_afterwards():
            prepare_model(self.survey, modules, undo)
            yield

    def take_batch(self, batch: Batch) -> None:
        """Take the batch, its coefficients divided by powers of two; the result multiplies with them again."""
        self.batch, self.powers = batch.of_unit_size()
        self.targets = Targets.of(self.batch)

    def take_weights(self, weights: Tensor | None) -> None:
        """Take `(M, N)` weights of the given rollouts, or None."""
        self.weights = None if weights is None else self.rollouts.summed_weights(weights).double() * self.powers

    def begin(self) -> None:
        """Start with nothing collected."""
        self.head_forward: HeadForward | None = None
        sketcher = None if self.sketch is None else Sketcher(self.sketch, self.parameters, self.batch.rollouts)
        self.collector = Collector(self.batch.rollouts, self.groups, self.weights, sketcher)
        self.interceptor = Interceptor(self.parameters, self.batch, self.collector, facts_of(self.model).axes)
        self.interceptor.dropped = bool(self.survey.dropping)  # evaluation mode: no dropout operation will be seen

    def begin_again(self) -> None:
        """Discard a pass that missed something."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self.begin()

    def leave_evaluation(self) -> None:
        """Put modules back in training mode, for a model that fails in evaluation mode."""
        for module in self.survey.in_training:
            vars(module)["training"] = True

    # The order of the stages

    def run(self, *, check_padding: bool = True) -> None:
        """Forward and backward pass; `result` and `write_gradients` read what they collected.

        Args:
            check_padding: Refuse a model whose output depends on padding; `verify` checks more and says more.
        """
        facts = facts_of(self.model)
        with Undo() as undo, undo, self.prepared(undo), torch.enable_grad():
            log_probs = None if facts.needs_wide_pass or facts.needs_plain_passes else self.narrow_pass()
            if log_probs is None and not facts.needs_plain_passes:
                facts.needs_wide_pass = True
                log_probs = self.wide_pass_or_none()
            if log_probs is None:
                log_probs = self.plain_passes()
                facts.needs_plain_passes = True
            if check_padding and not self.survey.shards.modules:  # a pass of a sharded model would need every process
                refuse_padding_dependence(self.model, self.batch, log_probs)
            self.finish_collection()
        self.log_probs = log_probs.detach()
        self.report_dropout()

    def narrow_pass(self) -> Tensor | None:
        """Log-probabilities from a pass that intercepts the modules that own parameters.

        None if that does not suffice: a parameter was used outside its module, random numbers were drawn, or the model
        failed, because it needs training mode or the shape of something that was replaced.
        """
        before = random_state(self.device)
        try:
            log_probs = self.pass_with_known_axes(narrow=True)
        except (ScoregramError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            log_probs, self.failure = None, error
            self.leave_evaluation()
        if log_probs is not None and not self.has_drawn(before) and not self.parameters_with_grad():
            return log_probs
        self.begin_again()
        return None

    def wide_pass_or_none(self) -> Tensor | None:
        """The same from a wide pass; None if the model failed in it."""
        try:
            return self.wide_pass()
        except (ScoregramError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self.failure = self.failure or error
            self.begin_again()
            self.notes.append(f"no operation was intercepted: {type(error).__name__}: {str(error).splitlines()[0]}")
            return None

    def plain_passes(self) -> Tensor:
        """Log-probabilities without interception; every parameter is replayed."""
        try:
            with torch.no_grad(), DropoutOff():
                log_probs = batch_log_probs(logits_of(self.model, self.batch), self.batch)
            self.replay(list(self.parameters.values()))
        except Exception as error:  # the model itself fails, so its first error is the one to show
            raise self.failure or error from None
        return log_probs

    def wide_pass(self) -> Tensor:
        """Log-probabilities from a pass that intercepts every operation of the model."""
        return self.pass_with_known_axes(narrow=False)

    def pass_with_known_axes(self, *, narrow: bool) -> Tensor:
        """Log-probabilities from a pass; from a second one if the first met operations that were not observed yet."""
        self.observe_axes(narrow=narrow)
        with self.intercepted(narrow=narrow):
            log_probs = self.forward_and_backward()
        if not self.interceptor.unknown:
            return log_probs
        self.observe_axes(narrow=narrow)
        self.begin_again()
        with self.intercepted(narrow=narrow):
            log_probs = self.forward_and_backward()
        self.give_up_unknown_axes()
        return log_probs

    def intercepted(self, *, narrow: bool) -> AbstractContextManager[object]:
        """Context for everything that runs the model, including checkpointed layers in the backward pass."""
        return self.around_owners() if narrow else self.interceptor

    def observe_axes(self, *, narrow: bool) -> None:
        """Learn which first axes run over the rollouts (`axis`), unless that is known; replaces the interceptor's."""
        facts = facts_of(self.model)
        unknown = self.interceptor.unknown
        if narrow in facts.probed and not unknown:
            return
        seen = []
        for count in PROBE_ROLLOUTS:
            probe = Measurement(self.model, all_rollouts(probe_batch(self.batch, count)), weights=None)
            probe.undo, probe.survey, probe.parameters = self.undo, self.survey, self.parameters
            probe.begin()
            seen.append(probe.observed_first_axes(narrow=narrow))
        new = observed_axes(seen[0], seen[1], self.batch.input_ids.shape[1])
        facts.axes = merged_axes(facts.axes, new)
        facts.probed.add(narrow)
        self.interceptor.axes = facts.axes

    def observed_first_axes(self, *, narrow: bool) -> Observations:
        """The first axes in a forward pass that runs as in training, but saves nothing for a backward pass."""
        self.interceptor.observations = observations = {}
        shards = self.survey.shards
        hooked = [] if shards.modules else [self.model]  # hooks on the model are for the passes of its user
        nothing_saved = saved_tensors_hooks(lambda _: torch.empty(0), lambda saved: saved)
        with Undo() as undo, undo, nothing_saved, self.intercepted(narrow=narrow):
            undo.keep_random_state(self.device)
            for module in hooked:
                undo.set_attribute(module, "_forward_pre_hooks", OrderedDict())
                undo.set_attribute(module, "_forward_hooks", OrderedDict())
            self.forward_to_head()
        shards.discard_pass()
        return observations

    def give_up_unknown_axes(self) -> None:
        """Do not seek again what is unknown even now: it counts as a first axis without the rollouts."""
        facts_of(self.model).axes.update(dict.fromkeys(self.interceptor.unknown, frozenset()))

    @contextmanager
    def around_owners(self) -> Iterator[None]:
        """Inside, the modules that own parameters and the head are intercepted."""
        head = getattr(self.model, "get_output_embeddings", lambda: None)()
        owners = self.survey.owners
        if isinstance(head, nn.Module) and not any(module is head for module in owners):
            owners = [*owners, head]
        with Undo() as undo, undo:
            self.undo.operations.append((undo.__exit__,))  # an interrupt may skip the end of this block
            self.interceptor.intercept_modules(owners, undo)
            yield

    def finish_collection(self) -> None:
        """After the backward pass: collect the rows of the leaves, replay what was missed, contract the rest."""
        for tensor, rows in self.interceptor.leaves.rows():
            self.collector.rows_arrived(tensor, rows)
        self.replay(self.parameters_with_grad() + self.collector.incomplete())
        self.collector.finish()

    def replay(self, parameters: list[Tensor]) -> None:
        """Collect rows from one backward pass per rollout for parameters that the rules did not cover."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        left = list({id(parameter): parameter for parameter in parameters}.values())
        if not left:
            return
        for parameter in left:  # part of its gradient may have been collected; replay gives all of it
            self.collector.forget(parameter)
        self.replayed = [names[id(parameter)] for parameter in left]
        for parameter in self.parameters.values():
            parameter.grad = None
        for parameter, rows in zip(left, replayed_rows(self.model, self.batch, left, self.survey), strict=True):
            self.collector.rows_arrived(parameter, rows)
        shown = ", ".join(self.replayed[:3]) + (", …" if len(left) > 3 else "")
        self.notes.append(f"rows of {shown} came from one backward pass per rollout")

    def parameters_with_grad(self) -> list[Tensor]:
        """Parameters with an ordinary gradient: some use of them was not split by rollout."""
        return [parameter for parameter in self.parameters.values() if parameter.grad is not None]

    def has_drawn(self, before: list[Tensor]) -> bool:
        """Whether random numbers were drawn since the generators were in the state `before`."""
        return any(not torch.equal(a, b) for a, b in zip(before, random_state(self.device), strict=True))

    def report_dropout(self) -> None:
        """Note and warn that dropout was active."""
        if self.interceptor.dropped:
            self.notes.append("active dropout was switched off for the measurement")
            warnings.warn("scoregram: " + self.notes[-1], stacklevel=4)

    # Forward

    def forward_and_backward(self) -> Tensor:
        """Log-probabilities `(N, T)`; Grams and sums go to the collector."""
        logits, captured = self.forward_to_head()
        if captured is not None:
            del logits
            return self.backward_through_head(captured)
        log_probs = batch_log_probs(logits, self.batch)
        self.backward_through_log_probs(log_probs)
        return log_probs

    def forward_to_head(self) -> tuple[Tensor, CapturedHead | None]:
        """Logits in autograd and None; or the logits of the first position, and the captured head."""
        self.interceptor.head = self.capturable_head()
        logits, captured = self.forward()
        # If the head was captured twice, or the model changed the logits, it does not return the head's product.
        if captured is not None and (
            self.interceptor.captures > 1
            or not is_same(logits, captured.first_logits)
            or captured.hidden.shape[:2] != self.batch.input_ids.shape
        ):
            logits, captured = self.forward_without_capture()
        if captured is None and logits.shape[:2] != self.batch.input_ids.shape:
            requirement = f"the model must return logits for {self.batch.input_ids.shape[1]} tokens"
            fail("measure_gram", requirement, logits.shape[1], "Wrap it in a module that returns one for each token.")
        self.interceptor.announcing = captured is not None
        self.interceptor.captured = None  # or the graph would keep itself alive through the interceptor
        return logits, captured

    def forward(self) -> tuple[Tensor, CapturedHead | None]:
        """Logits, and the captured head."""
        try:
            return logits_of(self.model, self.batch), self.interceptor.captured
        except Exception:
            if not self.interceptor.captures:
                raise
            self.survey.shards.reset_pass()
        return self.forward_without_capture()  # the model needs all logits, not those of the first position

    def forward_without_capture(self) -> tuple[Tensor, None]:
        """Logits in autograd, for a model that does more with its head's product than return it."""
        self.interceptor.head = self.interceptor.captured = None
        self.interceptor.captures = 0
        self.collector.states.clear()  # announcements of the discarded forward pass
        self.interceptor.leaves.leaf_of.clear()
        return logits_of(self.model, self.batch), None

    def capturable_head(self) -> Tensor | None:
        """The weight of the output head, unless the model's configuration says that it changes the logits."""
        embeddings = getattr(self.model, "get_output_embeddings", lambda: None)()
        config = getattr(self.model, "config", None)
        if not isinstance(embeddings, nn.Linear) or any(getattr(config, name, None) for name in LOGIT_SETTINGS):
            return None
        return self.survey.shards.whole.get(id(embeddings.weight), embeddings.weight)

    # Backward

    def backward_through_log_probs(self, log_probs: Tensor) -> None:
        """The backward pass of `Σ c log π`, for log-probabilities in autograd."""
        total = (log_probs * self.batch.coefficients.to(log_probs.dtype)).sum()
        if total.requires_grad:
            self.backward(total, torch.ones_like(total))

    def backward_through_head(self, captured: CapturedHead) -> Tensor:
        """Log-probabilities `(N, T)` from the fused head; then the rest of the backward pass."""
        hidden, bias, targets = captured.hidden, captured.bias, self.targets
        weight = self.interceptor.head
        assert weight is not None
        self.survey.shards.gather_around(self.model.get_output_embeddings)  # pyright: ignore[reportArgumentType]
        trained = weight.requires_grad or (bias is not None and bias.requires_grad)
        with torch.no_grad():
            head = fused_head(
                *self.head_operands(captured),
                targets,
                temperature=self.batch.temperature,
                keep=trained,
                forward=self.head_forward,
            )
            if weight.requires_grad:
                self.collect_head(weight, head.use)
            if bias is not None and bias.requires_grad:
                self.collector.rows_arrived(bias, head.use.bias_rows())
            rollout, place, position = targets.real_at
            grad = torch.zeros_like(hidden)
            grad[rollout, position] = head.grad_hidden[rollout, place].to(hidden.dtype)
            log_probs = targets.scattered(head.log_probs, self.batch.input_ids)
        del head  # and its logits, before the rest of the backward pass
        self.head_forward = None
        self.interceptor.announcing = False
        if hidden.requires_grad:
            self.backward(hidden, grad)
        return log_probs

    def head_operands(self, captured: CapturedHead) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states `(N, C, h)` that predict completion tokens, weight and bias, in the dtype of the product."""
        weight = self.interceptor.head
        assert weight is not None
        every = torch.arange(len(captured.hidden), device=captured.hidden.device).unsqueeze(1)
        return under_autocast(captured.hidden.detach()[every, self.targets.position], weight, captured.bias)

    def collect_head(self, weight: Tensor, use: HeadUse) -> None:
        """Give the head's use to the collector.

        A weight tied to the embedding gets cross terms in the rows that the embedding looked up, so these rows wait
        for the embedding. All others are contracted now: waiting would keep `N · T · V` logit gradients alive.
        """
        state = self.collector.state(weight)
        lookups = state.lookups
        if not lookups or len(lookups) != state.announced:  # a use in a product touches all rows
            self.collector.use_arrived(self.collector.expect(weight, weight), use)
            return
        rest, shared = use.split(lookups[0] if len(lookups) == 1 else torch.cat(lookups).unique())
        self.collector.contract(weight, weight, [rest])
        self.collector.use_arrived(self.collector.expect(weight, weight), shared)

    def backward(self, tensor: Tensor, grad: Tensor) -> None:
        """The backward pass; ordinary gradients stay in `.grad`."""
        run_backward(tensor, grad, list(self.parameters.values()))

    # Result

    def result(self) -> Gram:
        """The Gram of all given rollouts, duplicates included; this is the first call that waits for the device.

        Raises:
            NotFiniteError: Naming the parameter, or the rollouts and the layer, with a NaN or an infinity.
        """
        contractor = self.collector.contractor
        taking_part = contractor.owners()  # the scores of all other parameters are zero
        layers = {id(p): layer_of(name) for name, p in self.parameters.items() if id(p) in taking_part}
        order = {layer: index for index, layer in enumerate(dict.fromkeys(layers.values()))}
        stacked = contractor.grams({owner: order[layer] for owner, layer in layers.items()}, len(order))
        powers = self.powers.cpu()
        by_group = powers.view(self.groups, -1)
        stacked = stacked * by_group[:, :, None] * by_group[:, None, :]  # (L, P, R, R)
        if not bool(stacked.isfinite().all()):
            self.refuse_not_finite(dict(zip(order, stacked, strict=True)))
        stacked = block_diagonal_matrices((stacked + stacked.mT) / 2)  # matrix products round asymmetrically
        sketcher, rollouts = self.collector.sketcher, self.rollouts
        sketch = None if sketcher is None else (sketcher.total() * powers[:, None]).float()
        return Gram(
            matrix=rollouts.expanded_matrix(stacked.sum(0)),
            by_layer={layer: rollouts.expanded_matrix(gram) for layer, gram in zip(order, stacked, strict=True)},
            log_probs=rollouts.expanded_rows(self.log_probs),
            replayed=tuple(self.replayed),
            notes=tuple(self.notes),
            sketch=None if sketch is None else rollouts.expanded_rows(sketch),
        )

    def refuse_not_finite(self, by_layer: dict[str, Tensor]) -> None:
        """Raise with the first parameter, or else the rollouts and the layer, that is not finite."""
        for name, parameter in (self.survey.shards.sharded or self.parameters).items():
            if not bool(local_part(parameter).isfinite().all()):
                not_finite(
                    "measure_gram", "parameters must be finite", f"nan or inf in {name}", "Restore a checkpoint."
                )
        broken = {layer: gram for layer, gram in by_layer.items() if not bool(gram.isfinite().all())}
        layer, gram = list(broken.items())[-1]  # the last layer: the backward pass went through it first
        rows = (~gram.diagonal(dim1=1, dim2=2).reshape(-1).isfinite()).nonzero().squeeze(1).tolist()
        named = sorted(member for row in rows for member in self.rollouts.members(row))
        not_finite(
            "measure_gram",
            "gradients must be finite",
            f"nan or inf for rollout {', '.join(map(str, named))} in {layer} and {len(broken) - 1} other layers",
            "Look at these rollouts; low precision may have overflowed.",
        )

    def result_and_gradients(self) -> Gram:
        """The Gram, and `Σ_i w_i ψ_i` added to `.grad`; if possible, before waiting for the device."""
        parameters = self.parameters.values()
        if any(parameter.grad is not None for parameter in parameters):  # an addition could not be undone on an error
            gram = self.result()
            self.write_gradients(None)
            return gram
        with Undo() as undo, undo:
            undo.put_gradients_aside(list(parameters))
            self.write_gradients(None)
            gram = self.result()
            undo.operations.clear()  # from here on the gradients stay
        return gram

    def write_gradients(self, factors: Tensor | None) -> None:
        """Add `Σ_m f_m Σ_i w_mi ψ_i` to `.grad`, of all parameters or none.

        `factors` is None for a single weight vector, with the factor 1.
        """
        additions = []
        for parameter in self.parameters.values():
            sums = self.collector.take_sums(parameter)
            if sums is None:
                continue
            grad = sums[0] if factors is None else torch.tensordot(factors.to(sums), sums, dims=1)
            if parameter.grad is None:
                additions.append((setattr, parameter, "grad", grad.to(parameter.dtype)))
            else:
                additions.append((Tensor.add_, parameter.grad, grad))
        with Undo() as undo, undo:
            claimed_modules(self.model, undo)  # another measurement would put these gradients aside
            run_operations(additions)


def layer_of(name: str) -> str:
    """The name of the module that owns a parameter; a parameter of the model itself counts as its own layer."""
    return name.rpartition(".")[0] or name


def is_same(logits: Tensor, product: Tensor) -> bool:
    """Whether the model returned the head's product unchanged, except for its dtype."""
    return logits is product or (
        logits.shape == product.shape and bool(torch.equal(logits.detach().to(product.dtype), product))
    )


def block_diagonal_matrices(blocks: Tensor) -> Tensor:
    """Blocks `(L, P, R, R)` on the diagonals of `(L, N, N)` matrices, `nan` between groups."""
    layers, groups, size, _ = blocks.shape
    if groups == 1:
        return blocks[:, 0]
    matrices = blocks.new_full((layers, groups, size, groups, size), torch.nan)
    for group in range(groups):
        matrices[:, group, :, group] = blocks[:, group]
    return matrices.reshape(layers, groups * size, groups * size)
