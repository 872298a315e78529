"""Operations that the rules of interception name: in every spelling they are exact, and no parameter is replayed.

An operation that is not recognised would be exact too, by copies of the parameter or by one backward pass per rollout.
So no weight here is small enough for copies, except where a rule makes them itself, and `replayed` must be empty.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scoregram.gram import Gram, backward_with_gram, leaves
from scoregram.gram.operations import is_in_place, is_scalar_index, positional_arguments
from tests.cases import VOCABULARY, rollouts

pytestmark = pytest.mark.filterwarnings("default")

Call = Callable[[Any, Tensor], Tensor]
EXPERTS = 3


class Spelled(nn.Module):
    """A small model that passes its hidden states `(N, T, 8)` through one call."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
        self.left, self.right = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 8))
        self.experts = nn.Parameter(torch.randn(EXPERTS, 8, 8))
        self.scales = nn.Parameter(torch.rand(EXPERTS, 8) + 0.5)
        self.base = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.double()
        self.single = nn.Parameter(torch.randn(8, 8))  # float32

    def forward(self, input_ids: Tensor) -> Tensor:  # noqa: D102
        return self.head(self.call(self, self.embedding(input_ids).cumsum(1)))


def scores_by_definition(model: Spelled, ids: Tensor, mask: Tensor) -> Tensor:
    """Scores `(N, D)` from one backward pass per rollout."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rows = []
    for row, counted in zip(ids, mask, strict=True):
        chosen = model(row[None]).log_softmax(-1)[0, :-1].gather(1, row[1:, None])[:, 0]
        grads = torch.autograd.grad((chosen * counted[1:]).sum(), trained, materialize_grads=True)
        rows.append(torch.cat([grad.double().flatten() for grad in grads]))
    return torch.stack(rows)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def exact_gram(call: Call, *, bound: float = 1e-12) -> Gram:
    """The Gram of a model with this call, after a comparison of Gram and gradient with their definition.

    The gradient counts too: a term with the wrong sign would not change the Gram.
    """
    torch.manual_seed(0)
    model, (ids, mask, _) = Spelled(call), rollouts(tokens=4 * EXPERTS).arguments
    scores, weights = scores_by_definition(model, ids, mask), torch.linspace(-1, 2, len(ids), dtype=torch.float64)
    gram = backward_with_gram(model, ids, mask, weights=weights)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    assert distance(gram.matrix, scores @ scores.T) <= bound
    assert distance(torch.cat([grad.double().flatten() for grad in grads]), weights @ scores) <= bound
    return gram


@pytest.fixture
def streamed(monkeypatch):
    """No parameter is small enough for copies."""
    monkeypatch.setattr(leaves, "KEPT_ELEMENTS", 0)
    monkeypatch.setattr(leaves, "MOST_LEAF_ELEMENTS", 0)


# Products


def rows_of(call: Call) -> Call:
    """A call on all tokens in one axis: `(N · T, 8)`."""
    return lambda m, x: call(m, x.flatten(0, 1)).view_as(x)


PRODUCTS: dict[str, Call] = {
    "@": lambda m, x: x @ m.weight,
    "torch.matmul": lambda m, x: torch.matmul(x, m.weight),
    "torch.matmul by keywords": lambda m, x: torch.matmul(input=x, other=m.weight),
    "matmul by a keyword": lambda m, x: x.matmul(other=m.weight),
    "torch.mm": rows_of(lambda m, x: torch.mm(x, m.weight)),
    "torch.mm by keywords": rows_of(lambda m, x: torch.mm(input=x, mat2=m.weight)),
    "mm": rows_of(lambda m, x: x.mm(m.weight)),
    "mm by a keyword": rows_of(lambda m, x: x.mm(mat2=m.weight)),
    "addmm": rows_of(lambda m, x: torch.addmm(m.bias, x, m.weight)),
    "addmm by a keyword": rows_of(lambda m, x: torch.addmm(m.bias, x, mat2=m.weight)),
    "addmm by keywords": rows_of(lambda m, x: torch.addmm(mat2=m.weight, mat1=x, input=m.bias)),
    "linear": lambda m, x: F.linear(x, m.weight, m.bias),
    "linear by keywords": lambda m, x: F.linear(bias=m.bias, weight=m.weight, input=x),
    "a transposed weight": lambda m, x: x @ m.weight.t(),
    "two uses, one of them transposed": lambda m, x: F.linear(x @ m.weight, m.weight),
}


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("spelling", PRODUCTS)
def test_products(spelling):
    assert not exact_gram(PRODUCTS[spelling]).replayed


LOOKUPS: dict[str, Call] = {
    "by keywords": lambda m, x: x + F.embedding(weight=m.weight, input=tokens_in_pairs(x)),
    "with a padding row": lambda m, x: x + F.embedding(tokens_in_pairs(x), m.weight, 2),
    "with a padding row by keyword": lambda m, x: x + F.embedding(tokens_in_pairs(x), padding_idx=2, weight=m.weight),
    "with a padding row from the end": lambda m, x: x + F.embedding(tokens_in_pairs(x), m.weight, -6),
}


def tokens_in_pairs(x: Tensor) -> Tensor:
    """Ids `(N, T)` that depend on the place in the rollout; two tokens share each."""
    return (torch.arange(x.shape[1]) // 2).expand(len(x), -1)


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("spelling", LOOKUPS)
def test_lookups(spelling):
    assert not exact_gram(LOOKUPS[spelling]).replayed


# Casts: the last number is the rounding of the products and of their gradients

CASTS: dict[str, tuple[Call, float]] = {
    "to": (lambda m, x: F.linear(x, m.single.to(x.dtype)), 1e-6),
    "double": (lambda m, x: F.linear(x, m.single.double()), 1e-6),
    "type": (lambda m, x: F.linear(x, m.single.type(torch.float64)), 1e-6),
    "type_as": (lambda m, x: F.linear(x, m.single.type_as(x)), 1e-6),
    "float": (lambda m, x: F.linear(x.float(), m.weight.float()).double(), 1e-5),
    "half": (lambda m, x: F.linear(x.half(), m.weight.half()).double(), 1e-2),
    "bfloat16": (lambda m, x: F.linear(x.bfloat16(), m.weight.bfloat16()).double(), 5e-2),
    "a cast of a cast": (lambda m, x: F.linear(x, m.weight.float().double()), 1e-6),
}


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("spelling", CASTS)
def test_casts(spelling):
    call, bound = CASTS[spelling]
    assert not exact_gram(call, bound=bound).replayed


# Weights `W + s L R` that the model computes

WEIGHTS: dict[str, Callable[[Any], Tensor]] = {
    "@": lambda m: m.base + m.left @ m.right,
    "torch.matmul": lambda m: m.base + torch.matmul(m.left, m.right),
    "torch.mm": lambda m: m.base + torch.mm(m.left, m.right),
    "mm": lambda m: m.base + m.left.mm(m.right),
    "torch.bmm": lambda m: m.base + torch.bmm(m.left[None], m.right[None])[0],
    "bmm": lambda m: m.base + m.left[None].bmm(m.right[None])[0],
    "torch.add": lambda m: torch.add(m.left @ m.right, m.base),
    "add": lambda m: m.base.add(m.left @ m.right),
    "a number first": lambda m: 0.5 + m.left @ m.right,
    "times a number": lambda m: (m.left @ m.right) * 3,
    "a number times": lambda m: 0.3 * (m.left @ m.right),
    "torch.mul": lambda m: torch.mul(m.left @ m.right, 0.3),
    "mul": lambda m: (m.left @ m.right).mul(-2.0),
    "t": lambda m: (m.base + m.left @ m.right).t(),
    "torch.t": lambda m: torch.t(m.base + m.left @ m.right),
    "T": lambda m: (m.base + m.left @ m.right).T,
    "mT": lambda m: (m.base + m.left @ m.right).mT,
    "transpose": lambda m: (m.base + m.left @ m.right).transpose(0, 1),
    "torch.transpose": lambda m: torch.transpose(m.base + m.left @ m.right, -1, 0),
    "float": lambda m: (m.base + m.left @ m.right).float().double(),
}


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("spelling", WEIGHTS)
def test_weights_with_low_rank_terms(spelling):
    gram = exact_gram(lambda m, x: F.linear(x, WEIGHTS[spelling](m)), bound=1e-6 if spelling == "float" else 1e-12)
    assert not gram.replayed


# Tokens that are sorted by expert, split, and joined again: every row keeps its rollout

Selection = Callable[[Tensor, Tensor], Tensor]
SELECTIONS: dict[str, Selection] = {
    "[]": lambda x, order: x[order],
    "[:, ]": lambda x, order: x[order, :],
    "torch.index_select": lambda x, order: torch.index_select(x, 0, order),
    "torch.index_select by keywords": lambda x, order: torch.index_select(index=order, input=x, dim=0),
    "index_select": lambda x, order: x.index_select(0, order),
    "index_select by keywords": lambda x, order: x.index_select(index=order, dim=0),
}
Split = Callable[[Tensor, list[int]], tuple[Tensor, ...]]
SPLITS: dict[str, Split] = {
    "split": lambda x, counts: x.split(counts),
    "torch.split": lambda x, counts: torch.split(x, counts),
    "chunk": lambda x, counts: x.chunk(len(counts)),
    "torch.chunk": lambda x, counts: torch.chunk(x, len(counts)),
}
JOINTS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "torch.cat": torch.cat,
    "torch.concat": torch.concat,
    "torch.concatenate": torch.concatenate,
}


def order_by_expert(x: Tensor) -> Tensor:
    """The tokens of all rollouts, those of the first expert first; every expert has equally many."""
    return (torch.arange(x.shape[1]) % EXPERTS).repeat(len(x)).argsort(stable=True)


def in_parts(select: Selection, split: Split, join: Callable[[list[Tensor]], Tensor]) -> Call:
    """Two layers, the first of experts."""

    def call(m: Any, x: Tensor) -> Tensor:
        rows, order = x.flatten(0, 1), order_by_expert(x)
        counts = [len(order) // EXPERTS] * EXPERTS
        parts = [F.linear(part, m.experts[e]) for e, part in enumerate(split(select(rows, order), counts))]
        joined = F.linear(join(parts).tanh(), m.weight)
        return torch.zeros_like(rows).index_add(0, order, joined).view_as(x)

    return call


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("spelling", SELECTIONS)
def test_rows_are_selected(spelling):
    assert not exact_gram(in_parts(SELECTIONS[spelling], SPLITS["split"], torch.cat)).replayed


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("spelling", SPLITS)
def test_rows_are_split(spelling):
    assert not exact_gram(in_parts(SELECTIONS["[]"], SPLITS[spelling], torch.cat)).replayed


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("spelling", JOINTS)
def test_rows_are_joined(spelling):
    assert not exact_gram(in_parts(SELECTIONS["[]"], SPLITS["split"], JOINTS[spelling])).replayed


BROADCASTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "+": lambda x, scale: x + scale,
    "torch.add": torch.add,
    "-": lambda x, scale: x - scale,
    "a parameter minus rows": lambda x, scale: scale - x,
    "torch.sub": torch.sub,
    "*": lambda x, scale: x * scale,
    "torch.mul": torch.mul,
    "/": lambda x, scale: x / scale,
    "torch.div": torch.div,
}


@pytest.mark.parametrize("spelling", BROADCASTS)
def test_a_parameter_is_broadcast_over_selected_rows(spelling):
    def call(m: Any, x: Tensor) -> Tensor:
        rows, order = x.flatten(0, 1), order_by_expert(x)
        parts = [BROADCASTS[spelling](part, m.scales[e]) for e, part in enumerate(rows[order].chunk(EXPERTS))]
        return torch.zeros_like(rows).index_add(0, order, torch.cat(parts).tanh()).view_as(x)

    assert not exact_gram(call).replayed


# Tensors that are derived from a parameter


def read_in_backward(tensor: Tensor) -> Tensor:
    """The tensor with a hook that reads single numbers, which `torch.vmap` refuses, and doubles them."""
    tensor.register_hook(lambda grad: torch.tensor([2 * float(number) for number in grad], dtype=torch.float64))
    return tensor


DERIVED: dict[str, Call] = {
    "a part in two operations": lambda m, x: (x + m.scales[1]) * m.scales[1],
    "parts that overlap": lambda m, x: F.pad(x[..., :4] * m.bias[:4] + x[..., 4:] * m.bias[2:6], (0, 4)),
    "a window": lambda m, x: F.pad(x[..., :6] * m.bias.unfold(0, 3, 1)[:, 1], (0, 2)),
    "windows that overlap": lambda m, x: x[..., :6] * m.bias.unfold(0, 4, 2).reshape(-1)[:6] @ m.base[:6],
    "a backward pass that vmap refuses": lambda m, x: x * read_in_backward(m.bias.exp()),
    "tensors given by keyword": lambda m, x: torch.mul(input=x, other=m.bias),
    "the product with a vector": lambda m, x: x * torch.matmul(x, m.bias).unsqueeze(-1),
}


@pytest.mark.parametrize("kind", DERIVED)
def test_what_is_derived_from_a_parameter_gets_copies(kind):
    assert not exact_gram(DERIVED[kind]).replayed


OTHER_WEIGHTS: dict[str, Callable[[Any], Tensor]] = {
    "a function of a weight": lambda m: m.weight.exp(),
    "a difference": lambda m: m.base - m.left @ m.right,
    "torch.sub": lambda m: torch.sub(m.base, m.left @ m.right),
    "a quotient": lambda m: (m.left @ m.right) / 3,
    "torch.div": lambda m: torch.div(m.left @ m.right, 3),
    "a number divided by": lambda m: 3 / (m.left @ m.right),
    "times a constant": lambda m: (m.left @ m.right) * m.base,
    "windows of a weight that overlap": lambda m: m.experts.view(-1).as_strided((8, 8), (7, 1)),
}


@pytest.mark.parametrize("has_leaves", [True, False])
@pytest.mark.parametrize("kind", OTHER_WEIGHTS)
def test_weights_that_are_no_sum_of_products_are_exact(kind, has_leaves, monkeypatch):
    if not has_leaves:
        monkeypatch.setattr(leaves, "KEPT_ELEMENTS", 0)
        monkeypatch.setattr(leaves, "MOST_LEAF_ELEMENTS", 0)
    exact_gram(lambda m, x: F.linear(x, OTHER_WEIGHTS[kind](m)))


# Operations that write into an activation: the parameter in them is replayed


def written_by(change: Callable[[Tensor, Tensor], object]) -> Call:
    """A copy of the hidden states that an operation with the bias changes in place."""

    def call(m: Any, x: Tensor) -> Tensor:
        y = x.clone()
        change(y, m.bias)
        return y.tanh()

    return call


def set_rows(y: Tensor, bias: Tensor) -> None:
    y[:, 2:5] = bias


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "mul_": Tensor.mul_,
    "add_": Tensor.add_,
    "*=": lambda y, bias: y.__imul__(bias),
    "-=": lambda y, bias: y.__isub__(bias),
    "[] =": set_rows,
}


@pytest.mark.parametrize("spelling", WRITES)
def test_a_parameter_that_is_written_into_an_activation_is_replayed(spelling):
    assert exact_gram(written_by(WRITES[spelling])).replayed == ("bias",)


@pytest.mark.parametrize("name", ["relu_", "__iadd__", "__setitem__"])
def test_names_of_operations_in_place(name):
    assert is_in_place(getattr(Tensor, name))


@pytest.mark.parametrize("name", ["relu", "__add__", "__getitem__", "__invert__"])
def test_names_of_other_operations(name):
    assert is_in_place(getattr(Tensor, name)) == (name == "__invert__")  # never meets a parameter: it takes no float


# Arguments

NAMES = ("input", "weight", "bias")


@pytest.mark.parametrize(
    ("args", "kwargs", "moved", "rest"),
    [
        ((1,), {"weight": 2}, (1, 2), {}),
        ((), {"bias": 3, "weight": 2, "input": 1}, (1, 2, 3), {}),
        ((1, 2), {"other": 4}, (1, 2), {"other": 4}),
        ((1,), {"bias": 3}, (1,), {"bias": 3}),  # a weight is missing: the operation itself must say so
        ((1, 2, 3, 4), {}, (1, 2, 3, 4), {}),
    ],
)
def test_keywords_move_to_their_positions(args, kwargs, moved, rest):
    given = dict(kwargs)
    assert positional_arguments(NAMES, args, given) == (moved, rest)
    assert given == kwargs


@pytest.mark.parametrize(
    ("index", "is_scalar"),
    [
        (1, True),
        (torch.tensor(1), True),
        (True, False),
        (torch.tensor(True), False),
        (torch.tensor([1]), False),
        (slice(1), False),
        (None, False),
        (torch.tensor(1.0), False),
    ],
    ids=str,
)
def test_an_index_of_one_entry(index, is_scalar):
    assert is_scalar_index(index) == is_scalar
