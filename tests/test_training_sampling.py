"""Rollouts that are sampled at another temperature than the policy's, for a loss that takes rollouts of any policy."""

import warnings

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.policy import BiasedSamplingWarning, load_policy
from scoregram.runs import open_run
from scoregram.tasks import load_task
from scoregram.training import loop
from scoregram.training.checkpoint import Position
from scoregram.training.control import Controller
from scoregram.training.draw import one_sampling_warning
from scoregram.training.loop import train
from tests.training_cases import JUDGE, config_for, save_policy, without_times

TASK = load_task("arithmetic:3", reward=JUDGE)


@pytest.mark.parametrize("rows", [0, 4])
def test_rollouts_have_the_log_probabilities_of_both_temperatures(tmp_path, rows):
    folder = save_policy(tmp_path / "policy")
    config = config_for(
        folder, tmp_path, method="agro", temperature=0.8, sampling_temperature=2.0, micro_batch_size=rows
    )
    policy = load_policy(config.policy, TASK)
    with one_sampling_warning(config):
        rollouts = loop.draw_rollouts(Controller(config), policy, TASK, Position(0, 0, 0), 1).rollouts
    assert rollouts.log_probs is not None and rollouts.behaviour_log_probs is not None
    with torch.no_grad():
        logits = policy.model(rollouts.input_ids, attention_mask=rollouts.attention_mask.long()).logits
    for temperature, found in ((0.8, rollouts.log_probs), (2.0, rollouts.behaviour_log_probs)):
        everything = (logits[:, :-1] / temperature).log_softmax(2)
        expected = everything.gather(2, rollouts.input_ids[:, 1:, None]).squeeze(2)
        mask = rollouts.completion_mask
        torch.testing.assert_close(found[mask], expected[mask[:, 1:]], rtol=1e-4, atol=1e-4)
        assert bool((found[~mask] == 0).all())


def test_a_run_on_such_rollouts_is_reproducible_and_resumable(tmp_path):
    folder = save_policy(tmp_path / "policy")
    settings = {"method": "agro", "sampling_temperature": 1.5, "steps": 2, "inner_updates": 2}
    train(config_for(folder, tmp_path / "whole", **settings))
    train(config_for(folder, tmp_path / "halves", **(settings | {"steps": 1})))
    train(config_for(folder, tmp_path / "halves", **settings, resume=True))
    whole, halves = (without_times(list(open_run(tmp_path / name).metrics())) for name in ("whole", "halves"))
    assert whole[-1] == halves[-1] and whole[-1]["sampler_gap"] < 1e-4


@pytest.mark.parametrize("method", ["agro", "dpo"])
def test_an_estimator_is_refused_where_the_loss_takes_rewards(method, tmp_path):
    with pytest.raises(ScoregramError, match=f"train --estimator: {method} takes rewards, not advantages"):
        train(config_for(tmp_path / "no policy", tmp_path / "run", method=method, estimator="remax"))


def test_other_losses_and_wrong_temperatures_are_refused(tmp_path):
    folder = save_policy(tmp_path / "policy")
    with pytest.raises(ScoregramError, match="needs a loss for rollouts of any policy: agro, got objective grpo"):
        train(config_for(folder, tmp_path / "run", method="grpo", sampling_temperature=1.5))
    with pytest.raises(ScoregramError, match="train --sampling-temperature: must be finite and at least 0, got -1"):
        config_for(folder, tmp_path / "run", sampling_temperature=-1.0)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"temperature": 0.7}, 0),
        ({"top_k": 5}, 1),
        ({"method": "agro", "sampling_temperature": 1.5}, 0),
        ({"method": "agro", "top_k": 5}, 1),
        ({"method": "agro", "sampling_temperature": 1.5, "top_p": 0.9}, 1),
    ],
)
def test_a_biased_sampling_is_told_once_and_a_temperature_is_no_bias(changes, count, tmp_path):
    """Rollouts are scored at the temperature that they are sampled at; only top-k and top-p bias the gradient."""
    config = config_for(save_policy(tmp_path / "policy"), tmp_path / "run", eval_every=0, **changes)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train(config)
    told = [one for one in seen if issubclass(one.category, BiasedSamplingWarning)]
    assert len(told) == count and all("top-k and top-p exclude tokens" in str(one.message) for one in told)
