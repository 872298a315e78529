"""Other estimators on the rollouts of a run: unbiased by enumeration, and the same numbers from a folder."""

import json
import math
from itertools import product

import pytest
import torch

from scoregram import cli
from scoregram.advantages import ESTIMATORS, estimate
from scoregram.checks import ScoregramError
from scoregram.exhibits import Estimate
from scoregram.reading import RunReading, StoredGroup, what_if
from scoregram.reading.replay import USUAL, WEIGHTS, ReplayedGroups, can_replay, whole_steps
from scoregram.runs import GroupRecord
from scoregram.statistics import disjoint_parts, split_products

CHANCES = (0.5, 0.3, 0.2)
REWARDS = (0.0, 1.0, 0.4)
LENGTHS = (3, 5, 2)
SCORES = torch.tensor([[1.0, -0.5, 0.2], [-0.3, 2.0, 0.1], [0.4, 0.7, -1.5]], dtype=torch.float64)
"""A policy with three rollouts."""


def samples(count):
    """Every group of `count` rollouts, and its probability."""
    for chosen in product(range(3), repeat=count):
        yield list(chosen), math.prod(CHANCES[one] for one in chosen)


def expected(values):
    """Mean of `(chance, tensor)` pairs."""
    return torch.stack([chance * one for chance, one in values]).sum(0)


def update(name, chosen):
    """`(1/r) Σ A_i ψ_i` of one group."""
    rewards = torch.tensor([[REWARDS[one] for one in chosen]], dtype=torch.float64)
    scores, lengths = SCORES[chosen], torch.tensor([[LENGTHS[one] for one in chosen]])
    inputs = {"lengths": lengths, "score_energies": (scores**2).sum(1)[None], "outcomes": rewards}
    return estimate(name, rewards, **inputs)[0] @ scores / len(chosen)


def by_hand(weights, chosen, advantages):
    """Factor of each rollout, from the words of the table."""
    rewards = [REWARDS[one] for one in chosen]
    mean = sum(rewards) / len(rewards)
    spread = sum((reward - mean) ** 2 for reward in rewards) / len(rewards)
    factors = {
        "uniform": [1.0 for _ in chosen],
        "length": [1 / LENGTHS[one] for one in chosen],
        "right": [float(value > 0) for value in advantages],
        "wrong": [float(value < 0) for value in advantages],
        "hard": [1 - mean for _ in chosen],
        "spread": [spread for _ in chosen],
    }
    return torch.tensor(factors[weights], dtype=torch.float64)


