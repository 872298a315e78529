"""One measurement: a forward and a backward pass over a batch, and everything they leave behind."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from weakref import WeakSet

import torch
from torch import Tensor, nn

from scoregram.checks import ScoregramError, fail, not_finite
from scoregram.gram.backward import run_backward
from scoregram.gram.batch import logits_of, token_log_probs
from scoregram.gram.collect import Collector
from scoregram.gram.distinct import Distinct
from scoregram.gram.dropout import DropoutOff
from scoregram.gram.head import HeadLook, HeadUse, fused_head, targets_of
from scoregram.gram.intercept import Interceptor
from scoregram.gram.layout import Layout
from scoregram.gram.replay import score_rows
from scoregram.gram.restore import in_evaluation, left_as_it_was, random_state
from scoregram.gram.result import Gram
from scoregram.gram.sharding import here, model_inside
from scoregram.gram.sketch import Sketch, Sketcher
from scoregram.gram.streamed import under_autocast
from scoregram.gram.survey import survey

NEEDS_WIDE: WeakSet[nn.Module] = WeakSet()
"""Models of which a narrow pass did not see enough; they are not tried again."""
Captured = tuple[Tensor, Tensor, Tensor | None]
"""Input of the head, its logits at the first position, its bias."""
POSTPROCESSED = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings with which a model changes its logits after the head's product."""


