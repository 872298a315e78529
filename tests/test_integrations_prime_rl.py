"""The recording loss for prime-rl, driven as its trainer drives a custom loss; two classes play prime-rl itself."""

import json
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from scoregram.errors import ScoregramError
from scoregram.gram import measure_gram
from scoregram.integrations.prime_rl import LOSSES, coefficients_of, read_coefficients, recorded_loss
from tests.cases import build, rollouts


@dataclass
class LossInputs:
    """The fields of prime-rl's own."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass
class LossOutputs:
    """The fields of prime-rl's own."""

    loss: Tensor
    metrics: dict[str, Tensor]


@pytest.fixture(autouse=True)
def prime_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl", "prime_rl.trainer.rl.loss"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["prime_rl.trainer.rl.loss"].__dict__["LossOutputs"] = LossOutputs


def sequence(seed: int = 0, *, tokens: int = 7, weights: Tensor | None = None) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    trainer = -2 - torch.rand(tokens, generator=generator)
    advantages = torch.randn((), generator=generator).expand(tokens)
    drift = 0.3 * torch.randn(tokens, generator=generator)
    mask = torch.arange(tokens) >= 3
    return LossInputs(trainer.requires_grad_(), trainer.detach() + drift, None, advantages, mask, weights)


def export_of(inputs: LossInputs, **extra: Any) -> dict[str, Any]:
    """A line of the token exports, as prime-rl writes it: float32 through JSON."""
    line = {
        "token_ids": list(range(len(inputs.loss_mask))),
        "loss_mask": inputs.loss_mask.tolist(),
        "advantages": inputs.advantages.tolist(),
        "inference_logprobs": inputs.inference_logprobs.tolist(),
        "rl_weights": [None] * len(inputs.loss_mask),
    }
    return json.loads(json.dumps(line | extra))


@pytest.mark.parametrize("objective", sorted(LOSSES))
@pytest.mark.parametrize("aggregation", ["token_sum", "sequence_mean"])
def test_recorded_coefficients_are_the_gradient_that_the_trainer_takes(objective, aggregation, tmp_path):
    batch = [sequence(seed) for seed in range(4)]
    kwargs = {"objective": objective, "aggregation": aggregation, "record": str(tmp_path)}
    scale = sum(int(inputs.loss_mask.sum()) for inputs in batch)
    torch.stack([recorded_loss(inputs, **kwargs).loss / scale for inputs in batch]).sum().backward()
    recorded = read_coefficients(tmp_path)
    assert len(recorded) == len(batch)
    for inputs in batch:
        c, grad = coefficients_of(export_of(inputs), recorded), inputs.trainer_logprobs.grad
        assert c is not None and grad is not None
        torch.testing.assert_close(c / scale, grad.double(), rtol=1e-6, atol=1e-12)


def test_the_clipped_loss_is_the_one_on_paper():
    inputs = sequence(1)
    ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()
    surrogate = torch.minimum(ratio * inputs.advantages, ratio.clamp(0.9, 1.3) * inputs.advantages)
    found = recorded_loss(inputs, objective="grpo", eps_low=0.1, eps_high=0.3)
    torch.testing.assert_close(found.loss, -surrogate[inputs.loss_mask].sum())


# gspo shares one ratio among the tokens of a sequence, so that a weight on one reaches the others
@pytest.mark.parametrize("objective", sorted(LOSSES.keys() - {"gspo"}))
def test_weights_of_tokens_multiply_their_coefficients(objective, tmp_path):
    weights = torch.tensor([1.0, 1.0, 1.0, 0.5, 2.0, 1.0, 0.0])
    plain, weighted = sequence(2), sequence(2, weights=weights)
    weighted.loss_mask = weighted.loss_mask & (weights != 0)  # prime-rl's own selection
    plain.loss_mask = weighted.loss_mask
    recorded_loss(plain, objective=objective, record=str(tmp_path / "plain"))
    recorded_loss(weighted, objective=objective, record=str(tmp_path / "weighted"))
    one = coefficients_of(export_of(plain), read_coefficients(tmp_path / "plain"))
    export = export_of(sequence(2), rl_weights=weights.tolist())
    other = coefficients_of(export, read_coefficients(tmp_path / "weighted"))
    assert one is not None and other is not None
    torch.testing.assert_close(other, one * weights, rtol=1e-6, atol=0)
    assert other[-1] == 0 and other.count_nonzero() > 0


