"""The rule on dominating prompts: on given shares, on noise, and beside the rule on dominating rollouts."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from scoregram.advice import GRAM_RULES, RunFinding, advise_run
from scoregram.advice.findings import Undecided
from scoregram.advice.prompt_rules import dominating_prompts
from scoregram.bootstrap import mean_estimate, t_mean
from scoregram.reading import SHARE_COLUMN, RunReading, StoredGroup, read_run
from scoregram.runs import GroupRecord
from tests.report_cases import write_run

LIVE, DEAD = (1.0, 0.0, 1.0, 0.0), (1.0, 1.0, 1.0, 1.0)
Shares = Callable[[int], Sequence[float]]


def run_with(
    shares: Shares,
    *,
    steps: int = 30,
    names: Callable[[int, int], str] = lambda step, place: f"p/{step}-{place}",
    rewards: Callable[[int], Sequence[float]] = lambda place: LIVE,
    length: Callable[[int], int] = lambda place: 20,
    largest_rollout: float = 0.3,
    **config: Any,
) -> RunReading:
    """Steps of prompts with these shares of the update, and no Gram."""
    groups, lines = [], []
    for step in range(1, steps + 1):
        for place, share in enumerate(shares(step)):
            given = torch.tensor(rewards(place), dtype=torch.float64)
            record = GroupRecord(
                step=step,
                prompt_id=names(step, place),
                prompt=f"What is {place} plus {place}?",
                rewards=given,
                lengths=torch.full((len(given),), length(place)),
                advantages=given - given.mean(),
                statistics={SHARE_COLUMN: share},
            )
            groups.append(StoredGroup(record))
        lines.append({"step": step, "reward": 0.5, "gram/largest_share": largest_rollout})
    return RunReading({"method": "rloo", **config}, (), lines, groups)


def wavering(step: int) -> list[float]:
    top = 0.7 + 0.02 * (step % 5)
    return [top, *[(1 - top) / 7] * 7]


def finding(run: RunReading) -> RunFinding:
    verdict = dominating_prompts(run)
    assert isinstance(verdict, RunFinding) and verdict.change is not None
    return verdict


def test_one_prompt_of_eight_with_most_of_every_step_is_found():
    one = finding(run_with(wavering))
    expected = mean_estimate([wavering(step)[0] for step in range(21, 31)])
    assert one.number == expected and f"One prompt alone makes {expected.value:.0%}" in one.sentence
    assert "rewards 1, 0, 1, 0, 20 tokens on average: “What is 0 plus 0?”" in one.sentence
    assert "10 steps with three live prompts or more; scores of one norm at right angles would give 12%" in one.evidence
    assert one.change is not None and f"falls from {expected.value:.0%} towards 12%" in one.change.effect


@pytest.mark.parametrize("level", [0.3, 0.49])
def test_a_prompt_with_less_than_half_is_not(level):
    assert dominating_prompts(run_with(lambda step: [level, *[(1 - level) / 7] * 7])) is None


def test_the_whole_interval_must_lie_above_half():
    assert dominating_prompts(run_with(lambda step: [0.2 + 0.7 * (step % 2), *[0.1] * 7])) is None


def test_one_step_in_which_others_cancel_is_no_evidence():
    """A mean of shares that are not bounded would be that of one step."""
    assert dominating_prompts(run_with(lambda step: [40.0 if step == 25 else 0.3, *[0.1] * 7])) is None


@pytest.mark.parametrize(("live", "decided"), [(1, False), (2, False), (3, True)])
def test_a_live_group_among_dead_ones_is_no_fault_of_its_prompt(live, decided):
    shares = [0.6, 0.4, 0.0] if live == 2 else [1.0, 0.0, 0.0] if live == 1 else [0.6, 0.2, 0.2]
    run = run_with(lambda step: shares + [0.0] * 5, rewards=lambda place: LIVE if place < live else DEAD)
    verdict = dominating_prompts(run)
    # of three, one prompt needs more than twice a third
    assert verdict is None if decided else isinstance(verdict, Undecided)


def test_nearly_dead_groups_explain_a_large_share():
    """One group of 32 with half right among three with one right: 8 of 8 + 3 · 31/32 by their rewards alone."""
    half, one = [1.0] * 16 + [0.0] * 16, [1.0] + [0.0] * 31
    run = run_with(lambda step: [0.73, 0.09, 0.09, 0.09], rewards=lambda place: half if place == 0 else one)
    assert dominating_prompts(run) is None
    assert isinstance(dominating_prompts(run_with(lambda step: [0.73, 0.09, 0.09, 0.09])), RunFinding)


def test_a_prompt_that_comes_back_and_dominates_is_named():
    """It is drawn at every third step; the mean over all steps says nothing of it."""
    names = lambda step, place: "loud" if place == 0 and step % 3 == 0 else f"p/{place}"  # noqa: E731

    def shares(step: int) -> list[float]:
        return [0.8 + 0.01 * (step % 2), *[0.2 / 7] * 7] if step % 3 == 0 else [1 / 8] * 8

    one = finding(run_with(shares, names=names))
    expected = t_mean([0.8 + 0.01 * (step % 2) for step in range(3, 31, 3)], tests=9)
    assert one.number == expected and one.sentence.startswith("Prompt loud makes 80% of the squared update")
    assert "10 visits" in one.evidence and "corrected for 9 prompts" in one.evidence
    assert any("--names loud" in step for step in one.change.steps) if one.change else False
    once = lambda step, place: f"p/{step}-{place}"  # noqa: E731
    assert dominating_prompts(run_with(shares, names=once)) is None


def test_visits_that_differ_are_no_evidence():
    """Shares of 1 and 0.2 in turn: a mean of 0.6 over ten visits, whose interval reaches below half."""

    def shares(step: int) -> list[float]:
        return [1.0 if step % 2 else 0.2, *[0.1] * 7] if step % 3 == 0 else [1 / 8] * 8

    names = lambda step, place: "loud" if place == 0 and step % 3 == 0 else f"p/{step}-{place}"  # noqa: E731
    assert dominating_prompts(run_with(shares, names=names)) is None
    # beside nearly dead groups, 0.73 is what the rewards give
    half, one = [1.0] * 16 + [0.0] * 16, [1.0] + [0.0] * 31
    explained = run_with(
        lambda step: [0.73, 0.09, 0.09, 0.09] if step % 3 == 0 else [0.25] * 4,
        names=names,
        rewards=lambda place: half if place == 0 else one,
    )
    assert dominating_prompts(explained) is None


def test_a_prompt_that_is_always_the_largest_is_named_once():
    one = finding(run_with(wavering, names=lambda step, place: "loud" if place == 0 else f"p/{step}-{place}"))
    assert "At 10 of these 10 steps it is loud." in one.sentence and "prompt loud at step" in one.sentence


def test_the_change_follows_what_the_numbers_point_to():
    wide = finding(run_with(wavering, rewards=lambda place: [100 * one for one in LIVE] if place == 0 else LIVE))
    assert wide.change is not None and wide.change.knob == "reward function"
    assert any("its rewards are 100 apart, those of other prompts 1" in step for step in wide.change.steps)
    assert any("`--estimator grpo`" in step for step in wide.change.steps)
    divided = finding(
        run_with(wavering, rewards=lambda place: [100 * one for one in LIVE] if place == 0 else LIVE, method="grpo")
    )
    assert divided.change is not None and divided.change.knob != "reward function"  # the range has no effect there
    long = finding(run_with(wavering, length=lambda place: 90 if place == 0 else 20))
    assert long.change is not None and any("they have 4.5 times the tokens" in step for step in long.change.steps)
    assert any("`--objective grpo`" in step for step in long.change.steps)
    plain = finding(run_with(wavering))
    assert plain.change is not None and any("scoregram filter" in step for step in plain.change.steps)


def test_one_rollout_as_the_cause_speaks_for_its_prompt():
    run = run_with(wavering, largest_rollout=0.9)
    assert isinstance(GRAM_RULES["dominating rollouts"](run), RunFinding)
    verdict = dominating_prompts(run)
    assert isinstance(verdict, Undecided) and "dominating rollouts" in verdict.needs
    assert [one.name for one in advise_run(run).findings if one.name.startswith("dominating")] == [
        "dominating rollouts"
    ]


def test_a_few_of_many_prompts_are_found_together():
    one = finding(run_with(lambda step: [0.35, 0.35, *[0.01] * 30]))
    assert one.sentence.startswith("2 prompts, one in 16 of the live ones, make 70%")
    assert dominating_prompts(run_with(lambda step: [0.2] * 4 + [0.2 / 28] * 28)) is None  # four of 32 are not few


@pytest.mark.slow  # runs in `make test-results`
def test_random_gradients_have_no_dominating_prompt(tmp_path):
    """Three prompts of random scores in seven dimensions, coins for rewards: shares vary as much as they can."""
    for seed in range(12):
        rewards = lambda step, prompt, g, seed=seed: coin(step, prompt, seed)  # noqa: E731
        write_run(tmp_path / f"{seed}", steps=24, prompts=4, rewards=rewards, evaluated=False)
        assert dominating_prompts(read_run(tmp_path / f"{seed}")) is None


def coin(step: int, prompt: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 2, (4,), generator=torch.Generator().manual_seed(1000 * seed + 10 * step + prompt)).double()


def test_a_planted_scale_is_found_from_a_folder(tmp_path):
    """Rewards of one prompt of four are a hundred times those of the others; exact shares from K and weights."""

    def rewards(step: int, prompt: int, generator: torch.Generator) -> torch.Tensor:
        return torch.tensor([1.0, 1.0, 0.0, 0.0]).double() * (100 if prompt == 2 else 1)

    write_run(tmp_path / "run", steps=24, prompts=4, rewards=rewards, evaluated=False)
    one = finding(read_run(tmp_path / "run"))
    assert "it is p/2" in one.sentence and one.number.value > 0.9
    assert one.change is not None and one.change.knob == "reward function"
    assert "dominating prompts" in [each.name for each in advise_run(read_run(tmp_path / "run")).findings]
