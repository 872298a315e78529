"""Group, convention and batch estimators against loops over single rollouts, and on every degenerate group."""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scoregram import advantages as adv
from scoregram.advantages import ESTIMATORS, estimate
from scoregram.checks import ScoregramError

GROUP_ROWS = sorted(name for name, row in ESTIMATORS.items() if row.level == "group")
ABSOLUTE = {"reinforce", "constant", "remax", "reinforce++", "reinforce++-baseline", "tic", "g2rl"}
RELATIVE = sorted(set(GROUP_ROWS) - ABSOLUTE)


def inputs_for(name: str, rewards: Tensor) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    every = {
        "lengths": torch.randint(1, 9, rewards.shape, generator=draw),
        "score_energies": torch.rand(rewards.shape, generator=draw, dtype=torch.float64) + 0.1,
        "score_grams": random_grams(rewards, draw),
        "baselines": torch.full(rewards.shape[:1], 0.25, dtype=rewards.dtype),
        "greedy_rewards": torch.full(rewards.shape[:1], 0.5, dtype=rewards.dtype),
        "outcomes": rewards,
        "best_of": torch.full(rewards.shape[:1], 2),
    }
    return {need: every[need] for need in ESTIMATORS[name].needs}


def random_grams(rewards: Tensor, draw: torch.Generator) -> Tensor:
    vectors = torch.randn(*rewards.shape, 3, generator=draw, dtype=torch.float64)
    return vectors @ vectors.mT


def by_hand(name: str, r: list[float], extra: dict[str, list[float]]) -> list[float]:
    """One group, one rollout at a time, straight from the formulas."""
    result = []
    for i in range(len(r)):
        rest = [x for j, x in enumerate(r) if j != i]
        weights = extra.get("lengths") or extra.get("score_energies") or [1.0] * len(r)
        other_weights = [w for j, w in enumerate(weights) if j != i]
        mean, std = statistics.fmean(r), (statistics.stdev(r) if len(r) > 1 else 1.0)
        flat, rest_flat = len(set(r)) == 1, len(set(rest)) <= 1
        match name:
            case "reinforce":
                a = r[i]
            case "constant" | "remax":
                a = r[i] - (0.25 if name == "constant" else 0.5)
            case "mean" | "grpo-prime-rl":
                a = r[i] - mean
            case "rloo":
                a = r[i] - statistics.fmean(rest)
            case "grpo" | "dapo":
                a = 0.0 if flat else (r[i] - mean) / std
            case "grpo-trl" | "grpo-verl" | "grpo-openrlhf":
                eps = {"grpo-trl": 1e-4, "grpo-verl": 1e-6, "grpo-openrlhf": 1e-9}[name]
                a = (r[i] - mean) / (std + eps)
            case "grpo-nemo-rl":
                a = r[i] - statistics.fmean(rest)
                a = a if rest_flat else a / (statistics.stdev(rest) + 1e-6)
            case "tic":
                per_token = [x / w for x, w in zip(r, weights, strict=True)]
                spread = statistics.stdev(per_token)
                flat = max(per_token) - min(per_token) <= 1e-13 * max(map(abs, per_token))
                a = 0.0 if flat else (per_token[i] - statistics.fmean(per_token)) / spread
            case "max-at-k":
                a = sum(max(r[i], x) - x for x in rest) * len(r) / math.comb(len(r), 2)
            case "opo" | "optimal":
                a = r[i] - sum(w * x for w, x in zip(weights, r, strict=True)) / sum(weights)
            case "opo-loo" | "optimal-loo":
                a = r[i] - sum(w * x for w, x in zip(other_weights, rest, strict=True)) / sum(other_weights)
            case _:
                raise AssertionError(name)
        result.append(a)
    return result


grid = st.integers(-3, 3).map(lambda k: k / 4)


