"""Every rule of the verdicts at its edges: what holds, what its null predicts, what fails, what stays open."""

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

import pytest

from scoregram.exhibits import Cell, Estimate, Table
from scoregram.studies.grpo_rank import ABOUT_TWO, PRINTED_TOP1, cause_exhibits, learning_exhibits, rank_exhibits
from scoregram.studies.grpo_rank.claims import CLAIMS
from scoregram.studies.grpo_rank.evidence import assessment, headline
from scoregram.studies.grpo_rank.readings import Evidence
from scoregram.studies.grpo_rank.verdicts import (
    HALF_DIGIT,
    about_two,
    judge_claims,
    judge_fall,
    judge_gradient_error,
    judge_larger_groups,
    judge_rank,
    judge_rank_at,
    judge_row_at,
    judge_saturation,
    judge_top1_order,
    mean_success,
    model_scale,
    plain_verdict,
    surely_above,
    within,
    worst_verdict,
)
from scoregram.studies.ledger import MeasuredVerdict as Outcome
from scoregram.studies.ledger import replication_setting
from scoregram.studies.page import verdict_counts

NAN = math.nan
NONE = Evidence((), (), ())
INSIDE = Estimate(2.0, 1.9, 2.1)
OUTSIDE = Estimate(3.0, 2.9, 3.1)
OPEN = Estimate(2.2, 2.0, 2.4)
UNKNOWN = Estimate(NAN)
ONCE = Estimate(2.0)
FAR = 4.0


def table(columns: tuple[str, ...], rows: list[dict[str, Cell]]) -> Table:
    """A table with the columns of a real one; what is not given is blank."""
    return Table("x", "x", "x", columns, tuple(tuple(row.get(name) for name in columns) for row in rows))


def table_1(ranks: Mapping[Any, Estimate], *, null: float = FAR, **given: Any) -> Table:
    """Table 1 with these effective ranks; null models at `null` and top-1 fractions where the paper has them."""
    tops, top_nulls, nulls = given.get("tops", {}), given.get("top_nulls", {}), given.get("nulls", {})
    rows: list[dict[str, Cell]] = []
    for size, rank in ranks.items():
        printed = sum(PRINTED_TOP1.get(size, (0.5, 0.5))) / 2
        row: dict[str, Cell] = {"R": size, "effective rank": rank}
        row["success rate"] = given.get("success", 0.5)
        row["top-1 fraction"] = tops.get(size, Estimate(printed, printed - 0.01, printed + 0.01))
        for name in ("orthogonal", "shuffled", "unrelated"):
            row[f"null: {name}"] = nulls.get(name, null)
            row[f"top-1 {name}"] = top_nulls.get(name, {}).get(size, 0.5)
        rows.append(row)
    return table(rank_exhibits.table_1(NONE).columns, rows)


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [
        (2 - ABOUT_TWO, 2 + ABOUT_TWO, Outcome.REPLICATED),
        (1.9, 2.1, Outcome.REPLICATED),
        (2 - ABOUT_TWO - 0.01, 2.0, Outcome.UNDECIDED),
        (2.0, 2 + ABOUT_TWO + 0.01, Outcome.UNDECIDED),
        (1.0, 3.0, Outcome.UNDECIDED),
        (2 + ABOUT_TWO, 3.0, Outcome.UNDECIDED),
        (2 + ABOUT_TWO + 0.01, 3.0, Outcome.NOT),
        (1.0, 2 - ABOUT_TWO - 0.01, Outcome.NOT),
        (NAN, NAN, Outcome.UNDECIDED),
    ],
)
def test_about_two_is_decided_by_the_interval(low, high, outcome):
    assert about_two(Estimate(2.0, low, high)) is outcome
    assert about_two(Estimate(NAN, low, high)) is Outcome.NOT_MEASURED


def test_without_an_interval_nothing_is_decided():
    assert within(Estimate(0.5), 0.0, 1.0) is Outcome.UNDECIDED
    assert within(Estimate(5.0), 0.0, 1.0) is Outcome.UNDECIDED
    for one, other in itertools.product((INSIDE, ONCE, UNKNOWN), (ONCE, UNKNOWN)):
        assert not surely_above(one, other) and not surely_above(other, one)


