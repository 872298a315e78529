"""A budget of rollouts: every sampled rollout counts, and the number of steps follows."""

import math

import pytest

from scoregram import cli
from scoregram.checks import NotFiniteError, ScoregramError
from scoregram.runs import last_scalar, open_run
from scoregram.training import draw, loop
from scoregram.training.config import TrainConfig
from scoregram.training.critic import Critic
from scoregram.training.loop import train
from tests.training_cases import JUDGE, config_for, save_policy, without_times


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def counted_collect(monkeypatch) -> list[int]:
    """Rollouts of every call that samples for training, in order; evaluations take greedy rollouts of test problems."""
    counts: list[int] = []
    original = draw.collect

    def collect(policy, task, problems, *, group_size, **given):
        counts.append(len(problems) * group_size)
        return original(policy, task, problems, group_size=group_size, **given)

    monkeypatch.setattr(draw, "collect", collect)
    return counts


@pytest.mark.parametrize("method", ["grpo", "dapo", "remax", "vineppo"])
def test_training_ends_at_the_first_step_that_reaches_the_budget(method, policy, tmp_path, monkeypatch):
    sampled = counted_collect(monkeypatch)
    changes = {"method": method, "rollouts": 60, "prefix_rollouts": 1, "segments": "even", "segment_tokens": 3}
    trained = train(config_for(policy, tmp_path / "run", **changes))
    lines = open_run(tmp_path / "run").metrics()
    spent = [int(line["rollouts"]) for line in lines]
    extra = [int(line.get("credit/extra_rollouts", 0)) for line in lines]
    assert spent[0] == 0 and all(one < 60 for one in spent[:-1]) and spent[-1] >= 60
    assert spent[-1] == sum(sampled) + sum(extra) == trained.rollouts
    assert (sum(extra) > 0) == (method in ("remax", "vineppo"))
    if method == "remax":  # one greedy rollout for each of the three prompts
        assert extra[1:] == [3] * len(extra[1:])
    assert "eval/accuracy" in lines[-1] and lines[-1]["step"] == trained.step


def test_measurements_and_evaluations_come_at_equal_rollouts(policy, tmp_path):
    changes = {"rollouts": 96, "every_rollouts": 30, "batch_size": 12, "measure_every": 1, "eval_every": 1}
    train(config_for(policy, tmp_path / "run", **changes))
    lines = open_run(tmp_path / "run").metrics()
    crossed = {int(line["step"]) for line in lines if line["rollouts"] in (36, 60, 96)}  # first step at or past 30 n
    assert {int(line["step"]) for line in lines if "eval/accuracy" in line} == crossed | {0}
    assert {int(line["step"]) for line in lines if "gram/coherence" in line} == crossed


def test_a_larger_budget_continues_a_run_to_the_same_numbers(policy, tmp_path):
    straight, twice = tmp_path / "straight", tmp_path / "twice"
    changes = {"eval_every": 0, "checkpoint_every": 0}
    train(config_for(policy, straight, rollouts=60, **changes))
    train(config_for(policy, twice, rollouts=30, **changes))
    train(config_for(policy, twice, rollouts=60, resume=True, **changes))
    assert without_times(open_run(straight).metrics()) == without_times(open_run(twice).metrics())


def test_a_skipped_step_counts_too(policy, tmp_path, monkeypatch):
    original, calls = loop.apply_gradient, iter(range(99))

    def broken(*given):
        if next(calls) == 0:
            raise NotFiniteError("broken on purpose")
        return original(*given)

    monkeypatch.setattr(loop, "apply_gradient", broken)
    train(config_for(policy, tmp_path / "run", rollouts=36, on_not_finite="skip", eval_every=0))
    assert [line["rollouts"] for line in open_run(tmp_path / "run").metrics()] == [12, 24, 36]


def test_rollouts_drawn_before_an_input_fails_count(policy, tmp_path, monkeypatch):
    """The greedy rollouts of the three prompts were sampled, whatever the critic's values are."""

    def broken(critic: Critic, *_: object) -> None:
        raise NotFiniteError("broken on purpose")

    monkeypatch.setattr(Critic, "inputs", broken)
    changes = {"method": "reinforce-critic", "estimator": "remax", "on_not_finite": "skip", "eval_every": 0, "steps": 2}
    config = config_for(policy, tmp_path / "run", **changes)
    learner = loop.input_sources

    def both(method, config, policy, task):
        return [*learner(method, config, policy, task), Critic(config, policy, prompts_only=True)]

    monkeypatch.setattr(loop, "input_sources", both)
    train(config)
    lines = open_run(tmp_path / "run").metrics()
    assert [(line["rollouts"], line["skipped"], line["credit/extra_rollouts"]) for line in lines] == [
        (15, 1, 3),
        (30, 1, 3),
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rollouts": -1}, "train --rollouts: must be finite and at least 0"),
        ({"every_rollouts": -1}, "train --every-rollouts: must be finite and at least 0"),
        ({"rollouts": 100, "lr_schedule": "cosine"}, "train --rollouts: needs a constant learning rate, got cosine"),
        ({"every_rollouts": 10, "batches_every": 1}, "train --batches-every: needs measured steps by number"),
    ],
)
def test_budgets_that_cannot_work_are_refused(changes, says, tmp_path):
    with pytest.raises(ScoregramError, match=says):
        TrainConfig(out=tmp_path, **changes)


def test_the_steps_of_a_budget_are_rounded_up():
    assert TrainConfig(rollouts=65, batch_size=64).most_steps == math.ceil(65 / 64)


def test_the_command_line_says_how_much_of_the_budget_was_used(policy, tmp_path, capsys):
    given = f"--rollouts 20 --batch-size 12 --group-size 4 --eval-every 0 --device cpu --threads 1 --reward {JUDGE}"
    out = str(tmp_path / "run")
    arguments = ["train", "--model", str(policy), "--out", out, "--max-new-tokens", "6", *given.split()]
    assert cli.main([*arguments, "--task", "arithmetic:3", "--prompt", "plain"]) == 0
    assert "step 2, 24 of 20 rollouts" in capsys.readouterr().out


def test_a_line_that_is_being_written_leaves_the_one_before(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "rollouts": 64}\n{"step": 2, "rollouts": 128}\n{"step": 3, "rol'
    )
    assert last_scalar(tmp_path, "rollouts") == 128
    (tmp_path / "metrics.jsonl").write_text('{"step": 1')
    assert last_scalar(tmp_path, "step") == 0