@pytest.mark.parametrize("name", sorted(set(GROUP_ROWS) - {"reinforce++", "reinforce++-baseline", "salt", "g2rl"}))
@given(data=st.data(), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_equals_the_formula(name, data, scale):
    size = data.draw(st.integers(2, 5))
    rows = data.draw(st.lists(st.lists(grid, min_size=size, max_size=size), min_size=1, max_size=3))
    # `constant` and `remax` subtract fixed numbers, so only the unscaled rewards suit them.
    rewards = torch.tensor(rows, dtype=torch.float64) * (1.0 if name in {"constant", "remax"} else scale)
    extra = inputs_for(name, rewards)
    expected = [
        by_hand(name, rewards[p].tolist(), {k: v[p].tolist() for k, v in extra.items() if v.ndim == 2})
        for p in range(len(rewards))
    ]
    actual = estimate(name, rewards, **extra)
    formula = torch.tensor(expected, dtype=torch.float64)
    # The loop leaves a residue where the library is exactly zero: a rounding of what it subtracts.
    size = 1.0 if name.startswith(("grpo", "dapo", "tic")) and name != "grpo-prime-rl" else float(rewards.abs().max())
    size = max(size, float(formula.abs().max()))
    torch.testing.assert_close(actual, formula, rtol=1e-9, atol=1e-12 * size)


@given(rewards=st.lists(st.lists(grid, min_size=3, max_size=3), min_size=2, max_size=3), centered=st.booleans())
def test_batch_whitening_is_that_of_the_tiled_tokens(rewards, centered):
    r = torch.tensor(rewards, dtype=torch.float64)
    lengths = torch.randint(1, 6, r.shape, generator=torch.Generator().manual_seed(1))
    per_rollout = r - r.mean(dim=-1, keepdim=True) if centered else r
    tokens = torch.cat([per_rollout.flatten()[k].repeat(int(n)) for k, n in enumerate(lengths.flatten())])
    name = "reinforce++-baseline" if centered else "reinforce++"
    actual = estimate(name, r, lengths=lengths)
    if float(tokens.max() - tokens.min()) < 1e-12:
        assert bool((actual == 0).all())
    else:
        torch.testing.assert_close(actual, (per_rollout - tokens.mean()) / tokens.std(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", RELATIVE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_constant_group_gives_exactly_zero(name, dtype):
    for scale, level, size in itertools.product((1e-6, 1e-3, 1.0, 1e3, 1e6), (0.1, -0.3, 0.0), (2, 3, 7)):
        rewards = torch.full((2, size), level * scale, dtype=dtype)
        result = estimate(name, rewards, **inputs_for(name, rewards))
        assert result.dtype == dtype and bool((result == 0).all()), result


@pytest.mark.parametrize("name", ["reinforce++", "reinforce++-baseline"])
def test_constant_batch_gives_exactly_zero(name):
    rewards = torch.full((2, 3), 0.1, dtype=torch.float64)
    assert bool((estimate(name, rewards, **inputs_for(name, rewards)) == 0).all())


def test_a_constant_group_in_a_varied_batch_keeps_the_offset_of_the_batch():
    rewards = torch.tensor([[1.0, 0.0], [0.1, 0.1]], dtype=torch.float64)
    result = estimate("reinforce++-baseline", rewards, lengths=torch.tensor([[5, 1], [2, 2]]))
    assert float(result[1, 0]) == float(result[1, 1]) != 0.0


@pytest.mark.parametrize(
    "name", ["grpo", "grpo-openrlhf", "grpo-verl", "dapo", "grpo-nemo-rl", "reinforce++", "reinforce++-baseline"]
)
def test_rounding_residue_is_never_divided_by(name):
    third = torch.tensor([[0.3, 0.1 + 0.2, 0.3]], dtype=torch.float64)
    assert float(third.max() - third.min()) > 0  # one rounding step apart
    assert float(estimate(name, third, **inputs_for(name, third)).abs().max()) < 1e-15
    single = torch.tensor([[0.3, 0.1, 0.1, 0.1]], dtype=torch.float32) + 0
    others_constant = estimate("grpo-nemo-rl", single)
    torch.testing.assert_close(others_constant[0, 0], single[0, 0] - single[0, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_true_spread_survives_at_every_scale(dtype, scale):
    rewards = torch.tensor([[1.0, 2.0, 4.0]], dtype=dtype) * scale
    torch.testing.assert_close(adv.standardized(rewards), adv.standardized(rewards / scale))
    assert bool(adv.mixed_groups(rewards).all())


def test_a_spread_that_squares_to_nothing_is_kept():
    tiny = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64) * 1e-200
    torch.testing.assert_close(adv.standardized(tiny), adv.standardized(tiny * 1e200))


@given(size=st.integers(2, 8), ddof=st.integers(0, 1))
def test_standardised_energy_is_the_group_size_less_ddof(size, ddof):
    rewards = torch.arange(size, dtype=torch.float64).square().unsqueeze(0)
    energy = float(adv.standardized(rewards, ddof=ddof).square().sum())
    assert math.isclose(energy, size - ddof, rel_tol=1e-12)


@pytest.mark.parametrize("name", GROUP_ROWS)
def test_unobserved_rollouts_count_for_nothing(name):
    full = torch.tensor([[1.0, 0.0, 2.0, 0.5], [0.0, 3.0, 1.0, 1.0]], dtype=torch.float64)
    extra = inputs_for(name, full)
    holes = torch.tensor([[1.0, math.nan, 2.0, 0.5], [math.inf, 3.0, 1.0, -math.inf]], dtype=torch.float64)
    seen = holes.isfinite()
    given = extra | ({"outcomes": holes} if "outcomes" in extra else {})
    result = ESTIMATORS[name].fn(holes, observed=seen, **given)
    assert bool((result[~seen] == 0).all()) and bool(result.isfinite().all())
    if name.startswith("reinforce++"):
        garbage = ESTIMATORS[name].fn(torch.where(seen, holes, 77.0), observed=seen, **extra)
        torch.testing.assert_close(result, garbage)
        return
    for p in range(2):
        alone = {k: (v[p : p + 1] if v.ndim == 1 else v[p : p + 1, seen[p]]) for k, v in extra.items()}
        alone |= {k: v[..., seen[p]] for k, v in alone.items() if k == "score_grams"}
        torch.testing.assert_close(result[p : p + 1, seen[p]], estimate(name, full[p : p + 1, seen[p]], **alone))


@pytest.mark.parametrize("name", GROUP_ROWS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_observed_reward_must_be_finite(name, bad):
    rewards = torch.tensor([[1.0, bad, 0.0]])
    extra = inputs_for(name, torch.zeros(1, 3))
    with pytest.raises(ScoregramError, match=r"must be finite.*\(0, 1\).*observed=rewards.isfinite\(\)"):
        ESTIMATORS[name].fn(rewards, **extra)
    if math.isinf(bad):
        with pytest.raises(ScoregramError, match=r"must be finite.*\(0, 1\)\. Pass NaN where a reward is missing"):
            estimate(name, rewards, **extra)
        with pytest.raises(ScoregramError, match="must be finite"):  # too few judged rollouts do not hide it
            estimate(name, torch.tensor([[math.nan, bad, math.nan]]), **extra)


@pytest.mark.parametrize("name", GROUP_ROWS)
def test_too_few_observed_is_an_error_and_none_is_zero(name):
    row, rewards = ESTIMATORS[name], torch.tensor([[1.0, 0.0, 2.0], [1.0, 2.0, 0.0]])
    extra = inputs_for(name, rewards)
    none = torch.tensor([[False, False, False], [True, True, True]])
    assert bool((row.fn(rewards, observed=none, **extra)[0] == 0).all())
    one = torch.tensor([[True, True, True], [False, True, False]])
    if row.min_group == 1:
        assert bool(row.fn(rewards, observed=one, **extra).isfinite().all())
    else:
        with pytest.raises(ScoregramError, match="at least 2 observed rollouts in a group, got 1 in prompt 1"):
            row.fn(rewards, observed=one, **extra)
        assert bool((estimate(name, torch.where(one, rewards, math.nan), **extra)[1] == 0).all())


def by_hand_where_judged(name: str, rewards: list[list[float]], extra: dict[str, Tensor]) -> list[list[float]]:
    """The formula on the judged rollouts of each group alone, 0 elsewhere; a loop."""
    result = [[0.0] * len(row) for row in rewards]
    kept = [[i for i, r in enumerate(row) if not math.isnan(r)] for row in rewards]
    kept = [here if len(here) >= ESTIMATORS[name].min_group else [] for here in kept]
    if name.startswith("reinforce++"):
        tiled, places = [], [(p, i) for p, here in enumerate(kept) for i in here]
        for p, i in places:
            mean = statistics.fmean(rewards[p][j] for j in kept[p]) if name.endswith("baseline") else 0.0
            tiled += [(p, i, rewards[p][i] - mean)] * int(extra["lengths"][p, i])
        values = [value for _, _, value in tiled]
        if len(places) > 1 and max(values) - min(values) > 1e-12:
            for p, i, value in tiled:
                result[p][i] = (value - statistics.fmean(values)) / statistics.stdev(values)
        return result
    for p, here in enumerate(kept):
        inputs = {key: [float(value[p, i]) for i in here] for key, value in extra.items() if value.ndim == 2}
        alone = [rewards[p][i] for i in here]
        advantages = by_hand(name, alone, inputs) if alone else []
        if name == "grpo-verl" and len(alone) == 1:
            advantages = [alone[0] / (1 + 1e-6)]
        for i, advantage in zip(here, advantages, strict=True):
            result[p][i] = advantage
    return result


@pytest.mark.parametrize("name", sorted(set(GROUP_ROWS) - {"salt", "g2rl"}))
def test_every_pattern_of_missing_rewards_equals_the_loop(name):
    """Two groups of three, each of the 64 patterns; `observed` of the function says the same as NaN, bit for bit."""
    full = torch.tensor([[1.0, 0.25, -0.5], [0.0, 0.75, 0.75]], dtype=torch.float64)
    for pattern in itertools.product([True, False], repeat=6):
        seen = torch.tensor(pattern).view(2, 3)
        holes = torch.where(seen, full, math.nan)
        extra = inputs_for(name, full)
        given = extra | ({"outcomes": holes} if "outcomes" in extra else {})
        actual = estimate(name, holes, **given)
        expected = torch.tensor(by_hand_where_judged(name, holes.tolist(), extra), dtype=torch.float64)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)
        assert bool((actual[~seen] == 0).all())
        fn, counts = ESTIMATORS[name].fn, seen.sum(dim=-1)
        if bool(((counts == 0) | (counts >= ESTIMATORS[name].min_group)).all()) and int(counts.sum()) > 1:
            assert torch.equal(actual, fn(full, observed=seen, **extra))
            assert torch.equal(actual, fn(torch.where(seen, full, 77.0), observed=seen, **given))
        if bool(seen.all()):
            assert torch.equal(actual, fn(full, **extra))


@pytest.mark.parametrize("name", GROUP_ROWS)
@given(data=st.data())
def test_a_missing_rollout_is_as_if_it_had_not_been_sampled(name, data):
    """A column of NaN changes nothing, wherever it stands and however wide the groups are; a group of one included."""
    size, prompts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    rewards = torch.tensor(
        data.draw(st.lists(st.lists(grid, min_size=size, max_size=size), min_size=prompts, max_size=prompts)),
        dtype=torch.float64,
    )
    extra = inputs_for(name, rewards)
    at = data.draw(st.integers(0, size))

    def padded(table: Tensor, value: float) -> Tensor:
        return torch.cat([table[:, :at], torch.full_like(table[:, :1], value), table[:, at:]], dim=1)

    wide = {key: padded(value, 3) if value.ndim > 1 else value for key, value in extra.items()}
    wide |= {key: padded(value.mT, 3) for key, value in wide.items() if key == "score_grams"}
    wide |= {"outcomes": padded(rewards, math.nan)} if "outcomes" in extra else {}
    actual = estimate(name, padded(rewards, math.nan), **wide)
    torch.testing.assert_close(actual, padded(estimate(name, rewards, **extra), 0), rtol=1e-12, atol=1e-12)


def test_a_missing_outcome_leaves_its_rollout_out():
    rewards = torch.tensor([[1.0, 0.0, 0.5], [1.0, 0.0, 0.5]], dtype=torch.float64)
    outcomes = torch.tensor([[1.0, 0.0, math.nan], [1.0, 1.0, math.nan]], dtype=torch.float64)
    half = math.sqrt(0.5)
    expected = torch.tensor([[half, -half, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(estimate("dapo", rewards, outcomes=outcomes), expected)
    with pytest.raises(ScoregramError, match="outcomes must be finite, got inf at index"):
        estimate("dapo", rewards, outcomes=torch.full_like(rewards, math.inf))


@pytest.mark.parametrize("name", GROUP_ROWS)
def test_nothing_is_modified_and_dtype_is_kept(name):
    rewards = torch.tensor([[1.0, 0.0, 2.0]])
    extra = inputs_for(name, rewards)
    before = {k: v.clone() for k, v in extra.items()}
    kept = rewards.clone()
    assert estimate(name, rewards, **extra).dtype == torch.float32
    assert torch.equal(rewards, kept) and all(torch.equal(extra[k], before[k]) for k in extra)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_advantages_beyond_the_dtype_are_refused(dtype):
    largest = torch.finfo(dtype).max  # rloo's advantages would be ±2 times as large
    with pytest.raises(ScoregramError, match="advantages must be finite, got inf"):
        estimate("rloo", torch.tensor([[largest, -largest]], dtype=dtype))


@pytest.mark.parametrize("name", GROUP_ROWS)
def test_advantages_are_constants_to_autograd(name):
    rewards = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.5, 0.0]]).requires_grad_()
    extra = inputs_for(name, rewards.detach())
    extra = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in extra.items()}
    assert not estimate(name, rewards, **extra).requires_grad


def test_rewards_whose_squares_overflow_are_standardised_by_the_others():
    rewards = [0.0, 1.0, 3.0, 7.0]
    rest = [[x for j, x in enumerate(rewards) if j != i] for i in range(4)]
    formula = [(x - statistics.fmean(r)) / statistics.stdev(r) for x, r in zip(rewards, rest, strict=True)]
    actual = estimate("grpo-nemo-rl", torch.tensor([rewards], dtype=torch.float64) * 1e200)
    torch.testing.assert_close(actual, torch.tensor([formula], dtype=torch.float64), rtol=1e-9, atol=0)


def test_verl_gives_a_single_rollout_its_raw_reward():
    torch.testing.assert_close(adv.verl_standardized(torch.tensor([[3.0]])), torch.tensor([[3.0]]))


def test_mean_is_leave_one_out_shrunk():
    rewards = torch.tensor([[0.0, 1.0, 5.0, 2.0]], dtype=torch.float64)
    torch.testing.assert_close(adv.mean_centered(rewards), 3 / 4 * adv.leave_one_out(rewards))


def test_a_dominant_weight_does_not_swallow_the_others():
    rewards = torch.tensor([[1.0, 0.0, 2.0]], dtype=torch.float64)
    energies = torch.tensor([[1e20, 1.0, 3.0]], dtype=torch.float64)
    result = adv.energy_weighted_leave_one_out(rewards, score_energies=energies)
    assert float(result[0, 0]) == pytest.approx(1.0 - 6.0 / 4.0, rel=1e-12)


@pytest.mark.parametrize("name", ["optimal", "optimal-loo", "opo", "opo-loo"])
def test_weights_that_are_all_zero_count_as_equal(name):
    rewards = torch.tensor([[1.0, 0.0, 2.0]], dtype=torch.float64)
    plain = adv.leave_one_out(rewards) if name.endswith("loo") else adv.mean_centered(rewards)
    torch.testing.assert_close(estimate(name, rewards, **{ESTIMATORS[name].needs[0]: torch.zeros(1, 3)}), plain)
    with pytest.raises(ScoregramError, match="must not be negative"):
        estimate(name, rewards, **{ESTIMATORS[name].needs[0]: torch.tensor([[1.0, -1.0, 1.0]])})


def test_mixed_groups_and_phantom_advantages():
    outcomes = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.1, 0.1, 0.1]])
    assert adv.mixed_groups(outcomes).tolist() == [True, False, False, False]
    assert adv.mixed_groups(outcomes, observed=torch.zeros(4, 3).bool()).tolist() == [False] * 4
    assert adv.mixed_groups(outcomes, observed=torch.tensor([[True, False, True]] * 4)).tolist() == [False] * 4
    shaped = outcomes + torch.tensor([0.0, -0.5, -1.0])
    result = adv.mixed_groups_standardized(shaped, outcomes=outcomes)
    assert bool((result[1:] == 0).all())
    torch.testing.assert_close(result[:1], adv.standardized(shaped[:1]))


