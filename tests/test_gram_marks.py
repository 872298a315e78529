"""Weights that a model computes from parameters: which low-rank terms they contain, and adapters on fused experts."""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from scoregram.gram import Gram, Sketch, backward_with_gram, leaves, measure_gram
from scoregram.gram.collect import RegionUses, may_overlap
from scoregram.gram.marks import Derived, LowRankTerm, known_terms, low_rank_terms, set_mark
from tests.cases import ARCHITECTURES, KeepDouble, build, rollouts
from tests.naive import score_rows

pytestmark = pytest.mark.filterwarnings("default")

# Terms: the weight is a constant plus `Σ s L R`


def matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


STACK = 3  # experts; weights are 4 × 5, of rank 2
LEFT, RIGHT, BASE = matrix(STACK, 4, 2), matrix(STACK, 2, 5, seed=1), matrix(STACK, 4, 5, seed=2)
FIRST_LEFT, FIRST_RIGHT = LEFT[0], RIGHT[0]
FIRST_ROW = FIRST_LEFT[:1]
BY_OUTPUT = LEFT.permute(1, 2, 0)  # as PEFT keeps it: output, rank, expert


class Followed:
    """Applies operations to tensors, and follows their terms as the interceptor does."""

    def __init__(self) -> None:
        self.trained = [LEFT, RIGHT, FIRST_LEFT, FIRST_RIGHT, FIRST_ROW, BY_OUTPUT]

    def __call__(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        result = func(*args, **kwargs)
        terms = low_rank_terms(func, args, kwargs, self.is_parameter_side)
        if any(self.is_parameter_side(arg) for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)):
            set_mark(result, Derived(terms=terms, version=result._version))
            self.trained.append(result)
        return result

    def is_parameter_side(self, tensor: Tensor) -> bool:  # noqa: D102
        return any(tensor is other for other in self.trained)


def two_adapters(run: Followed) -> Tensor:
    first = run(Tensor.__mul__, run(torch.einsum, "o r e, e r i -> e o i", BY_OUTPUT, RIGHT), 0.5)
    return run(Tensor.__add__, BASE, run(torch.add, first, run(torch.bmm, LEFT, RIGHT)))


def one_expert(run: Followed) -> Tensor:
    delta = run(Tensor.__rmul__, run(torch.matmul, FIRST_LEFT, FIRST_RIGHT), 2)
    return run(Tensor.__add__, BASE[:1], delta)