class Measurement:
    """One forward and backward pass over a batch, and everything it leaves behind."""

    def __init__(
        self,
        model: nn.Module,
        rollouts: Distinct,
        *,
        weights: Tensor | None,
        sketch: Sketch | None = None,
    ) -> None:
        self.model = model_inside(model)
        self.rollouts = rollouts
        self.batch = batch = rollouts.batch
        self.survey = survey(self.model)
        self.parameters = self.survey.parameters
        if not self.parameters:
            fail(
                "measure_gram",
                "the model needs trainable parameters",
                "none that requires gradients",
                "Set requires_grad on what is trained.",
            )
        self.groups = 1 if rollouts.group_size is None else batch.rollouts // rollouts.group_size
        self.weights = None if weights is None else rollouts.summed(weights)
        self.sketch = sketch
        self.targets = targets_of(batch.input_ids, batch.completion_mask, batch.coefficients)
        self.notes: list[str] = []
        self.replayed: list[str] = []
        self.prepare()

    def prepare(self) -> None:
        """Begin with nothing collected."""
        self.look: HeadLook | None = None
        layout = Layout(self.batch.rollouts, self.batch.input_ids.shape[1])
        parameters = list(self.parameters.values())
        sketcher = None if self.sketch is None else Sketcher(self.sketch, self.parameters, self.batch.rollouts)
        self.collector = Collector(self.batch.rollouts, self.groups, self.weights, sketcher)
        given = (self.batch.input_ids, self.batch.attention_mask, self.batch.position_ids)
        self.interceptor = Interceptor(parameters, layout, self.collector, *given)

    def as_it_was(self) -> AbstractContextManager[None]:
        """The model prepared inside, and as it was outside."""
        return left_as_it_was(self.survey)

    def run(self) -> None:
        """Forward and backward pass; what they leave behind waits for `result` and `write_gradients`."""
        with self.as_it_was(), torch.enable_grad():
            log_probs = None if self.model in NEEDS_WIDE else self.narrow_pass()
            if log_probs is None:
                NEEDS_WIDE.add(self.model)
                log_probs = self.wide_pass()
            self.account_for_all()
        self.log_probs = log_probs.detach()
        self.tell_of_dropout()

    def account_for_all(self) -> None:
        """After the backward pass: what the leaves received, what has to be replayed, and what is left of the rest."""
        for tensor, rows in self.interceptor.leaves.rows():
            self.collector.rows_arrived(tensor, rows)
        self.replay(self.not_seen() + self.collector.overlapping())
        self.collector.finish()

    def tell_of_dropout(self) -> None:
        """Note and warn that dropout was active."""
        if self.interceptor.dropped:
            self.notes.append("active dropout was switched off for the measurement")
            warnings.warn("scoregram: " + self.notes[-1], stacklevel=4)

    def narrow_pass(self) -> Tensor | None:
        """Log-probabilities from a pass that sees into the modules that own parameters.

        None if that did not suffice: a parameter was used elsewhere, or something random happened elsewhere.
        """
        before = self.random_state()
        with self.narrowly():
            log_probs = self.forward_and_backward()
        if not self.has_drawn(before) and not self.not_seen():
            return log_probs
        self.begin_again()
        return None

    @contextmanager
    def narrowly(self) -> Iterator[None]:
        """The modules that own parameters seen inside, and everything in evaluation."""
        head = getattr(self.model, "get_output_embeddings", lambda: None)()
        owners = self.survey.owners
        if isinstance(head, nn.Module) and not any(module is head for module in owners):
            owners = [*owners, head]
        self.interceptor.dropped = bool(self.survey.dropping)
        with in_evaluation(self.survey.in_training), self.interceptor.narrowed(owners):
            yield

    def random_state(self) -> list[Tensor]:
        """Of the generators that a forward pass would draw from."""
        return random_state(self.batch.input_ids.device)

    def has_drawn(self, before: list[Tensor]) -> bool:
        """Whether something random has happened since."""
        return any(not torch.equal(a, b) for a, b in zip(before, self.random_state(), strict=True))

    def begin_again(self) -> None:
        """Forget a pass that did not see enough."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self.prepare()

    def wide_pass(self) -> Tensor:
        """Log-probabilities from a pass that sees every operation of the model."""
        with self.interceptor:
            return self.forward_and_backward()

    def not_seen(self) -> list[Tensor]:
        """Parameters that got an ordinary gradient: some use of them was not split by rollout."""
        return [parameter for parameter in self.parameters.values() if parameter.grad is not None]

    def forward_and_backward(self) -> Tensor:
        """Log-probabilities `(N, T)`; Grams and sums go to the collector."""
        logits, captured = self.forward_to_the_head()
        if captured is not None:
            del logits
            return self.backward_through_head(*captured)
        log_probs = token_log_probs(logits, self.batch)
        self.backward_through_log_probs(log_probs)
        return log_probs

    def forward_to_the_head(self) -> tuple[Tensor, Captured | None]:
        """Logits in autograd; or those of the first position, and what was captured at the head."""
        self.interceptor.head = self.fusable_head()
        logits, captured = self.forward()
        if captured is not None and (self.interceptor.captures > 1 or not is_same(logits, captured[1])):
            logits, captured = self.forward_without_capture()
        self.interceptor.recording = captured is not None
        self.interceptor.captured = None  # or the graph would hold itself through it
        return logits, captured

    def backward_through_log_probs(self, log_probs: Tensor) -> None:
        """The backward pass of `Σ c log π`, for log-probabilities that are in autograd."""
        total = (log_probs * self.batch.coefficients.to(log_probs.dtype)).sum()
        if total.requires_grad:
            self.backward(total, torch.ones_like(total))

    def forward(self) -> tuple[Tensor, Captured | None]:
        """Logits, and what was captured at the head."""
        try:
            return logits_of(self.model, self.batch), self.interceptor.captured
        except Exception:
            if not self.interceptor.captures:
                raise
            self.survey.shards.begin_again()
        return self.forward_without_capture()  # the model could not go on with what it was given at the head

    def forward_without_capture(self) -> tuple[Tensor, None]:
        """Logits in autograd, for a model that does more with its head than return the product."""
        self.interceptor.head = self.interceptor.captured = None
        self.interceptor.captures = 0
        self.collector.uses.clear()
        self.collector.looked_up.clear()
        self.interceptor.leaves.made.clear()
        return logits_of(self.model, self.batch), None

    def fusable_head(self) -> Tensor | None:
        """The weight of the output head, if nothing is known to change the logits after it."""
        embeddings = getattr(self.model, "get_output_embeddings", lambda: None)()
        config = getattr(self.model, "config", None)
        if not isinstance(embeddings, nn.Linear) or any(getattr(config, name, None) for name in POSTPROCESSED):
            return None
        return self.survey.shards.whole.get(id(embeddings.weight), embeddings.weight)

    def backward_through_head(self, hidden: Tensor, _: Tensor, bias: Tensor | None) -> Tensor:
        """Fused head, then the rest of the backward pass."""
        weight = self.interceptor.head
        assert weight is not None
        targets = self.targets
        self.survey.shards.gather_around(self.model.get_output_embeddings)  # pyright: ignore[reportArgumentType]
        trained = weight.requires_grad or (bias is not None and bias.requires_grad)
        with torch.no_grad():
            passed = fused_head(
                *self.at_the_head(hidden, weight, bias),
                targets,
                temperature=self.batch.temperature,
                keep=trained,
                look=self.look,
            )
            if weight.requires_grad:
                self.collect_head(weight, passed.use)
            if bias is not None and bias.requires_grad:
                self.collector.rows_arrived(bias, passed.use.bias_rows())
            rollout, place, position = targets.real_at
            grad = torch.zeros_like(hidden)
            grad[rollout, position] = passed.grad_hidden[rollout, place].to(hidden.dtype)
            log_probs = self.in_place(passed.log_probs)
        del passed
        self.look = None
        self.interceptor.recording = False
        if hidden.requires_grad:
            self.backward(hidden, grad)
        return log_probs

    def in_place(self, blocks: Tensor) -> Tensor:
        """What is known of every target `(N, C)`, at the place of its token `(N, T)`."""
        rollout, place, position = self.targets.real_at
        whole = torch.zeros(self.batch.input_ids.shape, dtype=blocks.dtype, device=blocks.device)
        whole[rollout, position + 1] = blocks[rollout, place]
        return whole

    def at_the_head(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states `(N, C, h)` that predict completion tokens, weight and bias, as the head multiplies them."""
        every = torch.arange(len(hidden), device=hidden.device).unsqueeze(1)
        return under_autocast(hidden.detach()[every, self.targets.position], weight, bias)

    def backward(self, tensor: Tensor, grad: Tensor) -> None:
        """The backward pass; ordinary gradients stay where autograd puts them, also in a sharded model."""
        run_backward(tensor, grad, list(self.parameters.values()) if self.survey.shards.modules else ())

    def collect_head(self, weight: Tensor, use: HeadUse) -> None:
        """Hand the head's use to the collector; a tied embedding's rows wait for the embedding."""
        looked_up = self.collector.looked_up.get(id(weight), [])
        if not looked_up or len(looked_up) != self.collector.announced(weight):  # some product needs the other rows too
            self.collector.use_arrived(self.collector.expect(weight, weight), use)
            return
        rest, shared = use.split(looked_up[0] if len(looked_up) == 1 else torch.cat(looked_up).unique())
        self.collector.contract(weight, weight, [rest])
        self.collector.use_arrived(self.collector.expect(weight, weight), shared)

    def replay(self, parameters: list[Tensor]) -> None:
        """One backward pass per rollout for what the rules could not split."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        left = list({id(parameter): parameter for parameter in parameters}.values())
        if not left:
            return
        for parameter in left:
            self.collector.give_up(parameter)
        self.replayed = [names[id(parameter)] for parameter in left]
        for parameter in self.parameters.values():
            parameter.grad = None
        rows = score_rows(self.model, self.batch, left, DropoutOff(), self.survey)
        for parameter, row in zip(left, rows, strict=True):
            self.collector.rows_arrived(parameter, row)
        shown = ", ".join(self.replayed[:3]) + (", …" if len(left) > 3 else "")
        self.notes.append(f"rows of {shown} came from one backward pass per rollout")

    def result(self) -> Gram:
        """The record, or an error that names what is not finite; the first thing here that waits for the device."""
        contractor = self.collector.contractor
        taking_part = contractor.owners()  # the scores of others are zero
        layers = {id(p): layer_of(name) for name, p in self.parameters.items() if id(p) in taking_part}
        order = {layer: index for index, layer in enumerate(dict.fromkeys(layers.values()))}
        stacked = contractor.grams({owner: order[layer] for owner, layer in layers.items()}, len(order))
        if not bool(stacked.isfinite().all()):
            refuse_not_finite(
                self.survey.shards.sharded or self.parameters, dict(zip(order, stacked, strict=True)), self.rollouts
            )
        stacked = spread((stacked + stacked.mT) / 2)
        by_layer = dict(zip(order, stacked.unbind(), strict=True))
        sketch = None if self.collector.sketcher is None else self.collector.sketcher.total()
        gram = Gram(stacked.sum(0), by_layer, self.log_probs, tuple(self.replayed), tuple(self.notes), sketch)
        return self.rollouts.expanded(gram)

    def result_and_gradients(self) -> Gram:
        """The record, and `.grad` as `write_gradients(None)` leaves it, written while the device is still at work."""
        parameters = self.parameters.values()
        if any(parameter.grad is not None for parameter in parameters):  # what is added to cannot be taken back
            gram = self.result()
            self.write_gradients(None)
            return gram
        self.write_gradients(None)
        try:
            return self.result()
        except ScoregramError:
            for parameter in parameters:
                parameter.grad = None
            raise

    def write_gradients(self, factors: Tensor | None) -> None:
        """Add `Σ_m f_m Σ_i w_mi ψ_i` to `.grad`; None for the one vector as it is."""
        for parameter in self.parameters.values():
            sums = self.collector.sums.pop(id(parameter), None)
            if sums is None:
                continue
            grad = sums[0] if factors is None else torch.tensordot(factors.to(sums), sums, dims=1)
            parameter.grad = grad.to(parameter.dtype) if parameter.grad is None else parameter.grad.add_(grad)


def layer_of(name: str) -> str:
    """The module that a parameter belongs to; a parameter of the model itself stands for itself."""
    return name.rpartition(".")[0] or name


def is_same(logits: Tensor, raw: Tensor) -> bool:
    """Whether the model returned the head's product as it was, up to a change of dtype."""
    return logits is raw or (logits.shape == raw.shape and bool(torch.equal(logits.detach().to(raw.dtype), raw)))


