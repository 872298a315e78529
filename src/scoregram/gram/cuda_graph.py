"""Measurements as CUDA graphs: the kernels of a pass are recorded once and then launched by one call.

With small batches a GPU waits for Python: at 135 M parameters and 64 rollouts of 132 tokens the kernels of a
measurement take 69 ms on an H200, and launching them one by one takes four times as long. `CudaGraphGram` records the
launches when a shape of batch comes the second time, and replays them from then on. A replay runs no Python of the
model, reads the weights where they were at the recording, and returns what `backward_with_gram` returns.

A graph has fixed shapes, so everything that depends on the values of a batch is fixed in advance (`StaticSizes`): the
longest completion, the number of distinct tokens, and whether there is padding. Duplicate rollouts are not removed.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scoregram.checks import fail, require_finite
from scoregram.gram.batch import (
    Batch,
    DistinctRollouts,
    StaticSizes,
    all_rollouts,
    make_batch,
    require_complete_groups,
    require_tensors,
    vocabulary_size,
    weight_vectors,
)
from scoregram.gram.engine import DeferredGram
from scoregram.gram.measurement import Measurement
from scoregram.gram.model import MeasuredModel, averages_gradients, modules_inside
from scoregram.gram.result import CollectedScores, Gram
from scoregram.gram.undo import Undo
from scoregram.rollouts import Rollouts

Recorded = TypeVar("Recorded")

AGREEMENT = 1e-3
"""Largest relative distance of the first replayed Gram to the one measured without a graph; kernels may differ."""
HALF_AGREEMENT = 2e-2
"""The same where products are taken in half precision: attention takes other kernels in a graph."""
MOST_GRAPHS = 8
"""Graphs that one `CudaGraphGram` keeps; beyond it the least recently used one is dropped."""


@dataclass(frozen=True)
class GraphShape:
    """Everything that must be the same for two measurements to share a graph, besides the model."""

    rollouts: int
    tokens: int
    completion: int
    """Bound on the longest completion."""
    distinct: int
    """Bound on the number of distinct tokens."""
    padded: bool
    vectors: int
    """Number of weight vectors, 0 without a gradient."""
    deferred: bool
    """Whether forward and backward pass are two graphs."""
    autocast: torch.dtype | None


@dataclass(frozen=True)
class GraphInputs:
    """The tensors that a graph reads."""

    batch: Batch
    """With coefficients of unit size and static sizes."""
    weights: Tensor | None
    """`(M, N)` float64."""

    def tensors(self) -> list[Tensor]:
        """All of them, in a fixed order."""
        batch = self.batch
        assert batch.static is not None
        found = [batch.input_ids, batch.attention_mask, batch.completion_mask, batch.coefficients]
        found.append(batch.static.vocabulary)
        return found if self.weights is None else [*found, self.weights]

    def take(self, other: "GraphInputs") -> None:
        """Copy the values of other inputs of this shape."""
        for own, their in zip(self.tensors(), other.tensors(), strict=True):
            assert own.shape == their.shape  # `copy_` would broadcast
            own.copy_(their)

    def clone(self) -> "GraphInputs":
        """Copies at addresses of their own."""
        batch = self.batch
        assert batch.static is not None
        copied = replace(
            batch,
            input_ids=batch.input_ids.clone(),
            attention_mask=batch.attention_mask.clone(),
            completion_mask=batch.completion_mask.clone(),
            coefficients=batch.coefficients.clone(),
            static=replace(batch.static, vocabulary=batch.static.vocabulary.clone()),
        )
        return GraphInputs(copied, None if self.weights is None else self.weights.clone())


class RecordedPass:
    """One recorded pass: its graphs, the tensors that they read, and those that they write."""

    log_probs: Tensor
    """Of a deferred pass, as `entropies`: what the forward pass writes."""
    entropies: Tensor
    scores: CollectedScores
    """What the last graph writes."""

    def __init__(
        self, measured: MeasuredModel, rollouts: DistinctRollouts, inputs: GraphInputs, pool: Any, *, deferred: bool
    ) -> None:
        """Record the pass. The model must be in use, and have been measured at this shape on the current stream.

        Raises:
            RuntimeError: If an operation of the pass cannot be recorded, such as one that waits for the device.
        """
        self.inputs = inputs.clone()
        self._pool = pool
        self._graphs: list[torch.cuda.CUDAGraph] = []
        measurement = graph_measurement(measured, rollouts, self.inputs)
        if deferred:
            self.log_probs, self.entropies = self._recorded(measurement.forward)
            weights = self.inputs.weights
            assert weights is not None
            self.scores = self._recorded(lambda: measurement.backward(measurement.rollouts, weights))
        else:
            self.scores = self._recorded(measurement.run_once)
        self._contractor = measurement.current.collector.contractor  # has tensors that the graphs read

    def _recorded(self, run: Callable[[], Recorded]) -> Recorded:
        """The result of `run`, whose launches become the next graph."""
        self._graphs.append(torch.cuda.CUDAGraph())
        device = "cuda"
        # Weights that autocast has cast are cached, and a graph must neither read nor fill that cache.
        torch.clear_autocast_cache()
        uncached = torch.autocast(
            device, torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device), cache_enabled=False
        )
        stream = torch.cuda.current_stream()
        capture = torch.cuda.graph(self._graphs[-1], pool=self._pool, stream=stream, capture_error_mode="thread_local")
        with uncached, random_generator_kept(stream.device), capture:
            return run()

    def forward(self, inputs: GraphInputs) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of a deferred pass over other rollouts of this shape."""
        self.inputs.take(inputs)
        self._graphs[0].replay()
        return self.log_probs.clone(), self.entropies.clone()

    def replayed(self, rollouts: DistinctRollouts, inputs: GraphInputs) -> CollectedScores:
        """The scores of other rollouts of this shape, in tensors of their own; does not wait for the device.

        For a deferred pass, `forward` must have run with the same tokens.
        """
        self.inputs.take(inputs)
        self._graphs[-1].replay()
        sums = list(self.scores.sums.values())
        # one call copies all of them in few launches
        copies = torch._foreach_mul(sums, 1.0) if sums else []  # pyright: ignore[reportPrivateImportUsage]
        return replace(
            self.scores,
            rollouts=rollouts,
            blocks=self.scores.blocks.clone(),
            sums=dict(zip(self.scores.sums, copies, strict=True)),
            log_probs=self.scores.log_probs.clone(),
        )