def weighted_update(name, weights, chosen):
    rewards = torch.tensor([[REWARDS[one] for one in chosen]], dtype=torch.float64)
    advantages = estimate(name, rewards)[0]
    return (advantages * by_hand(weights, chosen, advantages.tolist())) @ SCORES[chosen] / len(chosen)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_weighted_updates_are_unbiased_for_their_own_signal_and_bias(weights):
    """Over every group of four: products of halves against the exact means, variance and distance to the gradient."""
    true = expected([(chance, update("rloo", chosen)) for chosen, chance in samples(2)])
    exact = [(chance, weighted_update("rloo", weights, chosen)) for chosen, chance in samples(2)]
    mean, square = expected(exact), expected([(chance, one @ one) for chance, one in exact])
    groups = list(samples(4))
    chances = torch.tensor([chance for _, chance in groups], dtype=torch.float64)
    parts, records = disjoint_parts(4, 2), [StoredGroup(record_of(chosen)) for chosen, _ in groups]
    tables = [ReplayedGroups(records), ReplayedGroups(records, weights)]
    products = split_products(
        tables[0].grams, torch.stack([one.advantages_of_parts("rloo", parts) for one in tables]), parts
    )
    (own, shared, other) = (products.across[i, j] @ chances for i, j in ((1, 1), (0, 1), (0, 0)))
    torch.testing.assert_close(products.noise[1] @ chances, square - mean @ mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(own - 2 * shared + other, (mean - true) @ (mean - true), rtol=1e-10, atol=1e-12)


def test_variance_and_bias_of_a_large_run_are_those_of_enumeration():
    run = run_of(drawn_groups(400, 8))
    true = expected([(chance, update("rloo", chosen)) for chosen, chance in samples(4)])
    for name, weights in (("grpo", "uniform"), ("mean", "uniform"), ("rloo", "length"), ("rloo", "right")):
        (row,) = what_if(run, (name,), weights=weights).rows
        exact = [(chance, weighted_update(name, weights, chosen)) for chosen, chance in samples(4)]
        mean = expected(exact)
        variance = float(expected([(chance, one @ one) for chance, one in exact]) - mean @ mean)
        bias = float((mean - true) @ (mean - true) / (true @ true))
        assert row.variance.low <= variance <= row.variance.high
        assert row.bias.low - 1e-9 <= bias <= row.bias.high + 1e-9
    rloo, mean_row = what_if(run, ("rloo", "mean")).rows
    assert (rloo.bias.value, rloo.bias.low, rloo.bias.high) == (0.0, 0.0, 0.0)
    assert mean_row.bias.value == pytest.approx((1 / 4) ** 2)  # 3/4 of the gradient, from groups of four


@pytest.mark.parametrize(("size", "parts_of"), [(4, 2), (5, 2), (6, 3)])
def test_signal_and_noise_are_unbiased_for_every_estimator(size, parts_of):
    names = [name for name in USUAL if not ESTIMATORS[name].couples_prompts]
    exact = {name: [(chance, update(name, chosen)) for chosen, chance in samples(parts_of)] for name in names}
    means = torch.stack([expected(exact[name]) for name in names])
    squares = torch.stack([expected([(chance, one @ one) for chance, one in exact[name]]) for name in names])
    parts = disjoint_parts(size, parts_of)
    groups = list(samples(size))
    chances = torch.tensor([chance for _, chance in groups], dtype=torch.float64)
    table = table_of([chosen for chosen, _ in groups])
    advantages = torch.stack([table.advantages_of_parts(name, parts) for name in names])
    found = split_products(table.grams, advantages, parts)
    torch.testing.assert_close(found.across @ chances, means @ means.T, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.squared @ chances, squares, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.noise @ chances, squares - (means**2).sum(1), rtol=1e-10, atol=1e-12)


def table_of(groups, **changes):
    return ReplayedGroups([StoredGroup(record_of(chosen, **changes)) for chosen in groups])


def record_of(chosen, step=1, advantages=None, kind="train"):
    rewards = torch.tensor([REWARDS[one] for one in chosen], dtype=torch.float64)
    scores = SCORES[chosen]
    return GroupRecord(
        step=step,
        prompt_id=f"p{chosen}{step}",
        kind=kind,
        rewards=rewards,
        lengths=torch.tensor([LENGTHS[one] for one in chosen]),
        advantages=estimate("rloo", rewards[None])[0] if advantages is None else advantages,
        gram=scores @ scores.T,
    )


def run_of(groups, steps=1, **changes):
    records = [record_of(chosen, step=1 + place % steps, **changes) for place, chosen in enumerate(groups)]
    lines = [{"step": step, "reward": 0.5} for step in range(1, steps + 1)]
    return RunReading(config={"group_size": len(groups[0])}, notes=(), lines=lines, groups=[*map(StoredGroup, records)])


def drawn_groups(count, size):
    generator = torch.Generator().manual_seed(1)
    return torch.multinomial(torch.tensor(CHANCES), count * size, True, generator=generator).view(count, size).tolist()


@pytest.mark.parametrize(("rollouts", "size", "count"), [(2, 1, 1), (4, 2, 3), (5, 2, 15), (8, 4, 35), (7, 3, 70)])
def test_every_pair_of_parts_occurs_once(rollouts, size, count):
    parts = disjoint_parts(rollouts, size)
    if count > 64:
        assert len(parts) == 64
    else:
        assert len({frozenset(map(frozenset, pair)) for pair in parts.tolist()}) == len(parts) == count
    assert all(len({*first, *second}) == 2 * size for first, second in parts.tolist())
    with pytest.raises(ScoregramError, match="two parts must fit into a group, got two parts of"):
        disjoint_parts(rollouts, rollouts // 2 + 1)


def test_a_large_run_shows_the_truth():
    """Three hundred groups: enumeration lies within the intervals."""
    names = ("rloo", "grpo", "reinforce")
    found = {row.estimator: row for row in what_if(run_of(drawn_groups(300, 8)), names).rows}
    assert tuple(found) == names
    truth = {name: [(chance, update(name, chosen)) for chosen, chance in samples(4)] for name in names}
    mean = {name: expected(several) for name, several in truth.items()}
    for name, row in found.items():
        signal = mean[name] @ mean[name]
        noise = expected([(chance, one @ one) for chance, one in truth[name]]) - signal
        assert row.snr.low <= float(signal / noise) <= row.snr.high
        cosine = torch.nn.functional.cosine_similarity(mean[name], mean["rloo"], dim=0)
        assert row.direction.low - 1e-9 <= float(cosine) <= row.direction.high + 1e-9
    assert found["rloo"].efficiency.value == found["rloo"].taken.value == pytest.approx(1.0)


def test_the_mean_baseline_differs_from_leave_one_out_by_scale_alone():
    rows = {row.estimator: row for row in what_if(run_of(drawn_groups(50, 8)), ("mean", "rloo")).rows}
    assert rows["mean"].snr.value == pytest.approx(rows["rloo"].snr.value)
    assert rows["mean"].taken.value == pytest.approx(1.0)
    assert rows["mean"].effective_rank.value == pytest.approx(rows["rloo"].effective_rank.value)


def test_only_prompts_of_one_step_meet():
    groups = drawn_groups(6, 4)
    records = [record_of(chosen, step=1 + place // 3) for place, chosen in enumerate(groups)]
    found = ReplayedGroups([*map(StoredGroup, records)]).whole_advantages("reinforce++")
    for step in (0, 1):
        rewards = torch.stack([record.rewards for record in records[3 * step : 3 * step + 3]])
        lengths = torch.stack([record.lengths for record in records[3 * step : 3 * step + 3]])
        torch.testing.assert_close(found[3 * step :][:3], estimate("reinforce++", rewards, lengths=lengths))


def test_few_groups_have_no_interval_and_pure_noise_no_conclusion():
    few = what_if(run_of(drawn_groups(5, 4)), ("rloo", "grpo")).rows[1]
    assert math.isnan(few.snr.low) and math.isnan(few.efficiency.value) and math.isnan(few.direction.value)
    torch.manual_seed(0)
    records = []
    for place in range(40):  # rewards that have nothing to do with the scores
        scores = torch.randn(8, 50, dtype=torch.float64)
        rewards = torch.randint(0, 2, (8,)).double()
        records.append(
            GroupRecord(
                step=1, prompt_id=str(place), rewards=rewards, lengths=torch.ones(8, dtype=torch.long),
                advantages=rewards - rewards.mean(), gram=scores @ scores.T,
            )
        )  # fmt: skip
    run = RunReading(config={}, notes=(), lines=[{"step": 1, "reward": 0.5}], groups=[*map(StoredGroup, records)])
    reference, *others = what_if(run, ("rloo", "grpo", "mean")).rows
    assert all(row.snr.low <= 0 <= row.snr.high for row in (reference, *others))
    assert reference.efficiency == reference.direction == Estimate(1.0, 1.0, 1.0)  # compared with itself
    assert all(math.isnan(row.efficiency.value) and math.isnan(row.direction.value) for row in others)
    weighted = what_if(run, ("rloo",), weights="length").rows[0]  # no longer the reference
    assert math.isnan(weighted.efficiency.value) and math.isnan(weighted.direction.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"estimators": ("magic",)}, "whatif --estimators: the name must be one of"),
        ({"estimators": ("remax",)}, "a run must hold what the estimator needs, got remax, which needs greedy_rewards"),
        ({"estimators": ("gae",)}, "a run must hold what the estimator needs, got gae, which needs"),
        ({"weights": "magic"}, "whatif --weights: the name must be one of"),
        ({"group_size": 3}, "must be from 2 to 2, half of the run's groups of 4, got 3"),
        ({"group_size": 1, "estimators": ("reinforce",)}, "must be from 2 to 2"),
    ],
)
def test_what_cannot_be_replayed_is_named(given, says):
    with pytest.raises(ScoregramError, match=says):
        what_if(run_of(drawn_groups(5, 4)), **given)


@pytest.mark.parametrize("groups", [[], drawn_groups(5, 3)])
def test_a_run_without_large_measured_groups_is_refused(groups):
    run = run_of(groups) if groups else RunReading(config={}, notes=(), lines=[], groups=[])
    with pytest.raises(ScoregramError, match="a run needs measured groups of four rollouts or more with all rewards"):
        what_if(run)
    losses = run_of(drawn_groups(5, 4), kind="loss")
    with pytest.raises(ScoregramError, match="a run needs measured groups"):
        what_if(losses)


def test_every_usual_estimator_can_be_replayed():
    assert set(USUAL) <= {name for name in ESTIMATORS if can_replay(name)}


def test_the_command_prints_a_table_and_strict_json(tmp_path, capsys):
    options = [
        "--model",
        "tiny",
        "--steps",
        "3",
        "--batch-size",
        "32",
        "--group-size",
        "8",
        "--out",
        str(tmp_path / "run"),
    ]
    assert cli.main(["train", *options]) == 0
    capsys.readouterr()
    assert cli.main(["whatif", str(tmp_path / "run"), "--estimators", "rloo", "grpo", "--json"]) == 0
    record = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert record["run_size"] == 8 and record["group_size"] == 4 and len(record["rows"]) == 2
    assert cli.main(["whatif", str(tmp_path / "run")]) == 0
    assert "Signal over noise is that of one prompt's update from 4 rollouts" in capsys.readouterr().out
    assert cli.main(["whatif", str(tmp_path / "run"), "--estimators", "rloo", "--weights", "length"]) == 0
    assert "weights length" in capsys.readouterr().out
    assert cli.main(["whatif", str(tmp_path / "run"), "--group-size", "5"]) == 2
    assert "half of the run's groups of 8" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["reinforce++", "reinforce++-baseline"])
