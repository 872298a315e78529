"""Drafts: which one is refined, what the policy then reads, and that only refinements reach the update."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scoregram.checks import ScoregramError
from scoregram.policy import Policy, load_policy
from scoregram.rollouts import Rollouts
from scoregram.runs import open_run
from scoregram.tasks import load_task
from scoregram.training import loop
from scoregram.training.checkpoint import Position
from scoregram.training.collect import Drafts, best_drafts, collect, seeded_generator
from scoregram.training.control import Controller
from scoregram.training.loop import train
from tests.training_cases import JUDGE, config_for, save_policy, without_times

TASK = load_task("arithmetic:3", reward=JUDGE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def policy(folder) -> Policy:
    return load_policy(config_for(folder, folder).policy, TASK)


def drafts_by_hand(policy: Policy, config: Any, problems: Any, number: int) -> list[tuple[str, float]]:
    """All drafts of a step, with their rewards, problem after problem."""
    drawn = collect(
        policy,
        TASK,
        problems,
        group_size=config.drafts,
        sampling=config.sampling(TASK.max_new_tokens),
        generator=seeded_generator(config.seed, "drafts", number),
    )
    return list(zip(drawn.completions, drawn.rewards.tolist(), strict=True))


def test_refinements_read_the_first_best_draft_of_their_prompt(policy, folder):
    config = config_for(folder, folder, method="igrpo", drafts=3, draft_format="{draft}|{prompt}")
    drawn = loop.draw_rollouts(Controller(config), policy, TASK, Position(0, 0), 1)
    drafts = drafts_by_hand(policy, config, drawn.problems, 1)
    chosen = []
    for place, problem in enumerate(drawn.problems):
        own = drafts[3 * place : 3 * place + 3]
        text, reward = max(own, key=lambda pair: pair[1])  # the first of equals
        chosen.append(reward)
        expected = policy.encode_prompt(f"{text}|{problem.prompt}")
        for row in range(4 * place, 4 * place + 4):
            length = int(drawn.rollouts.prompt_lengths[row])
            assert drawn.rollouts.input_ids[row, :length].tolist() == expected
    assert drawn.rollouts.count == config.batch_size and len(drafts) == 9
    assert loop.extra_rollouts(drawn.drafts) == 9
    assert loop.draft_scalars(drawn.drafts) == {"credit/draft_reward": sum(chosen) / 3}
    assert len({reward for _, reward in drafts}) == 2  # otherwise any draft would be the best


def test_only_refinements_reach_the_update(folder, tmp_path, monkeypatch):
    """The updater gets the refinements and nothing else: the update is that of `grpo` on these rollouts."""
    seen: dict[str, Rollouts] = {}
    draw = loop.draw_rollouts

    def kept(*args: Any) -> Any:
        seen["drawn"] = draw(*args).rollouts
        return replace(draw(*args), rollouts=seen["drawn"])

    monkeypatch.setattr(loop, "draw_rollouts", kept)
    train(config_for(folder, tmp_path / "refined", method="igrpo", steps=1))
    monkeypatch.setattr(loop, "draw_rollouts", lambda *args: replace(draw(*args), rollouts=seen["drawn"], drafts=[]))
    train(config_for(folder, tmp_path / "plain", method="grpo", steps=1))
    refined, plain = (without_times(list(open_run(tmp_path / name).metrics()))[1] for name in ("refined", "plain"))
    assert refined.pop("credit/extra_rollouts") == 12 and 0 <= refined.pop("credit/draft_reward") <= 1
    assert refined.pop("rollouts") == plain.pop("rollouts") + 12
    evaluations = {name for name in refined if name.startswith("eval/")}
    assert {k: v for k, v in refined.items() if k not in evaluations} == {
        k: v for k, v in plain.items() if k not in evaluations
    }


def test_a_draft_without_a_reward_is_never_the_best_one(policy, folder):
    rewards = iter([None, 0.0, -1.0, None, None, None])
    task = replace(TASK, reward=lambda **columns: [next(rewards) for _ in columns["completions"]])
    config = config_for(folder, folder)
    problems = list(TASK.train[:2])
    sampling, stream = config.sampling(TASK.max_new_tokens), seeded_generator(0, "drafts", 1)
    found = best_drafts(policy, task, problems, count=3, sampling=sampling, generator=stream)
    texts = [text for text, _ in drafts_by_hand(policy, replace(config, drafts=3), problems, 1)]
    assert list(found.texts) == [texts[1], texts[3]]
    assert found.rewards[0] == 0.0 and math.isnan(found.rewards[1]) and found.extra_rollouts == 6


def test_braces_in_a_text_are_not_replaced():
    drafts = Drafts(["{prompt}!"], [1.0], 1)
    assert drafts.refinement_prompts(["{draft}?"], "{prompt}{draft}\n{prompt}{other}") == [
        "{draft}?{prompt}!\n{draft}?{other}"
    ]


def test_a_resumed_run_draws_the_same_drafts(folder, tmp_path):
    settings = {"method": "igrpo", "steps": 4, "drafts": 2}
    train(config_for(folder, tmp_path / "whole", **settings))
    train(config_for(folder, tmp_path / "halves", **(settings | {"steps": 2})))
    train(config_for(folder, tmp_path / "halves", **settings, resume=True))
    whole, halves = (without_times(list(open_run(tmp_path / name).metrics())) for name in ("whole", "halves"))
    assert whole[1:] == [*halves[1:3], *halves[-2:]] and "credit/draft_reward" in whole[-1]


def test_extra_rollouts_of_drafts_and_of_a_baseline_are_added(folder, tmp_path):
    train(config_for(folder, tmp_path / "run", method="igrpo", estimator="remax", drafts=2, steps=1))
    assert list(open_run(tmp_path / "run").metrics())[1]["credit/extra_rollouts"] == 3 * 2 + 3
    assert list(open_run(tmp_path / "run").metrics())[1]["rollouts"] == 12 + 3 * 2 + 3


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"drafts": 0}, "train --drafts: must be finite and at least 1, got 0"),
        ({"draft_format": "{prompt}"}, r"train --draft-format: must contain {prompt} and {draft}, got '{prompt}'"),
        ({"best_of": 1}, "train --best-of: must be finite and at least 2, got 1"),
    ],
)
def test_wrong_options_are_refused(folder, tmp_path, changes, part):
    with pytest.raises(ScoregramError, match=part):
        config_for(folder, tmp_path, **changes)


def test_k_beyond_the_group_is_refused_before_the_run_begins(folder, tmp_path):
    with pytest.raises(ScoregramError, match="train --best-of: must be at most group_size, got best_of 5"):
        train(config_for(folder, tmp_path / "run", method="pass-at-k", best_of=5))
    assert not (tmp_path / "run").exists()


def test_a_draft_that_fills_the_context_is_refused(policy, folder):
    config = config_for(folder, folder, method="igrpo", draft_format="{prompt}" * 80 + "{draft}")
    with pytest.raises(ScoregramError, match="prompt and completion must fit into the context"):
        loop.draw_rollouts(Controller(config), policy, TASK, Position(0, 0), 1)
