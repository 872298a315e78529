"""Rules on Grams: decided by intervals, on readings with given numbers; shares and products against definitions."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import t as student

from scoregram.advice import GRAM_RULES, RunFinding, advise_run, noise_rules
from scoregram.advice.findings import Undecided
from scoregram.advice.gram_rules import _who_dominates, largest_row, shortened_text
from scoregram.advice.noise_rules import least_error_size
from scoregram.bootstrap import t_mean
from scoregram.exhibits import Estimate
from scoregram.reading import RunReading, StoredGroup, SuccessLaw, group_size_for, layer_signals, read_run
from scoregram.runs import GroupRecord, RolloutRecord, RunWriter
from scoregram.statistics import NoiseComponents
from tests.contradictions import contradictions
from tests.reading_cases import run_of, with_noise
from tests.report_cases import write_run


def found(name: str, run: RunReading) -> Any:
    return GRAM_RULES[name](run)


def test_the_group_size_changes_only_when_the_error_says_so():
    noise = NoiseComponents(1.0, 1.0, 1.0, 100.0)  # best at 11
    run = with_noise(run_of("1000"), best_group_size=Estimate(11.0, 8.0, 15.0), components=noise)
    one = found("group size", run)
    # c1 R + c2 + c3/(R-1): 4 + 1 + 100/3 at 4, 11 + 1 + 10 at 11
    gain = 1 - 22 / (5 + 100 / 3)
    assert (
        one.change.direction == "up"
        and f"falls by about {gain:.0%}" in one.change.effect
        and "11" in one.change.sentence
    )
    assert (
        found("group size", with_noise(run_of("1000"), best_group_size=Estimate(5.0, 3.0, 9.0), components=noise))
        is None
    )
    small = NoiseComponents(1.0, 1.0, 1000.0, 100.0)  # within-prompt noise hides any gain
    assert (
        found("group size", with_noise(run_of("1000"), best_group_size=Estimate(11.0, 8.0, 15.0), components=small))
        is None
    )
    unbounded = with_noise(run_of("1000"), best_group_size=Estimate(11.0, 3.0, math.inf), components=noise)
    assert isinstance(found("group size", unbounded), Undecided)
    larger = with_noise(
        run_of("1000"),
        best_group_size=Estimate(math.inf, 8.0, math.inf),
        components=NoiseComponents(1.0, -1.0, 1.0, 100.0),
    )
    assert "about 8 in place of 4" in found("group size", larger).change.sentence


def test_liveness_names_a_group_size_only_where_no_error_is_known():
    """The contradiction that two rules gave: larger groups for liveness, smaller ones for the error."""
    dead = run_of("0000", "0000", "0000", "1000", "0000", "0000", "0000", "0000", prompts=list("abcdefgh"))
    by_liveness = found("group size", dead)
    # one right of 32, so all prompts may be alike: 1 - (31/32)^R - … reaches 0.8 at R = 51, beyond a step of 32
    assert group_size_for(SuccessLaw(1 / 32, math.inf)) == 51
    assert by_liveness.severity == "note" and "groups of 51, or measure" in by_liveness.change.sentence
    assert "about 80% of the groups would be live." in by_liveness.change.effect
    noise = NoiseComponents(1.0, 10.0, 1.0, 10.0)  # best at 2
    by_error = found("group size", with_noise(dead, best_group_size=Estimate(2.0, 2.0, 3.0), components=noise))
    assert by_error.change.direction == "down" and "of the groups live" in by_error.change.effect
    assert contradictions(advise_run(dead).findings) == []


def test_advised_group_sizes_divide_the_rollouts_of_a_step():
    outcomes = ["11110000"] * 4 + ["10000000"] * 4  # 64 rollouts
    noise = NoiseComponents(1.0, 4.0, 1.0, 16.0)  # best at 3
    run = with_noise(run_of(*outcomes), best_group_size=Estimate(3.0, 2.5, 3.7), components=noise)
    one = found("group size", run)
    # c1 R + c2 + c3/(R-1): 32 + 1 + 16/7 at 8, 16 + 1 + 16/3 at 4, the nearest that divides 64
    gain = 1 - (17 + 16 / 3) / (33 + 16 / 7)
    assert one.change.sentence == "Use groups of 4 in place of 8: 16 prompts at the same 64 rollouts."
    assert f"falls by about {gain:.0%}" in one.change.effect
    # 24 right pairs of one prompt, of 21 ± 3.5 by chance: all prompts count as alike
    live = [1 - (5 / 16) ** r - (11 / 16) ** r for r in (4, 8)]
    assert f"{16 * live[0]:.0f} of 16, now {8 * live[1]:.0f} of 8" in one.change.effect
    # best at 2.6: 2 + 2 + 2.56 at 2 is 4 % below 4 + 2 + 2.56/3 at 4; without within-prompt noise it is 6 % below
    for within, chosen in ((2.0, 4), (0.0, 2)):
        noise = NoiseComponents(1.0, 1.0, within, 2.56)
        small = with_noise(run, best_group_size=Estimate(2.6, 2.4, 3.7), components=noise)
        assert least_error_size(small.noise(), 8, 64) == chosen
    flat = NoiseComponents(1.0, 1.0, 1000.0, 1.0)  # no size saves anything
    assert found("group size", with_noise(run, best_group_size=Estimate(3.0, 2.5, 3.7), components=flat)) is None


@pytest.mark.parametrize(
    ("scale", "direction"),
    [
        (Estimate(200.0, 80.0, math.inf), "up"),
        (Estimate(math.inf, math.inf, math.inf), "undecided"),  # below 0 by chance
        (Estimate(1.0, 0.5, 1.5), "down"),
        (Estimate(200.0, 40.0, math.inf), "undecided"),
        (Estimate(1.0, 0.5, 30.0), "undecided"),
        (Estimate(100.0), "undecided"),
        (Estimate(16.0, 8.0, 32.0), None),
    ],
)
def test_the_batch_is_judged_by_the_whole_interval_of_the_noise_scale(scale, direction):
    one = found("batch size", with_noise(run_of(*["1000", "1100"] * 2), noise_scale=scale))  # a batch of 16
    told = "undecided" if isinstance(one, Undecided) else None if one is None else one.change.direction
    assert told == direction


def test_a_step_of_two_prompts_is_not_made_smaller():
    assert found("batch size", with_noise(run_of("1000", "1100"), noise_scale=Estimate(1.0, 0.5, 1.5))) is None


@pytest.mark.parametrize("high", [0.01, 0.03])
def test_the_expected_signal_never_comes_from_an_estimate_of_no_signal(high):
    """From -0.011 to -0.045 was once expected of four times the rollouts."""
    resolved: dict[str, Any] = {"snr": Estimate(0.05, 0.01, 0.1), "noise_scale": Estimate(320.0, 160.0, 1600.0)}
    run = run_of(*["1000", "1100"] * 2)
    one = found("batch size", with_noise(run, **resolved))
    assert "from 0.05 to about 0.2, at 4 times the cost" in one.change.effect
    assert one.change.sentence.startswith("Use more rollouts")
    half: dict[str, Any] = {"snr": Estimate(-0.01, -0.05, high), "noise_scale": Estimate(math.inf, 16 / high, math.inf)}
    one = found("batch size", with_noise(run, **half))
    assert one.change.sentence.startswith("First check that right completions get more reward")
    assert f"at most {high:.2g} to at most {4 * high:.2g}" in one.change.effect and "-0.0" not in one.change.effect
    none: dict[str, Any] = {"snr": Estimate(-0.03, -0.05, -0.01), "noise_scale": Estimate(math.inf, math.inf, math.inf)}
    verdict = GRAM_RULES["batch size"](with_noise(run, **none))
    assert isinstance(verdict, Undecided) and "which only chance can do" in verdict.needs


def test_batch_and_group_size_name_the_same_number_of_rollouts():
    """`--batch-size 64` once stood beside "groups of 8 … at the same 16 rollouts"."""
    scale = {"noise_scale": Estimate(200.0, 80.0, math.inf), "snr": Estimate(0.08, 0.0, 0.2)}
    size = {"best_group_size": Estimate(11.0, 8.0, 15.0), "components": NoiseComponents(1.0, 1.0, 1.0, 100.0)}
    run = run_of(*["1000", "1100"] * 2)
    both = with_noise(run, **scale, **size)
    assert found("batch size", both).change.value == 64
    told = "Use groups of 8 in place of 4: 8 prompts at the 64 rollouts that “batch size” advises."
    assert found("group size", both).change.sentence == told
    alone = with_noise(run_of(*["1000", "1100"] * 2), **size)
    told = "Use groups of 8 in place of 4: 2 prompts at the same 16 rollouts."
    assert found("group size", alone).change.sentence == told
    small = {"noise_scale": Estimate(1.0, 0.5, 1.5), "snr": Estimate(9.0, 8.0, 10.0)}
    large = with_noise(run_of(*["1000", "1100"] * 4), **small, **size)  # 32 rollouts, in groups of 8: not below 16
    assert found("batch size", large).change.value == 16
    assert "2 prompts at the 16 rollouts" in found("group size", large).change.sentence


def test_a_baseline_whose_estimate_costs_more_than_it_saves_is_not_advised(monkeypatch):
    saving = Estimate(0.4, 0.1, 0.7)
    gram = torch.eye(8, dtype=torch.float64)
    bare = run_of(*["11000000"] * 24)
    groups = [StoredGroup(dataclasses.replace(group.record, gram=gram)) for group in bare.groups]
    run = with_noise(RunReading({}, (), bare.lines, groups), baseline_saving=saving)
    replayed = {"rloo": 0.2, "optimal-loo": 0.1}

    def replay(groups: Any, size: int, names: Sequence[str]) -> Any:
        return SimpleNamespace(rows=[SimpleNamespace(estimator=n, snr=Estimate(replayed[n])) for n in names])

    monkeypatch.setattr(noise_rules, "replay_groups", replay)
    assert found("baseline", run) is None
    replayed["optimal-loo"] = 0.3
    assert isinstance(found("baseline", run), RunFinding)


@pytest.mark.parametrize(("used", "other"), [("rloo", "optimal-loo"), ("grpo", "rloo")])
def test_an_estimator_whose_signal_is_not_resolved_is_an_open_question(monkeypatch, used, other):
    gram = torch.eye(8, dtype=torch.float64)
    bare = run_of(*["11000000"] * 24)
    groups = [StoredGroup(dataclasses.replace(group.record, gram=gram)) for group in bare.groups]
    run = with_noise(RunReading({"method": used, "group_size": 8}, (), bare.lines, groups))
    known = {used: Estimate(1.0, 0.9, 1.1), other: Estimate(math.nan, math.nan, math.nan)}

    def replay(groups: Any, size: int, names: Sequence[str]) -> Any:
        return SimpleNamespace(
            rows=[SimpleNamespace(estimator=n, efficiency=known.get(n, known[other])) for n in names]
        )

    monkeypatch.setattr(noise_rules, "replay_groups", replay)
    assert isinstance(found("estimator", run), Undecided)
    known[other] = Estimate(2.0, 1.5, 2.5)
    assert found("estimator", run).change.value == other


def test_a_text_is_shown_only_if_it_is_known_whose_it_is(tmp_path):
    """Two groups of one prompt in a step: which of them has the largest row is known, but not which rollouts it has."""

    def rollout(step: int, group: int, index: int) -> RolloutRecord:
        known = {"token_ids": torch.tensor([1, 2]), "prompt_length": 1, "log_probs": torch.zeros(2), "reward": 1.0}
        known |= {"finished": True}
        return RolloutRecord(
            step=step, prompt_id="p", group=group, index=index, completion=f"text {group} {index}", **known
        )

    for groups in (1, 2):
        folder = tmp_path / str(groups)
        with RunWriter.create(folder, {}, environment={}) as writer:
            record = GroupRecord(
                step=1,
                prompt_id="p",
                rewards=torch.tensor([1.0, 0.0]),
                lengths=torch.tensor([1, 1]),
                advantages=torch.tensor([1.0, -1.0]),
                gram=torch.diag(torch.tensor([4.0, 1.0])),
            )
            writer.write_groups(1, [record])
            writer.write_rollouts(1, [rollout(1, group, index) for group in range(groups) for index in range(2)])
            writer.write_metrics(1, {"reward": 0.5, "gram/measured": 1.0})
        run = read_run(folder)
        assert ("“text 0 0”" in _who_dominates(run, largest_row(run))) == (groups == 1)


def test_the_baseline_is_judged_by_its_interval():
    assert "save 40%" in found("baseline", with_noise(run_of("1"), baseline_saving=Estimate(0.4, 0.1, 0.7))).sentence
    assert found("baseline", with_noise(run_of("1"), baseline_saving=Estimate(0.0, -0.02, 0.03))) is None
    assert isinstance(found("baseline", with_noise(run_of("1"), baseline_saving=Estimate(0.4, 0.01, 0.7))), Undecided)


def test_prompts_that_are_known_by_heart():
    """Ten training prompts at 3/4 against ten test problems at 1/4, each exactly: both intervals are points."""
    trained = run_of(*["1110"] * 10)
    run = dataclasses.replace(trained, tests={"test": {1: {f"t/{place}": 0.25 for place in range(10)}}})
    one = found("overfitting to prompts", run)
    assert "0.75" in one.sentence and "0.25" in one.sentence and one.number.value == pytest.approx(0.5)
    close = dataclasses.replace(trained, tests={"test": {1: {f"t/{place}": 0.71 for place in range(10)}}})
    assert found("overfitting to prompts", close) is None  # less than 5 %
    assert isinstance(found("overfitting to prompts", trained), Undecided)
    earlier = {**run.tests["test"], 0: {f"t/{place}": 1.0 for place in range(10)}}  # before the last third
    assert found("overfitting to prompts", dataclasses.replace(run, tests={"test": earlier})).number.value == 0.5
    stopped = dataclasses.replace(run, tests={"test": {0: earlier[0]}})  # no evaluation since the start
    assert isinstance(found("overfitting to prompts", stopped), Undecided)
    few = dataclasses.replace(run, groups=run_of(*["1110"] * 4).groups)
    assert isinstance(found("overfitting to prompts", few), Undecided)


def test_visits_of_one_prompt_are_no_evidence_about_others():
    """Six prompts seen 50 times each earn 0.67; that says as much about other prompts as six visits do."""
    outcomes = ["1111"] * 4 + ["0000"] * 2
    run = run_of(*outcomes * 50, prompts=[f"p/{place}" for place in range(6)] * 50)
    tests = {"test": {1: {f"t/{place}": float(place % 5 < 2) for place in range(40)}}}  # 0.4
    assert found("overfitting to prompts", dataclasses.replace(run, tests=tests)) is None
    apart = run_of(*outcomes * 50)  # the same rewards of 300 prompts
    assert isinstance(found("overfitting to prompts", dataclasses.replace(apart, tests=tests)), RunFinding)


@pytest.mark.parametrize("name", GRAM_RULES)
def test_too_few_steps_decide_nothing(name, tmp_path):
    """Two measured steps were once enough for "take more rollouts, towards 79"."""
    write_run(tmp_path / "run", steps=2, evaluated=False)
    assert not isinstance(found(name, read_run(tmp_path / "run")), RunFinding)


@pytest.mark.slow  # runs in `make test-results`
def test_random_gradients_have_findings_on_noise_alone(tmp_path):
    """Coins for rewards and random scores: all true gradients are zero, so batch and groups are too small."""
    wrong = 0
    for seed in range(10):
        write_run(
            tmp_path / f"{seed}",
            steps=18,
            prompts=4,
            rewards=lambda step, prompt, generator, seed=seed: coin(step, prompt, seed),
            evaluated=False,
        )
        names = {one.name for one in advise_run(read_run(tmp_path / f"{seed}")).findings}
        wrong += bool(names - {"batch size", "group size"})
    assert wrong <= 2  # at 5 %, more than 2 of 10 have a probability of 1 %


def coin(step: int, prompt: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 10 * step + prompt)
    return torch.randint(0, 2, (4,), generator=generator).double()


@pytest.mark.parametrize("tests", [1, 50, 1000])
def test_more_comparisons_widen_the_interval(tests):
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    found = t_mean(values, tests=tests)
    quantile = student.ppf(1 - 0.025 / tests, 4)  # with few visits far larger than the normal quantile
    assert found.value == 3
    assert found.high == pytest.approx(3 + quantile * np.std(values, ddof=1) / math.sqrt(5), rel=1e-5)


@pytest.mark.parametrize(
    ("slip", "told"), [(0.0, "Wrong rollouts have nearly the same gradient"), (3.0, "Wrong rollouts differ")]
)
def test_lost_exploration_says_what_wrong_rollouts_do(slip, told):
    """Two right rollouts become one direction; the wrong ones share it, or leave it by `slip`."""
    groups = []
    for step in range(1, 31):
        apart = 1.0 if step <= 10 else 0.05
        right = torch.tensor([[1.0, apart, 0.0], [1.0, -apart, 0.0]])
        wrong = torch.tensor([[1.0, 0.0, slip + 0.01], [1.0, 0.0, slip + 0.01]])
        scores = torch.cat([right, wrong]).double()
        record = GroupRecord(
            step=step,
            prompt_id=f"p/{step % 10}",
            rewards=torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64),
            lengths=torch.ones(4).long(),
            advantages=torch.zeros(4, dtype=torch.float64),
            gram=scores @ scores.mT,
        )
        groups.append(StoredGroup(record))
    run = RunReading({}, (), [{"step": step, "reward": 0.5} for step in range(1, 31)], groups)
    one = found("lost exploration", run)
    assert told in one.sentence
    assert one.number.value == pytest.approx((1 - 0.05**2) / (1 + 0.05**2))
    assert "at first" in one.evidence and "Between right and wrong rollouts it is" in one.evidence
    for failed in (range(1, 11), [30]):  # the whole first third, or a step of the last
        lines = [{**line, "check/passed": float(line["step"] not in failed)} for line in run.lines]
        assert isinstance(found("lost exploration", dataclasses.replace(run, lines=lines)), Undecided)


def test_the_best_group_size_moves_over_a_run():
    """Early groups of 11 would be best, late ones of 3; groups of 4 cost 43 % of the error early."""
    early, late = NoiseComponents(1.0, 1.0, 1.0, 100.0), NoiseComponents(1.0, 25.0, 1.0, 100.0)
    run = with_noise(run_of("1000"), best_group_size=Estimate(3.0, 2.5, 3.5), components=late)
    assert isinstance(found("group size by phase", run), Undecided)
    with_noise(run, phase="first", best_group_size=Estimate(11.0, 8.0, 15.0), components=early)
    one = found("group size by phase", run)
    assert "from 11.0 [8.0, 15.0] in the first third to 3.00 [2.50, 3.50] in the last" in one.sentence
    gains = (1 - 22 / (5 + 100 / 3), 1 - (75 + 1 + 50) / (100 + 1 + 100 / 3))  # at 11 and at 3, against 4
    assert f"(first {gains[0]:.0%}, last {gains[1]:.0%})" in one.evidence
    with_noise(run, phase="first", best_group_size=Estimate(11.0, 3.4, 15.0), components=early)
    assert found("group size by phase", run) is None  # the intervals overlap
    advice = advise_run(with_noise(run, phase="first", best_group_size=Estimate(11.0, 8.0, 15.0), components=early))
    assert contradictions(advice.findings) == []


def layered_run(folder: Path, signals: dict[str, float], *, steps: int = 36, noise: float = 1.0) -> RunReading:
    """A run of groups of 8 whose layers have scores `± signal e_1 + noise`: right rollouts point along `+ e_1`."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.tensor([1.0, 0.0] * 4, dtype=torch.float64)
    with RunWriter.create(folder, {"group_size": 8}, environment={}, layers="float64") as writer:
        for step in range(1, steps + 1):
            grams = {}
            for name, signal in signals.items():
                scores = noise * torch.randn(8, 6, generator=generator, dtype=torch.float64)
                scores[:, 0] += signal * (2 * rewards - 1)
                grams[name] = scores @ scores.mT
            record = GroupRecord(
                step=step,
                prompt_id=f"p/{step}",
                rewards=rewards,
                lengths=torch.ones(8).long(),
                advantages=rewards - 0.5,
                gram=torch.stack([*grams.values()]).sum(0),
                by_layer=grams,
            )
            writer.write_groups(step, [record])
            writer.write_metrics(step, {"reward": 0.5})
    return read_run(folder)