@contextmanager
def random_generator_kept(device: torch.device) -> Iterator[None]:
    """A block after which random numbers can be drawn on a GPU, even if a recording failed inside it.

    A failed recording leaves torch's generator in capture mode, and drawing the next random number raises.
    """
    generator = torch.cuda.default_generators[device.index]
    before = generator.clone_state()
    try:
        yield
    except BaseException:
        generator.graphsafe_set_state(before)
        raise


def graph_measurement(measured: MeasuredModel, rollouts: DistinctRollouts, inputs: GraphInputs) -> Measurement:
    """A measurement of static inputs; its weights already contain the powers of the rollouts."""
    measurement = Measurement(measured, replace(rollouts, batch=inputs.batch, powers=torch.ones_like(rollouts.powers)))
    measurement.weights = inputs.weights
    return measurement


class ReplayedDeferredGram:
    """A `DeferredGram` from CUDA graphs; finish it before the next measurement of the same `CudaGraphGram` begins.

    All graphs of a `CudaGraphGram` share their memory, so the next replay overwrites what the forward pass left there.
    """

    def __init__(self, owner: "CudaGraphGram", recorded: RecordedPass, given: Batch, inputs: GraphInputs) -> None:
        """Run the forward pass over a batch `given`, whose static form is in `inputs`."""
        self._owner = owner
        self._recorded = recorded
        self._batch = given
        self._inputs = inputs
        owner.replays += 1
        self._replay = owner.replays
        tokens = given.input_ids.shape[1]
        found = recorded.forward(inputs)
        self.log_probs, self.entropies = (given.as_given(values[:, :tokens]) for values in found)

    def finish(self, coefficients: Tensor, weights: Tensor) -> tuple[Gram, dict[Tensor, Tensor]]:
        """As `DeferredGram.finish`, with as many weight vectors as `CudaGraphGram.deferred` was called with."""
        caller, recorded = "CudaGraphGram.deferred", self._inputs.weights
        assert recorded is not None
        if self._owner.replays != self._replay:
            requirement = "must be finished once, and before the next measurement"
            fail(caller, requirement, "a later call", "Finish it first, or use DeferredGram.")
        weights = weight_vectors(weights, self._batch.rollouts, caller=caller)
        if weights.shape != recorded.shape:
            requirement = f"finish must get weights {tuple(recorded.shape)}"
            fail(caller, requirement, tuple(weights.shape), "Pass the number of vectors to deferred.")
        batch = padded_batch(self._batch.with_coefficients(coefficients), self._owner.round_tokens_to)
        rollouts = all_rollouts(batch, self._owner.group_size)
        weights = rollouts.row_weights(weights.to(self.log_probs.device))
        static = replace(rollouts.batch, static=self._inputs.batch.static)
        self._owner.replays += 1  # the backward pass overwrites what it reads
        scores = self._recorded.replayed(rollouts, GraphInputs(static, weights))
        return replace(scores.gram(), log_probs=self.log_probs), scores.sums


