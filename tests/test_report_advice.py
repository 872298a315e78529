import dataclasses
import math

import pytest
import torch

from scoregram.advice import RULES, advice_text, findings, group_size_for
from scoregram.exhibits import Estimate
from scoregram.reading import RunReading, RunSummary, StoredGroup
from scoregram.runs import GroupRecord
from scoregram.statistics import NoiseComponents, mixed_probability

NAN = Estimate(math.nan)
SILENT = RunSummary(
    groups=0,
    live=0,
    noise_steps=0,
    reward=NAN,
    tested=NAN,
    dead=NAN,
    equally_hard_dead=math.nan,
    effective_rank=NAN,
    effective_rank_null=NAN,
    rank_difference=NAN,
    least_rank=math.nan,
    most_rank=math.nan,
    top1=NAN,
    top1_null=NAN,
    cosine=NAN,
    baseline_saving=NAN,
    noise_scale=NAN,
    snr=NAN,
    best_group_size=NAN,
    components=None,
)


def run_of(*outcomes: str, lines=(), prompts: list[str] | None = None) -> RunReading:
    """One step with a group for each outcome, such as `1000`."""
    records = [
        GroupRecord(
            step=1,
            prompt_id=prompts[place] if prompts else f"p/{place}",
            rewards=torch.tensor([float(mark) for mark in outcome], dtype=torch.float64),
            lengths=torch.ones(len(outcome)).long(),
            advantages=torch.zeros(len(outcome), dtype=torch.float64),
        )
        for place, outcome in enumerate(outcomes)
    ]
    return RunReading({}, (), [{"step": 1, "reward": 0.5, **dict(lines)}], [StoredGroup(record) for record in records])


def with_summary(run: RunReading, **changes) -> RunReading:
    """The run as if its last third had these numbers."""
    vars(run)["summary"] = dataclasses.replace(SILENT, **changes)
    return run


def said(run: RunReading, **changes) -> list[str]:
    return [one.sentence for one in findings(with_summary(run, **changes))]


def test_nothing_is_said_where_nothing_is_known():
    assert said(run_of()) == said(run_of("1000", "1111")) == []
    text = advice_text(with_summary(run_of()))
    assert text.startswith("Cannot tell: ") and all(name in text for name in RULES)


def test_nothing_to_change_is_told_apart_from_cannot_tell():
    fine = {"dead": Estimate(0.1, 0.0, 0.2), "baseline_saving": Estimate(0.0, -0.02, 0.03)}
    run = with_summary(run_of("1000", "1100"), **fine, noise_scale=Estimate(100.0, 2.0, math.inf))
    assert RULES["batch size"](run) is None  # 8 rollouts: the interval holds too few and too many
    known, unknown = advice_text(run).split("\n\n")
    assert known == "Nothing to change: dead groups, baseline."
    assert unknown.startswith("Cannot tell: group size, batch size, length limit, ")
    run = with_summary(run_of("1000", "1100"), noise_scale=Estimate(8.0, 4.0, 16.0))
    assert RULES["batch size"](run) == []


def test_the_group_size_is_the_least_that_mixes_enough():
    chances = [0.05, 0.3, 0.9]
    size = group_size_for(chances)
    assert size is not None
    mean = [sum(mixed_probability(p, s) for p in chances) / 3 for s in (size - 1, size)]
    assert mean[0] < 0.8 <= mean[1]
    assert group_size_for([0.0]) is None


def test_prompts_seen_twice_count_once():
    assert run_of("1000", "0000", "1111", prompts=["a", "a", "b"]).success_rates() == [1.5 / 9, 4.5 / 5]
    assert run_of("1000", "2000").success_rates() == []  # neither right nor wrong


def test_dead_groups_call_for_other_prompts_and_larger_groups():
    known = run_of("0000", "0000", "0000", "1000")
    easier, larger = said(known, dead=Estimate(0.75))
    assert easier == "Draw easier prompts: 3 of the 3 dead groups are all wrong."
    size = group_size_for([0.1, 0.1, 0.1, 0.3])
    assert larger == f"A group size of {size} in place of 4 would make 80% of the groups live."
    assert "harder" in said(run_of("1111", "1111", "0111"), dead=Estimate(2 / 3))[0]
    assert said(known, dead=Estimate(0.5)) == []
    mixed = said(run_of("1111", "0000"), dead=Estimate(1.0))
    assert len(mixed) == 1 and mixed[0].startswith("A group size of ")  # neither kind has two thirds


def test_no_group_size_is_named_for_other_rewards():
    assert said(run_of("2222", "2222"), dead=Estimate(1.0)) == []


