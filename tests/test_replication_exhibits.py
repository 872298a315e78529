"""Every exhibit of a replication is what its caption says, on runs made of random numbers, and none fails for want of
data.
"""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch

from scoregram.bootstrap import ratio_of_means
from scoregram.exhibits import Exhibit, Figure, Table, from_plain, to_plain
from scoregram.runs import GroupRecord
from scoregram.spectra import (
    SpectrumSummary,
    feasible_interval,
    mean_pairwise_cosine,
    orthogonal_null,
    spectrum_summary,
)
from scoregram.statistics import (
    batch_mse,
    group_blocks,
    group_moments,
    leave_one_out_mse,
    mean_baseline_mse,
    noise_components,
    optimal_group_size,
    vanilla_mse,
)
from scoregram.studies.grpo_rank.cause_exhibits import (
    NULL_LADDER,
    accounting,
    at_fixed_right,
    conditions,
    spans_of,
    spearman,
    trend_table,
)
from scoregram.studies.grpo_rank.evidence import exhibits_of, turn_credit_table, turn_offset_table
from scoregram.studies.grpo_rank.learning_exhibits import (
    NoiseSamples,
    best_size,
    by_estimator,
    figure_3,
    figure_dead,
    group_size_table,
    methods_table,
    other_advantages,
    pooled_noise,
    variance_table,
)
from scoregram.studies.grpo_rank.rank_exhibits import (
    by_layer,
    by_right,
    by_temperature,
    feasible_ranks,
    figure_1,
    mean_of,
    table_1,
    unrelated_groups,
)
from scoregram.studies.grpo_rank.readings import Evidence, read_evidence
from scoregram.studies.grpo_rank.verdicts import judge_claims
from tests.replication_cases import draw_batch, draw_group, stream, toy_evidence, write_trial

CLOSE: dict[str, Any] = {"rel": 1e-9, "abs": 1e-12}