def test_overlong_penalty_is_piecewise_linear():
    lengths = torch.arange(0, 200, 10).unsqueeze(0)
    expected = [[0.0 if n <= 80 else (-1.0 if n > 100 else (80 - n) / 20) for n in lengths[0].tolist()]]
    torch.testing.assert_close(adv.overlong_penalty(lengths, limit=100, margin=20), torch.tensor(expected))
    with pytest.raises(ScoregramError, match="0 < margin <= limit"):
        adv.overlong_penalty(lengths, limit=10, margin=20)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: adv.leave_one_out(torch.zeros(3)), "shape \\(P, R\\)"),
        (lambda: adv.leave_one_out([[1.0, 0.0]]), "rewards must be a tensor, got list"),  # pyright: ignore[reportArgumentType]
        (lambda: adv.leave_one_out(torch.zeros(2, 1)), "group of 1"),
        (lambda: adv.no_baseline(torch.zeros(2, 0)), "group of 0"),
        (
            lambda: adv.leave_one_out(torch.zeros(2, 2), observed=torch.ones(2, 3).bool()),
            "observed must have the shape",
        ),
        (lambda: estimate("rloo", torch.zeros(2, 2), observed=torch.ones(2, 2).bool()), "got observed"),
        (lambda: estimate("dapo", torch.zeros(2, 2), outcomes=torch.zeros(2, 3)), "outcomes must have the shape"),
        (lambda: estimate("rloo", torch.zeros(3)), "shape \\(P, R\\)"),
        (lambda: adv.mixed_groups(torch.zeros(2, 2), observed=torch.ones(2, 3).bool()), "observed must have the shape"),
        (lambda: adv.mixed_groups(torch.zeros(2, 0)), "group of 0"),
        (lambda: adv.length_weighted(torch.zeros(2, 2), lengths=torch.ones(2)), "lengths must have the shape"),
        (lambda: adv.greedy_baseline(torch.zeros(2, 2), greedy_rewards=torch.ones(3)), "greedy_rewards must have"),
        (
            lambda: adv.constant_baseline(torch.zeros(1, 2), baselines=torch.tensor([math.nan])),
            "baselines must be finite",
        ),
        (lambda: adv.standardized(torch.zeros(2, 2), eps=-1.0), "eps must be finite"),
        (lambda: adv.standardized(torch.zeros(2, 2), ddof=2), "ddof must be 0 or 1"),
        (lambda: adv.batch_whitened(torch.ones(1, 1), lengths=torch.ones(1, 1)), "two observed rollouts"),
        (lambda: adv.batch_whitened(torch.ones(1, 2), lengths=torch.zeros(1, 2)), "got 0 rollouts with 0 tokens"),
    ],
)
def test_refusals_say_what_was_received(call, message):
    with pytest.raises(ScoregramError, match=message):
        call()


