"""Mistakes that once went through: in tasks, in pairs of estimator and loss, in settings, and with missing rewards."""

import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from scoregram import cli
from scoregram.advantages import ESTIMATORS
from scoregram.checks import ScoregramError
from scoregram.compare import CompareConfig, compare_methods
from scoregram.compare.table import accuracy_table, open_comparison, verdict_sentence
from scoregram.exhibits import cell_text
from scoregram.objectives import OBJECTIVES
from scoregram.policy.transcripts import checked_reply
from scoregram.report import write_report
from scoregram.runs import open_run
from scoregram.tasks import Problem, Reply, Task, load_task, rewarded_by_environment
from scoregram.training.config import TrainConfig
from scoregram.training.credit import require_method, require_runnable, token_advantages_of
from scoregram.training.effects import require_effects
from scoregram.training.evaluate import Evaluation
from scoregram.training.loop import train
from scoregram.training.methods import METHODS, Method
from tests.training_cases import JUDGE, config_for, judge, save_policy
from tests.turn_cases import Echo, two_turns

HERE = "tests.test_training_found_by_attack:{}"
PROBLEMS = [Problem(f"say/{index}", f"{index}=", str(index)) for index in range(8)]
QUIET = Console(quiet=True)
pytestmark = pytest.mark.usefixtures("unchecked_shapes")  # our own errors must come through


def half_judged(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    """A reward for every other rollout: none, one or some of a group of four, as the texts fall."""
    rewards = judge(prompts, completions)
    return [None if len(text) % 2 else reward for text, reward in zip(completions, rewards, strict=True)]


def never_judged(prompts: list[str], completions: list[str], **_: Any) -> list[None]:
    return [None] * len(completions)


def single_steps(prompts: list[str], completions: list[str], **_: Any) -> list[list[tuple[int, float]]]:
    """The whole completion as one step."""
    return [[(len(text), len(text) / 10)] if text else [] for text in completions]


def task_of(**changes: Any) -> Task:
    settings = {"name": "own", "train": PROBLEMS[:4], "test": PROBLEMS[4:], "reward": judge, "max_new_tokens": 4}
    return Task(**settings | changes)


def of_texts(seed: int) -> Task:
    return task_of(train=["1+1=", "1+2="])


def of_test_texts(seed: int) -> Task:
    return task_of(test=[{"prompt": "1+1="}])


def of_a_generator(seed: int) -> Task:
    return task_of(train=(problem for problem in PROBLEMS))


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


# Tasks


def test_a_task_with_an_environment_takes_no_reward_function():
    says = "Task: the rewards of own come from its environment, got reward judge. Pass reward=rewarded_by_environment"
    with pytest.raises(ScoregramError, match=says):
        task_of(environment=Echo)
    assert task_of(environment=Echo, reward=rewarded_by_environment).environment is Echo


def test_a_task_rewarded_by_its_environment_has_one():
    says = "Task: own, rewarded by its environment, must have one, got environment None. Pass environment=…, or a rew"
    with pytest.raises(ScoregramError, match=says):
        task_of(reward=rewarded_by_environment)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("of_texts", "train of the task must hold scoregram.tasks.Problem, got a str. Pass Problem("),
        ("of_test_texts", "test of the task must hold scoregram.tasks.Problem, got a dict. Pass Problem("),
        ("of_a_generator", "train of the task must be a sequence, got generator. Pass a list of Problem"),
    ],
)
def test_a_task_without_problems_in_it_is_named(name, says):
    spec = HERE.format(name)
    with pytest.raises(ScoregramError, match=re.escape(f"{spec}: {says}")):
        load_task(f"python:{spec}")


@pytest.mark.parametrize("done", ["no", "", None, 1, 0.0])
def test_done_is_true_or_false(done):
    says = re.escape(f"environment: done of Game.step must be True or False, got {done!r}. Return Reply(done=True)")
    with pytest.raises(ScoregramError, match=says):
        checked_reply(Reply(done=done), "Game")


@pytest.mark.parametrize("true", [True, np.bool_(True), torch.tensor(True)])
def test_done_may_be_a_scalar_of_numpy_or_torch(true: Any):
    reply = checked_reply(Reply("over", reward=1.0, outcome=2.0, done=true), "Game")
    assert reply == Reply("over", reward=1.0, outcome=2.0, done=True) and reply.done is True


# Pairs of estimator and loss