@pytest.fixture(scope="module")
def evidence(tmp_path_factory) -> Evidence:
    """Three group sizes, two seeds, one other method."""
    return toy_evidence(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def exhibits(evidence) -> dict[str, Exhibit]:
    return {one.id: one for one in exhibits_of(evidence)}


def cells(table: Exhibit, name: str) -> list[Any]:
    assert isinstance(table, Table)
    return [row[table.columns.index(name)] for row in table.rows]


def summary(group: GroupRecord) -> SpectrumSummary:
    """The spectrum of a group, mean-centred."""
    assert group.gram is not None
    return spectrum_summary(group.gram, group.rewards - group.rewards.mean())


def survives(made: tuple[Exhibit, ...]) -> list[Any]:
    """Exhibits and verdicts can be written, read and written again."""
    plain = to_plain(made)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert to_plain(from_plain(plain)) == plain
    verdicts = judge_claims(made, seeds=(0,), model="m", task="t")
    json.dumps(verdicts, allow_nan=False)
    return verdicts


def test_every_exhibit_survives_the_file(exhibits):
    survives(tuple(exhibits.values()))


def test_table_1_counts_and_averages_live_training_groups_of_the_paper(evidence, exhibits):
    table = exhibits["table-1"]
    assert cells(table, "R") == [2, 4, 8]
    for size, live, rank, null, largest in zip(
        *(cells(table, name) for name in ("R", "live groups", "effective rank", "null: orthogonal")),
        cells(table, "largest rank seen"),
        strict=True,
    ):
        groups = [g for t in evidence.of_paper(size=size) for g in t.run.groups() if g.kind == "train"]
        mixed = [g for g in groups if g.rewards.max() > g.rewards.min()]
        spectra = list(map(summary, mixed))
        assert live == f"{len(mixed)} of {len(groups)}"
        rewards = torch.cat([group.rewards for group in groups])
        assert cells(table, "success rate")[[2, 4, 8].index(size)] == pytest.approx(
            float((rewards >= 1).double().mean())
        )
        assert rank.value == pytest.approx(fmean(one.effective_rank for one in spectra), **CLOSE)
        assert rank.low < rank.value < rank.high
        nulls = [orthogonal_null(g.gram, g.rewards - g.rewards.mean()).effective_rank for g in mixed]
        assert null == pytest.approx(fmean(nulls), **CLOSE)
        assert largest == max(one.numerical_rank for one in spectra) == min(size, 6)


def test_unrelated_scores_stand_in_for_groups_of_table_1(evidence, exhibits):
    """The mean of the row, times stand-ins over own values among the groups whose batch is stored."""
    for row, size in enumerate(evidence.sizes):
        made, own = [], []
        for trial in evidence.of_paper(size=size):
            for batch in (one for one in trial.run.batches() if one.kind == "train"):
                for place, drawn in unrelated_groups(batch, seed=trial.seed).items():
                    ranks = [spectrum_summary(gram, a, psd_rtol=1e-5).effective_rank for gram, a in drawn]
                    name = batch.prompt_ids[place]
                    (group,) = (g for g in trial.run.groups([batch.step]) if (g.kind, g.prompt_id) == ("train", name))
                    made.append(fmean(ranks))
                    own.append(spectrum_summary(group.gram, group.rewards - group.rewards.mean()).effective_rank)
        cell = cells(exhibits["table-1"], "null: unrelated")[row]
        rank = cells(exhibits["table-1"], "effective rank")[row].value
        assert made and cell.value == pytest.approx(rank * fmean(made) / fmean(own), **CLOSE)
        assert cell.low <= cell.value <= cell.high
        assert cells(exhibits["table-1"], "groups with unrelated")[row].startswith(f"{len(made)} of ")


def test_possible_is_the_mean_of_the_feasible_intervals(evidence):
    for size in evidence.sizes:
        live = evidence.live(size=size)
        ends = [feasible_interval("effective_rank", r.top, size) for r in live]
        least, most = feasible_ranks(live, size)
        assert least == pytest.approx(fmean(end.low for end in ends), **CLOSE)
        assert most == pytest.approx(fmean(end.high for end in ends), **CLOSE)
        assert least - 1e-6 <= mean_of(live, lambda r: r.rank).value <= most + 1e-6
    assert all(map(math.isnan, feasible_ranks([], 4)))


def test_by_right_stands_beside_the_closed_form(exhibits, evidence):
    table = exhibits["by-right"]
    for size, right, groups, shape, deviation in zip(
        *(cells(table, name) for name in ("R", "k right", "groups", "4k(R-k)/R", "σ_r")), strict=True
    ):
        assert shape == pytest.approx(4 * right * (size - right) / size)
        assert deviation == pytest.approx(math.sqrt(right * (size - right)) / size)
        here = [r for r in evidence.live(size=size) if r.right == right]
        assert len(here) == groups > 0
        assert all(r.shape == pytest.approx(shape) for r in here)
    assert sum(cells(table, "groups")) == len(evidence.live())


def test_other_rewards_than_right_or_wrong_are_not_sorted_by_right(tmp_path):
    rewards = ([1.0, 0.0, 0.0, 0.0], [1.0, 0.5, 0.0, 0.0], [0.5, 0.25, 0.0, 0.0])
    groups = [draw_group(1, 4, stream(place), rewards=given) for place, given in enumerate(rewards)]
    write_trial(tmp_path / "runs/a", size=4, groups=groups)
    found = read_evidence(tmp_path)
    assert len(found.live()) == 3
    assert cells(by_right(found), "groups") == [1]
    survives(exhibits_of(found))


def test_the_factors_take_the_group_size_to_the_rank(exhibits, evidence):
    table = exhibits["accounting"]
    names = [name for name in table.columns if name.startswith("× ")]  # type: ignore[union-attr]
    assert len(names) == len(NULL_LADDER)
    for row, size in enumerate(evidence.sizes):
        product = size * math.prod(cells(table, name)[row] for name in names)
        ranks = [r.rank for r in evidence.live(size=size)]
        assert product == pytest.approx(math.exp(fmean(map(math.log, ranks))), **CLOSE)
        norms, shapes = (fmean(math.log(getattr(r, name)) for r in evidence.live(size=size)) for name in NULLS)
        assert cells(table, "× norms")[row] == pytest.approx(math.exp(norms - shapes), **CLOSE)


NULLS = ("orthogonal", "shape")


def test_estimators_that_only_scale_have_the_spectrum_of_the_mean(exhibits, evidence):
    table = exhibits["by-estimator"]
    ranks = dict(zip(cells(table, "baseline"), cells(table, "effective rank"), strict=True))
    assert ranks["mean"].value == pytest.approx(mean_of(evidence.live(size=8), lambda r: r.rank).value, **CLOSE)
    for name in ("rloo", "grpo"):
        assert vars(ranks[name]) == pytest.approx(vars(ranks["mean"]), **CLOSE)
    for name in ("opo", "optimal", "optimal-loo"):
        assert abs(ranks[name].value - ranks["mean"].value) > 1e-3


def test_baselines_weigh_by_the_lengths_and_norms_of_the_group(tmp_path):
    lengths, gram = torch.tensor([1, 3]), torch.diag(torch.tensor([1.0, 4.0])).double()
    group = draw_group(1, 2, stream(0), rewards=[1.0, 0.0], lengths=lengths, gram=gram)
    write_trial(tmp_path / "runs/a", size=2, groups=[group])
    (reading,) = read_evidence(tmp_path).live()
    assert other_advantages("opo", reading).tolist() == pytest.approx([3 / 4, -1 / 4])
    assert other_advantages("optimal", reading).tolist() == pytest.approx([4 / 5, -1 / 5])


def test_group_size_and_variance_follow_from_the_whole_batches(exhibits, evidence):
    table, errors = exhibits["group-size"], exhibits["variance"]
    assert cells(table, "R") == [2, 4, 8] and cells(errors, "R") == [4, 8]
    assert cells(table, "batches") == [0, 4, 4] and math.isnan(cells(table, "estimated R*")[0].value)
    for row, size in enumerate((4, 8)):
        batches = [b for t in evidence.of_paper(size=size) for b in t.run.batches() if b.kind == "train"]
        noise = [noise_components(b.gram, b.rewards.view(4, size)) for b in batches]
        moments = [group_moments(group_blocks(b.gram, size), b.rewards.view(4, size)) for b in batches]
        c1, c3 = fmean(n.between_prompts for n in noise), fmean(n.group_baseline for n in noise)
        assert cells(table, "c1")[row + 1].value == pytest.approx(c1, **CLOSE)
        assert cells(table, "c3")[row + 1].value == pytest.approx(c3, **CLOSE)
        best = 1 + math.sqrt(max(c3, 0) / c1) if c1 > 0 else math.inf
        found = cells(table, "estimated R*")[row + 1]
        assert found.value == pytest.approx(best) and math.isnan(found.low)  # too few batches for an interval
        base = fmean(float(leave_one_out_mse(m, size).mean()) for m in moments)
        for name, error in (("no baseline", vanilla_mse), ("group mean", mean_baseline_mse)):
            wanted = fmean(float(error(m, size).mean()) for m in moments) / base
            assert cells(errors, name)[row].value == pytest.approx(wanted, **CLOSE)
        oracle = fmean(float(m.oracle_trace.mean()) for m in moments) / size / base
        assert cells(errors, "oracle")[row].value == pytest.approx(oracle, **CLOSE)


def test_a_reward_independent_of_the_scores_has_the_share_of_its_null():
    """Many batches of random scores, rewards drawn apart from them: oracle over leave-one-out is (R-1)/R."""
    noise = NoiseSamples()
    for seed in range(60):
        rewards = torch.rand(40, 4, generator=stream(seed)).gt(0.5).double()
        scores = torch.randn(160, 50, generator=stream(1000 + seed)).double()
        moments = group_moments(group_blocks(scores @ scores.T, 4), rewards)
        noise.oracle.append(float(moments.oracle_trace.mean()) / 4)
        noise.others.append(float(leave_one_out_mse(moments, 4).mean()))
    found = ratio_of_means(noise.oracle, noise.others)
    assert found.low <= 3 / 4 <= found.high and found.high - found.low < 0.1


def test_the_best_size_is_open_above_where_prompts_do_not_differ():
    assert best_size(NoiseSamples([0, 0], [1.0, 1.0], [4.0, 4.0])).value == 3.0
    found = best_size(NoiseSamples([0] * 5, [1.0, 1.0, 1.0, 1.0, -30.0], [4.0] * 5))
    assert math.isinf(found.value) and found.low == 3.0 and math.isinf(found.high)
    assert math.isnan(best_size(NoiseSamples([0], [-1.0], [-1.0])).value) and math.isnan(
        best_size(NoiseSamples()).value
    )


def test_probes_stand_in_for_batches_that_a_run_does_not_store(tmp_path):
    batch = draw_batch(1, 3, 4, stream(0))
    probe = replace(batch, kind="fixed")
    write_trial(tmp_path / "runs/a", size=4, batches=[batch, probe])
    assert [one.kind for _, one in read_evidence(tmp_path).batches()] == ["train"]
    write_trial(tmp_path / "split/runs/a", size=4, batches=[probe], batches_every=0)
    found = read_evidence(tmp_path / "split")
    assert [one.kind for _, one in found.batches()] == ["fixed"] and len(pooled_noise(found)[4].others) == 3


def test_sampled_accuracy_is_preferred_where_every_run_has_it(tmp_path):
    both = {step: {"eval/accuracy": 0.5, "eval/sampled_accuracy": 0.25 + step / 4} for step in (0, 1)}
    write_trial(tmp_path / "runs/a", size=4, metrics=both)
    found = read_evidence(tmp_path)
    assert cells(group_size_table(found), "gain")[0].value == 0.25 and "sampled" in figure_3(found).caption
    write_trial(tmp_path / "runs/b", size=4, seed=1, metrics={0: {"eval/accuracy": 0.5}, 1: {"eval/accuracy": 0.6}})
    found = read_evidence(tmp_path)
    assert cells(group_size_table(found), "final accuracy")[0].value == pytest.approx(0.55)
    assert "greedy" in figure_3(found).caption


def test_leave_one_out_of_the_variance_table_is_the_noise_of_one_prompt():
    """The error within a prompt is that of a batch less what prompts differ by."""
    batch = draw_batch(1, 5, 4, stream(0))
    rewards = batch.rewards.view(5, 4)
    noise = noise_components(batch.gram, rewards)
    moments = group_moments(group_blocks(batch.gram, 4), rewards)
    within = batch_mse(noise, 1, 4) - noise.between_prompts
    assert float(leave_one_out_mse(moments, 4).mean()) == pytest.approx(within)
    assert optimal_group_size(noise).exact > 1


def test_batches_that_are_not_whole_are_left_out(tmp_path):
    whole, torn = draw_batch(1, 3, 4, stream(0)), draw_batch(2, 3, 4, stream(1))
    torn.rewards[0] = math.nan
    single, dead = draw_batch(3, 1, 4, stream(2)), draw_batch(4, 3, 4, stream(3), rewards=torch.ones(12).double())
    write_trial(tmp_path / "runs/a", size=4, batches=[whole, torn, single, dead])
    found = read_evidence(tmp_path)
    assert cells(group_size_table(found), "batches") == [2]
    assert cells(variance_table(found), "batches") == [2]
    survives(exhibits_of(found))


def test_methods_stand_side_by_side_at_the_largest_size(exhibits, evidence):
    table = exhibits["methods"]
    assert cells(table, "method") == ["grpo-paper", "rloo"] and cells(table, "seeds") == [2, 2]
    trials = [t for t in evidence.trials if t.method == "rloo"]
    ends = [t.metrics("eval/accuracy")[1][-1] for t in trials]
    assert cells(table, "final accuracy")[1].value == pytest.approx(fmean(ends))
    areas = [fmean(t.metrics("eval/accuracy")[1]) for t in trials]
    assert cells(table, "mean accuracy")[1].value == pytest.approx(fmean(areas))


def test_figure_3_averages_seeds_step_by_step(exhibits, evidence):
    figure = exhibits["figure-3"]
    assert isinstance(figure, Figure)
    runs = [dict(zip(*t.metrics("eval/accuracy"), strict=True)) for t in evidence.of_paper(size=4)]
    assert figure.series[1].x == (0.0, 2.0, 4.0)
    assert figure.series[1].y == pytest.approx([fmean(run[step] for run in runs) for step in (0, 2, 4)])


def test_dead_groups_and_spread_are_averaged_over_runs(exhibits, evidence):
    dead, spread = exhibits["figure-dead"], exhibits["figure-spread"]
    assert isinstance(dead, Figure) and isinstance(spread, Figure)
    groups = [g for t in evidence.of_paper(size=2) for g in t.run.groups([1]) if g.kind == "train"]
    assert dead.series[0].x[0] == 1.0
    assert dead.series[0].y[0] == pytest.approx(fmean(bool(g.rewards.min() == g.rewards.max()) for g in groups))
    assert spread.series[0].y[0] == pytest.approx(fmean(float(g.rewards.std(correction=0)) for g in groups))


def test_layers_are_read_from_the_probes(exhibits, evidence):
    table = exhibits["by-layer"]
    here = evidence.live(size=8, kind="fixed")
    assert here and sorted(cells(table, "layer")) == ["attention", "mlp"]
    assert sum(cells(table, "energy")) == pytest.approx(1)
    assert cells(table, "energy") == sorted(cells(table, "energy"), reverse=True)
    row = cells(table, "layer").index("mlp")
    ranks = [spectrum_summary(r.by_layer["mlp"], r.advantages).effective_rank for r in here]
    assert cells(table, "effective rank")[row].value == pytest.approx(fmean(ranks), rel=1e-6)
    assert fmean(ranks) <= 3 + 1e-9  # three dimensions
    cosines = [mean_pairwise_cosine(r.by_layer["mlp"]) for r in here]
    assert cells(table, "mean cosine")[row] == pytest.approx(fmean(cosines))


def test_temperatures_are_told_apart(exhibits, evidence):
    table = exhibits["by-temperature"]
    labels = ["as trained", "sampled at 0.7, scored at 1", "sampled at 0.7, scored at 0.7"]
    here = [label for size, label in zip(cells(table, "R"), cells(table, "rollouts"), strict=True) if size == 8]
    assert here == labels
    assert sum(cells(table, "groups")) == sum(
        r.kind.startswith("fixed") and r.trial.method != "rloo" for r in evidence.readings
    )


def test_spans_between_evaluations_by_hand():
    metrics: list[dict[str, float | int]] = [
        {"step": 0, "eval/accuracy": 0.1},
        {"step": 1, "reward": 0.2, "group/effective_rank": 2.0, "live_groups": 1, "groups": 4},
        {"step": 2, "reward": 0.4, "group/effective_rank": math.nan, "live_groups": 3, "groups": 4},
        {"step": 3, "reward": 9.0, "group/effective_rank": 9.0, "live_groups": 4, "groups": 4},
        {"step": 4, "reward": 9.0, "eval/accuracy": 0.5, "live_groups": 4, "groups": 4},
        {"step": 5, "skipped": 1},
        {"step": 6, "eval/accuracy": 0.25},
    ]
    (gain, means), (loss, empty) = spans_of(metrics)
    assert (gain, loss) == pytest.approx((0.4, -0.25))
    assert means["reward"] == pytest.approx(0.3) and means["group/effective_rank"] == 2.0
    assert means["live"] == pytest.approx(0.5) and math.isnan(means["gram/snr"])
    assert all(map(math.isnan, empty.values()))
    assert spans_of(metrics[:3]) == [] and spans_of([]) == []


def test_prediction_ranks_spans_within_a_group_size(evidence, exhibits):
    table = exhibits["prediction"]
    assert cells(table, "spans") == [12] * 4  # three sizes, two seeds, two spans
    spans = [(t, *span) for t in evidence.of_paper() for span in spans_of(t.run.metrics())]
    strata, clusters = [t.size for t, *_ in spans], [t.name for t, *_ in spans]
    wanted = spearman([m["reward"] for *_, m in spans], [g for _, g, _ in spans], strata=strata, clusters=clusters)
    assert cells(table, "correlation with the gain")[3] == wanted


def test_halves_are_compared_at_the_same_number_of_right_rollouts(tmp_path):
    groups = [draw_group(step, 2, stream(step), rewards=[1.0, 0.0]) for step in range(1, 11)]
    groups += [draw_group(step, 2, stream(99 + step), rewards=[1.0, 1.0]) for step in range(1, 11)]
    groups += [draw_group(step, 2, stream(199 + step), rewards=[1.0, 0.5]) for step in range(1, 11)]
    write_trial(tmp_path / "runs/a", size=2, groups=groups)
    table = at_fixed_right(read_evidence(tmp_path))
    assert [cells(table, name)[0] for name in ("R", "k right", "groups", "later")] == [2, 1, 5, 5]
    spectra = [summary(group).effective_rank for group in groups[:5]]
    assert cells(table, "first half")[0].value == pytest.approx(fmean(spectra))


def fitted_slope(points: list[tuple[int, Any, float]]) -> float:
    """Slope of least squares with one constant for each cell, from its design matrix; (step, cell, value) each."""
    cells_seen = sorted({cell for _, cell, _ in points})
    design = np.array(
        [[step / 1000, *(cell == other for other in cells_seen)] for step, cell, _ in points], dtype=float
    )
    return float(np.linalg.lstsq(design, np.array([value for *_, value in points]), rcond=None)[0][0])


def plain_logs(gram: np.ndarray, rewards: np.ndarray) -> tuple[float, float]:
    """Logarithms of the effective rank and of its ratio to the orthogonal null."""
    a = rewards - rewards.mean()
    rows = np.linalg.svd(np.diag(a) @ np.linalg.cholesky(gram), compute_uv=False)
    alone = np.abs(a) * np.sqrt(np.diag(gram))
    rank, null = (each.sum() ** 2 / (each @ each) for each in (rows, alone))
    return math.log(rank), math.log(rank / null)


def test_the_trend_is_the_slope_at_fixed_size_and_k_over_seeds(tmp_path):
    found: dict[str, dict[int, list[Any]]] = {name: {0: [], 1: []} for name in ("rank", "ratio", "distinct")}
    for seed, size in itertools.product((0, 1), (2, 4)):
        groups = []
        for step in range(1, 25):
            scores = torch.randn(size, 12, generator=stream(1000 * seed + 100 * size + step), dtype=torch.float64)
            rewards = torch.zeros(size, dtype=torch.float64)
            rewards[: 1 + step % (size - 1)] = 1
            repeated = size == 4 and step % 5 == 0
            if repeated:  # the last two, both wrong, are one text
                scores[3] = scores[2] * 1.0001 + 1e-4 * scores[3]
            gram = scores @ scores.mT
            groups.append(draw_group(step, size, stream(step), rewards=rewards, gram=gram))
            k, logs = int(rewards.sum()), plain_logs(gram.numpy(), rewards.numpy())
            found["rank"][seed].append((step, (size, k), logs[0]))
            found["ratio"][seed].append((step, (size, k), logs[1]))
            kept = gram[:3, :3] if repeated else gram
            if k < len(kept):
                logs = plain_logs(kept.numpy(), rewards[: len(kept)].numpy())
                found["distinct"][seed].append((step, (len(kept), k), logs[1]))
        write_trial(tmp_path / f"runs/R{size}-seed{seed}", size=size, seed=seed, groups=groups)
    table = trend_table(read_evidence(tmp_path))
    assert cells(table, "R") == [2, 4, "all"] and cells(table, "groups") == [48, 48, 96]
    columns = {"rank": "log rank", "ratio": "log rank over null", "distinct": "the same, repeats removed"}
    for name, title in columns.items():
        slopes = [fitted_slope(found[name][seed]) for seed in (0, 1)]
        pooled = cells(table, title)[-1]
        assert pooled.value == pytest.approx(fmean(slopes), rel=1e-6)
        half = 12.7062 * abs(slopes[0] - slopes[1]) / 2  # t of one degree of freedom
        assert (pooled.low, pooled.high) == pytest.approx((pooled.value - half, pooled.value + half), rel=1e-3)
        alone = [fitted_slope([one for one in found[name][seed] if one[1][0] != 2]) for seed in (0, 1)]
        assert cells(table, title)[1].value == pytest.approx(fmean(alone), rel=1e-6)
    assert cells(table, "the same, repeats removed")[1] != cells(table, "log rank over null")[1]


def test_a_trend_needs_steps_and_seeds(tmp_path):
    write_trial(tmp_path / "runs/a", size=2, groups=[draw_group(3, 2, stream(0), rewards=[1.0, 0.0])])
    assert all(math.isnan(cells(trend_table(read_evidence(tmp_path)), name)[-1].value) for name in ("log rank",))
    assert trend_table(Evidence((), (), ())).rows[0][:2] == ("all", 0)
    steps = [draw_group(step, 2, stream(step), rewards=[1.0, 0.0]) for step in (1, 2, 3)]
    write_trial(tmp_path / "more/runs/a", size=2, groups=steps)
    once = cells(trend_table(read_evidence(tmp_path / "more")), "log rank")[-1]
    assert not math.isnan(once.value) and math.isnan(once.low)  # one seed has no interval


def test_turns_are_exact_and_free_of_rounding():
    offsets, credit = turn_offset_table(), turn_credit_table()
    assert set(cells(offsets, "mean offset")) == {0.0}
    spread = cells(offsets, "standard deviation")
    assert spread[0] == 0.0 and spread == sorted(spread)
    numbers = [cell for table in (offsets, credit) for row in table.rows for cell in row if isinstance(cell, float)]
    assert all(number == 0 or abs(number) > 1e-12 for number in numbers)


def shrink(folder: Path, change: str) -> Evidence:
    """Replications that lack something."""
    metrics = {0: {"eval/accuracy": 0.1}, 1: {"reward": 0.5, "live_groups": 0, "groups": 2}}
    live = [draw_group(1, 4, stream(place), rewards=[1.0, 0.0, 0.0, 0.0]) for place in range(3)]
    dead = [draw_group(1, 4, stream(place), rewards=[1.0] * 4) for place in range(3)]
    cases: dict[str, dict[str, Any]] = {
        "nothing at all": {},
        "one evaluation": {"groups": live, "metrics": metrics},
        "no evaluation": {"groups": live, "metrics": {1: metrics[1]}},
        "no metrics": {"groups": live},
        "no groups": {"metrics": metrics},
        "no live group": {"groups": dead, "metrics": metrics, "batches": [draw_batch(1, 2, 4, stream(0))]},
        "one group": {"groups": live[:1], "metrics": metrics},
        "no gram": {"groups": [draw_group(1, 4, stream(0), rewards=[1.0, 0, 0, 0], gram=None, by_layer={})]},
        "undefined numbers": {"metrics": {0: {"eval/accuracy": math.nan}, 2: {"eval/accuracy": math.nan}}},
        "dead batches": {"batches": [draw_batch(1, 2, 4, stream(0), rewards=torch.zeros(8).double())]},
    }
    write_trial(folder / "runs/R4-seed0", size=4, **cases[change])
    return read_evidence(folder)


@pytest.mark.parametrize(
    "change",
    [
        "nothing at all",
        "one evaluation",
        "no evaluation",
        "no metrics",
        "no groups",
        "no live group",
        "one group",
        "no gram",
        "undefined numbers",
        "dead batches",
    ],
)
def test_what_is_missing_is_blank_and_nothing_fails(change, tmp_path):
    found = shrink(tmp_path, change)
    verdicts = survives(exhibits_of(found))
    assert {one["verdict"] for one in verdicts} <= {"not measured", "undecided", "not replicated"}
    if change not in ("one evaluation", "no evaluation", "no metrics", "one group"):
        assert math.isnan(cells(table_1(found), "effective rank")[0].value)


def test_one_size_of_several_without_live_groups(tmp_path):
    live = [draw_group(1, 2, stream(place), rewards=[1.0, 0.0]) for place in range(3)]
    write_trial(tmp_path / "runs/R2-seed0", size=2, groups=live)
    write_trial(tmp_path / "runs/R4-seed0", size=4, groups=[draw_group(1, 4, stream(0), rewards=[0.0] * 4)])
    found = read_evidence(tmp_path)
    assert cells(table_1(found), "live groups") == ["3 of 3", "0 of 1"]
    for make in (
        accounting,
        conditions,
        figure_1,
        figure_3,
        figure_dead,
        by_layer,
        by_temperature,
        by_estimator,
        methods_table,
    ):
        make(found)
    survives(exhibits_of(found))