def test_a_batch_of_no_prompts_gives_none():
    assert adv.standardized(torch.zeros(0, 3)).shape == adv.leave_one_out(torch.zeros(0, 3)).shape == (0, 3)


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("opo", {}, "'opo' needs lengths, got none. Pass lengths."),
        ("opo", {"lengths": None}, "Pass lengths."),
        ("gae", {"values": torch.zeros(1, 2, 3)}, "Pass mask."),
        ("opoo", {}, "must be one of"),
        ("rloo", {"lenghts": torch.zeros(1, 2)}, "got lenghts"),
        ("grpo", {"eps": torch.zeros(1)}, "calling the row's fn"),
    ],
)
def test_estimate_names_what_is_missing_or_unknown(name, inputs, message):
    with pytest.raises(ScoregramError, match=message):
        estimate(name, torch.zeros(1, 2), **inputs)


def test_estimate_leaves_what_a_row_does_not_need():
    rewards = torch.tensor([[1.0, 0.0]])
    everything = inputs_for("opo", rewards) | inputs_for("remax", rewards) | {"mask": None}
    torch.testing.assert_close(estimate("rloo", rewards, **everything), adv.leave_one_out(rewards))


@pytest.mark.parametrize("k", [2, 3, 4])
def test_best_of_contribution_is_the_gradient_of_the_best_of_k(k):
    """Every group of four draws from three actions: the expected update is `∇E[max of k rewards]`, by autograd."""
    rewards, size = [0.0, 1.0, 2.5], 4
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    log_pi = logits.log_softmax(0)
    best = [
        torch.stack([log_pi[a] for a in actions]).sum().exp() * max(rewards[a] for a in actions)
        for actions in itertools.product(range(3), repeat=k)
    ]
    (expected,) = torch.autograd.grad(torch.stack(best).sum(), logits, retain_graph=True)
    scores = [torch.autograd.grad(log_pi[a], logits, retain_graph=True)[0] for a in range(3)]
    update = torch.zeros(3, dtype=torch.float64)
    for group in itertools.product(range(3), repeat=size):
        chance = math.exp(sum(float(log_pi[a].detach()) for a in group))
        drawn = torch.tensor([[rewards[a] for a in group]], dtype=torch.float64)
        advantages = estimate("max-at-k", drawn, best_of=torch.tensor([k]))[0]
        update += chance * sum(advantages[i] * scores[a] for i, a in enumerate(group)) / size
    torch.testing.assert_close(update, expected, rtol=1e-12, atol=1e-14)


def test_best_of_contribution_averages_over_all_sets():
    rewards = [0.5, -1.0, 2.0, 2.0, 0.0]
    for k in (2, 3, 4, 5):
        expected = []
        for i in range(5):
            sets = [s for s in itertools.combinations(range(5), k) if i in s]
            added = [max(rewards[j] for j in s) - max(rewards[j] for j in s if j != i) for s in sets]
            expected.append(5 * sum(added) / math.comb(5, k))
        found = estimate("max-at-k", torch.tensor([rewards], dtype=torch.float64), best_of=torch.tensor([k]))
        torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_a_group_with_fewer_observed_rollouts_than_k_gets_zeros_and_a_smaller_group_is_an_error():
    rewards = torch.tensor([[1.0, math.nan, 0.0], [1.0, 0.0, 0.0]])
    assert estimate("max-at-k", rewards, best_of=torch.tensor([3, 3])).tolist() == [[0.0] * 3, [3.0, 0.0, 0.0]]
    for k in (1, 4):
        with pytest.raises(ScoregramError, match=rf"best_of must lie in \[2, 3\], got {k}"):
            estimate("max-at-k", rewards, best_of=torch.tensor([k, 2]))