def test_from_record_and_export_to_the_gram_of_the_loss(tmp_path):
    model = build("Llama").double().eval()
    batch = rollouts()
    ids, mask, attention = batch.arguments[:3]
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=attention, position_ids=positions).logits
    taken = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    log_probs = torch.cat([torch.zeros_like(taken[:, :1]), taken], dim=1)  # of the token itself, as prime-rl has them
    parameters, gradients, exports = list(model.parameters()), [], []
    for row, advantage in enumerate(torch.linspace(-1, 1, len(ids)).double()):
        sampled = (log_probs[row].detach() - 0.05).float().double()
        inputs = LossInputs(log_probs[row], sampled, None, advantage.float().double().expand(ids.shape[1]), mask[row])
        loss = recorded_loss(inputs, objective="cispo", record=str(tmp_path)).loss
        grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        gradients.append(torch.cat([g.flatten() for g in grads if g is not None]))
        exports.append(export_of(inputs))
    recorded = read_coefficients(tmp_path)
    found = [coefficients_of(export, recorded) for export in exports]
    c = torch.stack([value for value in found if value is not None])
    stacked = torch.stack(gradients)
    gram = measure_gram(model, ids, mask, attention, coefficients=c)
    torch.testing.assert_close(gram.matrix, stacked @ stacked.T, rtol=1e-6, atol=1e-9)


def test_nothing_is_recorded_unless_asked_and_an_untrained_sequence_has_loss_zero(tmp_path):
    inputs = sequence()
    inputs.loss_mask = torch.zeros_like(inputs.loss_mask)
    made = recorded_loss(inputs, record=str(tmp_path / "record"))
    made.loss.backward()
    assert made.loss == 0 and made.metrics["scoregram/mean_abs_coefficient"] == 0
    assert inputs.trainer_logprobs.grad is not None and inputs.trainer_logprobs.grad.count_nonzero() == 0
    recorded_loss(sequence())
    assert not (tmp_path / "record").exists()


def test_a_sequence_that_was_not_recorded_is_none(tmp_path):
    recorded_loss(sequence(0), record=str(tmp_path))
    assert coefficients_of(export_of(sequence(1)), read_coefficients(tmp_path)) is None


def test_a_full_file_or_disk_ends_the_record_and_not_the_training(tmp_path):
    recorded_loss(sequence(0), record=str(tmp_path), limit_mb=1e-4)
    with pytest.warns(UserWarning, match=r"has reached 0\.0001 MB"):
        recorded_loss(sequence(1), record=str(tmp_path), limit_mb=1e-4)
    assert len(read_coefficients(tmp_path)) == 1
    (tmp_path / "taken").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="coefficients are not recorded"):
        recorded_loss(sequence(1), record=str(tmp_path / "taken"))


def test_a_line_cut_off_is_passed_over_and_a_broken_one_named(tmp_path):
    recorded_loss(sequence(0), record=str(tmp_path))
    path = tmp_path / "rank_0.jsonl"
    path.write_text(path.read_text() + '{"sequence": "ab", "coeff')
    assert len(read_coefficients(tmp_path)) == 1
    path.write_text(path.read_text() + "\n")
    with pytest.raises(ScoregramError, match=r"rank_0\.jsonl line 2 must be a recorded sequence"):
        read_coefficients(tmp_path)
    with pytest.raises(ScoregramError, match=r"needs a folder with rank_\*\.jsonl"):
        read_coefficients(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"objective": "dpo"}, "the name must be one of cispo, dapo, dual_clip, grpo, gspo, reinforce"),
        ({"aggregation": "token_mean"}, "must be one of sequence_mean, token_sum, got 'token_mean'"),
    ],
)
def test_unknown_settings_are_refused(kwargs, message):
    with pytest.raises(ScoregramError, match=message):
        recorded_loss(sequence(), **kwargs)


def test_negative_weights_are_refused():
    with pytest.raises(ScoregramError, match="weights of tokens must not be negative"):
        recorded_loss(sequence(weights=-torch.ones(7)))


def test_another_interface_is_refused_by_name(monkeypatch):
    inputs: Any = sequence()
    del inputs.inference_logprobs
    with pytest.raises(ScoregramError, match="in which inference_logprobs changed or is absent"):
        recorded_loss(inputs)
    monkeypatch.setitem(sys.modules, "prime_rl.trainer.rl.loss", None)
    with pytest.raises(ScoregramError, match=r"needs prime_rl\.trainer\.rl\.loss\.LossOutputs"):
        recorded_loss(sequence())