@dataclass(frozen=True)
class TensorPlaces:
    """The parameters and buffers of a model, by what a graph relies on: which tensors they are and where."""

    tensors: list[Tensor] = field(compare=False)
    """Referenced, so that no other tensor can get the id or the memory of one of them."""
    places: list[tuple[int, int, bool]]
    """Id, address and `requires_grad` of each."""

    @staticmethod
    def of(model: nn.Module) -> "TensorPlaces":
        """The places of all tensors of a model; a walk over its modules, because it takes place at every call."""
        states = (state for m in modules_inside(model) for state in (m._parameters, m._buffers))
        tensors = [tensor for state in states for tensor in state.values() if tensor is not None]
        return TensorPlaces(tensors, [(id(t), t.data_ptr(), t.requires_grad) for t in tensors])


class CudaGraphGram:
    """`measure_gram` and `backward_with_gram` for one model, replayed from CUDA graphs where shapes repeat.

    The first measurement of a shape runs as usual, the second one also records a graph, and later ones replay it. The
    first replay is compared with the measurement that preceded it. Where a graph cannot be used, the measurement runs
    as usual and `Gram.notes` says why: without a GPU, if the model waits for the device or draws random numbers, if a
    parameter must be replayed by rollout, or if the first replay disagrees.

    The weights may change in place between two calls, as an optimiser changes them. Nothing else about the model may:
    a replay does not run hooks, and does not see attributes that were set later. If a parameter or a buffer is replaced
    or moves, or `requires_grad` of one of them changes, the graphs are dropped.

    The graphs keep the memory of one pass for as long as this object lives (`held_bytes`).
    """

    held_bytes: int = 0
    """Device memory that the graphs hold."""
    reason: str | None = None
    """Why no further graph is recorded; None while recording is possible."""
    replays: int = 0
    """Number of passes so far that wrote to the graphs' memory."""

    def __init__(
        self,
        model: nn.Module,
        *,
        group_size: int | None = None,
        temperature: float = 1.0,
        keep_padding: bool = False,
        round_tokens_to: int = 1,
    ) -> None:
        """Take the model, and the arguments of `measure_gram` that all measurements share.

        Args:
            model: A causal language model in one process.
            group_size: As for `measure_gram`.
            temperature: As for `measure_gram`.
            keep_padding: As for `measure_gram`.
            round_tokens_to: Pad rollouts on the right, and completions in the head, to a multiple of this many tokens.
                With rollouts of many lengths, 64 makes shapes repeat; 1 pads nothing.
        """
        caller = "CudaGraphGram"
        if averages_gradients(model):
            got = "a model whose gradients are averaged over processes"
            fail(caller, "the model must be in one process", got, "Use measure_gram.")
        if round_tokens_to < 1:
            fail(caller, "round_tokens_to must be at least 1", round_tokens_to, "Pass 1 to pad nothing.")
        self.model = model
        self.group_size = group_size
        self.temperature = temperature
        self.keep_padding = keep_padding
        self.round_tokens_to = round_tokens_to
        self._seen: set[GraphShape] = set()
        self._graphs: OrderedDict[GraphShape, RecordedPass] = OrderedDict()
        self._places: TensorPlaces | None = None
        """Those of the model at the recordings; None while there is no graph."""
        self._pool: Any = None
        self._stream: Any = None

    @property
    def recorded(self) -> tuple[GraphShape, ...]:
        """The shapes that have a graph."""
        return tuple(self._graphs)

    def measure(
        self,
        input_ids: Tensor | Rollouts,
        completion_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        coefficients: Tensor | None = None,
    ) -> Gram:
        """The Gram of `measure_gram`; arguments and errors as there."""
        return self._run(input_ids, completion_mask, attention_mask, weights=None, coefficients=coefficients)

    def backward(
        self,
        input_ids: Tensor | Rollouts,
        completion_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        weights: Tensor,
        coefficients: Tensor | None = None,
    ) -> Gram:
        """The Gram; adds `Σ_i w_i ψ_i` with `weights` `(N,)` to `.grad`, as `backward_with_gram` does."""
        require_tensors("CudaGraphGram", weights=weights)
        return self._run(input_ids, completion_mask, attention_mask, weights=weights, coefficients=coefficients)

    def deferred(
        self, input_ids: Tensor, completion_mask: Tensor, attention_mask: Tensor | None = None, *, vectors: int = 1
    ) -> "DeferredGram | ReplayedDeferredGram":
        """The forward pass now, the backward pass later, as `DeferredGram`; `finish` must get `vectors` weights."""
        if self.reason is None and input_ids.is_cuda:
            measured = MeasuredModel(self.model)
            given = self._batch(measured, input_ids, completion_mask, attention_mask)
            rollouts = all_rollouts(padded_batch(given, self.round_tokens_to), self.group_size)
            weights = torch.ones(vectors, given.rollouts, dtype=torch.float64, device=input_ids.device)
            shape, inputs = self._shape_and_inputs(measured, rollouts, weights, deferred=True)
            if shape in self._seen and shape not in self._graphs:
                self._record(measured, rollouts, inputs, shape)
            self._seen.add(shape)
            if shape in self._graphs:
                self._graphs.move_to_end(shape)
                return ReplayedDeferredGram(self, self._graphs[shape], given, inputs)
        return DeferredGram(
            self.model,
            input_ids,
            completion_mask,
            attention_mask,
            group_size=self.group_size,
            temperature=self.temperature,
            keep_padding=self.keep_padding,
        )

    def _batch(self, measured: MeasuredModel, *given: Any, coefficients: Tensor | None = None) -> Batch:
        """The checked batch of `measure_gram`."""
        options = {"temperature": self.temperature, "keep_padding": self.keep_padding}
        batch = make_batch(measured.model, *given, coefficients=coefficients, **options)
        require_complete_groups(batch, self.group_size, caller="CudaGraphGram")
        return batch

    def _run(self, *given: Any, weights: Tensor | None, coefficients: Tensor | None) -> Gram:
        """The Gram; the gradient goes to `.grad`."""
        measured = MeasuredModel(self.model)
        batch = self._batch(measured, *given, coefficients=coefficients)
        if weights is not None:
            if weights.shape != (batch.rollouts,):
                requirement = f"weights must be (N,) with N = {batch.rollouts}"
                fail("CudaGraphGram", requirement, tuple(weights.shape), "Pass one weight per rollout.")
            weights = require_finite(weights, name="weights", caller="CudaGraphGram").to(batch.input_ids.device)
        rollouts = all_rollouts(padded_batch(batch, self.round_tokens_to), self.group_size)
        scores = self._scores(measured, rollouts, None if weights is None else weights.unsqueeze(0))
        gram = scores.gram()
        scores.write_gradients(None)
        return replace(gram, log_probs=batch.as_given(gram.log_probs[:, : batch.input_ids.shape[1]]))

    def _scores(self, measured: MeasuredModel, rollouts: DistinctRollouts, weights: Tensor | None) -> CollectedScores:
        """The scores of rollouts, replayed if there is a graph for them."""
        if self.reason is None and rollouts.batch.input_ids.is_cuda:
            vectors = None if weights is None else rollouts.row_weights(weights)
            shape, inputs = self._shape_and_inputs(measured, rollouts, vectors, deferred=False)
            if shape in self._seen and shape not in self._graphs:
                self._record(measured, rollouts, inputs, shape)
            self._seen.add(shape)
            if shape in self._graphs:
                self._graphs.move_to_end(shape)
                self.replays += 1
                return self._graphs[shape].replayed(rollouts, inputs)
        reason = self.reason if rollouts.batch.input_ids.is_cuda else "the rollouts are not on a GPU"
        with Undo() as undo, undo, measured.in_use(undo):
            scores = Measurement(measured, rollouts, weights=weights).run()
        note = () if reason is None else (f"measured without a CUDA graph: {reason}",)
        return replace(scores, notes=(*scores.notes, *note))

    def _shape_and_inputs(
        self, measured: MeasuredModel, rollouts: DistinctRollouts, weights: Tensor | None, *, deferred: bool
    ) -> tuple[GraphShape, GraphInputs]:
        """`graph_inputs`, after graphs of a changed model are dropped."""
        if self._places is not None and self._places != TensorPlaces.of(measured.model):
            self._graphs.clear()
            self._seen.clear()
            self._places, self._pool, self.held_bytes = None, None, 0
        return graph_inputs(measured.model, rollouts.batch, weights, self.round_tokens_to, deferred=deferred)

    def _record(
        self, measured: MeasuredModel, rollouts: DistinctRollouts, inputs: GraphInputs, shape: GraphShape
    ) -> None:
        """Measure once without a graph, record one, and keep it if its Gram is the same; sets `reason` if not."""
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self.replays += 1
        self._stream.wait_stream(torch.cuda.current_stream())
        own = torch.cuda.stream(self._stream)  # operations have to be warm on the stream that records them
        try:
            with own, Undo() as undo, undo, measured.in_use(undo):
                recorded = self._compared_pass(measured, rollouts, inputs, deferred=shape.deferred)
        except Exception as error:
            self._end_failed_recording()
            self.reason = f"{type(error).__name__}: {error}".splitlines()[0]  # the message itself may be empty
            return
        torch.cuda.current_stream().wait_stream(self._stream)
        self._places = TensorPlaces.of(measured.model)
        self._graphs[shape] = recorded
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)

    def _end_failed_recording(self) -> None:
        """Stop allocating from the graphs' memory pool: a failed recording leaves the pool in use."""
        torch.cuda.synchronize()
        with suppress(RuntimeError):  # the recording did end
            getattr(torch._C, "_cuda_endAllocateToPool")(torch.cuda.current_device(), self._pool)  # noqa: B009
        self._pool = None

    def _compared_pass(
        self, measured: MeasuredModel, rollouts: DistinctRollouts, inputs: GraphInputs, *, deferred: bool
    ) -> RecordedPass:
        """A recorded pass whose Gram is that of a measurement without a graph.

        Raises:
            RuntimeError: If it is not, or the measurement needs more than one pass.
        """
        measurement = graph_measurement(measured, rollouts, inputs)
        if deferred:
            assert inputs.weights is not None
            measurement.forward()
            scores = measurement.backward(measurement.rollouts, inputs.weights)
        else:
            scores = measurement.run()
        if scores.replayed or scores.notes:
            raise RuntimeError("; ".join(scores.notes))
        exact = replace(scores, rollouts=rollouts).gram().matrix
        del scores, measurement
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        recorded = RecordedPass(measured, rollouts, inputs, self._pool, deferred=deferred)
        self.held_bytes += torch.cuda.memory_reserved() - before
        if deferred:
            recorded.forward(inputs)
        matrix = recorded.replayed(rollouts, inputs).gram().matrix
        error = float((matrix - exact).nan_to_num().norm() / exact.nan_to_num().norm().clamp(min=1e-300))
        if not error <= (HALF_AGREEMENT if has_half_products(measured) else AGREEMENT):
            raise RuntimeError(f"the replayed Gram differs from the measured one by {error:.1e}")
        return recorded


