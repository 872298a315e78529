"""Log-probabilities of given tokens, against one plain forward pass for every row without its padding."""

from typing import Any

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.policy import token_log_probs
from tests.cases import ARCHITECTURES, build, rollouts


def row_by_row(model, batch, temperature: float = 1.0) -> torch.Tensor:
    """Each row alone, its padding cut off, the whole of its logits."""
    out = torch.zeros(batch.input_ids.shape, dtype=torch.float64)
    for row, (ids, real, chosen) in enumerate(
        zip(batch.input_ids, batch.attention_mask.bool(), batch.completion_mask, strict=True)
    ):
        logits = model(input_ids=ids[real][None], use_cache=False).logits[0] / temperature
        log_probs = torch.cat([logits.new_zeros(1), logits[:-1].log_softmax(1).gather(1, ids[real][1:, None])[:, 0]])
        out[row, real] = torch.where(chosen[real], log_probs, 0.0).double()
    return out


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "gemma2", "gemma3", "cohere", "bloom", "granite"])
def test_log_probs_are_those_of_each_row_alone(name, padding):
    model = ARCHITECTURES[name]()
    if name in {"gemma2", "bloom"}:
        model = model.float()  # padded rows are nan in float64
    batch = rollouts(padding=padding)
    found = token_log_probs(model, batch.input_ids, batch.attention_mask.bool(), batch.completion_mask, temperature=0.7)
    expected = row_by_row(model, batch, 0.7)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert not found[~batch.completion_mask].any()


@pytest.mark.parametrize("family", ["Roberta", "Bart"])  # positions from padding_idx + 1; no argument for positions
def test_models_count_positions_from_the_first_real_token(family):
    sizes: dict[str, Any] = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 40}
    model, batch = build(family, is_decoder=True, **sizes), rollouts(padding="left")
    found = token_log_probs(model, batch.input_ids, batch.attention_mask.bool(), batch.completion_mask)
    torch.testing.assert_close(found.double(), row_by_row(model, batch))


def test_gradients_are_those_of_the_definition():
    model, batch = build("Llama"), rollouts()
    weights = torch.randn(batch.input_ids.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    given = batch.input_ids, batch.attention_mask.bool(), batch.completion_mask
    parameters = list(model.parameters())
    found = torch.autograd.grad((token_log_probs(model, *given) * weights).sum(), parameters)
    expected = torch.autograd.grad((row_by_row(model, batch) * weights).sum(), parameters)
    torch.testing.assert_close(found, expected)


def test_the_head_sees_only_what_predicts_a_completion():
    model, batch = build("Llama"), rollouts()
    seen = []
    handle = model.lm_head.register_forward_hook(lambda _, given, out: seen.append((given[0].shape, out.shape)))
    token_log_probs(model, batch.input_ids, batch.attention_mask.bool(), batch.completion_mask)
    handle.remove()
    count = int(batch.completion_mask.sum())
    assert seen == [((count, 32), (count, 61))]
    assert not model.lm_head._forward_pre_hooks


def test_hooks_are_gone_after_an_exception():
    model, batch = build("Llama"), rollouts()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:, :3])
    with pytest.raises(RuntimeError):
        token_log_probs(model, batch.input_ids, batch.attention_mask.bool(), batch.completion_mask)
    assert not model.lm_head._forward_pre_hooks


@pytest.mark.usefixtures("unchecked_shapes")
def test_batches_without_meaning():
    model, batch = build("Llama"), rollouts()
    ids, real, chosen = batch.input_ids, batch.attention_mask.bool(), batch.completion_mask
    with pytest.raises(ScoregramError, match="attention_mask must have the shape of input_ids"):
        token_log_probs(model, ids, real[:, :3], chosen)
    with pytest.raises(ScoregramError, match="temperature must be positive"):
        token_log_probs(model, ids, real, chosen, temperature=0.0)
    with pytest.raises(ScoregramError, match="must follow a real token, got one at row 0, column 0"):
        token_log_probs(model, ids, real, torch.ones_like(chosen))
    with pytest.raises(ScoregramError, match="must follow a real token, got one at row 1, column 10"):
        token_log_probs(model, ids, real, chosen | (torch.arange(11) == 10))