def spread(blocks: Tensor) -> Tensor:
    """Blocks `(L, P, R, R)` on the diagonals of `(L, N, N)` matrices, `nan` between groups."""
    layers, groups, size, _ = blocks.shape
    if groups == 1:
        return blocks[:, 0]
    matrices = blocks.new_full((layers, groups, size, groups, size), torch.nan)
    for group in range(groups):
        matrices[:, group, :, group] = blocks[:, group]
    return matrices.reshape(layers, groups * size, groups * size)


def refuse_not_finite(parameters: dict[str, Tensor], by_layer: dict[str, Tensor], rollouts: Distinct) -> None:
    """Raise with the first parameter, or else the rollouts and the layer, that is not finite."""
    broken = {layer: gram for layer, gram in by_layer.items() if not bool(gram.isfinite().all())}
    for name, parameter in parameters.items():
        if not bool(here(parameter).isfinite().all()):
            not_finite("measure_gram", "parameters must be finite", f"nan or inf in {name}", "Restore a checkpoint.")
    layer, gram = list(broken.items())[-1]
    rows = (~gram.diagonal(dim1=1, dim2=2).reshape(-1).isfinite()).nonzero().squeeze(1).tolist()
    names = sorted(member for row in rows for member in rollouts.members(row))
    not_finite(
        "measure_gram",
        "gradients must be finite",
        f"nan or inf for rollout {', '.join(map(str, names))} in {layer} and {len(broken) - 1} other layers",
        "Look at these rollouts; a lower precision may overflow.",
    )
