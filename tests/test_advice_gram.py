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
from scoregram.advice.difficulty import SuccessLaw, group_size_for
from scoregram.advice.findings import Undecided, contradictions
from scoregram.advice.gram_rules import (
    group_cosines,
    layer_energy_shares,
    layer_signals,
    prompt_products,
    shortened,
)
from scoregram.advice.noise_rules import least_error_size
from scoregram.bootstrap import t_mean
from scoregram.exhibits import Estimate
from scoregram.reading import RunNoise, RunReading, StoredGroup, read_run
from scoregram.runs import BatchRecord, GroupRecord, RunWriter
from scoregram.statistics import NoiseComponents
from tests.report_cases import write_run


def run_of(*outcomes: str, lines: Any = (), prompts: list[str] | None = None) -> RunReading:
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


def with_noise(run: RunReading, steps: int = 8, *, phase: str = "last", **changes: Any) -> RunReading:
    """The run as if the noise of a third had been pooled to these numbers."""
    vars(run).setdefault("_noises", {})[phase] = RunNoise(steps=steps, **changes)
    return run


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


def live_by_integration(a: float, b: float, size: int) -> float:
    """`E[1 - p^R - (1-p)^R]` for `p ~ Beta(a, b)`, by the midpoint rule."""
    points = (np.arange(200_000) + 0.5) / 200_000
    density = points ** (a - 1) * (1 - points) ** (b - 1)
    return float((density * (1 - points**size - (1 - points) ** size)).sum() / density.sum())


@pytest.mark.parametrize(("a", "b"), [(2.0, 3.0), (1.0, 8.0), (5.0, 1.5)])
def test_live_shares_under_a_beta_law(a, b):
    law = SuccessLaw(a / (a + b), a + b)
    for size in (2, 8, 32):
        assert law.live_share(size) == pytest.approx(live_by_integration(a, b, size), abs=1e-4)
    size = group_size_for(law)
    assert size is None or law.live_share(size - 1) < 0.8 <= law.live_share(size)


def test_the_law_is_that_of_the_prompts():
    """Counts drawn from a known law give it back, also where most groups are dead."""
    rng = np.random.default_rng(0)
    rates = rng.beta(0.4, 5.6, 20_000)
    counts = [(int(right), 8) for right in rng.binomial(8, rates)]
    law = SuccessLaw.of(counts)
    assert law is not None and law.mean == pytest.approx(0.4 / 6, abs=0.003)
    assert law.concentration == pytest.approx(6, rel=0.1)
    dead = sum(right in (0, 8) for right, _ in counts) / len(counts)
    assert law.live_share(8) == pytest.approx(1 - dead, abs=0.01)
    assert law.live_share(32) <= 1 - (1 - law.live_share(8)) ** 4  # whatever the law of the prompts
    assert law.live_share(32) == pytest.approx(np.mean(1 - rates**32 - (1 - rates) ** 32), abs=0.01)


@pytest.mark.parametrize(
    ("counts", "live"),
    [
        ([(0, 4), (0, 4)], 0.0),  # never solved
        ([(0, 4), (4, 4)], 0.0),  # each always or never
        ([(2, 4), (2, 4)], 7 / 8),  # less spread than chance: all alike
        ([(1, 1), (0, 1)], None),  # one rollout says nothing about spread
        ([], None),
    ],
)
def test_laws_at_the_edges(counts, live):
    law = SuccessLaw.of(counts)
    assert live == (None if law is None else pytest.approx(law.live_share(4)))


def test_prompts_seen_twice_count_once():
    assert run_of("1000", "0000", "1111", prompts=["a", "a", "b"]).success_rates() == [1 / 8, 1.0]
    assert run_of("1000", "2000").success_rates() == []  # neither right nor wrong


@pytest.mark.parametrize(
    ("scale", "direction"),
    [
        (Estimate(100.0, 40.0, math.inf), "up"),
        (Estimate(math.inf, math.inf, math.inf), "up"),
        (Estimate(1.0, 0.5, 1.5), "down"),
        (Estimate(100.0, 20.0, math.inf), "undecided"),
        (Estimate(1.0, 0.5, 30.0), "undecided"),
        (Estimate(100.0), "undecided"),
        (Estimate(8.0, 4.0, 16.0), None),
    ],
)
def test_the_batch_is_judged_by_the_whole_interval_of_the_noise_scale(scale, direction):
    one = found("batch size", with_noise(run_of("1000", "1100"), noise_scale=scale))  # a batch of 8
    told = "undecided" if isinstance(one, Undecided) else None if one is None else one.change.direction
    assert told == direction


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