def test_several_things_claimed_at_once_are_as_good_as_the_worst():
    order = [
        Outcome.NOT,
        Outcome.NOT_MEASURED,
        Outcome.UNDECIDED,
        Outcome.AS_NULL,
        Outcome.REPLICATED,
    ]
    for one, two in itertools.product(order, order):
        assert worst_verdict(one, two) is order[min(order.index(one), order.index(two))]


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize(
    ("rank", "near_null", "far_null"),
    [
        (INSIDE, Outcome.AS_NULL, Outcome.REPLICATED),
        (OUTSIDE, Outcome.NOT, Outcome.NOT),
        (OPEN, Outcome.UNDECIDED, Outcome.UNDECIDED),
        (ONCE, Outcome.UNDECIDED, Outcome.UNDECIDED),
        (UNKNOWN, Outcome.NOT_MEASURED, Outcome.NOT_MEASURED),
    ],
)
def test_a_rank_near_two_counts_only_where_no_null_is_near_two(size, rank, near_null, far_null):
    assert judge_rank_at(table_1({size: rank}), size).verdict is far_null
    for name in ("orthogonal", "shuffled", "unrelated"):
        for null in (2.0, 2 - ABOUT_TWO, 2 + ABOUT_TWO):
            found = judge_rank_at(table_1({size: rank}, nulls={name: null}), size)
            assert found.verdict is near_null and found.details == {"nulls near 2": name}
        beyond = table_1({size: rank}, nulls={name: 2 + ABOUT_TWO + 0.01})
        assert judge_rank_at(beyond, size).verdict is far_null
    assert judge_rank_at(table_1({size: rank}, null=NAN), size).verdict is far_null


def test_two_rows_never_say_more_than_the_null():
    for null in (1.0, 2.0, 4.0, NAN):
        assert judge_rank_at(table_1({2: INSIDE}, null=null), 2).verdict is Outcome.AS_NULL
    assert judge_rank_at(table_1({2: OUTSIDE}), 2).verdict is Outcome.NOT
    assert "follows from the top-1 fraction" in judge_rank_at(table_1({2: INSIDE}), 2).sentence


@pytest.mark.parametrize("size", sorted(PRINTED_TOP1))
def test_a_row_needs_its_top_fraction_too(size):
    low, high = PRINTED_TOP1[size]
    base = judge_rank_at(table_1({size: INSIDE}), size).verdict
    cases = {
        (low - HALF_DIGIT, high + HALF_DIGIT): base,
        (low - HALF_DIGIT - 0.01, high): Outcome.UNDECIDED,
        (0.0, low - HALF_DIGIT - 0.01): Outcome.NOT,
        (high + HALF_DIGIT + 0.01, 1.0): Outcome.NOT,
    }
    for (start, end), outcome in cases.items():
        made = table_1({size: INSIDE}, tops={size: Estimate((start + end) / 2, start, end)})
        assert judge_row_at(made, size).verdict is outcome
    assert judge_row_at(table_1({size: OUTSIDE}), size).verdict is Outcome.NOT
    assert judge_row_at(table_1({size: INSIDE}), size).claim in {claim.id for claim in CLAIMS}


def test_a_row_that_the_paper_has_not_is_judged_by_its_rank():
    found = judge_row_at(table_1({16: INSIDE}, tops={16: Estimate(0.9, 0.9, 0.9)}), 16)
    assert (found.claim, found.verdict) == ("table-1-r16", Outcome.REPLICATED)


def expected_headline(outcomes: list[Outcome]) -> Outcome:
    """All of R = 2, 4 and 8 were measured."""
    if Outcome.NOT in outcomes:
        return Outcome.NOT
    if set(outcomes) == {Outcome.NOT_MEASURED}:
        return Outcome.NOT_MEASURED
    if set(outcomes) & {Outcome.UNDECIDED, Outcome.NOT_MEASURED}:
        return Outcome.UNDECIDED
    return Outcome.AS_NULL if set(outcomes) == {Outcome.AS_NULL} else Outcome.REPLICATED


