"""Measurements of static shape, and CUDA graphs, against `backward_with_gram` and `DeferredGram`."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.gram import CudaGraphGram, DeferredGram, backward_with_gram, measure_gram
from scoregram.gram.batch import all_rollouts, make_batch
from scoregram.gram.cuda_graph import (
    RecordedPass,
    ReplayedDeferredGram,
    TensorPlaces,
    graph_inputs,
    graph_measurement,
    has_half_products,
    padded_batch,
    rounded_up,
)
from scoregram.gram.model import MeasuredModel
from scoregram.gram.undo import Undo
from tests.cases import ARCHITECTURES, rollouts


def needs_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")(test))


def gradients_of(model):
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return grads


def largest_difference(ours, theirs):
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(ours, theirs, strict=True))


# Everywhere: static sizes change nothing


@pytest.mark.parametrize("name", ["llama", "llama-tied", "nemotron", "gpt2"])
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("group_size", [None, 3])
def test_static_sizes_leave_gram_and_gradient_as_they_are(name, multiple, group_size):
    model = ARCHITECTURES[name]().double()
    given, weights = rollouts(6, 12).arguments, torch.linspace(-1.0, 2.0, 6, dtype=torch.float64)
    exact = backward_with_gram(model, *given, weights=weights, group_size=group_size)
    grads = gradients_of(model)
    measured = MeasuredModel(model)
    chosen = all_rollouts(padded_batch(make_batch(model, *given), multiple), group_size)
    vectors = chosen.row_weights(weights.unsqueeze(0))
    shape, inputs = graph_inputs(model, chosen.batch, vectors, multiple, deferred=False)
    assert shape.tokens % multiple == 0 and shape.tokens >= 12 and shape.padded
    assert inputs.batch.static is not None
    assert set(given[0].flatten().tolist()) <= set(inputs.batch.static.vocabulary.tolist())
    with Undo() as undo, undo, measured.in_use(undo):
        scores = replace(graph_measurement(measured, chosen, inputs).run_once(), rollouts=chosen)
    scores.write_gradients(None)
    torch.testing.assert_close(scores.gram().matrix, exact.matrix, rtol=1e-10, atol=1e-10, equal_nan=True)
    assert largest_difference(gradients_of(model), grads) < 1e-9


@pytest.mark.parametrize("vectors", [1, 2])
def test_a_static_forward_and_backward_pass_is_that_of_deferred_gram(vectors):
    model = ARCHITECTURES["llama-tied"]().double()
    ids, mask, attention = rollouts(5, 12).arguments
    weights = torch.randn(vectors, 5, dtype=torch.float64)
    coefficients = torch.randn(5, 12, dtype=torch.float64)
    deferred = DeferredGram(model, ids, mask, attention)
    exact, sums = deferred.finish(coefficients, weights)
    measured = MeasuredModel(model)
    chosen = all_rollouts(padded_batch(make_batch(model, ids, mask, attention, coefficients=coefficients), 8))
    _, inputs = graph_inputs(model, chosen.batch, chosen.row_weights(weights), 8, deferred=True)
    measurement = graph_measurement(measured, chosen, inputs)
    with Undo() as undo, undo, measured.in_use(undo):
        log_probs, entropies = measurement.forward()
        scores = measurement.backward(measurement.rollouts, chosen.row_weights(weights))
    torch.testing.assert_close(log_probs[:, :12], deferred.log_probs)
    torch.testing.assert_close(entropies[:, :12], deferred.entropies)
    torch.testing.assert_close(replace(scores, rollouts=chosen).gram().matrix, exact.matrix)
    for parameter, total in sums.items():
        torch.testing.assert_close(scores.sums[parameter], total, rtol=1e-9, atol=1e-12)


def test_without_a_gpu_the_measurement_runs_as_usual_and_says_so():
    model = ARCHITECTURES["llama"]().double()
    given, weights = rollouts(4, 12).arguments, torch.ones(4)
    exact = backward_with_gram(model, *given, weights=weights)
    grads = gradients_of(model)
    graphs = CudaGraphGram(model)
    for _ in range(3):
        gram = graphs.backward(*given, weights=weights)
        assert largest_difference(gradients_of(model), grads) < 1e-12
        torch.testing.assert_close(gram.matrix, exact.matrix)
        torch.testing.assert_close(gram.log_probs, exact.log_probs)
        assert gram.notes == ("measured without a CUDA graph: the rollouts are not on a GPU",)
    assert graphs.recorded == () and graphs.held_bytes == 0
    assert isinstance(graphs.deferred(*given), DeferredGram)
    torch.testing.assert_close(graphs.measure(*given).matrix, exact.matrix)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_tokens_that_fill_up_a_shape_are_padding():
    """A model that looks at all tokens of a row sees in the mask that they are none of its own."""
    batch = make_batch(ARCHITECTURES["llama"](), *rollouts(4, 12).arguments)
    wide = padded_batch(batch, 8)
    assert wide.input_ids.shape == (4, 16) and torch.equal(wide.input_ids[:, :12], batch.input_ids)
    for name in ("attention_mask", "completion_mask", "coefficients"):
        values = getattr(wide, name)
        assert torch.equal(values[:, :12], getattr(batch, name)) and not bool(values[:, 12:].any())


class UnrecordedPass(RecordedPass):
    """A stand-in for `RecordedPass`: the same measurement of static inputs, run each time instead of replayed."""

    def __init__(self, model: Any, chosen: Any) -> None:
        self.measured, self.chosen = MeasuredModel(model), chosen

    def forward(self, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: D102
        self.measurement = graph_measurement(self.measured, self.chosen, inputs)
        with Undo() as undo, undo, self.measured.in_use(undo):
            return self.measurement.forward()

    def replayed(self, rollouts: Any, inputs: Any) -> Any:  # noqa: D102
        unit = replace(rollouts, batch=inputs.batch, powers=torch.ones_like(rollouts.powers))
        with Undo() as undo, undo, self.measured.in_use(undo):
            return replace(self.measurement.backward(unit, inputs.weights), rollouts=rollouts)


def replayed_deferred(owner, given, vectors=2) -> ReplayedDeferredGram:
    """A replay of `owner`, on a CPU."""
    batch = make_batch(owner.model, *given, keep_padding=owner.keep_padding)
    chosen = all_rollouts(padded_batch(batch, owner.round_tokens_to), owner.group_size)
    ones = torch.ones(vectors, batch.rollouts, dtype=torch.float64)
    _, inputs = graph_inputs(owner.model, chosen.batch, ones, owner.round_tokens_to, deferred=True)
    return ReplayedDeferredGram(owner, UnrecordedPass(owner.model, chosen), batch, inputs)


@pytest.mark.parametrize("group_size", [None, 3])
def test_a_deferred_replay_is_the_measurement_with_the_final_coefficients(group_size):
    """What `ReplayedDeferredGram` does around the graphs, with a stand-in for these."""
    model, given = ARCHITECTURES["llama-tied"]().double(), rollouts(6, 12).arguments
    coefficients, weights = torch.randn(6, 12, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)
    usual = DeferredGram(model, *given, group_size=group_size)
    exact, sums = usual.finish(coefficients, weights)
    ours = replayed_deferred(CudaGraphGram(model, group_size=group_size, round_tokens_to=8), given)
    gram, totals = ours.finish(coefficients, weights)
    torch.testing.assert_close(ours.log_probs, usual.log_probs)
    torch.testing.assert_close(ours.entropies, usual.entropies)
    torch.testing.assert_close(gram.matrix, exact.matrix, equal_nan=True)
    for parameter, total in sums.items():
        torch.testing.assert_close(totals[parameter], total, rtol=1e-9, atol=1e-12)


def test_a_deferred_replay_whose_memory_was_overwritten_is_refused():
    """All graphs of one object share their memory: the next measurement, or `finish` itself, overwrites it."""
    graphs, given = CudaGraphGram(ARCHITECTURES["llama"]().double()), rollouts(4, 12).arguments
    coefficients, weights = torch.ones(4, 12), torch.ones(2, 4)
    first = replayed_deferred(graphs, given)
    second = replayed_deferred(graphs, given)
    message = "CudaGraphGram.deferred: must be finished once, and before the next measurement, got a later call."
    with pytest.raises(ScoregramError, match=message):
        first.finish(coefficients, weights)
    second.finish(coefficients, weights)
    with pytest.raises(ScoregramError, match=message):
        second.finish(coefficients, weights)


def test_a_deferred_replay_takes_the_recorded_number_of_weight_vectors():
    """A single vector would be broadcast to all that the graph reads."""
    graphs, given = CudaGraphGram(ARCHITECTURES["llama"]().double()), rollouts(4, 12).arguments
    with pytest.raises(ScoregramError, match=r"finish must get weights \(2, 4\), got \(1, 4\)"):
        replayed_deferred(graphs, given).finish(torch.ones(4, 12), torch.ones(1, 4))


def test_groups_are_the_same_with_and_without_a_graph():
    model, given = ARCHITECTURES["llama"]().double(), rollouts(4, 12).arguments
    coefficients, weights = torch.rand(4, 12), torch.ones(1, 4)
    gram, _ = CudaGraphGram(model, group_size=2).deferred(*given).finish(coefficients, weights)
    replayed, _ = replayed_deferred(CudaGraphGram(model, group_size=2), given, 1).finish(coefficients, weights)
    assert bool(gram.matrix[:2, 2:].isnan().all())
    torch.testing.assert_close(gram.matrix, replayed.matrix, equal_nan=True)


def replaced_parameter(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach())  # the same memory, another tensor


def moved_parameter(model: Any) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data.clone()


def frozen_parameter(model: Any) -> None:
    model.lm_head.weight.requires_grad_(False)


def replaced_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()


@pytest.mark.parametrize("change", [replaced_parameter, moved_parameter, frozen_parameter, replaced_buffer])
def test_changes_of_a_model_that_its_graphs_do_not_see(change):
    model = ARCHITECTURES["llama"]()
    before = TensorPlaces.of(model)
    with torch.no_grad():
        for parameter in model.parameters():  # as an optimiser: in place
            parameter.mul_(1.01)
    assert TensorPlaces.of(model) == before
    change(model)
    assert TensorPlaces.of(model) != before


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 31, 32, 100, 6500, 49152])
def test_bounds_are_tight_and_few(count):
    bound = rounded_up(count)
    assert count <= bound <= count * 1.125 and rounded_up(bound) == bound
    assert len({rounded_up(other) for other in range(count, 2 * count)}) <= 16


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        (
            {"round_tokens_to": 0},
            {},
            "CudaGraphGram: round_tokens_to must be at least 1, got 0. Pass 1 to pad nothing.",
        ),
        ({"group_size": 3}, {}, "CudaGraphGram: group_size must divide the number of rollouts 4, got 3."),
        ({}, {"weights": torch.ones(3)}, r"CudaGraphGram: weights must be \(N,\) with N = 4, got \(3,\)."),
        ({}, {"weights": torch.full((4,), torch.nan)}, "CudaGraphGram: weights must be finite"),
        ({"temperature": 0.0}, {}, "measure_gram: temperature must be positive, got 0.0."),
    ],
)
def test_wrong_values_are_refused_in_one_sentence(options, given, message):
    model = ARCHITECTURES["llama"]()
    with pytest.raises(ScoregramError, match=message):
        CudaGraphGram(model, **options).backward(*rollouts(4, 12).arguments, **{"weights": torch.ones(4), **given})


# On a GPU: replays


def low_precision_model(name) -> Any:
    return ARCHITECTURES[name]().cuda().bfloat16()


def moved(batch, seed=0):
    ids, mask, attention = (tensor.cuda() for tensor in batch.arguments)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 40, ids.shape, generator=generator).cuda(), mask, attention


@pytest.mark.parametrize("name", ["llama", "llama-tied", "nemotron"])
@pytest.mark.parametrize("group_size", [None, 4])
@needs_gpu
def test_a_replay_is_the_measurement_of_new_rollouts_and_new_weights(name, group_size, monkeypatch):
    monkeypatch.setattr("scoregram.gram.leaves.KEPT_ELEMENTS_CUDA", 0)
    model = low_precision_model(name)
    graphs = CudaGraphGram(model, group_size=group_size)
    for call in range(5):
        given = moved(rollouts(8, 24), seed=call)
        weights = torch.linspace(-1.0, 2.0, 8, device="cuda") * (call + 1)
        exact = backward_with_gram(model, *given, weights=weights, group_size=group_size)
        grads = gradients_of(model)
        gram = graphs.backward(*given, weights=weights)
        assert graphs.reason is None
        assert bool(graphs.recorded) == (call > 0)
        torch.testing.assert_close(gram.matrix, exact.matrix, rtol=1e-3, atol=1e-3, equal_nan=True)
        torch.testing.assert_close(gram.log_probs, exact.log_probs, rtol=1e-2, atol=1e-2)
        assert largest_difference(gradients_of(model), grads) < 1e-2
        with torch.no_grad():  # as an optimiser: in place
            for parameter in model.parameters():
                parameter.mul_(1.01)


@needs_gpu
def test_gradients_accumulate_and_are_not_overwritten_by_the_next_replay():
    model = low_precision_model("llama-tied")
    given, weights = moved(rollouts(8, 24)), torch.ones(8, device="cuda")
    graphs = CudaGraphGram(model)
    for _ in range(2):
        graphs.backward(*given, weights=weights)
        gradients_of(model)
    graphs.backward(*given, weights=weights)
    once = gradients_of(model)
    graphs.backward(*given, weights=weights)
    graphs.backward(*given, weights=3 * weights)
    assert largest_difference(gradients_of(model), [4 * grad for grad in once]) < 2e-2
    gram = graphs.measure(*given)
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(gram.matrix, measure_gram(model, *given).matrix, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("autocast", [False, True])
@needs_gpu
def test_a_deferred_replay_is_deferred_gram(autocast):
    model = ARCHITECTURES["llama-tied"]().cuda()
    graphs = CudaGraphGram(model, keep_padding=True)
    for call in range(4):
        given = moved(rollouts(8, 24, padding="left"), seed=call)
        weights = torch.randn(1, 8, device="cuda")
        coefficients = torch.randn(8, 24, device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            usual = DeferredGram(model, *given, keep_padding=True)
            exact, sums = usual.finish(coefficients, weights)
            ours = graphs.deferred(*given)
            gram, totals = ours.finish(coefficients, weights)
        assert graphs.reason is None and isinstance(ours, ReplayedDeferredGram) == (call > 0)
        torch.testing.assert_close(ours.log_probs, usual.log_probs, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(ours.entropies, usual.entropies, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(gram.matrix, exact.matrix, rtol=1e-3, atol=1e-3)
        names = list(sums)
        assert largest_difference([totals[name] for name in names], [sums[name] for name in names]) < 1e-2


@needs_gpu
def test_a_parameter_that_moved_or_is_frozen_drops_the_graphs():
    model = low_precision_model("llama")
    given, weights = moved(rollouts(8, 24)), torch.ones(8, device="cuda")
    graphs = CudaGraphGram(model)
    for _ in range(2):
        graphs.backward(*given, weights=weights)
    assert graphs.recorded and graphs.held_bytes > 0
    first = next(iter(model.parameters()))
    first.data = first.data.clone() * 2
    gram = graphs.measure(*given)
    assert not graphs.recorded
    torch.testing.assert_close(gram.matrix, measure_gram(model, *given).matrix, rtol=1e-3, atol=1e-3)


@needs_gpu
def test_a_model_that_waits_for_the_device_is_measured_as_usual():
    model = low_precision_model("llama")
    mlp: Any = model.model.layers[0].mlp
    forward = type(mlp).forward
    mlp.forward = lambda x: forward(mlp, x) * (1.0 if float(x.sum()) < 1e30 else 0.0)
    given, weights = moved(rollouts(8, 24)), torch.ones(8, device="cuda")
    exact = backward_with_gram(model, *given, weights=weights)
    gradients_of(model)
    graphs = CudaGraphGram(model)
    for _ in range(2):
        graphs.backward(*given, weights=weights)
        gradients_of(model)
    gram = graphs.backward(*given, weights=weights)
    assert graphs.reason is not None and not graphs.recorded
    assert gram.notes[-1].startswith("measured without a CUDA graph")
    assert float(torch.rand(1000, device="cuda").mean()) == pytest.approx(0.5, abs=0.1)  # the generator works again
    torch.cuda.empty_cache()
    other = CudaGraphGram(low_precision_model("llama"))
    for _ in range(3):
        other.measure(*given)
    assert other.recorded and other.reason is None
    torch.testing.assert_close(gram.matrix, exact.matrix, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_recognised(dtype, autocast):
    """A replayed Gram may differ by the rounding of half precision only where products are taken in it."""
    measured = MeasuredModel(ARCHITECTURES["llama"]().to(dtype))
    with Undo() as undo, undo, measured.in_use(undo):
        torch.set_autocast_enabled("cuda", autocast)
        try:
            assert has_half_products(measured) == (autocast or dtype == torch.bfloat16)
        finally:
            torch.set_autocast_enabled("cuda", False)