def has_half_products(measured: MeasuredModel) -> bool:
    """Whether a pass takes products in half precision: under autocast, or because a parameter is in half precision."""
    parameters = measured.parameters.values()
    return torch.is_autocast_enabled("cuda") or any(parameter.itemsize < 4 for parameter in parameters)


def padded_batch(batch: Batch, multiple: int) -> Batch:
    """The batch with padding on the right, so that its number of tokens is a multiple of `multiple`."""
    missing = -batch.input_ids.shape[1] % multiple
    if not missing:
        return batch
    return replace(
        batch,
        input_ids=F.pad(batch.input_ids, (0, missing)),
        attention_mask=F.pad(batch.attention_mask, (0, missing)),
        completion_mask=F.pad(batch.completion_mask, (0, missing)),
        coefficients=F.pad(batch.coefficients, (0, missing)),
    )


def graph_inputs(
    model: nn.Module, batch: Batch, weights: Tensor | None, multiple: int, *, deferred: bool
) -> tuple[GraphShape, GraphInputs]:
    """The shape of a measurement and the tensors that its graph reads; waits for the device once."""
    ids = batch.input_ids
    size = vocabulary_size(model, "get_input_embeddings") or int(ids.max()) + 1
    present = torch.zeros(size, dtype=torch.bool, device=ids.device).index_fill_(0, ids.flatten(), True)
    longest = batch.completion_mask.sum(1).amax()
    unmasked = batch.attention_mask.sum()
    completion, distinct, real = torch.stack([longest, present.sum(), unmasked]).tolist()
    completion = min(max(completion + -completion % multiple, 1), ids.shape[1])
    distinct = min(rounded_up(distinct), size)
    # Absent ids fill up the bound: their rows of the embedding get zero.
    vocabulary = present.to(torch.uint8).argsort(stable=True, descending=True)[:distinct].sort().values
    padded = real < ids.numel()
    static = StaticSizes(completion, vocabulary, padded)
    device = ids.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    vectors = 0 if weights is None else len(weights)
    shape = GraphShape(batch.rollouts, ids.shape[1], completion, distinct, padded, vectors, deferred, autocast)
    return shape, GraphInputs(replace(batch, static=static), weights)


def rounded_up(count: int) -> int:
    """The least number that is at least `count` among those with four significant bits; at most an eighth larger."""
    unit = 1 << max(count.bit_length() - 4, 0)
    return -(-count // unit) * unit
