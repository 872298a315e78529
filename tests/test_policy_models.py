"""Layers that run again in the backward pass, in a model that is otherwise in evaluation mode."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from scoregram.checks import ScoregramError
from scoregram.policy import token_log_probs
from scoregram.policy.fused_decoders import FusedDecoder
from scoregram.policy.models import evaluating, hides_precision, recompute_layers, without_autocast
from scoregram.policy.sampler import fastest_decoder
from scoregram.runs import open_run
from scoregram.training.loop import train
from tests.cases import ARCHITECTURES, build
from tests.training_cases import config_for, save_policy, without_times

IDS = torch.tensor([[1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7]])
REAL, COMPLETION = torch.ones_like(IDS).bool(), torch.arange(6).expand(2, 6) >= 2


def runs_of_a_layer(model, layer):
    """How often a layer runs in one training pass, and the gradient that comes out."""
    count = []
    handle = layer.register_forward_pre_hook(lambda *_: count.append(1))
    model.zero_grad()
    token_log_probs(model, IDS, REAL, COMPLETION).sum().backward()
    handle.remove()
    return len(count), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_layers_run_again_and_the_gradient_is_the_same(name):
    model = (build("Llama") if name == "llama" else ARCHITECTURES["gpt2"]()).eval()
    layer = model.model.layers[0].mlp if name == "llama" else model.transformer.h[0].mlp
    once, gradient = runs_of_a_layer(model, layer)
    recompute_layers(model, caller="test")
    twice, same = runs_of_a_layer(model, layer)
    assert (once, twice) == (1, 2) and torch.equal(gradient, same)
    assert not any(module.training for module in model.modules() if isinstance(module, nn.Dropout))


def test_sampling_takes_layers_out_of_it_for_its_time():
    model = build("Llama").eval()
    recompute_layers(model, caller="test")
    trained = [name for name, module in model.named_modules() if module.training]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert trained and trained == [name for name, module in model.named_modules() if module.training]


def test_a_fused_decoder_still_samples():
    model = build("Llama").eval()
    recompute_layers(model, caller="test")
    with evaluating(model):
        assert fastest_decoder(model, 16) is FusedDecoder


def test_adapters_get_the_same_gradient_under_frozen_weights():
    torch.manual_seed(0)
    model = get_peft_model(build("Llama"), LoraConfig(target_modules=["q_proj", "down_proj"], r=2)).eval()
    adapters = [weight for name, weight in model.named_parameters() if "lora" in name]
    for weight in adapters:
        nn.init.normal_(weight)

    def gradient():
        total = token_log_probs(model, IDS, REAL, COMPLETION).sum()
        return torch.cat([part.flatten() for part in torch.autograd.grad(total, adapters)])

    expected = gradient()
    recompute_layers(model, caller="test")
    assert expected.any() and torch.equal(gradient(), expected)


def test_a_layer_that_drops_activations_of_its_own_is_refused():
    model = ARCHITECTURES["opt"]()
    for layer in model.model.decoder.layers:
        layer.dropout = 0.1
    with pytest.raises(ScoregramError, match=r"must not drop activations, got \{'dropout': 0.1\} in"):
        recompute_layers(model, caller="test")


def test_a_model_that_cannot_is_refused():
    with pytest.raises(ScoregramError, match="test: the model must support gradient checkpointing, got Linear"):
        recompute_layers(nn.Linear(2, 2), caller="test")


def test_a_run_with_layers_that_run_again_has_the_same_numbers(tmp_path):
    model, lines = save_policy(tmp_path / "policy"), []
    for again in (False, True):
        out = tmp_path / str(again)
        train(config_for(model, out, steps=2, measure_every=2, gradient_checkpointing=again))
        lines.append(without_times(open_run(out).metrics()))
    for kept, again in zip(*lines, strict=True):
        assert again == pytest.approx(kept, rel=1e-4, abs=1e-6, nan_ok=True)


def test_precision_is_hidden_by_autocast_over_wide_weights_alone():
    wide, narrow = build("Llama").float(), build("Llama").bfloat16()
    assert not hides_precision(wide)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert hides_precision(wide) and not hides_precision(narrow)
        with without_autocast(wide):
            assert not hides_precision(wide)