WEIGHTS: dict[str, tuple[Callable[[Followed], Tensor], Tensor]] = {
    "baddbmm": (lambda run: run(torch.baddbmm, BASE, LEFT, RIGHT, alpha=1.5), BASE),
    "baddbmm with beta": (lambda run: run(torch.baddbmm, BASE, LEFT, RIGHT, beta=3, alpha=2), 3 * BASE),
    "addmm": (lambda run: run(torch.addmm, BASE[0], FIRST_LEFT, FIRST_RIGHT, alpha=0.5), BASE[0]),
    "two baddbmm": (
        lambda run: run(torch.baddbmm, run(torch.baddbmm, BASE, LEFT, RIGHT), LEFT, RIGHT, beta=2, alpha=-1),
        2 * BASE,
    ),
    "einsum": (lambda run: run(torch.einsum, "ore,eri->eio", BY_OUTPUT, RIGHT), torch.zeros(STACK, 5, 4)),
    "einsum, other order": (lambda run: run(torch.einsum, "eri,ore->eoi", RIGHT, BY_OUTPUT), torch.zeros(STACK, 4, 5)),
    "two adapters": (two_adapters, BASE),
    "one expert": (one_expert, BASE[:1]),
    "cast": (lambda run: run(Tensor.double, run(torch.baddbmm, BASE, LEFT, RIGHT)), BASE),
    "one of a stack": (lambda run: run(Tensor.__getitem__, run(torch.bmm, LEFT, RIGHT), 1), torch.zeros(4, 5)),
    "one by a tensor": (
        lambda run: run(Tensor.__getitem__, run(torch.baddbmm, BASE, LEFT, RIGHT), torch.tensor(2)),
        BASE[2],
    ),
    "transposed": (lambda run: run(Tensor.transpose, run(torch.baddbmm, BASE, LEFT, RIGHT), 1, -1), BASE.mT),
    "mT": (lambda run: run(Tensor.mT.__get__, run(torch.baddbmm, BASE, LEFT, RIGHT)), BASE.mT),  # pyright: ignore[reportAttributeAccessIssue]
    "T of a matrix": (
        lambda run: run(Tensor.T.__get__, run(Tensor.__getitem__, run(torch.bmm, LEFT, RIGHT), 0)),  # pyright: ignore[reportAttributeAccessIssue]
        torch.zeros(5, 4),
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_is_a_constant_plus_its_terms(name):
    make, constant = WEIGHTS[name]
    weight = make(Followed())
    terms = known_terms(weight)
    assert terms and all(term.shape == tuple(weight.shape) for term in terms)
    total = constant + torch.stack([term.scale * (term.left @ term.right) for term in terms]).sum(0)
    torch.testing.assert_close(total, weight, rtol=0, atol=1e-13)


OTHERS: dict[str, Callable[[Followed], Tensor]] = {
    "a sum of parameters": lambda run: run(torch.add, LEFT, LEFT),
    "a product plus a parameter": lambda run: run(
        torch.add, run(torch.bmm, LEFT, RIGHT), run(torch.exp, run(torch.bmm, LEFT, RIGHT))
    ),
    "more than a product": lambda run: run(torch.add, run(torch.exp, run(torch.bmm, LEFT, RIGHT)), BASE),
    "baddbmm on a parameter": lambda run: run(torch.baddbmm, run(torch.exp, run(torch.bmm, LEFT, RIGHT)), LEFT, RIGHT),
    "times a tensor": lambda run: run(torch.mul, run(torch.bmm, LEFT, RIGHT), BASE),
    "some of a stack": lambda run: run(Tensor.__getitem__, run(torch.bmm, LEFT, RIGHT), slice(0, 2)),
    "by a mask": lambda run: run(Tensor.__getitem__, run(torch.bmm, LEFT, RIGHT), torch.tensor(True)),
    "a row of a matrix": lambda run: run(Tensor.__getitem__, run(torch.mm, FIRST_LEFT, FIRST_RIGHT), 1),
    "transposed as a stack": lambda run: run(Tensor.transpose, run(torch.bmm, LEFT, RIGHT), 0, 1),
    "a matrix times a stack": lambda run: run(torch.matmul, matrix(6, 4), LEFT),
    "einsum that sums an axis": lambda run: run(torch.einsum, "ore,eri->reo", BY_OUTPUT, RIGHT),
    "einsum of one": lambda run: run(torch.einsum, "ore->eor", BY_OUTPUT),
    "a sum that broadcasts": lambda run: run(torch.add, run(torch.bmm, LEFT, RIGHT), matrix(2, STACK, 4, 5)),
    "einsum that broadcasts the rank": lambda run: run(torch.einsum, "eor,eri->eoi", LEFT[:, :, :1], RIGHT),
    "einsum that broadcasts the experts": lambda run: run(torch.einsum, "eor,eri->eoi", LEFT[:1], RIGHT),
    "addmm that broadcasts a term": lambda run: run(
        torch.addmm, run(torch.mm, FIRST_ROW, FIRST_RIGHT), FIRST_LEFT, FIRST_RIGHT
    ),
    "baddbmm that broadcasts a term": lambda run: run(
        torch.baddbmm, run(torch.mm, FIRST_LEFT, FIRST_RIGHT), LEFT, RIGHT
    ),
    "baddbmm by keywords": lambda run: run(torch.baddbmm, input=BASE, batch1=LEFT, batch2=RIGHT),
    "transposed by a keyword": lambda run: run(torch.t, input=run(torch.mm, FIRST_LEFT, FIRST_RIGHT)),
    "sum with a factor": lambda run: run(torch.add, BASE, run(torch.bmm, LEFT, RIGHT), alpha=2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_weights_have_no_terms(name):
    assert known_terms(OTHERS[name](Followed())) == ()


def test_a_weight_that_is_changed_in_place_loses_its_terms():
    weight = Followed()(torch.baddbmm, BASE, LEFT, RIGHT)
    assert known_terms(weight) and isinstance(known_terms(weight)[0], LowRankTerm)
    weight[0].mul_(2)
    assert known_terms(weight) == ()


# Regions


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)),
    order=st.permutations([0, 1, 2]),
    chosen=st.sets(st.integers(0, 3), min_size=1),
    extra=st.booleans(),
)
def test_regions_that_share_an_element_are_found(shape, order, chosen, extra):
    """Against the sets of elements: regions that share one are never called separate."""
    parameter = torch.arange(float(torch.Size(shape).numel())).view(shape)
    stack = parameter.permute(order)
    views = [stack[place] for place in chosen if place < len(stack)]
    views += [parameter[-1]] * extra
    keys = {(view.storage_offset(), *view.shape, *view.stride()): view for view in views}
    regions = [RegionUses(parameter, view) for view in keys.values()]
    elements = [{*view.flatten().tolist()} for view in keys.values()]
    shared = any(not a.isdisjoint(b) for a, b in combinations(elements, 2))
    assert may_overlap(regions) or not shared


def test_experts_between_each_other_share_nothing():
    """`lora_B` `(out, rank · experts)`: the columns of one expert lie between those of the others."""
    matrix_b = torch.zeros(6, 2 * 4)
    stack = matrix_b.reshape(6, 2, 4).permute(2, 0, 1)
    assert not may_overlap([RegionUses(matrix_b, view) for view in stack])
    assert may_overlap([RegionUses(matrix_b, stack[0]), RegionUses(matrix_b, matrix_b[1:])])


# Adapters on fused experts


def with_adapters(base: Any, *, rank: int = 2, adapters: int = 1, experts: tuple[str, ...] = ()) -> Any:
    """A model with random LoRA weights on its fused experts and on one projection of the attention."""
    import peft

    names = experts or ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    config = peft.LoraConfig(r=rank, lora_alpha=3, target_modules=["q_proj"], target_parameters=list(names))
    model: Any = peft.get_peft_model(base, config)
    for place in range(1, adapters):
        model.add_adapter(f"more{place}", config)
    if adapters > 1:
        model.base_model.set_adapter(["default", *(f"more{place}" for place in range(1, adapters))])
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.requires_grad_(True)
            nn.init.normal_(parameter, std=0.1, generator=generator)
    return model.double().eval()


def assert_exact(model: Any, *, replayed: bool = False, bound: float = 1e-12) -> None:
    """Gram and gradient equal one backward pass per rollout; no parameter is replayed.

    A bound above 1e-12 leaves norms and routers in float32.
    """
    batch = rollouts()
    weights = torch.linspace(-1, 2, len(batch.arguments[0]), dtype=torch.float64)
    with KeepDouble() if bound == 1e-12 else nullcontext():
        scores = score_rows(model, *batch.arguments)
        gram = backward_with_gram(model, *batch.arguments, weights=weights)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradient = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in trained])
    expected = scores @ scores.T
    assert float((gram.matrix - expected).norm()) < bound * float(expected.norm())
    assert float((gradient - weights @ scores).norm()) < bound * float((weights @ scores).norm())
    assert bool(gram.replayed) == replayed


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "mixtral", "olmoe"])
def test_lora_on_fused_experts(name):
    assert_exact(with_adapters(ARCHITECTURES[name]()))