def test_layers_that_carry_the_update_are_named_with_their_share(tmp_path):
    """`g = Cov(score, reward) = signal / 2` along one axis, so the squared norms are as 16 to 4."""
    run = layered_run(tmp_path / "run", {f"layer.{place}": 0.0 for place in range(8)} | {"big": 4.0, "second": 2.0})
    names, values = layer_signals(run) or ([], np.zeros(0))
    assert names[-2:] == ["big", "second"] and values.shape == (12, 10)
    shares = values.sum(0) / values.sum()
    assert shares[-2:] == pytest.approx([0.8, 0.2], abs=0.1)
    one = found("layers that carry the update", run)
    assert "of 10 layers have most" in one.sentence and one.listing[0].endswith("big")
    assert not any("layer." in line for line in one.listing)
    assert one.number.low <= 0.8 + 0.2 and one.number.high >= 0.8
    assert "all with the same rank" in one.change.sentence and "have lost" in one.change.effect


def test_a_model_with_one_stored_layer_has_no_dominating_one(tmp_path):
    assert found("exploding layer", layered_run(tmp_path / "one", {"lm_head": 3.0})) is None
    loud = found("exploding layer", layered_run(tmp_path / "two", {"model.layers.*.mlp": 300.0, "lm_head": 0.0}))
    assert loud.change.effect.startswith("the other layers get more than ")
    assert any("fnmatch(n, 'model.layers.*.mlp')" in step for step in loud.change.steps)


def test_no_layer_carries_noise(tmp_path):
    signals = {f"layer.{place}": 0.0 for place in range(8)}
    verdict = found("layers that carry the update", layered_run(tmp_path / "noise", signals))
    assert not isinstance(verdict, RunFinding)
    equal = {f"layer.{place}": 3.0 for place in range(8)}
    assert found("layers that carry the update", layered_run(tmp_path / "equal", equal)) is None


def test_the_page_shows_the_findings_of_advise(tmp_path):
    from scoregram.report.run_page import run_page
    from scoregram.runs import open_run

    write_run(tmp_path / "run", steps=12, rewards=lambda s, p, g: torch.zeros(4, dtype=torch.float64))
    page = run_page(open_run(tmp_path / "run"))
    advice = advise_run(read_run(tmp_path / "run"))
    assert page.cards == advice.findings and page.open_rules == advice.open_text()
    assert "constant reward" in [one.name for one in page.cards]
    assert "Check the reward function on one right" in page.html()


def test_long_text_is_cut():
    assert shortened_text("a\n b") == "a b" and shortened_text("x" * 100) == "x" * 80 + " …"