def takes(objective: str, shape: tuple[int, ...]) -> bool:
    """Whether a loss takes advantages of this shape; one that takes none leaves them to the rewards of a rollout."""
    row = OBJECTIVES[objective]
    if "advantages" not in row.needs:
        return len(shape) == 1
    logs = torch.full((4, 3), -1.0)
    given = {"log_probs": logs, "old_log_probs": logs, "mask": logs < 0, "advantages": torch.ones(shape), "length": 3}
    try:
        row.fn(**{name: given[name] for name in row.needs})
    except ScoregramError:
        return False
    return True


def test_every_pair_that_is_accepted_can_be_trained_with():
    refused = set()
    for (estimator, row), objective in product(ESTIMATORS.items(), OBJECTIVES):
        pair = Method(estimator=estimator, objective=objective, about="")
        works = takes(objective, (4,) if row.level == "group" else (4, 3))
        try:
            require_method(pair, chosen=estimator, group_size=4, kl="k3")
            assert works, (estimator, objective)
        except ScoregramError as error:
            assert not works, (estimator, objective)
            refused.add(objective)
            able = str(error).partition("needs one of ")[2].partition(", got")[0].split(", ")
            assert able == sorted(name for name in OBJECTIVES if takes(name, (4, 3)))
    assert refused == {"tic", "agro", "dpo"}


@pytest.mark.parametrize("estimator", sorted(name for name, row in ESTIMATORS.items() if row.level != "group"))
def test_credit_inside_a_rollout_is_refused_for_tic_before_anything_is_loaded(estimator, tmp_path):
    config = config_for(tmp_path / "no policy", tmp_path / "run", estimator=estimator, objective="tic")
    with pytest.raises(ScoregramError, match=f"credit for {ESTIMATORS[estimator].level}s needs one of .*, got 'tic'"):
        train(config)


# Missing rewards


