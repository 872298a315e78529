"""What a measurement leaves alone, and what it says of bad input."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from scoregram.checks import ScoregramError
from scoregram.gram import Gram, backward_with_gram, contract, measure_gram, row_gram
from scoregram.gram.result import CollectedScores
from tests.cases import ARCHITECTURES, build, rollouts

pytestmark = pytest.mark.filterwarnings("default")


def state_of(model: nn.Module) -> list[object]:
    """Everything about a model that a measurement could disturb."""
    seen: list[object] = [torch.get_rng_state().tolist()]
    for name, module in model.named_modules():
        hooks = [len(vars(module)[key]) for key in vars(module) if key.endswith("_hooks")]
        seen.append((name, module.training, sorted(vars(module)), hooks))
        seen.append(id(vars(module).get("_gradient_checkpointing_func")))
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        held = (id(grad), grad._version) if grad is not None else None
        attributes = sorted(getattr(parameter, "__dict__", {}))
        seen.append((name, parameter.requires_grad, parameter._version, held, attributes))
    return seen


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe"])
def test_the_model_is_as_before(name):
    model: Any
    model, batch = ARCHITECTURES[name](), rollouts()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.train()
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    before = state_of(model)
    measure_gram(model, *batch.arguments)
    assert state_of(model) == before


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_model_is_as_before_after_an_exception(where):
    model, batch = build("Llama"), rollouts()

    class Failing(nn.Module):
        def forward(self, x):
            if where == "forward":
                raise RuntimeError("in the middle")
            x = x * 1
            x.register_hook(lambda grad: (_ for _ in ()).throw(RuntimeError("in the middle")))
            return x

    model.model.layers[1].mlp.act_fn = Failing()
    before = state_of(model)
    with pytest.raises(RuntimeError, match="in the middle"):
        measure_gram(model, *batch.arguments)
    assert state_of(model) == before
    assert torch.ones(2).mul(2).tolist() == [2.0, 2.0], "no mode is left behind"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: (b[0][:0], b[1][:0], b[2][:0]), r"not empty, got \(0, 11\)"),
        (
            lambda b: (b[0], b[1][:, 1:], b[2]),
            r"completion_mask must have the shape of input_ids \(5, 11\), got \(5, 10\)",
        ),
        (lambda b: (b[0], b[1], b[2][:4]), r"attention_mask must have the shape"),
        (lambda b: (b[0], torch.ones_like(b[1]), b[2]), r"first token .* completion_mask\[0, 0\] = True"),
        (lambda b: (b[0], b[1] | (b[2] == 0), b[2]), r"completion tokens must be real"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ScoregramError, match=message):
        measure_gram(build("Llama"), *change(rollouts().arguments))


def test_bad_options_are_named():
    model, batch = build("Llama"), rollouts()
    with pytest.raises(ScoregramError, match="group_size must divide the number of rollouts 5, got 2"):
        measure_gram(model, *batch.arguments, group_size=2)
    with pytest.raises(ScoregramError, match=r"temperature must be positive, got 0\.0"):
        measure_gram(model, *batch.arguments, temperature=0.0)
    with pytest.raises(ScoregramError, match=r"weights must be \(N,\) or \(M, N\) with N = 5, got \(4,\)"):
        backward_with_gram(model, *batch.arguments, weights=torch.ones(4))
    with pytest.raises(ScoregramError, match="several weight vectors need `combine`, got 2 vectors"):
        backward_with_gram(model, *batch.arguments, weights=torch.ones(2, 5))
    with pytest.raises(ScoregramError, match="weights must be finite, got nan"):
        backward_with_gram(model, *batch.arguments, weights=torch.full((5,), torch.nan))
    coefficients = torch.full(batch.input_ids.shape, torch.inf)
    with pytest.raises(ScoregramError, match="coefficients must be finite, got inf"):
        measure_gram(model, *batch.arguments, coefficients=coefficients)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ScoregramError, match="trainable parameters, got none"):
        measure_gram(model, *batch.arguments)


def test_what_is_not_finite_is_named():
    model, batch = build("Llama"), rollouts()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ScoregramError, match=r"nan or inf in model.layers.1.mlp.up_proj.weight"):
        measure_gram(model, *batch.arguments)
    model = build("Llama")
    token = int(batch.input_ids[2, 6])
    model.get_input_embeddings().weight.data[token] = 1e200  # squares overflow in the norm's gradient
    with pytest.raises(ScoregramError, match=r"nan or inf for rollout .* in "):
        measure_gram(model, *batch.arguments)


def test_one_rollout_and_no_completion_at_all():
    model, batch = build("Llama"), rollouts(1)
    gram = measure_gram(model, *batch.arguments)
    assert gram.matrix.tolist() == [[0.0]]


def test_verification_finds_a_layer_that_mixes_rollouts():
    model, batch = build("Llama"), rollouts()

    class Mixing(nn.Module):
        def forward(self, x):
            return torch.tanh(x + 0.3 * x.mean(0, keepdim=True))

    model.model.layers[0].mlp.act_fn = Mixing()
    measure_gram(build("Llama"), *batch.arguments, verify=True)
    with pytest.raises(ScoregramError, match="must agree with a plain backward pass"):
        measure_gram(model, *batch.arguments, verify=True)


def test_verification_sees_an_error_that_cancels_in_the_sum_of_all_rows(monkeypatch):
    """`1ᵀE1 = 0` for `E = [[1, -1], [-1, 1]]`: equal weights would not show it."""
    of_scores = CollectedScores.gram

    def disturbed(self: CollectedScores) -> Gram:
        gram = of_scores(self)
        error = torch.zeros_like(gram.matrix)
        error[:2, :2] = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]) * gram.matrix.norm()
        return replace(gram, matrix=gram.matrix + error)

    monkeypatch.setattr(CollectedScores, "gram", disturbed)
    with pytest.raises(ScoregramError, match="must agree with a plain backward pass"):
        measure_gram(build("Llama"), *rollouts().arguments, verify=True)


@pytest.mark.parametrize("groups", [1, 2])
def test_autocast_does_not_round_grams_and_sums(groups):
    """Rows of small parameters are contracted inside the caller's autocast block."""
    torch.manual_seed(0)
    rows, weights = torch.randn(6, 5000), torch.randn(2, 6)
    exact, sums = row_gram(rows, groups), contract.weighted_sums(weights, rows)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(row_gram(rows, groups), exact)
        assert torch.equal(contract.weighted_sums(weights, rows), sums)