def test_lora_on_experts_in_one_batched_product():
    """Llama 4 multiplies `(experts, tokens, hidden)` by the weights of all experts."""
    sizes: dict[str, Any] = {
        "intermediate_size": 24,
        "intermediate_size_mlp": 24,
        "num_local_experts": 4,
        "head_dim": 8,
    }
    base = build("Llama4", config="Llama4TextConfig", **sizes)
    assert_exact(base)
    names = ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj")
    assert_exact(with_adapters(build("Llama4", config="Llama4TextConfig", **sizes), experts=names))


def test_two_adapters_on_fused_experts():
    """PEFT then adds products that `einsum` forms to the weight."""
    assert_exact(with_adapters(ARCHITECTURES["mixtral"](), adapters=2))


@pytest.mark.parametrize("frozen", ["lora_A", "lora_B"])
def test_one_of_the_two_adapters_is_frozen(frozen):
    model = with_adapters(ARCHITECTURES["mixtral"]())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and frozen not in name)
    assert_exact(model)


def test_experts_that_are_trained_beside_their_adapters_are_replayed():
    model = with_adapters(ARCHITECTURES["mixtral"]())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name.endswith("experts.base_layer.base_layer.down_proj"))
    assert_exact(model, replayed=True)


def test_checkpointed_layers_with_adapters_on_fused_experts():
    """Within float32 rounding: no mode reaches the second forward pass, so norms and routers stay in float32."""
    model = with_adapters(ARCHITECTURES["mixtral"]())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_exact(model.train(), bound=1e-5)


