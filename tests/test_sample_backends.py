"""Sampling backends by name: what each decodes with, which models it refuses, and how a run chooses one."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scoregram import cli
from scoregram.checks import ScoregramError
from scoregram.policy import PolicyConfig, SamplingConfig, fastest_decoder, load_policy, sample, token_log_probs
from scoregram.policy.decoders import ModelCacheDecoder, SharedCacheDecoder, UncachedDecoder
from scoregram.policy.fused_decoders import FusedDecoder
from scoregram.policy.models import PolicyWarning
from scoregram.runs import open_run
from scoregram.training import train
from tests.cases import ARCHITECTURES, build
from tests.training_cases import config_for, save_policy, without_times

PROMPTS = [[5, 9, 11], [7], [3, 4, 5, 6, 7, 8, 9]]


def drawn(model, sampler, **settings):
    request: dict[str, Any] = {"rollouts_per_prompt": 3, "stop_ids": (17,), "pad_id": 0}
    sampling = SamplingConfig(12, sampler=sampler, **settings)
    return sample(model, PROMPTS, sampling=sampling, generator=torch.Generator().manual_seed(0), **request)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_every_backend_draws_the_same(name):
    model = ARCHITECTURES[name]()
    auto, fast, plain = (drawn(model, sampler) for sampler in ("auto", "fast", "transformers"))
    assert auto.completion_ids() == fast.completion_ids() == plain.completion_ids()
    assert auto.log_probs is not None and fast.log_probs is not None
    assert torch.equal(auto.log_probs, fast.log_probs)
    torch.testing.assert_close(plain.log_probs, auto.log_probs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "sampler", "decoder"),
    [
        ("llama", "auto", FusedDecoder),
        ("llama", "fast", FusedDecoder),
        ("llama", "transformers", ModelCacheDecoder),
        ("gpt2", "fast", SharedCacheDecoder),
        ("mamba", "auto", ModelCacheDecoder),
        ("mamba", "transformers", ModelCacheDecoder),
    ],
)
def test_the_decoder_of_a_backend(name, sampler, decoder):
    with torch.no_grad():
        assert fastest_decoder(ARCHITECTURES[name](), 20, sampler) is decoder


def test_transformers_works_without_a_cache(monkeypatch):
    model, step = ARCHITECTURES["gpt2"](), ModelCacheDecoder.step
    expected = drawn(model, "transformers")
    monkeypatch.setattr(ModelCacheDecoder, "step", lambda self, token: step(self, token) * 1.01)
    other = ARCHITECTURES["gpt2"]()
    with pytest.warns(PolicyWarning, match="every token takes a forward pass over the whole text"):
        found = drawn(other, "transformers")
    with torch.no_grad():
        assert fastest_decoder(other, 20, "transformers") is UncachedDecoder
    assert found.completion_ids() == expected.completion_ids()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (ARCHITECTURES["mamba"], "got a cache of more than keys and values"),
        (lambda: build("Mistral", sliding_window=16, head_dim=8), "got a layer that sees 16 of 19 tokens"),
        (ARCHITECTURES["gemma2"], "got no finite logits"),  # its padded rows are nan in float64
    ],
    ids=["state-space", "sliding-window", "padding"],
)
def test_fast_refuses_a_model_and_says_why(make, reason):
    with pytest.raises(ScoregramError, match=f"sampler fast needs plain attention .*{reason}.*auto or transformers"):
        drawn(make(), "fast")


@pytest.mark.usefixtures("unchecked_shapes")
def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(ScoregramError, match="one of auto, transformers, fast, vllm, got 'sglang'"):
        SamplingConfig(4, sampler="sglang")  # pyright: ignore[reportArgumentType]


class Engine:
    """Answers as `vllm.LLM` does: every completion is one token and the stop token."""

    built = 0

    def __init__(self, folder, **settings):
        from transformers import AutoConfig

        Engine.built += 1
        self.config, self.settings, self.loads = AutoConfig.from_pretrained(folder), settings, 0

    def apply_model(self, change):  # noqa: D102
        change(SimpleNamespace(load_weights=lambda _: setattr(self, "loads", self.loads + 1)))

    def reset_prefix_cache(self):  # noqa: D102
        pass

    def generate(self, prompts, settings, *, use_tqdm):  # noqa: D102
        (stop,) = settings.stop_token_ids
        chances = [{6 + number: SimpleNamespace(logprob=-0.5)} for number in range(settings.n)]
        outputs = [
            SimpleNamespace(token_ids=[*one, stop], logprobs=[one, {stop: SimpleNamespace(logprob=-0.5)}])
            for one in chances
        ]
        return [SimpleNamespace(outputs=outputs) for _ in prompts]


@pytest.fixture
def stand_in(monkeypatch):
    made = SimpleNamespace(LLM=Engine, SamplingParams=lambda **given: SimpleNamespace(**given))
    monkeypatch.setitem(sys.modules, "vllm", made)
    monkeypatch.setattr(Engine, "built", 0)


@pytest.mark.usefixtures("stand_in")
def test_vllm_gets_an_engine_of_the_model_that_is_built_once():
    from scoregram.policy.models import policy_facts

    model = build("Llama").float()
    first, greedy = drawn(model, "vllm"), drawn(model, "vllm", temperature=0.0)
    engine = policy_facts(model).vllm_engine
    assert Engine.built == 1 and engine.loads == 2
    assert engine.config.architectures == ["LlamaForCausalLM"] and engine.config.hidden_size == 32
    assert engine.settings["dtype"] == "float32" and engine.settings["load_format"] == "dummy"
    assert first.completion_ids() == [[6, 17], [7, 17], [8, 17]] * 3
    assert greedy.completion_ids() == [[6, 17]] * 9
    own = token_log_probs(model, first.input_ids, first.attention_mask, first.completion_mask)
    torch.testing.assert_close(first.log_probs, own.detach())
    assert first.behaviour_log_probs is not None
    assert set(first.behaviour_log_probs[first.completion_mask].tolist()) == {-0.5}


def test_vllm_that_is_missing_is_named_with_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ScoregramError, match=r"sampler vllm needs vllm, got .*Install it: pip install vllm"):
        drawn(build("Llama"), "vllm")


@pytest.mark.usefixtures("stand_in")
def test_vllm_refuses_adapters(tmp_path):
    config = PolicyConfig(str(save_policy(tmp_path)), lora_rank=2, prompt="plain", device="cpu")
    with pytest.raises(ScoregramError, match="sampler vllm needs a model without adapters, got Peft"):
        drawn(load_policy(config).model, "vllm")


def lines_of(config) -> list[dict[str, Any]]:
    train(config)
    return without_times(open_run(config.out).metrics())


@pytest.mark.usefixtures("stand_in")
def test_a_run_chooses_its_backend(tmp_path):
    model = save_policy(tmp_path / "policy")
    auto, fast, plain, engine = (
        lines_of(config_for(model, tmp_path / sampler, sampler=sampler, steps=2))
        for sampler in ("auto", "fast", "transformers", "vllm")
    )
    assert repr(fast) == repr(auto)
    assert [line.get("reward") for line in plain] == [line.get("reward") for line in auto]
    assert Engine.built == 1 and [line["length"] for line in engine if "length" in line] == [2.0, 2.0]


@pytest.mark.parametrize("sampler", ["transformers", "fast"])
def test_the_command_line_takes_a_backend(sampler, tmp_path):
    model, out = save_policy(tmp_path / "policy"), tmp_path / "run"
    asked = ["--steps", "1", "--batch-size", "4", "--group-size", "4", "--max-new-tokens", "4", "--device", "cpu"]
    asked += ["--prompt", "plain", "--task", "arithmetic:3", "--eval-every", "0", "--sampler", sampler]
    cli.main(["train", "--model", str(model), "--out", str(out), *asked])
    assert open_run(out).config["sampler"] == sampler


def test_a_run_from_before_the_option_can_be_resumed(tmp_path):
    record = config_for(tmp_path, tmp_path / "run").record()
    assert "sampler" not in record
    assert config_for(tmp_path, tmp_path / "run", sampler="fast").record()["sampler"] == "fast"
