import math

import pytest
import torch

from scoregram import theory
from scoregram.studies.grpo_rank.claims import CLAIMS, companions
from scoregram.studies.grpo_rank.claims.companions import COMPANION_CLAIMS, DISCOUNT_CLAIMS
from scoregram.studies.ledger import Verdict
from tests.claims_cases import check_verdicts, finding

ALL = (*DISCOUNT_CLAIMS, *COMPANION_CLAIMS)


def test_verdicts():
    check_verdicts(
        ALL,
        {
            "eq-4": Verdict.HOLDS,
            "rm-output-set": Verdict.CORRECTED,
            "performative-lemma": Verdict.HOLDS,
            "performative-gradient": Verdict.HOLDS,
            "performative-optimum": Verdict.CORRECTED,
            "matryoshka-optimum": Verdict.HOLDS,
            "matryoshka-horizon": Verdict.HOLDS,
            "utility-global": Verdict.HOLDS,
            "agnostic-best-in-class": Verdict.HOLDS,
            "agnostic-dominance": Verdict.HOLDS,
        },
    )
    assert {claim.id for claim in ALL} <= {claim.id for claim in CLAIMS}


def _short_sighted(world, horizon, *, temperature):
    return theory.matryoshka_optimum(world, min(horizon, 5), temperature=temperature)


@pytest.mark.parametrize(
    ("claim", "name", "wrong"),
    [
        ("eq-4", "occupancy", lambda *args: 1.01 * theory.occupancy(*args)),
        ("rm-output-set", "output_set_update", lambda *args: 1.01 * theory.output_set_update(*args)),
        ("rm-output-set", "mean_centered", lambda rewards: rewards),
        ("performative-lemma", "performative_difference", lambda *args: 1.01 * theory.performative_difference(*args)),
        ("performative-gradient", "_true_gradient", torch.zeros_like),
        ("performative-optimum", "_deployed_optimum", lambda: torch.zeros(2, 2, dtype=torch.float64)),
        ("matryoshka-optimum", "matryoshka_gap", lambda *args, **at: 1.01 * theory.matryoshka_gap(*args, **at)),
        ("matryoshka-horizon", "matryoshka_optimum", _short_sighted),
        ("utility-global", "utility_gradient", lambda *args: 1.01 * theory.utility_gradient(*args)),
        ("utility-global", "pass_every_utility", theory.pass_at_k_utility),
        ("agnostic-best-in-class", "conservative_iteration", lambda world, first, **_: first),
        ("agnostic-best-in-class", "REPETITION", theory.ALTERNATION),
        ("agnostic-dominance", "_TWINS", (0, 0, 0, 1)),
        ("agnostic-dominance", "tabular_objective", lambda *args: 2 * theory.tabular_objective(*args)),
        ("rm-output-set", "_uniform_gradient", lambda seed, prompt: companions._classes(seed).gradient[prompt]),
    ],
)
def test_a_wrong_part_is_noticed(monkeypatch, claim, name, wrong):
    monkeypatch.setattr(companions, name, wrong)
    assert finding(ALL, claim).verdict is Verdict.BROKEN


def test_the_class_of_the_second_world_is_not_dominated():
    best, ratio = companions._class_gaps(theory.REPETITION)
    assert (best, ratio) == (1.0, math.inf)