@pytest.mark.parametrize("null", [2.0, FAR])
def test_the_headline_is_judged_at_every_size(null):
    for ranks in itertools.product((INSIDE, OUTSIDE, OPEN, ONCE, UNKNOWN), repeat=3):
        made = table_1(dict(zip((2, 4, 8), ranks, strict=True)), null=null)
        outcomes = [judge_rank_at(made, size).verdict for size in (2, 4, 8)]
        assert judge_rank(made).verdict is expected_headline(outcomes)
        with_larger = table_1(dict(zip((2, 4, 8, 16), (*ranks, OUTSIDE), strict=True)), null=null)
        assert judge_rank(with_larger).verdict is expected_headline(outcomes)


@pytest.mark.parametrize("missing", [{2}, {4}, {8}, {2, 4}, {4, 8}, {2, 8}])
def test_a_missing_size_leaves_the_headline_open_unless_another_refutes_it(missing):
    sizes = {2, 4, 8} - missing
    found = judge_rank(table_1(dict.fromkeys(sorted(sizes), INSIDE)))
    assert found.verdict is Outcome.UNDECIDED
    assert {found.details[f"R = {size}"] for size in missing} == {"not measured"}
    assert judge_rank(table_1(dict.fromkeys(sorted(sizes), OUTSIDE))).verdict is Outcome.NOT


def test_without_any_size_of_the_paper_nothing_was_measured():
    for ranks in ({}, {16: INSIDE}):
        assert judge_rank(table_1(ranks)).verdict is Outcome.NOT_MEASURED


def spread(value: float, half: float = 0.01) -> Estimate:
    return Estimate(value, value - half, value + half)


HEIGHTS = (0.5, 0.6, 0.7)


def test_fig_2_needs_the_order_and_a_null_without_it():
    """Its absence refutes it only where a null model has the order; elsewhere the success rate rules it out."""
    ranks = dict.fromkeys((2, 4, 8), INSIDE)
    for heights in itertools.product(HEIGHTS, repeat=3):
        two, four, eight = heights
        tops = {size: spread(height) for size, height in zip((2, 4, 8), heights, strict=True)}
        holds, fails = four > two > eight, two > four or eight > two or eight > four
        outcome = Outcome.REPLICATED if holds else Outcome.UNDECIDED
        judged = judge_top1_order(table_1(ranks, tops=tops, success=0.08))
        assert judged.verdict is outcome and judged.details == {"nulls in that order": "none"}
        reason = (
            "Not decided at this success rate: 8 % of the rollouts are right, and no null model has the printed order"
        )
        assert (reason in judged.sentence) is fails
        assert ("orthogonal scores of equal norms have it from 23 to 77 % right" in judged.sentence) is fails
        wide = {size: spread(height, 0.06) for size, height in zip((2, 4, 8), heights, strict=True)}
        assert judge_top1_order(table_1(ranks, tops=wide)).verdict is not Outcome.REPLICATED  # neighbours overlap
        for name in ("orthogonal", "shuffled", "unrelated"):
            ordered = table_1(ranks, tops=tops, top_nulls={name: {2: 0.6, 4: 0.7, 8: 0.5}})
            judged = judge_top1_order(ordered)
            assert judged.verdict is (Outcome.AS_NULL if holds else Outcome.NOT if fails else Outcome.UNDECIDED)
            assert judged.details == {"nulls in that order": name} and "Not decided" not in judged.sentence
            other = table_1(ranks, tops=tops, top_nulls={name: {2: 0.7, 4: 0.6, 8: 0.5}})
            assert judge_top1_order(other).verdict is outcome


