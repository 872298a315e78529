"""Sketches against the map written out element by element, and their errors against the stated bound."""

import copy
import hashlib
import math
import struct
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scoregram.checks import ScoregramError
from scoregram.gram import (
    Sketch,
    backward_with_gram,
    contract,
    gradient_sketch,
    head,
    leaves,
    measure_gram,
    update_sketch,
)
from scoregram.gram.measurement import Measurement
from scoregram.gram.sketch import Sketcher, _sums_by_device, flat_index
from tests.cases import ARCHITECTURES, KeepDouble, build, rollouts
from tests.naive import score_rows

pytestmark = pytest.mark.filterwarnings("default")

SMALL = Sketch(features=37, seed=5)


def words(seed: int, axis: str, name: str, count: int) -> tuple[int, ...]:
    stream = hashlib.shake_128(f"scoregram sketch|{seed}|{axis}|{name}".encode()).digest(4 * count)
    return struct.unpack(f"<{count}I", stream)


def dense_map(name: str, shape: tuple[int, ...], sketch: Sketch) -> Tensor:
    """The map of one parameter as a matrix `(D, m)`, one element after another."""
    columns = shape[-1] if shape else 1
    rows = math.prod(shape) // columns
    left = words(sketch.seed, "rows", name, rows)
    right = words(sketch.seed, "columns", name, columns)
    place = torch.tensor([(a // 2 + b // 2) % sketch.features for a in left for b in right])
    sign = torch.tensor([(1 - 2 * (a % 2)) * (1 - 2 * (b % 2)) for a in left for b in right])
    return nn.functional.one_hot(place, sketch.features) * sign[:, None].double()


def sketched_by_definition(model: nn.Module, batch, sketch: Sketch) -> Tensor:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    whole = torch.cat([dense_map(name, tuple(p.shape), sketch) for name, p in trained.items()])
    return score_rows(model, *batch.arguments) @ whole


def distance(measured: Tensor, reference: Tensor) -> float:
    return float((measured.double() - reference).norm() / reference.norm())


@pytest.fixture
def streamed(monkeypatch):
    """Every weight streamed, however small, in small chunks, and the logits computed again."""
    monkeypatch.setattr(leaves, "KEPT_ELEMENTS", 0)
    monkeypatch.setattr(contract, "CHUNK_ELEMENTS", 3000)
    monkeypatch.setattr(head, "STORE_BYTES", 0)


# The map itself, on every route a parameter can take.

ROUTES = ["llama", "llama-tied", "gpt2", "gemma2", "phi", "qwen3-moe", "gpt-oss", "nemotron-h"]


@pytest.mark.parametrize("route", ["rows", "streamed"])
@pytest.mark.parametrize("name", ROUTES)
def test_a_sketch_is_the_map_applied_to_the_score(name, route, request):
    if route == "streamed":
        request.getfixturevalue("streamed")
    model, batch = ARCHITECTURES[name](), rollouts()
    with KeepDouble():
        gram = measure_gram(model, *batch.arguments, sketch=SMALL)
        expected = sketched_by_definition(model, batch, SMALL)
    assert gram.sketch is not None
    assert distance(gram.sketch, expected) < 1e-12
    assert bool((gram.sketch[3] == 0).all()), "a rollout without a completion token has a zero sketch"


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_a_padding_row_of_the_embedding_receives_nothing(name):
    model, batch = ARCHITECTURES[name](), rollouts()
    assert model.get_input_embeddings().padding_idx == 0
    batch.input_ids[:, 1] = 0  # in the prompt, and real
    with KeepDouble():
        gram = measure_gram(model, *batch.arguments, sketch=SMALL)
        expected = sketched_by_definition(model, batch, SMALL)
    assert gram.sketch is not None
    assert distance(gram.sketch, expected) < 1e-12


@pytest.mark.parametrize("copies", [0, 2])
def test_coefficients_count_and_equal_rollouts_have_equal_sketches(copies):
    """Coefficients of any size: the engine divides those of each rollout by a power of two of its own."""
    model, batch = ARCHITECTURES["llama"](), rollouts()
    chosen = torch.tensor([0, 1, 2, 3, 4, *range(copies)])
    given = [tensor[chosen] for tensor in batch.arguments]
    factors = torch.linspace(0.5, 2.0, batch.input_ids.numel(), dtype=torch.float64).view_as(batch.input_ids)
    coefficients = (factors * torch.tensor([1e-3, 7.0, -1.0, 1.0, 300.0])[:, None])[chosen]
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    whole = torch.cat([dense_map(name, shape, SMALL) for name, shape in trained.items()])
    with KeepDouble():
        gram = measure_gram(model, *given, coefficients=coefficients, sketch=SMALL)
        expected = score_rows(model, *given, coefficients=coefficients) @ whole
    assert gram.sketch is not None
    scored = expected.any(1)  # one rollout has no completion token
    assert not bool(gram.sketch[~scored].any())
    for row, reference in zip(gram.sketch[scored], expected[scored], strict=True):
        assert distance(row, reference) < 1e-12


def test_the_training_form_and_adapters_give_the_same_map():
    import peft

    config = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    model: Any = peft.get_peft_model(build("Llama"), config).double().eval()
    batch = rollouts()
    with KeepDouble():
        gram = backward_with_gram(model, *batch.arguments, weights=torch.ones(5), sketch=SMALL)
        model.zero_grad(set_to_none=True)
        expected = sketched_by_definition(model, batch, SMALL)
    assert gram.sketch is not None
    assert distance(gram.sketch, expected) < 1e-12


class Views(nn.Module):
    """A weight used in parts, transposed and reshaped; each region of it once."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 6)
        self.parts = nn.Parameter(torch.randn(12, 6) / 3)
        self.turned = nn.Parameter(torch.randn(6, 6).t() / 3)
        self.experts = nn.Parameter(torch.randn(2, 6, 6) / 3)
        self.folded = nn.Parameter(torch.randn(6, 2, 3) / 3)
        self.wrapped = nn.Parameter(torch.randn(12, 6) / 3)
        self.head = nn.Linear(6, 61)

    def forward(self, input_ids):  # noqa: D102
        x = self.embedding(input_ids).cumsum(1)
        x = x + torch.tanh(nn.functional.linear(x, self.parts[:6]))
        x = x + torch.tanh(x @ self.parts[6:].mT.mT)
        x = x + torch.tanh(nn.functional.linear(x[..., :3], self.turned[:, :3]))
        x = x + torch.tanh(nn.functional.linear(x, self.experts[0].mT))
        x = x + torch.tanh(x @ self.experts[1])
        x = x + torch.tanh(nn.functional.linear(x, self.folded.view(6, 6)))
        # rows of seven elements: a row of the parameter and the first element of the next
        x = x + torch.tanh(
            nn.functional.linear(nn.functional.pad(x, (0, 1), value=1.0), self.wrapped.view(6, 12)[:, :7])
        )
        return self.head(x)


def plain_sketch(model: nn.Module, batch) -> Tensor:
    """The sketch by definition of a model that takes token ids and returns logits."""
    rows = []
    for i in range(5):
        real = batch.attention_mask[i].bool()
        ids = batch.input_ids[i][real][None]
        chosen = model(ids).log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        total = (chosen * batch.completion_mask[i][real][1:]).sum()
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()))]))
    whole = torch.cat([dense_map(name, tuple(p.shape), SMALL) for name, p in model.named_parameters()])
    return torch.stack(rows) @ whole


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("chunk", [60, 3000])
def test_every_view_of_a_parameter_is_found_in_it(chunk, monkeypatch):
    monkeypatch.setattr(contract, "CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    model, batch = Views().double(), rollouts()
    assert not model.turned.is_contiguous()
    with KeepDouble():
        gram = measure_gram(model, *batch.arguments, sketch=SMALL)
    assert gram.sketch is not None
    assert not gram.replayed
    assert distance(gram.sketch, plain_sketch(model, batch)) < 1e-12


def test_a_flat_index_is_that_of_the_flattened_parameter():
    for parameter in (torch.randn(4, 3, 5), torch.randn(5, 3, 4).permute(2, 1, 0), torch.randn(3, 4, 5).mT):
        numbered = torch.empty_strided(parameter.shape, parameter.stride(), dtype=torch.int64)
        numbered.copy_(torch.arange(60).view(parameter.shape))
        for choose in (lambda t: t[1], lambda t: t[:, 1], lambda t: t[:, :, 2].mT, lambda t: t[2, 1:, ::2]):
            view, expected = choose(parameter), choose(numbered)
            rows = torch.arange(len(view)).flip(0)
            assert flat_index(parameter, view, rows).tolist() == expected[rows].flatten().tolist()


# The same seed, the same map.


def test_order_subset_and_chunks_change_nothing_but_rounding(monkeypatch):
    model, batch = ARCHITECTURES["llama-tied"](), rollouts()
    order = torch.tensor([4, 2, 0])
    with KeepDouble():
        whole = measure_gram(model, *batch.arguments, sketch=SMALL).sketch
        part = measure_gram(model, *(tensor[order] for tensor in batch.arguments), sketch=SMALL).sketch
        monkeypatch.setattr(contract, "CHUNK_ELEMENTS", 500)
        again = measure_gram(model, *batch.arguments, group_size=1, sketch=SMALL).sketch
        other = measure_gram(model, *batch.arguments, sketch=Sketch(features=37, seed=6)).sketch
    assert whole is not None and part is not None and again is not None and other is not None
    assert distance(part, whole[order]) < 1e-12
    assert distance(again, whole) < 1e-12
    assert distance(other, whole) > 0.5


class Overlapping(nn.Module):
    """A weight of which two regions overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 6)
        self.shared = nn.Parameter(torch.randn(8, 6) / 3)
        self.head = nn.Linear(6, 61)

    def forward(self, input_ids):  # noqa: D102
        x = self.embedding(input_ids)
        x = x + nn.functional.linear(torch.tanh(x), self.shared[:6])
        return self.head(x + nn.functional.linear(torch.tanh(x), self.shared[2:]))


@pytest.mark.usefixtures("streamed")
def test_a_replayed_parameter_counts_once():
    """Its uses were sketched before the engine knew that it had to be replayed."""
    torch.manual_seed(0)
    model, batch = Overlapping().double(), rollouts()
    with KeepDouble():
        gram = measure_gram(model, *batch.arguments, sketch=SMALL)
    assert gram.sketch is not None
    assert gram.replayed == ("shared",)
    assert distance(gram.sketch, plain_sketch(model, batch)) < 1e-12


def test_no_sketch_unless_asked_and_nothing_random_drawn():
    model, batch = build("Llama"), rollouts()
    assert measure_gram(model, *batch.arguments).sketch is None
    state = torch.get_rng_state()
    measure_gram(model, *batch.arguments, sketch=SMALL)
    assert torch.equal(torch.get_rng_state(), state)
    low = measure_gram(build("Llama").bfloat16(), *batch.arguments, sketch=SMALL).sketch
    assert low is not None and low.dtype is torch.float32


@pytest.mark.parametrize("features", [0, -3])
def test_a_sketch_without_features_is_refused(features):
    with pytest.raises(ScoregramError, match=f"features must be at least 1, got {features}"):
        Sketch(features=features)


# The error.


def relative_error_bound(features: int) -> float:
    """Largest standard deviation of `⟨s_i, s_j⟩` in units of `|ψ_i| |ψ_j|` over random seeds (docs/gram.md)."""
    return math.sqrt((6 + 4 / features) / features)


def draws(shapes: dict[str, tuple[int, ...]], rows: list[Tensor], features: int, seeds: int) -> Tensor:
    """`⟨s_0, s_1⟩` for many seeds, for scores given parameter by parameter as rows `(2, D)`."""
    parameters = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    products = []
    for seed in range(seeds):
        sketcher = Sketcher(Sketch(features, seed), parameters, rollouts=2)
        for parameter, value in zip(parameters.values(), rows, strict=True):
            sketcher.add_rows(parameter, value)
        made = torch.stack(list(sketcher.made.values())).sum(0)
        products.append(made[0] @ made[1])
    return torch.stack(products)


def rank_one(left: Tensor, right: Tensor) -> Tensor:
    return torch.outer(left, right).flatten().expand(2, -1)


def scores(kind: str) -> tuple[dict[str, tuple[int, ...]], list[Tensor]]:
    """Two scores over some parameters: easy ones, and those that come near to the bound."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    ones = torch.ones(12, dtype=torch.float64)
    if kind == "matrix":
        return {"w": (5, 7)}, [normal(2, 35)]
    if kind == "vector":
        return {"w": (30,)}, [normal(2, 30)]
    if kind == "flat rank one":  # every term of the variance near its bound
        return {"w": (12, 12)}, [rank_one(ones, ones)]
    if kind == "two alike":
        return {"v": (12, 12), "w": (12, 12)}, [rank_one(ones, ones), rank_one(ones, -ones)]
    assert kind == "many"
    return {f"w{i}": (4, 3) for i in range(4)}, [normal(2, 12) for _ in range(4)]


@pytest.mark.parametrize("kind", ["matrix", "vector", "flat rank one", "two alike", "many"])
def test_products_are_unbiased_and_within_the_bound(kind):
    shapes, rows = scores(kind)
    features, seeds = 16, 700
    found = draws(shapes, rows, features, seeds)
    exact = float(sum((r[0] * r[1]).sum() for r in rows))
    size = math.prod(float(sum(r[i].square().sum() for r in rows)) for i in (0, 1))  # |ψ|²|ψ'|²
    error = float(found.std()) / math.sqrt(seeds)
    assert abs(float(found.mean()) - exact) < 4 * error
    squares = (found - exact).square()
    variance, doubt = float(squares.mean()), float(squares.std()) / math.sqrt(seeds)
    shares = sum(math.prod(float(r[i].square().sum()) for i in (0, 1)) for r in rows) / size
    worst = relative_error_bound(features) ** 2
    assert variance - 4 * doubt < worst * size
    assert variance - 4 * doubt < (worst * shares + 2 / features * (1 - shares)) * size
    if kind == "vector":
        assert variance - 4 * doubt < 2 / features * size
    if kind == "flat rank one":
        assert variance + 4 * doubt > 0.75 * worst * size, "the bound is nearly reached"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sketches_of_a_model_estimate_its_gram_within_the_bound(name):
    model, batch = ARCHITECTURES[name](), rollouts()
    exact, squares = None, []
    for seed in range(12):
        gram = measure_gram(model, *batch.arguments, sketch=Sketch(features=256, seed=seed))
        assert gram.sketch is not None
        exact = gram.matrix
        norms = exact.diagonal().sqrt()
        made = gram.sketch.double()
        squares.append(((made @ made.T - exact) / norms.outer(norms))[norms.outer(norms) > 0].square())
    mean = torch.stack(squares).mean(0)
    assert float(mean.max().sqrt()) < relative_error_bound(256)
    assert float(torch.stack(squares).max().sqrt()) < 4 * relative_error_bound(256)


def test_sketches_compare_scores_of_two_calls():
    """Directions of two models, one step apart, from sketches alone."""
    first, batch, sketch = ARCHITECTURES["llama-tied"](), rollouts(), Sketch(features=2048)
    second = ARCHITECTURES["llama-tied"]()
    for parameter in second.parameters():
        parameter.data *= 1.05
    with KeepDouble():
        exact = score_rows(first, *batch.arguments) @ score_rows(second, *batch.arguments).T
        made = [measure_gram(model, *batch.arguments, sketch=sketch) for model in (first, second)]
    assert made[0].sketch is not None and made[1].sketch is not None
    sizes = [gram.matrix.diagonal().sqrt() for gram in made]
    error = (made[0].sketch @ made[1].sketch.T - exact).abs()
    assert bool((error <= 4 * relative_error_bound(sketch.features) * sizes[0].outer(sizes[1])).all())


def test_a_wide_pass_sketches_alike(monkeypatch):
    model, batch = ARCHITECTURES["gpt2"](), rollouts()
    with KeepDouble():
        narrow = measure_gram(model, *batch.arguments, sketch=SMALL).sketch
        monkeypatch.setattr(Measurement, "narrow_pass", lambda self: None)
        wide = measure_gram(model, *batch.arguments, sketch=SMALL).sketch
    assert narrow is not None and wide is not None
    assert distance(wide, narrow) < 1e-12


# The sketch of a gradient.

GRADIENTS: dict[str, tuple[int, ...]] = {
    "tall": (23, 4),
    "flat": (4, 23),
    "vector": (9,),
    "number": (),
    "experts": (3, 5, 4),
    "empty": (0, 6),
    "one column": (7, 1),
}


def gradients(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in GRADIENTS.items()}


def gradient_by_definition(given: dict[str, Tensor], sketch: Sketch) -> Tensor:
    """Every element added with its sign at its place, one after another."""
    made = [0.0] * sketch.features
    for name, gradient in given.items():
        width = gradient.shape[-1] if gradient.ndim else 1
        height = gradient.numel() // width if width else 0
        left = words(sketch.seed, "rows", name, height) if height else ()
        right = words(sketch.seed, "columns", name, width)
        for place, value in enumerate(gradient.double().flatten().tolist()):
            a, b = left[place // width], right[place % width]
            made[(a // 2 + b // 2) % sketch.features] += value * (-1) ** (a % 2) * (-1) ** (b % 2)
    return torch.tensor(made, dtype=torch.float64)


@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
@pytest.mark.parametrize("sketch", [SMALL, Sketch(features=1), Sketch(features=64, seed=2)])
def test_a_gradients_sketch_is_every_element_at_its_place(sketch, chunk, monkeypatch):
    monkeypatch.setattr(contract, "CHUNK_ELEMENTS", chunk)
    expected = gradient_by_definition(gradients(), sketch)
    assert distance(gradient_sketch(gradients(), sketch), expected) < 1e-12


def test_the_layout_of_a_gradient_changes_nothing():
    given = gradients()
    turned = {name: one.mT.contiguous().mT if one.ndim > 1 else one for name, one in given.items()}
    assert not turned["experts"].is_contiguous()
    turned["tall"] = given["tall"].to_sparse()
    torch.testing.assert_close(gradient_sketch(turned, SMALL), gradient_sketch(given, SMALL), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gradient_of_low_precision_is_summed_in_float32(dtype):
    given = gradients(dtype)
    assert distance(gradient_sketch(given, SMALL), gradient_by_definition(given, SMALL)) < 1e-6


def test_a_missing_gradient_is_zero():
    given = gradients()
    zeroed = {**given, "flat": torch.zeros(4, 23), "vector": torch.zeros(9)}
    missing = {**given, "flat": None, "vector": None}
    assert torch.equal(gradient_sketch(missing, SMALL), gradient_sketch(zeroed, SMALL))
    assert torch.equal(gradient_sketch({"w": None}, SMALL), torch.zeros(37, dtype=torch.float64))
    assert torch.equal(gradient_sketch({}), torch.zeros(1024, dtype=torch.float64))


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "qwen3-moe"])
def test_the_sketch_of_the_gradient_is_the_weighted_sum_of_the_rollouts_sketches(name):
    model, batch = ARCHITECTURES[name](), rollouts()
    weights = torch.tensor([0.5, -2.0, 0.25, 3.0, -1.0])
    with KeepDouble():
        gram = backward_with_gram(model, *batch.arguments, weights=weights, sketch=Sketch())
        made = update_sketch(model)
    assert gram.sketch is not None and made is not None
    assert distance(made, weights.double() @ gram.sketch) < 1e-12
    halved = update_sketch(model, scale=2.0)
    assert halved is not None and torch.equal(halved, made / 2)


def test_a_model_without_a_finite_gradient_has_no_sketch():
    model = build("Llama")
    assert update_sketch(model) is None
    weight = model.get_output_embeddings().weight
    weight.grad = torch.zeros_like(weight)
    made = update_sketch(model)
    assert made is not None and torch.equal(made, torch.zeros(1024).double())
    weight.grad[3, 1] = math.inf
    assert update_sketch(model) is None


def test_wrappers_of_a_model_do_not_change_the_names():
    model, batch = build("Llama"), rollouts()
    backward_with_gram(model, *batch.arguments, weights=torch.ones(5))
    compiled = nn.Module()
    compiled._orig_mod = model  # as `torch.compile` keeps it
    assert torch.equal(update_sketch(compiled), update_sketch(model))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("cosine", [0.0, 0.5])
def test_the_error_of_a_cosine_is_one_minus_its_square_over_the_root_of_the_length(cosine):
    """Not `√(2/m)`: that is the error of an inner product of parallel gradients."""
    generator = torch.Generator().manual_seed(0)
    features, seeds = 32, 150
    a, b = (torch.linalg.qr(torch.randn(6 * 20 * 15, 2, generator=generator, dtype=torch.float64))[0]).T
    both = [a, cosine * a + math.sqrt(1 - cosine**2) * b]
    given = [{f"w{i}": part for i, part in enumerate(one.view(6, 20, 15))} for one in both]
    found = []
    for seed in range(seeds):
        one, other = (gradient_sketch(gradient, Sketch(features, seed)) for gradient in given)
        found.append(float(torch.cosine_similarity(one, other, dim=0)))
    squares = (torch.tensor(found) - cosine).square() * features / (1 - cosine**2) ** 2
    assert abs(float(squares.mean()) - 1) < 4 * float(squares.std()) / math.sqrt(seeds) + 2 / features


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "floor"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
@pytest.mark.usefixtures("streamed")
def test_the_device_changes_nothing_but_rounding(dtype, floor):
    model, batch = ARCHITECTURES["llama-tied"]().to(dtype), rollouts()
    here = measure_gram(copy.deepcopy(model).float(), *batch.arguments, sketch=SMALL).sketch
    there = measure_gram(model.cuda(), *(tensor.cuda() for tensor in batch.arguments), sketch=SMALL).sketch
    assert here is not None and there is not None
    assert distance(there, here.double()) < floor


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gradient_is_sketched_on_its_device_without_a_wait():
    given: dict[str, Tensor | None] = {name: one.float().cuda() for name, one in gradients().items()}
    _sums_by_device(given, SMALL)
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = _sums_by_device(given, SMALL)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = gradient_by_definition(gradients(torch.float32), SMALL)
    assert [one.device.type for one in made] == ["cuda"] and distance(made[0].cpu(), expected) < 1e-5
    assert distance(gradient_sketch(given, SMALL), expected) < 1e-5
