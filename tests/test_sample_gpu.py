"""The sampler on a GPU: captured steps draw what the CPU draws; advantages stay on it."""

from typing import Any

import pytest
import torch

from scoregram.integrations.registries import labelled_advantages
from scoregram.policy import SamplingConfig, sample, token_log_probs
from scoregram.policy.fused_decoders import TritonDecoder
from scoregram.policy.log_probs import pack_groups, packed_log_probs
from scoregram.policy.sampler import decoder_logits, fastest_decoder, plain_logits
from tests.cases import ARCHITECTURES, build

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROMPTS = [[5, 9, 11], [7], [3, 4, 5, 6, 7, 8, 9], [12, 13, 14]]


def drawn(model, *, most: int = 40, stop_ids=(17,), **settings):
    request = {
        "rollouts_per_prompt": 4,
        "sampling": SamplingConfig(most, **settings),
        "stop_ids": stop_ids,
        "pad_id": 0,
    }
    return sample(model, PROMPTS, generator=torch.Generator().manual_seed(0), **request)


@pytest.mark.filterwarnings("ignore::scoregram.policy.BiasedSamplingWarning")
@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9}], ids=str
)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma3", "mamba"])
def test_a_gpu_draws_what_a_cpu_draws(name, settings):
    model = ARCHITECTURES[name]()
    expected = drawn(model, **settings)
    found = drawn(model.cuda(), **settings)
    assert found.completion_ids() == expected.completion_ids()
    assert found.log_probs is not None and expected.log_probs is not None
    torch.testing.assert_close(found.log_probs.cpu(), expected.log_probs, atol=1e-5, rtol=1e-5)
    assert found.behaviour_log_probs is not None and expected.behaviour_log_probs is not None
    torch.testing.assert_close(found.behaviour_log_probs.cpu(), expected.behaviour_log_probs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cast", [False, True])
def test_half_precision_and_autocast(cast):
    model = build("Llama", vocab_size=5000).float().cuda()
    model = model if cast else model.bfloat16()
    with torch.autocast("cuda", torch.bfloat16, enabled=cast):
        found = drawn(model)
        again = token_log_probs(model, found.input_ids, found.attention_mask, found.completion_mask)
    torch.testing.assert_close(found.log_probs, again.detach().float(), atol=0.05, rtol=0)


def test_weights_may_change_between_calls():
    model = build("Llama").cuda()
    drawn(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    found = drawn(model)
    again = token_log_probs(model, found.input_ids, found.attention_mask, found.completion_mask)
    torch.testing.assert_close(found.log_probs, again.detach().float(), atol=1e-5, rtol=0)


def test_everything_ends_when_all_have_ended():
    found = drawn(build("Llama").cuda(), stop_ids=range(0, 61, 2), most=50)
    assert found.finished is not None
    assert found.finished.all() and int(found.lengths.max()) < 50


WIDE: dict[str, Any] = {
    "max_position_embeddings": 256,
    "hidden_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 5000,
}
"""A shape that the kernels take: heads as wide as a power of two, three queries to a key."""


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "autocast"])
def test_kernels_of_our_own_give_the_logits_of_the_model(name, kind):
    prompts = [[(7 * place + length) % 5000 for place in range(length)] for length in (1, 3, 64, 129, 200)]
    forced = [11, 12, 13, 14]
    model = build(name, **WIDE).float().cuda().eval()
    model = model.bfloat16() if kind == "bfloat16" else model
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=kind == "autocast"):
        assert fastest_decoder(model, 256) is TritonDecoder
        found = decoder_logits(TritonDecoder, model, prompts, forced).float()
        expected = torch.cat([plain_logits(model, [[*prompt, *forced]], 5) for prompt in prompts]).float()
    bound = 1e-5 if kind == "float32" else 3e-2
    assert float((found - expected).abs().max()) <= bound * float(expected.abs().max())


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}], ids=str)
def test_kernels_of_our_own_draw_what_a_cpu_draws(settings):
    model = build("Llama", **WIDE).float()
    expected = drawn(model, most=100, **settings)
    found = drawn(model.cuda(), most=100, **settings)
    assert found.completion_ids() == expected.completion_ids()
    assert found.log_probs is not None and expected.log_probs is not None
    torch.testing.assert_close(found.log_probs.cpu(), expected.log_probs, atol=1e-4, rtol=1e-4)


def test_rollouts_as_trees_have_the_log_probabilities_of_rows():
    model = ARCHITECTURES["llama"]().cuda()
    rollouts = drawn(model, most=6)
    given = rollouts.input_ids, rollouts.attention_mask, rollouts.completion_mask
    together = pack_groups(rollouts.input_ids, rollouts.completion_mask)
    assert together is not None and together.visible.is_cuda
    found = packed_log_probs(model, together, rollouts.input_ids, 1.0)
    torch.testing.assert_close(found, token_log_probs(model, *given), atol=1e-5, rtol=1e-5)


def test_advantages_stay_on_the_device_of_the_rewards():
    rewards = torch.tensor([[0.0, 1.0], [0.5, 0.0]], device="cuda")
    assert labelled_advantages("opo", rewards, torch.ones_like(rewards), ["a", "a"]).device == rewards.device
