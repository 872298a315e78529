import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from scoregram.advice.diagnose import DEMOS, GRAM_RULES, LOG_RULES, _truncation_lines
from scoregram.advice.findings import Change, RunFinding, Severity, Undecided, diagnosis_of
from scoregram.advice.settings import (
    measuring_setting,
)
from scoregram.bootstrap import FEWEST, LEVEL, bootstrap_estimate, mean_estimate
from scoregram.exhibits import Estimate, Figure
from scoregram.reading import Indicator, IndicatorState, StoredGroup, indicators, last_outcomes, read_run, running_curve
from scoregram.report import write_report
from scoregram.report.figures import HeatMap, StackedFigure
from scoregram.report.first_screen import (
    MOST_CARDS,
    SUBJECTS,
    NextStep,
    agreed_tiles,
    learning_answer,
    run_facts,
    when_learnt,
)
from scoregram.report.page import sparkline
from scoregram.report.run_page import run_page, summary_table
from scoregram.report.step_figures import learning_figures, noise_figures, prompts_figures
from scoregram.runs import GroupRecord, RolloutRecord, RunWriter, open_run
from scoregram.spectra import feasible_intervals
from scoregram.statistics import baseline_saving, group_blocks, noise_components
from tests.report_cases import CONFIG, Page, write_run

pytest.importorskip("plotly")

