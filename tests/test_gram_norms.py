"""Norms that are remembered after one look, and modules that must not be."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scoregram.checks import ScoregramError
from scoregram.gram import backward_with_gram, measure_gram, row_gram
from scoregram.gram.contract import Contractor
from scoregram.gram.model import facts_of
from tests.cases import ARCHITECTURES, KeepDouble, build, rollouts
from tests.naive import score_rows

pytestmark = pytest.mark.filterwarnings("default")


def error_of(model: Any, batch: Any) -> float:
    with KeepDouble():
        rows = score_rows(model, *batch.arguments)
        gram = measure_gram(model, *batch.arguments)
    reference = rows @ rows.T
    return float((gram.matrix - reference).norm() / reference.norm())


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "olmoe", "nemotron", "gpt2"])
def test_the_second_measurement_is_as_exact_as_the_first(name):
    model: Any = ARCHITECTURES[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # no norm of all ones
    for parameter_padding in ("right", "left"):
        assert error_of(model, rollouts(padding=parameter_padding)) < 1e-12


def test_a_norm_is_remembered_and_the_copies_are_gone():
    model = build("Qwen3", head_dim=8)
    measure_gram(model, *rollouts().arguments)
    assert facts_of(model.model.layers[0].input_layernorm).broadcast_axes == 3
    assert facts_of(model.model.layers[0].self_attn.q_norm).broadcast_axes == 4
    measure_gram(model, *rollouts().arguments)
    assert "weight" not in vars(model.model.norm)


class ByShape(nn.Module):
    """Scales by its weight, and reads the shape of it: a copy per rollout has another one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32, dtype=torch.float64) * 1.1)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x * self.weight * (self.weight.shape[0] / 32)


class Centred(ByShape):
    """Mixes the elements of its weight before it scales by them."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x * (self.weight - self.weight.mean() + 1)


class Stretched(ByShape):
    """Broadcasts its weight against something narrower than itself."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x + x.mean(-1, keepdim=True) * self.weight


class Summed(ByShape):
    """Mixes the elements of its weight, and keeps its shape."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x * self.weight.cumsum(0) / 16


class Plain(ByShape):
    """Scales by its weight, as a norm does."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x * self.weight


class Parent(Plain):
    """Scales by its weight, and has a module that could do anything."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.child(x) * self.weight


@pytest.mark.parametrize("kind", [ByShape, Centred, Stretched, Summed, Parent])
def test_a_module_that_does_more_than_broadcast_is_not_remembered(kind, monkeypatch):
    monkeypatch.setattr(kind.forward, "__module__", "transformers.models.custom")
    model: Any = ARCHITECTURES["llama"]()
    model.model.layers[1].input_layernorm = module = kind()
    for _ in range(2):
        assert error_of(model, rollouts()) < 1e-12
        assert facts_of(module).broadcast_axes is None


@pytest.mark.parametrize("source", ["transformers.models.custom", "a_script"])
def test_a_module_is_remembered_if_transformers_defines_it(source, monkeypatch):
    monkeypatch.setattr(Plain.forward, "__module__", source)
    model: Any = ARCHITECTURES["llama"]()
    model.model.layers[1].input_layernorm = module = Plain()
    assert error_of(model, rollouts()) < 1e-12
    assert (facts_of(module).broadcast_axes is not None) == (source != "a_script")


class ByRank(Plain):
    """Scales by its weight; by the weight reversed if its input has four axes."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x * (self.weight if x.ndim == 3 else self.weight.flip(0))


class Reshaped(nn.Module):
    """A module that gives another one three axes, or four."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.axes = inner, 3

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.inner(x) if self.axes == 3 else self.inner(x.unsqueeze(1)).squeeze(1)


def test_what_was_remembered_for_three_axes_is_not_used_for_four(monkeypatch):
    monkeypatch.setattr(ByRank.forward, "__module__", "transformers.models.custom")
    model: Any = ARCHITECTURES["llama"]()
    with torch.no_grad():
        inner = ByRank()
        inner.weight.copy_(torch.linspace(0.5, 1.5, 32))
    model.model.layers[1].input_layernorm = outer = Reshaped(inner)
    assert error_of(model, rollouts()) < 1e-12
    assert facts_of(inner).broadcast_axes == 3
    outer.axes = 4
    assert error_of(model, rollouts()) < 1e-12


def test_norms_of_which_only_the_bias_is_trained():
    model: Any = ARCHITECTURES["gpt2"]()
    for block in model.transformer.h:
        block.ln_1.weight.requires_grad_(False)
    assert error_of(model, rollouts()) < 1e-12


def test_a_norm_whose_class_was_patched_is_forgotten(monkeypatch):
    """As libraries of kernels do it: the class is the same, its forward function another."""
    model: Any = ARCHITECTURES["llama"]()
    assert error_of(model, rollouts()) < 1e-12
    norm = model.model.norm
    assert facts_of(norm).broadcast_axes is not None
    monkeypatch.setattr(type(norm), "forward", Centred.forward)
    assert error_of(model, rollouts()) < 1e-12


@pytest.mark.parametrize("rows", [15, 16, 21, 40])
@pytest.mark.parametrize("groups", [1, 2])
def test_strips_give_the_whole_gram(rows, groups):
    values = torch.randn(rows * groups, 9000, dtype=torch.float64)
    blocks = values.view(groups, rows, -1)
    torch.testing.assert_close(row_gram(values, groups), torch.einsum("gid,gjd->gij", blocks, blocks))


def test_long_rows_in_float32_are_added_up_in_float64():
    rows = 1 + torch.rand(3, (1 << 20) + 77, generator=torch.Generator().manual_seed(0))
    exact = rows.double() @ rows.double().T
    assert float((row_gram(rows, 1)[0] - exact).norm() / exact.norm()) < 5e-8  # 7e-7 in float32 alone


def test_gradients_are_taken_back_when_they_are_not_finite():
    model: Any = ARCHITECTURES["llama"]()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1e200)
    with pytest.raises(ScoregramError, match="must be finite"):
        backward_with_gram(model, *rollouts().arguments, weights=torch.ones(5))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_weights_keep_their_digits_beside_rows_in_half_precision():
    weights, sums = torch.tensor([[1 + 2**-9, -1.0]]), torch.empty(1, 3)
    Contractor(2, 1, weights).contract(torch.ones(2, 3).bfloat16(), sums, owner=0)
    assert sums.tolist() == [[2**-9] * 3], "1 + 2⁻⁹ is 1 in bfloat16"