def test_products_between_prompts_are_those_of_leave_one_out_gradients():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    rewards = torch.randint(0, 2, (3, 4), generator=generator).double()
    gradients = []
    for prompt in range(3):
        mine = rewards[prompt]
        centred = torch.stack([mine[i] - (mine.sum() - mine[i]) / 3 for i in range(4)])
        gradients.append((centred[:, None] * scores[4 * prompt : 4 * prompt + 4]).mean(0))
    batch = BatchRecord(
        step=1,
        prompt_ids=("a", "b", "c"),
        sizes=torch.tensor([4, 4, 4]),
        rewards=rewards.flatten(),
        lengths=torch.ones(12).long(),
        weights=torch.zeros(12, dtype=torch.float64),
        gram=scores @ scores.mT,
    )
    scale = float((scores @ scores.mT).diagonal().mean()) / 4
    products = prompt_products([batch, batch])
    for place, name in enumerate("abc"):
        others = [gradients[other] for other in range(3) if other != place]
        expected = sum(float(gradients[place] @ other) for other in others) / 2 / scale
        assert products[name] == pytest.approx([expected, expected])
    unknown = dataclasses.replace(batch, gram=torch.full((12, 12), math.nan, dtype=torch.float64))
    assert prompt_products([unknown]) == {}


@pytest.mark.parametrize("tests", [1, 50, 1000])
def test_more_comparisons_widen_the_interval(tests):
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    found = t_mean(values, tests=tests)
    quantile = student.ppf(1 - 0.025 / tests, 4)  # with few visits far larger than the normal quantile
    assert found.value == 3
    assert found.high == pytest.approx(3 + quantile * np.std(values, ddof=1) / math.sqrt(5), rel=1e-5)


def test_cosines_are_those_between_right_rollouts_and_from_right_to_wrong_ones():
    scores = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 5.0], [2.0, 0.0]], dtype=torch.float64)
    record = GroupRecord(
        step=1,
        prompt_id="a",
        rewards=torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64),
        lengths=torch.ones(4).long(),
        advantages=torch.zeros(4, dtype=torch.float64),
        gram=scores @ scores.mT,
    )
    (one,) = group_cosines([StoredGroup(record)])
    assert one.prompt == "a" and one.right_right == pytest.approx((2 / math.sqrt(2) + 1) / 3)
    assert one.right_wrong == pytest.approx((0 + 1 / math.sqrt(2) + 0) / 3)  # against the rollout along the second axis
    assert group_cosines([StoredGroup(dataclasses.replace(record, rewards=torch.ones(4, dtype=torch.float64)))]) == []


@pytest.mark.parametrize(("slip", "told"), [(0.0, "Wrong rollouts have it too"), (3.0, "Wrong rollouts differ")])
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


def test_shares_of_layers_are_those_of_their_update(tmp_path):
    generator = torch.Generator().manual_seed(0)
    wanted = {}
    with RunWriter.create(tmp_path / "run", {"group_size": 4}, environment={}, layers="float64") as writer:
        for step in range(1, 13):
            layers = {name: torch.randn(4, 3, generator=generator, dtype=torch.float64) for name in ("a", "b")}
            advantages = torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64)
            energy = {name: float((advantages @ scores).square().sum()) for name, scores in layers.items()}
            wanted[step] = energy["a"] / sum(energy.values())
            grams = {name: scores @ scores.mT for name, scores in layers.items()}
            record = GroupRecord(
                step=step,
                prompt_id="p",
                rewards=torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64),
                lengths=torch.ones(4).long(),
                advantages=advantages,
                gram=grams["a"] + grams["b"],
                by_layer=grams,
            )
            writer.write_groups(step, [record])
            writer.write_metrics(step, {"reward": 0.5})
    shares = layer_energy_shares(read_run(tmp_path / "run"))
    assert shares is not None
    names, first, last = shares
    assert names == ["a", "b"]
    assert first[:, 0].tolist() == pytest.approx([wanted[step] for step in range(1, 7)])
    assert last[:, 0].tolist() == pytest.approx([wanted[step] for step in range(7, 13)])


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
    assert shortened("a\n b") == "a b" and shortened("x" * 100) == "x" * 80 + " …"