PLANTED = Path(__file__).parent / "planted"
"""Recorded runs with one fault each."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return folder, write_run(folder)


@pytest.fixture(scope="module")
def facts(run):
    return read_run(open_run(run[0]))


def drawings(folder) -> dict[str, Figure | HeatMap]:
    page = run_page(open_run(folder))
    return {one.id: one for section in page.sections for one in section.exhibits if isinstance(one, Figure | HeatMap)}


def figures(folder) -> dict[str, Figure]:
    return {name: one for name, one in drawings(folder).items() if isinstance(one, Figure)}


def test_a_measured_run_shows_everything(run):
    assert drawings(run[0]).keys() == {
        *("learning", "truncated", "groups", "success", "effective-rank", "top1-fraction", "rank-by-right", "cosine"),
        *("update-norm", "coherence", "snr", "noise-scale", "drivers", "conflict", "mse", "spectrum"),
    }


def test_the_rank_is_shown_over_its_null(run, facts):
    measured, null = figures(run[0])["effective-rank"].series
    assert null.role == "null" and set(null.y) == {1.0}
    for place, step in enumerate(measured.x):
        live = [g.record.statistics for g in facts.groups if g.record.step == step and g.is_live]
        rank, base = (sum(one[name] for one in live) for name in ("effective_rank", "effective_rank_orthogonal"))
        assert measured.y[place] == pytest.approx(rank / base)


def test_lines_are_means_over_the_groups_of_a_step(run, facts):
    measured, null = figures(run[0])["top1-fraction"].series
    for place, step in enumerate(measured.x):
        live = [g.record.statistics for g in facts.groups if g.record.step == step and g.is_live]
        for series, name in ((measured, "top1_fraction"), (null, "top1_fraction_orthogonal")):
            assert series.y[place] == pytest.approx(sum(one[name] for one in live) / len(live))


def test_outcomes_are_stacked_to_one(run):
    stacked = figures(run[0])["groups"]
    assert isinstance(stacked, StackedFigure) and [one.name for one in stacked.series] == [
        *("live", "all wrong", "all right")
    ]
    for shares in zip(*(one.y for one in stacked.series), strict=True):
        assert sum(shares) == pytest.approx(1)


def test_the_first_screen_names_the_run_and_says_how_it_goes(run):
    page = run_page(open_run(run[0]))
    facts = dict(page.facts)
    assert facts["model"] == "tiny" and facts["trains"] == "all parameters" and facts["group size R"] == "4"
    assert facts["steps"] == "6 trained, gradients of 6 measured"
    shown = Page(page.html())
    classes = [one.get("class", "") for one in shown.named("div")]
    drawn = [f"tile {tile.state}{' of-test' * tile.headline.startswith('test')}" for tile in page.tiles]
    assert [one for one in classes if one.startswith("tile ")] == drawn
    assert sum(one == "card" for one in classes) - len(page.cards[MOST_CARDS:]) == min(len(page.cards), MOST_CARDS)
    unbroken = [tile.headline.replace(" → ", "\u00a0→\u00a0") for tile in page.tiles]
    assert all(headline in shown.text("p") for headline in unbroken)
    links = [one["href"] for one in shown.named("a")]
    assert "https://arxiv.org/abs/2606.29238" in links and "#terms" in links


def test_the_possible_ranks_are_those_of_the_feasible_interval(facts):
    for group in facts.groups:
        if group.is_live:
            rows = int((group.record.advantages != 0).sum())
            interval = feasible_intervals(group.reading.top1_fraction, rows)["effective_rank"]
            assert group.possible_ranks == pytest.approx((interval.low, interval.high), abs=1e-12)
        else:
            assert all(map(math.isnan, group.possible_ranks))


def test_ranks_are_shown_by_how_many_were_right(run, facts):
    measured, null = figures(run[0])["rank-by-right"].series
    assert null.role == "null"
    for series, key in ((measured, "effective_rank"), (null, "effective_rank_orthogonal")):
        for k, y in zip(series.x, series.y, strict=True):
            values = [getattr(g.reading, key) for g in facts.groups if g.record.rewards.sum() == k]
            assert y == pytest.approx(sum(values) / len(values))


def test_the_last_third_is_averaged(run, facts):
    assert facts.steps == [1, 2, 3, 4, 5, 6] and facts.last_third == range(5, 7)
    last = [g for g in facts.groups if g.record.step >= 5]
    summary = facts.summary
    dead = [float(g.record.rewards.unique().numel() == 1) for g in last]
    assert summary.groups == len(last) == 6 and summary.dead.value == pytest.approx(sum(dead) / len(dead))
    rewards = torch.cat([g.record.rewards for g in last])
    chance = float(rewards.mean())
    assert summary.reward.value == pytest.approx(chance)
    right, rollouts = int(rewards.sum()), len(rewards)  # 6 groups are one stretch: all choices of 4 are equally likely
    alike = math.comb(right, 4) + math.comb(rollouts - right, 4)
    assert summary.equally_hard_dead == pytest.approx(alike / math.comb(rollouts, 4))
    pairs = [(g.reading.effective_rank, g.reading.effective_rank_orthogonal) for g in last if g.is_live]
    assert summary.rank_difference.value == pytest.approx(sum(a - b for a, b in pairs) / len(pairs))
    cosines = [g.reading.cosine for g in last]  # dead groups have angles too
    assert summary.cosine.value == pytest.approx(sum(cosines) / len(cosines))


def test_noise_is_pooled_over_steps_before_it_is_divided(run, facts):
    known = [noise_components(*run[1][step]) for step in (5, 6)]
    expected = np.array([list(vars(one).values()) for one in known])
    pooled = dict(zip(vars(known[0]), expected.mean(axis=0), strict=True))
    summary = facts.summary
    c1, c3 = pooled["between_prompts"], pooled["group_baseline"]
    best = 1 + math.sqrt(c3 / c1) if c1 > 0 else math.inf
    components = facts.noise().components
    assert components is not None and vars(components) == pytest.approx(pooled)
    assert summary.best_group_size.value == pytest.approx(max(2, best)) and summary.noise_steps == 2


def test_the_saving_of_the_baseline_is_that_of_all_groups_together(run, facts):
    grams = torch.cat([group_blocks(run[1][step][0], 4) for step in (5, 6)])
    rewards = torch.cat([run[1][step][1] for step in (5, 6)])
    assert facts.summary.baseline_saving.value == pytest.approx(baseline_saving(grams, rewards).fraction)


def test_the_table_holds_each_number_beside_what_to_compare_it_with(run, facts):
    rows = {row[0]: row for row in summary_table(facts).rows}
    assert rows["best group size"][2] == 4 and rows["noise scale, in rollouts"][2] == 12
    assert rows["test accuracy, last"][1:4] == (Estimate(0.75, 0.65, 0.85), 0.25, "at step 0")
    assert isinstance(rows["effective rank"][2], Estimate) and rows["cosine between rollouts"][2] == 0


def test_the_mean_has_the_interval_of_its_standard_error():
    values = np.random.default_rng(1).normal(size=500)
    found = mean_estimate(values)
    error = values.std(ddof=1) / math.sqrt(len(values))
    assert found.value == pytest.approx(values.mean())
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * error, rel=0.15)  # 1000 resamples: ends ± 5 % or so
    assert found == mean_estimate(values) and LEVEL == 0.95


def test_intervals_of_the_undefined_and_the_infinite():
    assert math.isnan(mean_estimate([]).value) and math.isnan(mean_estimate([math.nan]).value)
    one = mean_estimate([2.0, math.nan])
    assert one.value == 2 and math.isnan(one.low)
    jump = np.array([1.0, 1.0, math.inf])
    found = bootstrap_estimate(3, lambda drawn: jump[drawn].max(axis=-1))
    assert found.value == math.inf and found.low == 1 and found.high == math.inf
    assert math.isnan(bootstrap_estimate(2, lambda drawn: np.full(drawn.shape[:-1], math.nan)).low)


def all_wrong(step, prompt, generator):
    return torch.zeros(4, dtype=torch.float64)


def graded(step, prompt, generator):
    return torch.rand(4, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("options", "missing", "absent"),
    [
        ({"measured": False}, "No Gram was measured", {"effective-rank", "snr", "cosine"}),
        ({"measured": False, "evaluated": False, "steps": 1}, "No test accuracy", {"effective-rank"}),
        ({"rewards": all_wrong}, "No group was live", {"effective-rank", "rank-by-right", "coherence"}),
        ({"steps": 1}, "", set()),
        ({"prompts": 1}, "No noise components", {"snr", "noise-scale"}),
        ({"size": 2}, "need groups of at least 4", {"snr", "noise-scale"}),
        ({"size": 1}, "No group was live", {"effective-rank"}),
        ({"rewards": graded}, "", {"rank-by-right"}),
        ({"statistics": False}, "", set()),
    ],
)
def test_a_run_may_lack_anything(options, missing, absent, tmp_path):
    write_run(tmp_path / "run", **({"steps": 3} | options))
    assert not absent & figures(tmp_path / "run").keys()
    page = Page(write_report(tmp_path / "run").read_text())
    assert missing in page.text("li") and "nan" not in page.text()


def test_scalars_are_made_from_the_gram_where_the_run_did_not_store_them(tmp_path):
    write_run(tmp_path / "with")
    write_run(tmp_path / "without", statistics=False)
    assert figures(tmp_path / "with")["effective-rank"] == figures(tmp_path / "without")["effective-rank"]


def test_a_run_that_has_only_begun(tmp_path):
    RunWriter.create(tmp_path / "run", CONFIG, environment={}).close()
    text = Page(write_report(tmp_path / "run").read_text()).text()
    assert "This run holds no step yet." in text and "No step has been logged." in text


def test_a_run_that_was_killed_says_so(tmp_path):
    write_run(tmp_path / "run", steps=2)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    (tmp_path / "run" / "groups" / ".partial-step-000000003-000.parquet").write_bytes(b"x")
    text = Page(write_report(tmp_path / "run").read_text()).text("li")
    assert "bytes after the last complete line are ignored" in text and "unfinished, ignored" in text


def test_steps_passed_over_and_rollouts_without_a_reward(tmp_path):
    with RunWriter.create(tmp_path / "run", {}, environment={}) as writer:
        writer.write_metrics(1, {"skipped": 1})
        writer.write_metrics(2, {"reward": 0.5, "groups": 0, "live_groups": 0})
        rewards, zeros = torch.tensor([1.0, math.nan, 0.0]), torch.zeros(3, dtype=torch.float64)
        record = GroupRecord(
            step=2, prompt_id="<script>", rewards=rewards, lengths=torch.ones(3).long(), advantages=zeros
        )
        writer.write_groups(2, [record])
        writer.write_groups(2, [dataclasses.replace(record, rewards=torch.full((3,), math.nan))])
    (mixed, unknown) = read_run(open_run(tmp_path / "run")).groups
    assert mixed.is_live and mixed.right is None and not unknown.is_live
    assert read_run(open_run(tmp_path / "run")).summary.dead.value == 0  # who knows of the other
    assert "not finite: 1." in Page(write_report(tmp_path / "run").read_text()).text("li")


def test_probes_do_not_count_as_training(tmp_path):
    rewards, zeros = torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.float64)
    trained = GroupRecord(step=1, prompt_id="a", rewards=rewards, lengths=torch.ones(2).long(), advantages=zeros)
    with RunWriter.create(tmp_path / "run", {}, environment={}) as writer:
        writer.write_groups(1, [trained, dataclasses.replace(trained, prompt_id="b", kind="fixed")])
    assert [g.record.prompt_id for g in read_run(open_run(tmp_path / "run")).groups] == ["a"]


def test_what_is_no_gram_has_no_reading():
    gram = torch.tensor([[1.0, 5.0], [5.0, 1.0]], dtype=torch.float64)
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
    record = GroupRecord(
        step=1, prompt_id="p", rewards=rewards, lengths=torch.ones(2).long(), advantages=rewards - 0.5, gram=gram
    )
    assert StoredGroup(record).reading is None


def test_a_reading_needs_advantages_and_no_rewards():
    rewards = torch.tensor([1.0, math.nan], dtype=torch.float64)
    advantages, gram = torch.tensor([0.5, -0.5], dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    record = GroupRecord(
        step=1, prompt_id="p", rewards=rewards, lengths=torch.ones(2).long(), advantages=advantages, gram=gram
    )
    assert getattr(StoredGroup(record).reading, "effective_rank", None) == pytest.approx(2)
    assert StoredGroup(dataclasses.replace(record, advantages=rewards)).reading is None


def test_the_lead_says_in_plain_words_what_is_known(run, tmp_path):
    page = run_page(open_run(run[0]))
    assert dict(page.answers)["Does it learn?"] == "Yes: test accuracy 0.25 → 0.75."
    assert "Other numbers are means over the last third, steps 5 to 6." in page.window
    assert page.window.startswith("This is one run with one seed, 3: the 95 % intervals, in brackets, leave out")
    assert "“0.25 → 0.75” goes from the first to the last evaluation." in page.window
    write_run(tmp_path / "bare", measured=False, evaluated=False, steps=2)
    assert run_page(open_run(tmp_path / "bare")).answers[0][1] == "Too early to tell."


def test_a_reward_that_rises_on_unfinished_texts_is_no_success(run):
    reading = read_run(open_run(run[0]))
    *others, cut = indicators(reading)
    learning, *_ = agreed_tiles([*others, dataclasses.replace(cut, state="act")], diagnosis_of("", {}))
    assert (others[0].state, learning.state) == ("good", "watch")
    answer = learning_answer(reading, [*others, dataclasses.replace(cut, state="act", headline="98% truncated")])
    assert (
        answer == "Not proven: test accuracy 0.25 → 0.75, but 98% truncated. Read some rollouts before you believe it."
    )


@pytest.mark.parametrize(
    ("state", "change", "says"),
    [
        (
            "watch",
            (-0.2, -0.3, -0.1),
            "No, it gets worse: reward 0.8 → 0.6.",
        ),  # too few evaluations to ask for a change
        ("act", (-0.2, -0.3, -0.1), "No, it gets worse: reward 0.8 → 0.6."),
        ("act", (0.0, 0.0, 0.0), "No: reward 0.8 → 0.6. The finding below says why."),  # constant reward
        ("act", (0.3, 0.2, 0.4), "No: reward 0.8 → 0.6. The finding below says why."),  # it rises, held-out falls
        ("watch", (0.1, -0.1, 0.3), "Not proven: reward 0.8 → 0.6; the interval of the change includes 0."),
    ],
)
def test_only_a_change_below_0_is_called_worse(run, state, change, says):
    reading = read_run(open_run(run[0]))
    learning, *others = indicators(reading)
    told = {"state": state, "headline": "reward 0.8 → 0.6", "change": Estimate(*change)}
    assert learning_answer(reading, [dataclasses.replace(learning, **told), *others]).startswith(says)


def test_names_from_data_are_text(tmp_path):
    folder = tmp_path / "<script>alert(1)<"
    write_run(folder, prompt_id="</script><script>alert({})</script>")
    page = Page(write_report(folder).read_text())
    assert len(page.named("script")) == 2 and "<script>alert(1)<" in page.text("h1")


def a_tile(name: str, state: IndicatorState) -> Indicator:
    return Indicator(name=name, state=state, headline="", sentence="S.", curve=running_curve((), ()))


AGREED: dict[Severity, dict[str, str]] = {
    "critical": {"good": "act", "watch": "act", "act": "act", "unknown": "act"},
    "warning": {"good": "watch", "watch": "watch", "act": "act", "unknown": "unknown"},
    "note": {"good": "good", "watch": "watch", "act": "act", "unknown": "unknown"},
}
"""Severity of a finding → word of a tile → the word that the page shows."""


@pytest.mark.parametrize("name", sorted(SUBJECTS))
@pytest.mark.parametrize("state", ["good", "watch", "act", "unknown"])
def test_a_tile_agrees_with_the_findings_of_its_subject(name, state):
    tile = a_tile(name, state)
    rule = SUBJECTS[name][0]
    for severity, words in AGREED.items():
        finding = RunFinding(name=rule, severity=severity, sentence="", evidence="")
        (agreed,) = agreed_tiles([tile], diagnosis_of("", {rule: finding}))
        assert agreed.state == words[state], severity
    (open_tile,) = agreed_tiles([tile], diagnosis_of("", {rule: Undecided("more steps")}))
    assert open_tile.state == ("watch" if state == "act" else state)
    assert agreed_tiles([tile], diagnosis_of("", {rule: None, "seed": Undecided("x")})) == (tile,)


def test_every_subject_is_a_rule_and_every_tile_has_one(tmp_path):
    write_run(tmp_path / "run")
    assert {tile.name for tile in run_page(open_run(tmp_path / "run")).tiles} == set(SUBJECTS)
    assert {rule for rules in SUBJECTS.values() for rule in rules} <= {*LOG_RULES, *GRAM_RULES}


FAULTS = [path.parent for root in (DEMOS, PLANTED) for path in sorted(root.glob("*/config.yaml"))]


@pytest.mark.parametrize("folder", FAULTS, ids=lambda folder: folder.name)
def test_no_tile_of_a_recorded_fault_is_good_where_a_finding_warns(folder):
    page = run_page(open_run(folder))
    grave = {card.name for card in page.cards if card.severity != "note"}
    for tile in page.tiles:
        assert tile.state != "good" or not grave & set(SUBJECTS[tile.name]), tile.name


@pytest.mark.parametrize("steps", [13, 31, 60, 100])
def test_the_advised_interval_measures_often_enough(steps):
    every = int(measuring_setting({"method": "grpo"}, steps // (3 * FEWEST - 2)).removeprefix("--measure-every "))
    assert math.ceil(len(range(every, steps + 1, every)) / 3) >= FEWEST  # the last third of the measured steps
    trl = {"integration": {"name": "trl"}, "measure_every": 10}
    assert measuring_setting(trl, 4) == "attach(trainer, every=4) (now 10)"
    assert (
        measuring_setting({"method": "grpo", "measure_every": 4}, 4)
        == ""
        == measuring_setting({"integration": {"name": "verl"}}, 4)
    )


def test_a_run_that_measures_by_rollouts_is_told_to_measure_by_fewer_of_them():
    """`--measure-every` has no effect there."""
    config = {"method": "grpo", "rollouts": 64000, "batch_size": 64, "measure_every": 1}
    assert measuring_setting(config | {"every_rollouts": 2048}, 4) == "--every-rollouts 256 (now 2048)"
    assert measuring_setting(config | {"every_rollouts": 256}, 4) == ""
    by_steps = {**config, "every_rollouts": 0, "measure_every": 10}  # a budget alone changes nothing
    assert measuring_setting(by_steps, 4) == "--measure-every 4 (now 10)"


def test_the_method_of_the_paper_is_named_with_its_paper(run):
    reading = read_run(open_run(run[0]))
    named = dict(run_facts(dataclasses.replace(reading, config={"method": "grpo-paper"})))
    assert named["method"].startswith("grpo-paper (eq. 22 of arXiv:2606.29238")
    assert dict(run_facts(dataclasses.replace(reading, config={"method": "grpo"})))["method"] == "grpo"


def test_success_rates_say_whose_they_are(run):
    reading = read_run(open_run(run[0]))
    figure = next(one for one in prompts_figures(reading) if one.id == "success")
    last = [group for group in reading.groups if group.record.step in reading.last_third]
    prompts, steps = {one.record.prompt_id for one in last}, {one.record.step for one in last}
    assert (
        f"of {len(prompts)} prompts" in figure.caption and f"at {len(steps)} steps of the last third" in figure.caption
    )


def test_a_run_of_another_trainer_counts_the_steps_between_its_logs(tmp_path):
    write_run(tmp_path / "run", steps=2)
    run = dataclasses.replace(
        read_run(tmp_path / "run"),
        config={"integration": {"name": "trl"}, "arguments": {"max_steps": 60, "learning_rate": 0.003}},
        lines=[{"step": 10, "reward": 0.5}, {"step": 40, "reward": 0.5}],
        groups=[],
    )
    facts = dict(run_facts(run))
    assert facts["steps"] == "40 of 60 trained, gradients of 0 measured" and facts["learning rate"] == "0.003"


def learning(steps, values, *, quantity: str = "test accuracy", state: IndicatorState = "good") -> Indicator:
    headline, curve = f"{quantity} {values[0]:.2f} → {values[-1]:.2f}", running_curve(steps, values)
    return Indicator(name="learning", state=state, headline=headline, sentence="", curve=curve, scale=(0.0, 1.0))


def test_the_lead_says_when_the_run_had_learnt():
    steps = (0, 20, 40, 60)
    solved = list(when_learnt(learning(steps, (0.34, 0.95, 0.98, 0.96))))
    assert solved == ["90% of the gain or more was there at step 20."]
    assert list(when_learnt(learning(steps, (0.34, 0.98, 0.98, 0.97)))) == ["All of the gain was there at step 20."]
    assert list(when_learnt(learning(steps, (0.1, 0.2, 0.3, 0.5)))) == []  # it still learns
    assert list(when_learnt(learning(steps, (0.3, 0.9, 0.9, 0.96), quantity="reward"))) == [
        "90% of the gain or more was there at step 20."
    ]
    assert list(when_learnt(learning(steps, (0.9, 0.9, 0.8, 0.96), state="watch"))) == []


def a_finding(name: str, knob: str, severity: Severity = "warning") -> RunFinding:
    change = Change(knob=knob, direction="up", sentence=f"Change the {knob}.", effect="")
    return RunFinding(name=name, severity=severity, sentence="", evidence="", change=change)


def test_cards_have_the_words_of_the_tiles(run):
    page = dataclasses.replace(
        run_page(open_run(run[0])), cards=(a_finding("a", "x", "critical"), a_finding("b", "y", "note")), shown_cards=2
    )
    classes = [one.get("class", "") for one in Page(page.html()).named("div")]
    assert [one for one in classes if one.startswith("card")] == ["card act", "card watch"]
    assert "critical" not in Page(page.html()).text("h3")


def test_sampled_and_greedy_tests_are_in_the_first_figure(run):
    rewards = {0: {"a": 0.0, "b": 1.0}, 6: {"a": 1.0, "b": 1.0}}
    reading = dataclasses.replace(read_run(open_run(run[0])), tests={"test": rewards})
    figure = next(learning_figures(reading))
    sampled = next(one for one in figure.series if one.name == "test reward, sampled")
    assert (sampled.x, sampled.y) == ((0.0, 6.0), (0.5, 1.0)) and "Test reward: sampled" in figure.caption
    assert [one.y for one in figure.series if one.name == "test accuracy, greedy"] == [(0.25, 0.75)]
    untested = dataclasses.replace(reading, tests={}, lines=[{"step": 1, "reward": 0.5}])
    assert "No test was made." in next(learning_figures(untested)).caption


def test_a_small_line_has_an_axis_and_dots_for_single_values():
    drawn = sparkline(learning((0, 30, 60), (0.05, 0.06, 0.064)))
    assert drawn is not None and drawn["ticks"] == [(78.0, "0"), (40.0, "0.5"), (2.0, "1")]
    assert drawn["points"] == "0.0,74.2 100.0,73.4 200.0,73.1"  # 78 - 76 y: a small change looks small
    assert [x for x, _ in drawn["dots"]] == ["0.0", "100.0", "200.0"]
    many = sparkline(learning(range(60), [0.5] * 60))
    assert many is not None and many["dots"] == [] and many["mean"] == "mean of 5 steps"
    assert many["band"].count(",") == 120  # the low and the high end of every step
    assert drawn["band"] == "" and drawn["mean"] == ""


def test_the_ends_of_stored_rollouts_are_those_of_the_records(tmp_path):
    def rollout(index: int, kind: str, reward: float, finished: bool) -> RolloutRecord:
        tokens = torch.tensor([1, 2, 3])
        known = {"token_ids": tokens, "prompt_length": 1, "log_probs": torch.zeros(3), "reward": reward}
        return RolloutRecord(step=1, prompt_id="p", group=0, index=index, kind=kind, finished=finished, **known)

    with RunWriter.create(tmp_path / "run", CONFIG, environment={}) as writer:
        ends = [("train", 0.5, True), ("train", 1.0, False), ("test", 0.0, True), ("loss", 0.0, False)]
        writer.write_rollouts(1, [rollout(place, *end) for place, end in enumerate(ends)])
        writer.write_metrics(1, {"reward": 0.5})
    folder = open_run(tmp_path / "run")
    assert folder.rollout_ends(1) == [(0.5, True), (1.0, False), (0.0, False)]
    lines = list(_truncation_lines(read_run(folder)))
    assert lines == [{"step": 1, "truncated_reward": 0.5, "finished_reward": 0.5}]


def test_the_page_states_a_change_once_and_what_to_do_otherwise(run):
    change = Change(knob="x", direction="up", sentence="Do it.", effect="more.", setting="--x 1", others=("Or so.",))
    change = dataclasses.replace(change, not_advised=("Not so.",))
    cards = tuple(dataclasses.replace(a_finding(name, name), change=change) for name in ("a", "b"))
    lead = NextStep(sentence="", finding="a")
    page = dataclasses.replace(run_page(open_run(run[0])), cards=cards, shown_cards=1, next_step=lead)
    html = page.html()
    assert html.count("<b>Do:</b> Do it.") == 1 == html.count("<b>Expect:</b> more.")
    assert html.count("<b>Do:</b> what the top of this page says.") == 1 and html.count("<code>--x 1</code>.") >= 2
    assert html.count("<li>Or so.</li>") == 2 == html.count("<b>Not advised:</b> Not so.")
    assert "1. a <span" in html and "2. b <span" in html and "Then: b (--x 1); and what the other rules say" in html


def test_a_page_whose_cards_are_all_folded_away_does_not_say_that_there_are_none(run):
    page = run_page(open_run(run[0]))
    folded = dataclasses.replace(page, cards=(a_finding("a", "a"),), shown_cards=0).html()
    assert "No rule about the prompts asks for a change." in folded and "No rule asks for a change." not in folded
    assert "No rule asks for a change." in dataclasses.replace(page, cards=(), shown_cards=0, answers=()).html()


def test_rollouts_are_linked_where_the_page_has_their_texts(run):
    following = NextStep(sentence="", steps=("Read some rollouts: `--x 1`",))
    page = dataclasses.replace(run_page(open_run(run[0])), answers=(), next_step=following)
    for has_texts in (True, False):
        html = dataclasses.replace(page, glass=dataclasses.replace(page.glass, has_texts=has_texts)).html()
        assert ('class="to-rollouts">Read some rollouts</a>: <code><span>--x</span> 1</code>' in html) == has_texts
        assert ("The rollouts: text, reward" in html) == has_texts


def test_every_page_names_its_trainer(run):
    reading = read_run(open_run(run[0]))
    named = {
        "scoregram train": {"method": "grpo"},
        "TRL": {"integration": {"name": "trl"}},
        "not known: a dump, format verl": {"format": "verl"},
    }
    for name, config in named.items():
        assert dict(run_facts(dataclasses.replace(reading, config=config)))["trainer"] == name


def test_captions_on_noise_agree_with_the_tile(run):
    reading = read_run(open_run(run[0]))
    assert reading.trust.has_few_steps
    captions = {figure.id: figure.caption for figure in noise_figures(reading)}
    assert "says what it needs" in captions["noise-scale"] and "pools" not in captions["noise-scale"]
    scales = [scale for scale in reading.series("gram/noise_scale")[1] if math.isfinite(scale)]
    above = sum(scale > reading.batch_size for scale in scales)
    assert f"of the {len(scales)} of" in captions["noise-scale"] and f"; {above} of them" in captions["noise-scale"]


def test_the_chance_of_a_dead_group_has_one_basis_on_a_page(run):
    """The table and the card on dead groups: chance within stretches of steps, given their right rollouts."""
    reading = read_run(open_run(run[0]))
    row = next(row for row in summary_table(reading).rows if row[0] == "share of dead groups")
    outcomes = last_outcomes(reading)
    assert outcomes is not None and row[3] == "by chance, if all prompts of a step were equally hard"
    assert row[2] == outcomes.chance_share("all wrong") + outcomes.chance_share("all right")
    bare = dataclasses.replace(reading, lines=[{"step": step, "reward": 0.5} for step in reading.steps])
    stored = next(row for row in summary_table(bare).rows if row[0] == "share of dead groups")
    assert stored[2] == bare.summary.equally_hard_dead == pytest.approx(row[2]) and stored[3] == row[3]


def test_conflict_says_how_many_pairs_it_is_of(run):
    reading = read_run(open_run(run[0]))
    live = dict(zip(*reading.series("live_groups"), strict=True))
    steps = [step for step in reading.series("gram/conflicting_prompts")[0] if live[step] >= 2]
    pairs = [math.comb(int(live[step]), 2) for step in steps]
    caption = figures(run[0])["conflict"].caption
    spread = f"{pairs[0]}" if len(set(pairs)) == 1 else f"{min(pairs)} to {max(pairs)}"
    assert f": {spread} pairs a step, {sum(pairs) / len(pairs):.0f} on average" in caption