def test_fig_2_needs_all_three_sizes():
    for sizes in ((2, 4), (4, 8), (2, 8, 16), ()):
        assert judge_top1_order(table_1(dict.fromkeys(sizes, INSIDE))).verdict is Outcome.NOT_MEASURED
    undefined = table_1(dict.fromkeys((2, 4, 8), INSIDE), tops={4: UNKNOWN})
    assert judge_top1_order(undefined).verdict is Outcome.NOT_MEASURED
    no_null = dict.fromkeys((2, 4, 8), NAN)
    found = judge_top1_order(table_1(dict.fromkeys((2, 4, 8), INSIDE), top_nulls={"orthogonal": no_null}))
    assert found.effect.null is None
    json.dumps(plain_verdict(found), allow_nan=False)


def accuracy_table(ends: dict[int, Estimate]) -> Table:
    rows: list[dict[str, Cell]] = [{"R": size, "final accuracy": end} for size, end in ends.items()]
    return table(learning_exhibits.group_size_table(NONE).columns, rows)


def test_fig_3_needs_the_largest_surely_above_and_nothing_the_other_way_round():
    for heights in itertools.product(HEIGHTS, repeat=3):
        two, four, eight = heights
        found = judge_larger_groups(accuracy_table({s: spread(h) for s, h in zip((2, 4, 8), heights, strict=True)}))
        refuted = two > four or four > eight or two > eight
        outcome = Outcome.NOT if refuted else Outcome.REPLICATED if eight > two else Outcome.UNDECIDED
        assert found.verdict is outcome
        assert found.effect.value == pytest.approx(eight - two)
        assert found.effect.low == pytest.approx(eight - two - 0.02)
        wide = accuracy_table({s: spread(h, 0.2) for s, h in zip((2, 4, 8), heights, strict=True)})
        assert judge_larger_groups(wide).verdict is Outcome.UNDECIDED


def test_fig_3_leaves_larger_sizes_and_single_seeds_aside():
    rising = {2: spread(0.1), 8: spread(0.3)}
    assert judge_larger_groups(accuracy_table({**rising, 16: spread(0.05)})).verdict is Outcome.REPLICATED
    assert judge_larger_groups(accuracy_table({2: Estimate(0.1), 8: Estimate(0.9)})).verdict is Outcome.UNDECIDED
    cases: tuple[dict[int, Estimate], ...] = ({}, {4: spread(0.1)}, {2: UNKNOWN, 8: spread(0.1)}, {16: spread(0.1)})
    for ends in cases:
        assert judge_larger_groups(accuracy_table(ends)).verdict is Outcome.NOT_MEASURED


def prediction_table(rank: Estimate, reward: Estimate, live: Estimate) -> Table:
    found = {"effective rank": rank, "signal to noise": UNKNOWN, "share of live groups": live, "mean reward": reward}
    rows: list[dict[str, Cell]] = [
        {"quantity": name, "correlation with the gain": cell} for name, cell in found.items()
    ]
    return table(cause_exhibits.prediction(NONE).columns, rows)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("near", "far", "rivals", "answer"),
    [
        (0.5, 0.9, (0.2, 0.3), "and"),
        (0.5, 0.9, (0.2, -0.3), "and"),
        (0.5, 0.9, (0.2, 0.6), "but not"),
        (0.5, 0.9, (-0.6, 0.2), "but not"),
        (0.5, 0.9, (0.5, 0.2), "but not"),
        (0.5, 0.9, (NAN, NAN), "and"),
        (-0.1, 0.9, (0.0, 0.0), None),
        (0.0, 0.9, (0.0, 0.0), None),
        (NAN, NAN, (0.0, 0.0), None),
    ],
)
def test_a_signal_of_saturation_must_surely_beat_what_is_known_anyway(sign, near, far, rivals, answer):
    """The paper asks whether it could be one, so the verdict is an answer."""
    low, high = sorted((sign * near, sign * far)) if not math.isnan(near) else (NAN, NAN)
    made = prediction_table(Estimate(sign * 0.7, low, high), Estimate(rivals[0]), Estimate(rivals[1]))
    found = judge_saturation(made)
    assert found.verdict is (Outcome.ANSWERED if answer else Outcome.OPEN)
    assert found.sentence.startswith(f"Here it predicts gains, {answer} surely" if answer else "Correlation")


