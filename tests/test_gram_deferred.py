"""A measurement in two halves against the definition, and against plain log-probabilities and entropies."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from scoregram.checks import ScoregramError
from scoregram.gram import DeferredGram, head, leaves
from scoregram.gram.model import facts_of
from tests.cases import ARCHITECTURES, KeepDouble, build, rollouts
from tests.naive import score_rows

pytestmark = pytest.mark.filterwarnings("default")

WEIGHTS = torch.stack([torch.linspace(-1.0, 2.0, 5), torch.eye(5)[2]]).double()
COEFFICIENTS = torch.linspace(0.5, 1.5, 55, dtype=torch.float64).reshape(5, 11)


def finished(model: Any, batch: Any, **settings: Any) -> tuple[Any, torch.Tensor, DeferredGram]:
    """The Gram, flat sums `(2, D)` and the object, with something in between that a trainer would do."""
    deferred = DeferredGram(model, *batch.arguments, **settings)
    with torch.no_grad():
        model(input_ids=batch.input_ids)
    gram, sums = deferred.finish(COEFFICIENTS, WEIGHTS)
    flat = torch.cat([sums.get(p, torch.zeros(2, *p.shape)).double().flatten(1) for p in model.parameters()], 1)
    assert all(parameter.grad is None for parameter in model.parameters())
    return gram, flat, deferred


def assert_matches_definition(model: Any, temperature: float = 1.0, padding: str = "right", plain: Any = None) -> None:
    """Of `plain`, the same model in another mood, if one is given."""
    batch = rollouts(padding=padding)
    with KeepDouble():
        rows = score_rows(plain or model, *batch.arguments, COEFFICIENTS, temperature)
        gram, flat, deferred = finished(model, batch, temperature=temperature)
    torch.testing.assert_close(gram.matrix, rows @ rows.T, rtol=0, atol=1e-12 * float((rows @ rows.T).norm()))
    torch.testing.assert_close(flat, WEIGHTS @ rows, rtol=0, atol=1e-12 * float(rows.norm()))
    for i in range(5):
        real = batch.attention_mask[i].bool()
        with KeepDouble(), torch.no_grad():
            said = (model(input_ids=batch.input_ids[i][real][None]).logits.double()[0, :-1] / temperature).log_softmax(
                1
            )
        counted = batch.completion_mask[i][real][1:]
        chosen = said.gather(1, batch.input_ids[i][real][1:, None])[:, 0]
        entropies = -(said.exp() * said).sum(1)
        torch.testing.assert_close(deferred.log_probs[i][real][1:], torch.where(counted, chosen, 0.0))
        torch.testing.assert_close(deferred.entropies[i][real][1:], torch.where(counted, entropies, 0.0))
    torch.testing.assert_close(gram.log_probs, deferred.log_probs)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_two_halves_match_the_definition(name):
    assert_matches_definition(ARCHITECTURES[name]())


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", ["llama-tied", "phi", "gemma2"])
def test_streamed_weights_a_temperature_and_padding(name, padding, monkeypatch):
    monkeypatch.setattr(leaves, "KEPT_ELEMENTS", 0)
    assert_matches_definition(ARCHITECTURES[name](), 0.7, padding)


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_what_is_not_kept_is_made_again(name, monkeypatch):
    monkeypatch.setattr(head, "STORE_BYTES", 0)
    monkeypatch.setattr(head, "LOGIT_CHUNK_ELEMENTS", 200)
    assert_matches_definition(ARCHITECTURES[name](), 0.7)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_run_again_in_the_second_half(reentrant):
    model = build("Llama", tie_word_embeddings=True).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    was = model.model._gradient_checkpointing_func
    assert_matches_definition(model, plain=build("Llama", tie_word_embeddings=True))
    assert model.model._gradient_checkpointing_func is was and checkpoint is was.func


def test_a_head_that_is_not_trained():
    model = build("Llama")
    model.lm_head.weight.requires_grad_(False)
    batch = rollouts()
    rows = score_rows(model, *batch.arguments, COEFFICIENTS)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gram, sums = DeferredGram(model, *batch.arguments).finish(COEFFICIENTS, WEIGHTS)
    torch.testing.assert_close(gram.matrix, rows @ rows.T, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([sums[p].flatten(1) for p in trained], 1), WEIGHTS @ rows, rtol=0, atol=1e-4)


def test_a_model_of_which_too_little_was_seen_goes_through_once_more():
    class Sideways(torch.nn.Module):
        """Multiplies with a parameter of a module that it does not call."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = build("Llama")
            self.scale = torch.nn.Linear(32, 1, bias=False).double()
            self.inner.model.norm.register_forward_hook(lambda _, __, out: out * self.scale.weight)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
            return self.inner(input_ids=input_ids, attention_mask=attention_mask)

        def get_output_embeddings(self) -> Any:
            return self.inner.get_output_embeddings()

    model = Sideways()
    assert_matches_definition(model)
    assert facts_of(model).needs_wide_pass
    assert_matches_definition(model)