def test_the_sketch_of_adapters_on_fused_experts():
    """Inner products of the sketches are within five standard deviations of the Gram."""
    model, batch = with_adapters(ARCHITECTURES["mixtral"]()), rollouts()
    with KeepDouble():
        sketched = measure_gram(model, *batch.arguments, sketch=Sketch(features=64))
        scores = score_rows(model, *batch.arguments)
    assert sketched.sketch is not None
    assert not sketched.replayed
    estimate = sketched.sketch.double() @ sketched.sketch.double().T
    expected = scores @ scores.T
    # the variance of an entry is at most (6 + 4/m)/m |ψ|²|ψ'|² (docs/gram.md)
    bound = 5 * ((6 + 4 / 64) / 64) ** 0.5 * expected.diagonal().outer(expected.diagonal()).sqrt()
    assert bool(((estimate - expected).abs() <= bound).all())


def gram_of(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """The Gram of a model that takes token ids alone and returns logits, one backward pass per rollout."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rows = []
    for row, counted in zip(ids, mask, strict=True):
        chosen = model(row[None]).log_softmax(-1)[0, :-1].gather(1, row[1:, None])[:, 0]
        grads = torch.autograd.grad((chosen * counted[1:]).sum(), trained, materialize_grads=True)
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(rows) @ torch.stack(rows).T


def exact_gram(model: nn.Module) -> Gram:
    """The Gram of some rollouts, after a comparison with one backward pass per rollout."""
    ids, mask = rollouts().arguments[:2]
    expected = gram_of(model, ids, mask)
    gram = measure_gram(model, ids, mask)
    assert float((gram.matrix - expected).norm()) <= 1e-12 * float(expected.norm())
    return gram


def changed_in_place(m: Any) -> Tensor:
    weight = m.base + m.left @ m.right
    weight[:3].mul_(2)
    return weight


@torch.no_grad()
def without_gradient(tensor: Tensor) -> Tensor:
    """A view of all of `tensor`; autograd passes no gradient from it to `tensor`."""
    return tensor[:]


def hooked(tensor: Tensor) -> Tensor:
    """The tensor with a hook that triples its gradient."""
    tensor.register_hook(lambda gradient: None if gradient is None else 3 * gradient)
    return tensor


COMPUTED: dict[str, Callable[[Any], Tensor]] = {
    "changed in place": changed_in_place,
    "a function of the left factor": lambda m: m.base + m.left.exp() @ m.right,
    "a function of the right factor": lambda m: m.base + m.left @ m.right.exp(),
    "one parameter on both sides": lambda m: m.base + m.left @ m.left.T,
    "a factor without a gradient": lambda m: m.base + without_gradient(m.left) @ m.right,
    "a weight without a gradient": lambda m: without_gradient(m.square),
    "a term that is broadcast": lambda m: torch.addmm(m.left[:1] @ m.right, m.left, m.right),
    "a matrix as a stack of one": lambda m: torch.baddbmm(m.left @ m.right, m.left[None], m.right[None])[0],
    "a rank that is broadcast": lambda m: torch.einsum("eor,eri->eoi", m.left[None, :, :1], m.right[None])[0],
    "keywords": lambda m: torch.t(input=torch.baddbmm(input=m.base, batch1=m.left[None], batch2=m.right[None])[0]),
    "a hook on the weight": lambda m: hooked(m.base + m.left @ m.right),
    "a hook on a term": lambda m: m.base + hooked(m.left @ m.right),
    "a hook on a cast": lambda m: m.base + hooked(m.left.to(torch.complex128)).real @ m.right,
    "a hook on a view of a factor": lambda m: m.base + hooked(m.left[:]) @ m.right,
    "a hook on a view": lambda m: hooked(m.square[:]),
    "a hook before a view": lambda m: hooked(m.square[:])[:8],
}


class ComputedWeight(nn.Module):
    """A model that computes a weight from parameters in another way than `W + s L R` with separate `L` and `R`."""

    def __init__(self, compute: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.embedding = nn.Embedding(61, 8)
        self.left, self.right = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 8))
        self.square = nn.Parameter(torch.randn(8, 8))
        self.base = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.head = nn.Linear(8, 61, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:  # noqa: D102
        return self.head(F.linear(self.embedding(input_ids).cumsum(1), self.compute(self)))


@pytest.mark.parametrize("has_leaves", [True, False])
@pytest.mark.parametrize("kind", COMPUTED)
def test_other_computed_weights_are_exact(kind, has_leaves, monkeypatch):
    if not has_leaves:
        monkeypatch.setattr(leaves, "MOST_LEAF_ELEMENTS", 0)
    torch.manual_seed(0)
    gram = exact_gram(ComputedWeight(COMPUTED[kind]).double())
    assert not any("without interception" in note for note in gram.notes)


def test_a_cast_that_casts_nothing_does_not_keep_the_weight_alive():
    """A weight that is marked as the cast of itself would wait for Python's garbage collector."""
    references = []

    def compute(m: Any) -> Tensor:
        weight = (m.base + m.left @ m.right).to(torch.float64)
        references.append(weakref.ref(weight))
        return weight

    model = ComputedWeight(compute).double()
    gc.disable()
    try:
        measure_gram(model, *rollouts().arguments[:2])
        assert references and not any(reference() is not None for reference in references)
    finally:
        gc.enable()


class SortedExperts(nn.Module):
    """Sorts the tokens by expert, splits them, and puts the results together again, as JetMoE does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 8)
        self.first, self.second = (nn.Parameter(torch.randn(3, 8, 8)) for _ in range(2))
        self.head = nn.Linear(8, 61, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:  # noqa: D102
        x = self.embedding(input_ids).cumsum(1).flatten(0, 1)
        expert = input_ids.flatten() % 3
        order, counts = expert.argsort(stable=True), torch.bincount(expert, minlength=3).tolist()
        rows = x[order]
        for weights in (self.first, self.second):
            parts = [F.linear(part, weights[place]) for place, part in enumerate(rows.split(counts))]
            rows = torch.cat(parts).tanh()
        return self.head(x.index_add(0, order, rows).view(*input_ids.shape, -1))


class TimeFirstExperts(nn.Module):
    """One batched product over experts, whose rows are sorted by token first and by rollout second."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 8)
        self.experts = nn.Parameter(torch.randn(3, 8, 8))
        self.head = nn.Linear(8, 61, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:  # noqa: D102
        x = self.embedding(input_ids).cumsum(1).transpose(0, 1)  # (T, N, h)
        rows = x.reshape(1, -1, 8).expand(3, -1, -1).contiguous()
        mixed = torch.bmm(rows, self.experts).tanh().sum(0).view_as(x)
        return self.head(mixed.transpose(0, 1))


def test_a_batched_product_over_rows_in_the_order_of_the_tokens():
    """The rows of one rollout are not adjacent, so the product cannot be split by rollout."""
    torch.manual_seed(0)
    gram = exact_gram(TimeFirstExperts().double())
    assert gram.replayed == ("experts",)


class HookedExperts(TimeFirstExperts):
    """One batched product over experts with a hook on the stack of their weights."""

    def forward(self, input_ids: Tensor) -> Tensor:  # noqa: D102
        x = self.embedding(input_ids).cumsum(1)
        rows = x.reshape(1, -1, 8).expand(3, -1, -1).contiguous()
        return self.head(torch.bmm(rows, hooked(self.experts[:])).tanh().sum(0).view_as(x))


def test_a_hook_on_the_experts_of_a_batched_product():
    torch.manual_seed(0)
    exact_gram(HookedExperts().double())


def test_rows_that_are_sorted_split_and_joined_keep_their_rollouts(monkeypatch):
    monkeypatch.setattr(leaves, "KEPT_ELEMENTS", 0)
    torch.manual_seed(0)
    gram = exact_gram(SortedExperts().double())
    assert not gram.replayed