def test_saturation_without_a_correlation_was_not_measured():
    found = judge_saturation(prediction_table(UNKNOWN, UNKNOWN, UNKNOWN))
    assert found.verdict is Outcome.NOT_MEASURED and "none is defined" in found.sentence
    json.dumps(plain_verdict(found), allow_nan=False)


FALL, RISE, SAME = spread(-0.05), spread(0.05), spread(0.005)


def slopes_table(rank: Estimate, ratio: Estimate, distinct: Estimate) -> Table:
    """The pooled row decides; the row of one group size, here against it, does not."""
    columns = cause_exhibits.trend_table(NONE).columns
    rows = [(8, 9, FALL, RISE, RISE), (cause_exhibits.ALL_SIZES, 9, rank, ratio, distinct)]
    return table(columns, [dict(zip(columns, row, strict=True)) for row in rows])


def test_the_rank_falls_only_by_the_pooled_slope():
    for rank, ratio, distinct in itertools.product((FALL, RISE, SAME, ONCE), repeat=3):
        found = judge_fall(slopes_table(rank, ratio, distinct))
        outcome = Outcome.UNDECIDED
        if ratio is FALL:
            outcome = Outcome.REPLICATED
        elif rank is FALL:
            outcome = Outcome.AS_NULL
        elif RISE in (rank, ratio):
            outcome = Outcome.NOT
        assert found.verdict is outcome, (rank, ratio)
        alone = {FALL: Outcome.REPLICATED, RISE: Outcome.NOT}.get(distinct, Outcome.UNDECIDED)
        assert found.details == {"without repeated texts": str(alone)}
        assert ("results/over-training" in found.sentence) is (outcome is Outcome.UNDECIDED)
        assert found.effect.value == ratio.value and json.dumps(plain_verdict(found), allow_nan=False)
    sentence = judge_fall(slopes_table(RISE, FALL, SAME)).sentence
    shown = (
        "null) -0.050 [-0.060, -0.040],",
        "texts +0.005 [-0.005, +0.015];",
        "of log(rank) +0.050 [+0.040, +0.060].",
    )
    assert all(slope in sentence for slope in shown)


def test_without_slopes_nothing_was_measured_about_the_fall():
    for made in (slopes_table(UNKNOWN, UNKNOWN, UNKNOWN), cause_exhibits.trend_table(NONE)):
        found = judge_fall(made)
        assert found.verdict is Outcome.NOT_MEASURED and found.effect.value is None
        assert "results/over-training" in found.sentence and "nan" not in found.sentence


ORACLE = {
    "near": (Estimate(0.9, 0.89, 0.95), Outcome.REPLICATED),
    "as independent": (Estimate(0.9, 0.86, 0.95), Outcome.AS_NULL),
    "open": (Estimate(0.9, 0.7, 0.95), Outcome.UNDECIDED),
    "far": (Estimate(0.5, 0.4, 0.6), Outcome.NOT),
    "no interval": (Estimate(0.9), Outcome.UNDECIDED),
    "missing": (Estimate(NAN), Outcome.NOT_MEASURED),
}
UNAIDED = {
    "worst": (Estimate(1.2, 1.1, 1.3), Outcome.REPLICATED),
    "open": (Estimate(1.2, 0.9, 1.3), Outcome.UNDECIDED),
    "better": (Estimate(0.8, 0.7, 0.9), Outcome.NOT),
}


@pytest.mark.parametrize("unaided", UNAIDED)
@pytest.mark.parametrize("oracle", ORACLE)
def test_the_error_of_the_gradient_is_near_the_oracle_and_largest_without_a_baseline(oracle, unaided):
    """Both must hold; a share that an independent reward gives too is no finding."""
    cell, near = ORACLE[oracle]
    none, largest = UNAIDED[unaided]
    row: dict[str, Cell] = {"R": 8, "no baseline": none, "oracle": cell, "null: independent reward": 7 / 8}
    found = judge_gradient_error(table(learning_exhibits.variance_table(NONE).columns, [row]))
    worst = [one for one in (Outcome.NOT, Outcome.NOT_MEASURED, Outcome.UNDECIDED) if one in (near, largest)]
    assert found.verdict is (worst[0] if worst else near)
    assert found.effect.null == 7 / 8 and json.dumps(plain_verdict(found), allow_nan=False)


