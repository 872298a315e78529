"""Options that cannot act are refused by name on the command line."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from scoregram import cli
from scoregram.errors import ScoregramError
from scoregram.training.config import TrainConfig
from scoregram.training.credit import require_runnable
from scoregram.training.effects import EFFECTS, require_effects

OTHER_VALUES: dict[str, Any] = {
    "lora_alpha": 16.0,
    "lora_targets": ("q_proj",),
    "gae_lambda": 0.5,
    "clip_low": 0.1,
    "clip_high": 0.3,
    "baseline": 0.5,
    "baseline_decay": 0.5,
    "critic": "head",
    "critic_learning_rate": 1e-4,
    "critic_updates": 2,
    "critic_clip": 0.0,
    "critic_warmup": 2,
    "exact_values": True,
    "drafts": 2,
    "draft_format": "{draft} {prompt}",
    "best_of": 4,
    "prefix_rollouts": 2,
    "segments": "even",
    "segment_tokens": 4,
    "segment_probability": 0.5,
    "step_scores": "my_rewards:steps",
    "steps": 50,
    "dynamic_rounds": 2,
    "kl": "k1",
    "adam_betas": (0.9, 0.99),
    "momentum": 0.9,
    "warmup_steps": 10,
    "measure_every": 2,
    "every_rollouts": 640,
    "between_prompts": False,
    "layers": "float64",
    "layer_detail": "kinds",
    "batches_every": 4,
    "rollouts_every": 4,
    "credit_truth": "exact",
    "truth_rollouts": 4,
    "push": True,
    "probe_problems": 4,
    "probe_temperatures": (0.5,),
    "eval_every": 5,
    "eval_problems": 10,
    "eval_samples": 2,
}
"""A value of each option that is not its default."""
IDLE: dict[str, dict[str, Any]] = {
    "steps": {"rollouts": 640},
    "adam_betas": {"optimizer": "sgd"},
    "measure_every": {"every_rollouts": 64},
    "every_rollouts": {"rollouts": 320},
    "warmup_steps": {"steps": 5, "lr_schedule": "cosine"},
    "between_prompts": {"measure_every": 0},
    "layers": {"measure_every": 0},
    "layer_detail": {"layers": "none"},
    "batches_every": {"steps": 3},
    "rollouts_every": {"steps": 3},
    "eval_every": {"every_rollouts": 64},
    "credit_truth": {"measure_every": 0},
    "push": {"measure_every": 0},
    "eval_problems": {"eval_every": 0},
    "eval_samples": {"eval_every": 0},
}
"""Settings beside which an option cannot act, if it can beside the defaults."""
ACTIVE: dict[str, dict[str, Any]] = {
    "lora_alpha": {"lora_rank": 4},
    "lora_targets": {"lora_rank": 4},
    "gae_lambda": {"method": "ppo-whitened"},
    "clip_low": {"inner_updates": 2},
    "clip_high": {"method": "tic-length", "inner_updates": 2},
    "baseline": {"method": "reinforce-baseline"},
    "baseline_decay": {"method": "reinforce-baseline"},
    **{name: {"method": "ppo"} for name in ("critic", "critic_learning_rate", "critic_updates")},
    "critic_clip": {"method": "ppo", "critic_updates": 2},
    "critic_warmup": {"method": "reinforce-critic"},
    "exact_values": {"method": "vineppo"},
    "drafts": {"method": "igrpo"},
    "draft_format": {"method": "igrpo"},
    "best_of": {"method": "pass-at-k"},
    "step_scores": {"method": "grpo-process"},
    "prefix_rollouts": {"method": "vineppo"},
    "segments": {"method": "vineppo"},
    "segment_tokens": {"method": "vineppo", "segments": "even"},
    "segment_probability": {"method": "vineppo", "segments": "unlikely"},
    "dynamic_rounds": {"method": "dapo"},
    "kl": {"beta": 0.1},
    "momentum": {"optimizer": "sgd"},
    "truth_rollouts": {"credit_truth": "sampled"},
    "probe_problems": {"probe_every": 5},
    "probe_temperatures": {"probe_every": 5},
}
"""Settings beside which an option acts, if it does not beside the defaults."""


def test_every_option_in_the_table_is_tried():
    assert OTHER_VALUES.keys() == EFFECTS.keys() and EFFECTS.keys() <= {field.name for field in fields(TrainConfig)}


@pytest.mark.parametrize("name", sorted(EFFECTS))
def test_an_option_is_refused_only_where_it_cannot_act(name):
    idle = TrainConfig(**{**IDLE.get(name, {}), name: OTHER_VALUES[name]})
    with pytest.raises(ScoregramError, match=rf"^train --{name.replace('_', '-')}: acts only with .*\. Leave it out\."):
        require_effects(idle)
    require_effects(TrainConfig(**{**ACTIVE.get(name, {}), name: OTHER_VALUES[name]}))
    require_effects(TrainConfig(**IDLE.get(name, {})))
    require_runnable(idle)  # a comparison gives it to methods that do not use it


@pytest.mark.parametrize(("method", "option"), [("ppo", "critic_updates"), ("vineppo", "prefix_rollouts")])
def test_exact_values_take_the_place_of_other_sources(method, option):
    given: dict[str, Any] = {"method": method, option: OTHER_VALUES[option]}
    require_effects(TrainConfig(**given))
    with pytest.raises(ScoregramError, match=r"acts only with .*exact-values True\. Leave it out"):
        require_effects(TrainConfig(**given, exact_values=True))


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"method": "ppo-monte-carlo", "gae_lambda": 0.5}, "gae-lambda"),  # its λ is 1
        ({"method": "mt-grpo", "gae_lambda": 0.5}, "gae-lambda"),  # its λ weighs the outcome
        ({"method": "tic-length", "clip_low": 0.1, "inner_updates": 2}, "clip-low"),
        ({"method": "rloo", "clip_high": 0.1, "inner_updates": 2}, "clip-high"),
    ],
)
def test_a_loss_or_an_estimator_without_the_option_refuses_it(settings, option):
    with pytest.raises(ScoregramError, match=f"^train --{option}: acts only with"):
        require_effects(TrainConfig(**settings))


def test_the_command_line_refuses_it_before_any_work(tmp_path: Path, capsys):
    assert cli.main(["train", "--out", str(tmp_path / "run"), "--best-of", "4"]) == 2
    told = "scoregram: train --best-of: acts only with the method pass-at-k, got method grpo. Leave it out."
    assert capsys.readouterr().err.strip() == told and not (tmp_path / "run").exists()
