import math

import pytest

from scoregram.advantages import ESTIMATORS
from scoregram.checks import ScoregramError
from scoregram.theory.lab.comparison import OTHER_SAMPLING, comparison, moments_of, rollouts_of_group
from scoregram.theory.lab.turns import turn_moments
from tests.lab_cases import CASES, case, close, drawn

QUICK = ("reinforce", "mean", "rloo", "remax", "grpo", "opo", "turn-mean", "turn-rloo", "vineppo", "reward_to_go")


def rows_of(key, **options):
    found = comparison(case(*key).truth, estimators=QUICK, **options)
    assert not found.left_out
    return found, {row.estimator: row for row in found.rows}


@pytest.mark.parametrize("key", CASES)
def test_rows_are_sorted_and_consistent(key):
    found, rows = rows_of(key, budget=128)
    errors = [row.mse for row in found.rows]
    assert errors == sorted(errors) and set(rows) == set(QUICK)
    gradient = float(case(*key).truth.objective_gradient.norm())
    for row in found.rows:
        close(row.mse, row.variance + (row.relative_bias * gradient) ** 2)
        assert row.rollouts <= 128 and row.prompts >= 1
    assert found.least_error == found.rows[0]
    assert found.highest_snr.snr_squared == max(row.snr_squared for row in found.rows)


@pytest.mark.parametrize("key", CASES)
def test_mean_and_leave_one_out_differ_in_scale_alone(key):
    _, rows = rows_of(key, budget=64)
    close(rows["mean"].snr_squared, rows["rloo"].snr_squared)
    close(rows["mean"].relative_bias, 0.25)
    close(rows["mean"].cosine, 1.0)
    close(rows["rloo"].relative_bias, 0.0)


@pytest.mark.parametrize("key", CASES)
def test_what_each_costs_in_rollouts(key):
    at = case(*key)
    decisions = sum(
        weight * sum(rollout.probability * len(rollout.rewards) for rollout in drawn(key, prompt))
        for prompt, weight in enumerate(at.world.prompt_weights)
    )
    cost = {name: rollouts_of_group(at.truth, name, group_size=4, rollouts_per_state=3) for name in QUICK}
    close(cost.pop("vineppo"), 4 * (1 + 3 * decisions))
    assert cost.pop("remax") == 5.0
    assert set(cost.values()) == {4.0}


def test_twice_the_budget_halves_the_variance():
    _, once = rows_of(("stopping", "network"), budget=100)
    _, twice = rows_of(("stopping", "network"), budget=200)
    for name in ("rloo", "grpo", "remax"):
        close(twice[name].variance, once[name].variance / 2)
        close(twice[name].relative_bias, once[name].relative_bias)


def test_exact_values_are_marked_and_never_win():
    names = ("rloo", "constant", "gae", "gae-monte-carlo", "spo-chain", "exact_advantage")
    found = comparison(case("user_turns", "network").truth, budget=64, estimators=names)
    assert {row.estimator for row in found.rows if row.given_values} == set(names) - {"rloo"}
    assert found.rows[0].estimator == "exact_advantage" and found.least_error.estimator == "rloo"
    assert all(row.relative_bias < 1e-12 for row in found.rows)


@pytest.mark.parametrize("name", ["gae", "gae-monte-carlo", "spo-chain"])
def test_credit_that_needs_no_group_gives_what_groups_give(name):
    truth = case("stopping", "network").truth
    needs = (*ESTIMATORS[name].needs, "mask")
    for prompt, moments in enumerate(moments_of(truth, name, group_size=3)):
        listed = turn_moments(truth, ESTIMATORS[name].fn, prompt=prompt, group_size=3, needs=needs)
        close(moments.expected, listed.expected)
        close(moments.variance, listed.variance)


CLAIMING = {name for name, row in ESTIMATORS.items() if row.unbiased or row.direction_exact}


@pytest.mark.parametrize("name", sorted(CLAIMING - set(OTHER_SAMPLING)))
def test_claims_of_bias_hold_at_every_prompt(name):
    """A row that claims to be unbiased, or right in direction, is so in these worlds, parameters shared or not."""
    claim = ESTIMATORS[name]
    for key in (("output_only", "network"), ("step_rewards", "network"), ("user_turns", "tabular")):
        for moments in moments_of(case(*key).truth, name, group_size=2):
            if claim.unbiased:
                close(moments.relative_bias, 0.0)
            if claim.direction_exact:
                close(moments.cosine, 1.0)


# The critic of the lab is exact, and with an exact critic gae is too.
TURNED = {name for name, row in ESTIMATORS.items() if not row.direction_exact} - {"gae", *OTHER_SAMPLING}


@pytest.mark.parametrize("name", sorted(TURNED))
def test_every_loss_of_direction_is_seen_somewhere(name):
    found = [
        moments.cosine
        for world in ("output_only", "step_rewards")
        for moments in moments_of(case(world, "network").truth, name, group_size=3)
        if not math.isnan(moments.cosine)
    ]
    assert min(found) < 1 - 1e-6


def test_what_cannot_be_enumerated_is_said_to_be_left_out():
    found = comparison(case("user_turns", "tabular").truth, budget=64, estimators=("rloo", "same-state", "gigpo"))
    reasons = dict(found.left_out)
    assert "candidates of one turn" in reasons["same-state"] and "groups are enumerated" in reasons["gigpo"]
    assert [row.estimator for row in found.rows] == ["rloo"]


def test_what_the_budget_does_not_pay_for_is_said_to_be_left_out():
    found = comparison(case("stopping", "tabular").truth, budget=4, estimators=("rloo", "remax"))
    assert [row.estimator for row in found.rows] == ["rloo"]
    assert "one group of remax, 5 rollouts, got 4" in dict(found.left_out)["remax"]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda t: comparison(t, budget=3, estimators=("rloo",)), "cover one group of rloo, 4 rollouts, got 3"),
        (lambda t: comparison(t, budget=64, estimators=("nonsense",)), "one of .*rloo.*'nonsense'"),
        (lambda t: comparison(t, budget=64, estimators=("gae",)).least_error, "without exact values, got 1"),
    ],
)
def test_what_has_no_answer_is_refused(call, says):
    with pytest.raises(ScoregramError, match=says):
        call(case("stopping", "tabular").truth)