def test_the_error_of_the_gradient_needs_eight_rollouts():
    row: dict[str, Cell] = {"R": 4, "no baseline": Estimate(1.0), "oracle": Estimate(1.0)}
    found = judge_gradient_error(table(learning_exhibits.variance_table(NONE).columns, [row]))
    assert found.verdict is Outcome.NOT_MEASURED and found.effect.value is None


def test_judging_says_where_and_what_and_fits_json():
    exhibits = [
        rank_exhibits.table_1(NONE),
        learning_exhibits.group_size_table(NONE),
        cause_exhibits.prediction(NONE),
        cause_exhibits.trend_table(NONE),
        learning_exhibits.variance_table(NONE),
    ]
    exhibits[0] = table_1({2: INSIDE, 4: OUTSIDE, 8: UNKNOWN, 16: OPEN})
    exhibits[0] = Table("table-1", "", "", exhibits[0].columns, exhibits[0].rows)
    verdicts = judge_claims(exhibits, seeds=(0, 1), model="some-135M.gguf", task="t")
    assert json.loads(json.dumps(verdicts, allow_nan=False)) == verdicts
    ledger = {claim.id for claim in CLAIMS}
    assert [one["claim"] for one in verdicts if one["claim"] not in ledger] == ["table-1-r16"]
    assert all((one["seeds"], one["model"], one["task"]) == ([0, 1], "some-135M.gguf", "t") for one in verdicts)
    assert all(
        (one["replication"], one["scale"], one["success_rate"]) == ("conceptual", "135 M", 0.5) for one in verdicts
    )
    assert all(one["sentence"].endswith(".") and one["place"] and one["statement"] for one in verdicts)
    where = "conceptual replication, some-135M.gguf, 135 M parameters against the paper's 4 B, t, 50 % of rollouts "
    where += "right, 2 seeds"
    assert headline(verdicts).startswith(
        f"“Effective rank about 2 whatever the group size” is not replicated here ({where}). Effective rank 2.00 at "
    )
    concluded = assessment(verdicts)
    assert concluded.summary == headline(verdicts) and where in concluded.strongest_claim
    assert "nan" not in json.dumps(verdicts)
    by_claim = {one["claim"]: one["restates"] for one in verdicts}
    assert {claim for claim, other in by_claim.items() if other} == {f"table-1-r{size}" for size in (2, 4, 8, 16)}
    assert verdict_counts(verdicts).startswith("Of 6 independent statements: ")
    assert verdict_counts(verdicts).endswith(" (4 claims restate others).")


@pytest.mark.parametrize(
    ("model", "scale"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "135 M"),
        ("nvidia/Nemotron-Mini-4B-Instruct", "4 B"),
        ("folder-7B/start", None),  # the size of the folder's name is not the model's
        ("qwen2.5-coder-0.5b", "0.5 B"),
        ("tiny", "0.9 M"),
        ("llama4bits", None),
        ("x4b", None),
    ],
)
def test_the_scale_comes_from_the_name_of_the_model(model, scale):
    assert model_scale(model) == scale


def test_the_embedded_policy_is_as_large_as_is_said():
    from scoregram.policy.tiny import tiny_policy
    from scoregram.tasks import load_task

    model, _ = tiny_policy(load_task("arithmetic"), 0)
    assert f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f} M" == model_scale("tiny")


def test_a_success_rate_that_is_not_known_is_left_out():
    made = table_1({2: INSIDE, 4: INSIDE}, success=NAN)
    assert math.isnan(mean_success(made)) and "right" not in replication_setting({"model": "m", "success_rate": None})
    assert mean_success(table_1({2: INSIDE, 4: INSIDE}, success=0.25)) == 0.25
