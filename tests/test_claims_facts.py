"""Each fact that a check of the ledger computes decides its verdict: one broken part, and the check fails.

`ALONE` breaks the corrected statement, or the printed one where it holds, and nothing else. `BOTH` makes the printed
statement true beside the corrected one, which must not pass for a correction.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import pytest

from scoregram.advantages import leave_one_out, mean_centered, spread_over_tokens
from scoregram.objectives import clipped_ratio
from scoregram.statistics import NoiseComponents, excess_variance
from scoregram.studies.grpo_rank.claims import CLAIMS, derivation, grounds, multiturn, rank, structure, ustatistic
from scoregram.studies.ledger import Verdict
from scoregram.theory import (
    CREDITS,
    GroundTruth,
    Transition,
    World,
    credit_costs,
    offsets_by_turn,
    pair_kernels,
)
from tests.claims_cases import break_estimator, finding

Parts = Mapping[str, Any]

NOTHING_TO_GAIN = World(
    "nothing to gain", (1.0,), lambda history: 2, lambda history, action: (Transition(1.0, 0.0, ends=len(history) > 1),)
)


def credits_with(name: str, change: Callable[[GroundTruth, Any], Any]) -> Parts:
    """The table of credits with one row changed."""
    row = CREDITS[name]
    return {"CREDITS": MappingProxyType({**CREDITS, name: replace(row, fn=lambda truth: change(truth, row.fn(truth)))})}


def worlds(*names: str) -> Parts:
    """These worlds, whichever the check asks for."""
    return {"lab_worlds": lambda *_: grounds.lab_worlds(*names)}


ALONE: dict[str, tuple[ModuleType, Parts]] = {
    "eq-8": (derivation, credits_with("temporal_difference", lambda truth, credit: credit + 0.1)),
    "eq-9": (derivation, credits_with("temporal_difference", lambda truth, credit: credit + 0.1)),
    "eq-10": (derivation, credits_with("exact_advantage", lambda truth, credit: 1.01 * credit)),
    "eq-12": (derivation, credits_with("temporal_difference", lambda truth, credit: 1.01 * credit)),
    "scope-clipping": (derivation, {"clipped_ratio": lambda *args, **settings: 2 * clipped_ratio(*args, **settings)}),
    "eq-22": (multiturn, {"spread_over_tokens": lambda a, mask: 1.01 * spread_over_tokens(a, mask=mask)}),
    "multi-turn-bias-linear": (
        multiturn,
        {"offsets_by_turn": lambda truth: tuple(replace(at, sd=1.5 * at.sd) for at in offsets_by_turn(truth))},
    ),
    "a3-past-reward-leakage": (
        multiturn,
        {"lab_worlds": lambda *names: (replace(t, value=t.value + 0.1) for t in grounds.lab_worlds(*names))},
    ),
    "a3-value-needs-critic": (
        multiturn,
        {
            "comparison": lambda *_, **__: SimpleNamespace(
                rows=[SimpleNamespace(estimator="vineppo", mse=1.0), SimpleNamespace(estimator="rloo", mse=2.0)]
            )
        },
    ),
    "a3-subtract-state-value": (
        multiturn,
        {"credit_costs": lambda *a, **k: tuple(replace(c, largest_error=0.1) for c in credit_costs(*a, **k))},
    ),
    "sec-7.2-diminishing": (rank, {"optimal_group_size": lambda parts: SimpleNamespace(exact=math.inf)}),
    "sec-5.1-2": (rank, {"common_cosine_null": lambda *_, cosine: SimpleNamespace(effective_rank=3.0 - cosine)}),
    "hoeffding-needs-large-groups": (structure, {"hoeffding_bound": lambda size, *, epsilon: 1.0}),
    "ustat-hoeffding-split": (ustatistic, {"pair_kernels": lambda *args: 1.01 * pair_kernels(*args)}),
    "ustat-abstract-optimal": (ustatistic, {"excess_variance": lambda *args: 2 * excess_variance(*args)}),
    "ustat-experiment-mse": (ustatistic, {"leave_one_out_mse": lambda exact, size: exact.oracle_trace / size}),
    "ustat-experiment-universal": (
        ustatistic,
        {"_MATH_ACCURACIES": dict.fromkeys((1024, 2048, 4096), (0.9, 0.1, 0.1, 0.1, 0.1, 0.1))},
    ),
}

BOTH: dict[str, tuple[ModuleType, Parts]] = {
    "eq-7-baseline": (
        derivation,
        {"coin": lambda p: grounds.coin(0.5), "lab_worlds": lambda *_: (grounds.coin(0.5),)},
    ),
    "eq-8": (derivation, credits_with("temporal_difference", lambda truth, _: truth.reward_to_go - truth.turn_values)),
    "eq-12": (derivation, {"lab_worlds": lambda *_: (grounds.ground(NOTHING_TO_GAIN, "tabular"),)}),
    "eq-21": (multiturn, worlds("step_rewards")),
    "eq-23": (multiturn, {"_error_gap": lambda *_: 0.0}),
    "eq-26": (multiturn, {"_largest_gap": lambda *_: 0.0}),
    "a3-single-turn": (multiturn, {"_error_gap": lambda *_: 0.0}),
    "cor-4.2-scale": (structure, {"_SUCCESS": (0.5,)}),
    "ustat-projection": (ustatistic, {"lab_worlds": lambda *_: ()}),
    "ustat-cor-5-finite-group": (ustatistic, {"_SIZES": ()}),
    "ustat-theorem-7": (ustatistic, {"exact_components": lambda truth: NoiseComponents(1.0, 1.0, 1.0, 0.01)}),
}


@pytest.mark.parametrize("claim", ALONE)
def test_the_corrected_statement_decides(monkeypatch, claim):
    module, parts = ALONE[claim]
    for name, part in parts.items():
        monkeypatch.setattr(module, name, part)
    assert finding(CLAIMS, claim).verdict is Verdict.BROKEN


@pytest.mark.parametrize("claim", BOTH)
def test_what_holds_as_printed_is_not_corrected(monkeypatch, claim):
    module, parts = BOTH[claim]
    for name, part in parts.items():
        monkeypatch.setattr(module, name, part)
    assert finding(CLAIMS, claim).verdict is Verdict.BROKEN


def test_an_exact_group_mean_is_not_corrected(monkeypatch):
    break_estimator(monkeypatch, "mean", leave_one_out)
    monkeypatch.setattr(derivation, "group_mean_scale", lambda size: 1.0)
    assert finding(CLAIMS, "single-turn-exact").verdict is Verdict.BROKEN


def test_advantages_too_large_to_vanish_are_noticed(monkeypatch):
    break_estimator(monkeypatch, "mean", lambda rewards: 10 * mean_centered(rewards))
    assert finding(CLAIMS, "cor-4.2-vanish").verdict is Verdict.BROKEN