def test_the_group_size_changes_only_when_its_interval_says_so():
    noise = NoiseComponents(1.0, 1.0, 1.0, 100.0)  # best at 11
    known = run_of("1000")
    decided = said(known, best_group_size=Estimate(11.0, 8.0, 15.0), components=noise)
    # c1 R + c2 + c3/(R-1): 4 + 1 + 100/3 at 4, 11 + 1 + 10 at 11
    gain = 1 - 22 / (5 + 100 / 3)
    assert decided == [
        "Use groups of about 11 in place of 4: at the same number of rollouts the error of the update would fall by "
        f"about {gain:.0%}."
    ]
    assert said(known, best_group_size=Estimate(11.0, 3.0, math.inf), components=noise) == []
    assert said(known, best_group_size=Estimate(math.inf, 8.0, math.inf), components=noise) == []
    small = NoiseComponents(1.0, 1.0, 1000.0, 100.0)  # within-prompt noise hides any gain
    assert said(known, best_group_size=Estimate(11.0, 8.0, 15.0), components=small) == []


@pytest.mark.parametrize(
    ("scale", "told"),
    [
        (Estimate(100.0, 40.0, math.inf), "Use more rollouts per step, towards 40 or more"),
        (Estimate(math.inf, math.inf, math.inf), "Use more rollouts per step, well beyond"),
        (Estimate(1.0, 0.5, 1.5), "Fewer rollouts per step would be enough, towards 2"),
        (Estimate(100.0, 20.0, math.inf), None),
        (Estimate(1.0, 0.5, 30.0), None),
        (Estimate(100.0), None),
    ],
)
def test_the_batch_is_judged_by_the_whole_interval_of_the_noise_scale(scale, told):
    found = said(run_of("1000", "1100"), noise_scale=scale)  # a batch of 8
    assert [sentence[: len(told or "")] for sentence in found] == ([told] if told else [])


def test_the_baseline_the_limit_on_length_and_a_single_driver():
    known = run_of("1000", lines={"finished": 0.5, "gram/largest_share": 0.75})
    baseline, limit, driver = said(known, baseline_saving=Estimate(0.4, 0.1, 0.7))
    assert "save about 40%" in baseline and "50% of the rollouts were cut off" in limit and "75%" in driver
    fine = run_of("1000", lines={"finished": 0.95, "gram/largest_share": 0.2})
    assert said(fine, baseline_saving=Estimate(0.4, 0.01, 0.7)) == []


def test_prompts_that_are_known_by_heart():
    (sentence,) = said(run_of(), reward=Estimate(0.195, 0.178, 0.213), tested=Estimate(0.111, 0.097, 0.125))
    assert sentence.startswith("Train on more prompts: sampled in the same way")
    assert "0.195 [0.178, 0.213]" in sentence and "0.111 [0.097, 0.125]" in sentence
    assert said(run_of(), reward=Estimate(0.195, 0.12, 0.25), tested=Estimate(0.111, 0.097, 0.125)) == []
    assert said(run_of(), reward=Estimate(0.15, 0.14, 0.16), tested=Estimate(0.111, 0.097, 0.125)) == []


def test_a_rank_on_its_null_is_no_redundancy():
    rank = {"effective_rank": Estimate(2.4), "effective_rank_null": Estimate(2.5), "live": 9}
    (sentence,) = said(run_of(), **rank, rank_difference=Estimate(-0.1, -0.3, 0.1))
    assert sentence.startswith("Do not read redundancy into the effective rank of 2.40")
    assert said(run_of(), **rank, rank_difference=Estimate(-0.2, -0.3, -0.1)) == []


def test_every_sentence_carries_its_rule_and_number():
    run = with_summary(run_of("1000"), baseline_saving=Estimate(0.4, 0.1, 0.7))
    (one,) = findings(run)
    assert one.rule.startswith("given if ") and "0.400 [0.100, 0.700]" in one.rule
    assert f"- {one.sentence} Rule: {one.rule}" in advice_text(run)


@pytest.mark.parametrize("measured", [1, 4, 5])
def test_nothing_is_concluded_about_noise_from_few_steps(measured):
    run = with_summary(
        run_of("1000", "1100"),
        dead=Estimate(0.1, 0.0, 0.2),
        noise_scale=Estimate(100.0, 90.0, 110.0),
        baseline_saving=Estimate(0.5, 0.4, 0.6),
        rank_difference=Estimate(0.0, -0.1, 0.1),
    )
    vars(run)["trust"] = dataclasses.replace(run.trust, last_measured=measured)
    assert bool(findings(run)) == (measured == 5)
    assert ("Cannot tell: group size, batch size, baseline" in advice_text(run)) == (measured < 5)
    assert "Nothing to change: dead groups." in advice_text(run)