def test_low_precision_keeps_logits_not_probabilities():
    """A probability near 1 has no digits left in bfloat16: what is kept decides the gradient of sure tokens."""
    model, batch = build("Llama").float(), rollouts()
    model.lm_head.weight.data *= 40  # sure of nearly every token
    rows = score_rows(model, *batch.arguments, COEFFICIENTS)
    low = model.bfloat16()
    gram, _, deferred = finished(low, batch)
    once = score_rows(low, *batch.arguments, COEFFICIENTS)
    ours, theirs = (float((found - rows @ rows.T).norm()) for found in (gram.matrix, once @ once.T))
    assert ours < 3 * theirs + 1e-3 * float((rows @ rows.T).norm())
    assert deferred.log_probs.dtype == torch.float32


def test_what_is_not_finite_is_refused_and_nothing_is_left_behind():
    model, batch = build("Llama"), rollouts()
    deferred = DeferredGram(model, *batch.arguments)
    with pytest.raises(ScoregramError, match="coefficients must be finite"):
        deferred.finish(COEFFICIENTS * torch.nan, WEIGHTS)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(vars(module).get("forward") for module in model.modules())


def test_groups_of_a_deferred_gram():
    """Within groups as without them; `nan` between groups."""
    model, batch = build("Llama").double(), rollouts(6, 11)
    coefficients, weights = torch.rand(6, 11, dtype=torch.float64), torch.rand(1, 6, dtype=torch.float64)
    whole, sums = DeferredGram(model, *batch.arguments).finish(coefficients, weights)
    grouped, same = DeferredGram(model, *batch.arguments, group_size=2).finish(coefficients, weights)
    inside = torch.block_diag(*[torch.ones(2, 2)] * 3).bool()
    assert bool((grouped.matrix.isnan() == ~inside).all())
    torch.testing.assert_close(grouped.matrix[inside], whole.matrix[inside])
    for parameter, total in sums.items():
        torch.testing.assert_close(same[parameter], total)


@pytest.mark.parametrize(
    ("settings", "weights", "message"),
    [
        ({"group_size": 2}, WEIGHTS, "DeferredGram: group_size must divide the number of rollouts 5, got 2."),
        ({}, WEIGHTS[0], r"DeferredGram.finish: weights must be \(M, N\) with N = 5, got \(5,\)."),
        ({}, WEIGHTS[:, :4], r"DeferredGram.finish: weights must be \(M, N\) with N = 5, got \(2, 4\)."),
        ({}, WEIGHTS * torch.inf, "DeferredGram.finish: weights must be finite"),
    ],
)
def test_wrong_groups_and_weights_are_refused(settings, weights, message):
    with pytest.raises(ScoregramError, match=message):
        DeferredGram(build("Llama"), *rollouts().arguments, **settings).finish(COEFFICIENTS, weights)


def test_a_second_call_of_finish_is_refused():
    batch = rollouts()
    _, _, deferred = finished(build("Llama"), batch)
    with pytest.raises(ScoregramError, match=r"DeferredGram\.finish: can be called once"):
        deferred.finish(COEFFICIENTS, WEIGHTS)