def test_a_rollout_without_a_reward_has_no_process_advantage():
    """Its steps are left out, and so is a group in which only one rollout has a reward."""
    rewards = torch.tensor([1.0, math.nan, 0.0, 1.0, math.nan, math.nan, 0.5, math.nan], dtype=torch.float64)
    groups = torch.arange(2).repeat_interleave(4)
    rollouts = two_turns([[2], [3], [1], [2], [2], [3], [1], [2]], prompt=1, group_ids=groups, rewards=rewards)
    ends = rollouts.completion_mask & (rollouts.completion_mask.flip(1).cumsum(1).flip(1) == 1)
    given = torch.tensor([0.0, 9.0, 0.3, 0.9, 9.0, 9.0, 0.4, 9.0], dtype=torch.float64)
    scores = torch.where(ends, given[:, None], 0.0)
    found = token_advantages_of("grpo-process", rollouts, {"token_rewards": scores, "step_ends": ends})
    judged = torch.tensor([0.0, 0.3, 0.9], dtype=torch.float64)
    expected = torch.zeros(found.shape, dtype=torch.float64)
    for row, score in zip((0, 2, 3), (judged - judged.mean()) / judged.std(), strict=True):
        expected[row] = torch.where(rollouts.completion_mask[row], score, 0.0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_trains_with_missing_rewards_or_names_them(name, policy, tmp_path):
    changes: dict[str, Any] = {"method": name, "reward": HERE.format("half_judged"), "steps": 2, "eval_every": 0}
    if name == "grpo-process":
        changes["step_scores"] = HERE.format("single_steps")
    config = config_for(policy, tmp_path / "run", rollouts_every=1, checkpoint_every=0, **changes)
    if name in ("remax", "vineppo"):
        unjudged = replace(config, reward=HERE.format("never_judged"))
        with pytest.raises(
            ScoregramError, match=r"a reward for every .*rollout.*, got None for .+ of .+ Pass a reward func"
        ):
            train(unjudged)
        return
    assert train(config).step == 2
    rollouts = list(open_run(tmp_path / "run").rollouts())
    unjudged = [rollout for rollout in rollouts if math.isnan(rollout.reward)]
    assert unjudged and len(unjudged) < len(rollouts)


def test_accuracy_is_undefined_where_nothing_was_judged():
    unjudged = Evaluation((math.nan, math.nan), ((math.nan,), (math.nan,))).scalars()
    for name in ("accuracy", "accuracy_low", "accuracy_high", "sampled_accuracy", "reward"):
        assert math.isnan(unjudged[f"eval/{name}"])
    some = Evaluation((math.nan, 1.0), ((math.nan,), (1.0,))).scalars()  # a missing reward beside others is wrong
    assert some["eval/accuracy"] == some["eval/sampled_accuracy"] == 0.5 and some["eval/reward"] == 1.0


def test_an_evaluation_without_a_reward_shows_a_dash(policy, tmp_path, capsys):
    train(config_for(policy, tmp_path / "run", steps=1, reward=HERE.format("never_judged"), eval_samples=2))
    shown = capsys.readouterr().out
    assert "step 1: test accuracy –, no test rollout has a reward" in " ".join(shown.split())
    assert all(math.isnan(line["eval/accuracy"]) for line in open_run(tmp_path / "run").metrics())


def test_a_comparison_without_a_reward_has_a_dash_and_no_verdict(policy, tmp_path):
    changes = {"reward": HERE.format("never_judged"), "task": "arithmetic:3", "max_new_tokens": 6, "device": "cpu"}
    changes |= {"methods": "grpo,rloo", "rollouts": 24, "batch_size": 12, "group_size": 4, "eval_problems": 4}
    config = CompareConfig(model=str(policy), out=tmp_path / "cmp", seeds=1, jobs=1, prompt="plain", **changes)
    assert compare_methods(config, console=QUIET) == 0
    comparison = open_comparison(config.out)
    rows = [dict(zip(accuracy_table(comparison).columns, row, strict=True)) for row in accuracy_table(comparison).rows]
    assert [cell_text(row["accuracy"]) for row in rows] == ["–", "–"]
    assert rows[1]["verdict"] == "cannot tell" and not any("rollouts to" in name for name in rows[0])
    assert "nan" not in verdict_sentence(comparison) + (config.out / "table.md").read_text()
    page = write_report(config.out / "runs" / "rloo" / "seed-0").read_text()
    assert "No test accuracy: no test rollout has a reward." in page


# Settings


@pytest.mark.parametrize(
    ("given", "acts"),
    [
        ({"rollouts": 640}, True),
        ({"rollouts": 639}, False),
        ({"steps": 10}, True),
        ({"steps": 9}, False),
        *(({"steps": 9, "method": name}, True) for name in ("dapo", "remax", "vineppo", "igrpo", "tl-grpo")),
        ({"steps": 9, "method": "vineppo", "exact_values": True}, False),
    ],
)
def test_a_measurement_beyond_the_end_of_the_run_is_refused(given, acts):
    config = TrainConfig(every_rollouts=640, **given)
    if acts:
        require_effects(config)
        return
    says = (
        "train --every-rollouts: acts only with a run that samples at least that many rollouts, got every-rollouts 640,"
    )
    with pytest.raises(ScoregramError, match=says):
        require_effects(config)


def test_a_comparison_refuses_it_too_and_has_a_value_of_its_own(policy, tmp_path, capsys):
    line = (
        f"compare --out {tmp_path / 'cmp'} --model {policy} --device cpu --jobs 1 --seeds 1 --methods grpo --batch-size"
    )
    line += (
        f" 12 --group-size 4 --eval-problems 4 --max-new-tokens 6 --prompt plain --task arithmetic:3 --reward {JUDGE}"
    )
    assert cli.main(f"{line} --rollouts 24 --every-rollouts 25".split()) == 2
    assert "compare --every-rollouts: acts only with a run that samples" in capsys.readouterr().err
    for budget in (12, 24):
        assert cli.main(f"{line} --rollouts {budget}".split()) == 0
    run = open_run(tmp_path / "cmp" / "runs" / "grpo" / "seed-0")
    assert run.config["every_rollouts"] == 1 and [line["rollouts"] for line in run.metrics()] == [0, 12, 24]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"method": "dr-grpo"}, "dr-grpo"),
        ({"method": "tic-length"}, "tic-length"),
        ({"method": "tic"}, "tic"),
        ({"objective": "tic"}, "grpo"),
        ({"method": "dr-grpo", "estimator": "opo"}, "opo"),
    ],
)
def test_a_group_of_one_is_refused_by_the_name_that_was_given(given, name):
    with pytest.raises(
        ScoregramError, match=f"^train --group-size: {name} needs at least 2 rollouts, got group_size 1"
    ):
        require_runnable(TrainConfig(group_size=1, **given))


@pytest.mark.parametrize("given", [{"method": "agro"}, {"method": "dpo"}])
@pytest.mark.parametrize("beta", [1e-300, 2e30])
def test_a_strength_outside_the_range_of_the_loss_is_refused_before_the_run(given, beta):
    says = f"train --beta: {given['method']} needs a value from 1.17549e-38 to 1e+30, got {beta}. Choose one in this"
    with pytest.raises(ScoregramError, match=re.escape(says)):
        require_runnable(TrainConfig(beta=beta, **given))
    for fine in (0.0, 1.2e-38, 1e30):
        require_runnable(TrainConfig(beta=fine, **given))
    require_runnable(TrainConfig(beta=beta))  # the coefficient of a KL term