def test_prompts_are_coupled_with_those_of_their_step_and_part(name):
    """Against one call for each step and part."""
    records = [record_of(chosen, step=step) for step in (1, 4, 9) for chosen in drawn_groups(3 + step, 4)]
    table, parts = ReplayedGroups([*map(StoredGroup, records)]), disjoint_parts(4, 2)
    found = table.advantages_of_parts(name, parts)
    for step in (1, 4, 9):
        here = [place for place, record in enumerate(records) if record.step == step]
        for split, half in product(range(len(parts)), range(2)):
            chosen = parts[split, half]
            rewards = torch.stack([records[place].rewards[chosen] for place in here])
            lengths = torch.stack([records[place].lengths[chosen] for place in here])
            torch.testing.assert_close(found[here, split, half], estimate(name, rewards, lengths=lengths))


def test_places_are_split_when_they_are_many(monkeypatch):
    table, parts = table_of(drawn_groups(6, 6)), disjoint_parts(6, 3)
    whole = {name: table.advantages_of_parts(name, parts) for name in USUAL}
    monkeypatch.setattr("scoregram.reading.replay.MOST_PAIRS", 1)
    for name, expected_advantages in whole.items():
        torch.testing.assert_close(table.advantages_of_parts(name, parts), expected_advantages)


@pytest.mark.parametrize(("most", "steps"), [(1, [0]), (8, [0, 5]), (12, [0, 4, 8]), (1000, list(range(10)))])
def test_a_long_run_is_thinned_by_whole_steps(most, steps):
    groups = [StoredGroup(record_of([0, 1, 2, 0], step=step)) for step in range(10) for _ in range(4)]
    kept = [group.record.step for group in whole_steps(groups, most)]
    assert kept == [step for step in steps for _ in range(4)]
    assert whole_steps([], 5) == []
