"""vLLM is not installed here: its absence is named, and what comes back from it is read by a stand-in."""

import sys
from types import SimpleNamespace

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.policy import SamplingConfig, token_log_probs
from scoregram.policy.vllm import sample_with_vllm, vllm_engine
from tests.cases import build

PROMPTS = [[5, 6, 7], [8]]


def test_its_absence_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ScoregramError, match=r"needs vllm, got .* pip install vllm"):
        vllm_engine("folder")


class StandIn:
    """Answers as `vllm.LLM` does, with completions written down beforehand."""

    def __init__(self, completions):
        self.completions, self.log = completions, []

    def apply_model(self, change):  # noqa: D102
        change(SimpleNamespace(load_weights=lambda weights: self.log.append(dict(weights))))

    def reset_prefix_cache(self):  # noqa: D102
        self.log.append("forgotten")

    def generate(self, prompts, settings, *, use_tqdm):  # noqa: D102
        self.log.append((prompts, settings))
        outputs = [
            SimpleNamespace(token_ids=ids, logprobs=[{token: SimpleNamespace(logprob=-0.5)} for token in ids])
            for ids in self.completions
        ]
        per_prompt = len(outputs) // len(prompts)
        return [SimpleNamespace(outputs=outputs[i * per_prompt : (i + 1) * per_prompt]) for i in range(len(prompts))]


@pytest.mark.parametrize(("temperature", "answers"), [(1.0, 4), (0.0, 2)])
def test_tokens_are_the_engines_and_log_probs_the_policys(temperature, answers, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **given: SimpleNamespace(**given)))
    model = build("Llama")
    engine = StandIn([[9, 10, 17], [11, 12, 13, 14], [17], [20, 21, 17]][:answers])
    found = sample_with_vllm(
        engine,
        model,
        PROMPTS,
        rollouts_per_prompt=2,
        sampling=SamplingConfig(4, temperature=temperature),
        stop_ids=(17,),
        pad_id=0,
        generator=torch.Generator().manual_seed(0),
    )
    weights, forgotten, (prompts, settings) = engine.log
    assert weights.keys() == model.state_dict().keys() and forgotten == "forgotten"
    assert [prompt["prompt_token_ids"] for prompt in prompts] == PROMPTS
    assert settings.n == (1 if temperature == 0 else 2) and settings.stop_token_ids == [17]
    expected = engine.completions if temperature else [engine.completions[0]] * 2 + [engine.completions[1]] * 2
    assert found.completion_ids() == expected
    assert found.finished is not None
    assert found.finished.tolist() == [ids[-1] == 17 for ids in expected]
    own = token_log_probs(model, found.input_ids, found.attention_mask, found.completion_mask)
    torch.testing.assert_close(found.log_probs, own.detach().float())
    said = -0.5 if temperature else 0.0
    assert found.behaviour_log_probs is not None
    assert set(found.behaviour_log_probs[found.completion_mask].tolist()) == {said}


def test_adapters_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    adapted = SimpleNamespace(get_base_model=lambda: None)
    request = {"rollouts_per_prompt": 1, "sampling": SamplingConfig(4), "stop_ids": (), "pad_id": 0}
    with pytest.raises(ScoregramError, match="needs a model without adapters"):
        sample_with_vllm(None, adapted, PROMPTS, **request)
