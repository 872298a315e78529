import pytest
import torch

from scoregram import statistics
from scoregram.advantages import leave_one_out, mean_centered, no_baseline, standardized
from scoregram.studies.grpo_rank.claims import CLAIMS, ustatistic
from scoregram.studies.ledger import Verdict, check_claims
from scoregram.theory import bounds

EXPECTED = {
    "ustat-lemma-1": Verdict.HOLDS,
    "ustat-projection": Verdict.CORRECTED,
    "ustat-hoeffding-split": Verdict.HOLDS,
    "ustat-theorem-2": Verdict.HOLDS,
    "ustat-prop-3": Verdict.HOLDS,
    "ustat-cor-4": Verdict.HOLDS,
    "ustat-cor-5-optimal": Verdict.HOLDS,
    "ustat-abstract-optimal": Verdict.CORRECTED,
    "ustat-cor-5-below-vanilla": Verdict.HOLDS,
    "ustat-cor-5-finite-group": Verdict.CORRECTED,
    "ustat-lemma-6": Verdict.HOLDS,
    "ustat-theorem-7": Verdict.CORRECTED,
    "ustat-theorem-7-universal": Verdict.HOLDS,
    "ustat-experiment-mse": Verdict.NEEDS_MEASUREMENT,
    "ustat-experiment-universal": Verdict.NEEDS_MEASUREMENT,
    "ustat-prop-13": Verdict.HOLDS,
    "mixed-group-selection": Verdict.HOLDS,
}
CLAIM = {claim.id: claim for claim in (*ustatistic.USTATISTIC_CLAIMS, *ustatistic.GROUP_SIZE_CLAIMS)}


def verdict(name: str) -> Verdict:
    return CLAIM[name].check().verdict


def test_every_verdict():
    entries = list(check_claims(CLAIM.values()))
    assert {entry.claim.id: entry.finding.verdict for entry in entries} == EXPECTED
    assert set(CLAIM) <= {claim.id for claim in CLAIMS}
    for entry in entries:
        assert entry.finding.evidence
        assert bool(entry.finding.correction) == (entry.finding.verdict is not Verdict.HOLDS)
        assert (entry.claim.paper == ustatistic.USTATISTIC_PAPER) == entry.claim.id.startswith("ustat-")


@pytest.mark.parametrize(
    "name",
    [
        "ustat-lemma-1",
        "ustat-theorem-2",
        "ustat-prop-3",
        "ustat-cor-4",
        "ustat-cor-5-finite-group",
        "ustat-theorem-7-universal",
    ],
)
def test_a_leave_one_out_that_sees_itself_is_noticed(monkeypatch, name):
    monkeypatch.setattr(ustatistic, "leave_one_out", mean_centered)
    assert verdict(name) is Verdict.BROKEN


@pytest.mark.parametrize("name", ["ustat-cor-5-below-vanilla", "ustat-cor-5-finite-group"])
def test_a_vanilla_with_a_baseline_is_noticed(monkeypatch, name):
    monkeypatch.setattr(ustatistic, "no_baseline", leave_one_out)
    assert verdict(name) is Verdict.BROKEN


@pytest.mark.parametrize("name", ["ustat-cor-4", "ustat-cor-5-optimal", "ustat-abstract-optimal"])
def test_a_constant_baseline_that_is_not_subtracted_is_noticed(monkeypatch, name):
    monkeypatch.setattr(ustatistic, "constant_baseline", lambda rewards, *, baselines: no_baseline(rewards))
    assert verdict(name) is Verdict.BROKEN


def test_a_projection_without_the_gradient_is_noticed(monkeypatch):
    right = ustatistic.kernel_projection
    monkeypatch.setattr(
        ustatistic, "kernel_projection", lambda truth, prompt: right(truth, prompt) - truth.gradient[prompt]
    )
    assert verdict("ustat-projection") is Verdict.BROKEN


def test_a_remainder_with_the_square_of_the_group_size_is_noticed(monkeypatch):
    def squared(moments, size):
        return moments.oracle_trace / size + (moments.variance_fisher_trace + moments.gradient_squared) / size**2

    monkeypatch.setattr(ustatistic, "leave_one_out_mse", squared)
    assert verdict("ustat-theorem-2") is Verdict.BROKEN


def test_an_optimum_one_too_small_is_noticed(monkeypatch):
    def asymptotic(components):
        found = statistics.optimal_group_size(components)
        assert found.integer is not None
        return statistics.OptimalGroupSize(found.asymptotic, found.asymptotic, found.integer - 1)

    monkeypatch.setattr(ustatistic, "optimal_group_size", asymptotic)
    assert verdict("ustat-theorem-7") is Verdict.BROKEN


def test_a_bound_without_its_floor_is_noticed(monkeypatch):
    def noiseless(steps, **options):
        return bounds.suboptimality_bound(steps, **(options | {"noise": 0.0}))

    monkeypatch.setattr(ustatistic, "suboptimality_bound", noiseless)
    assert verdict("ustat-lemma-6") is Verdict.BROKEN


def test_a_spread_of_the_other_convention_is_noticed(monkeypatch):
    monkeypatch.setattr(ustatistic, "standardized", lambda rewards, *, ddof: standardized(rewards, ddof=1))
    assert verdict("ustat-prop-13") is Verdict.BROKEN


def test_a_selection_that_keeps_every_group_is_noticed(monkeypatch):
    monkeypatch.setattr(ustatistic, "mixed_groups", lambda rewards: torch.ones(len(rewards), dtype=torch.bool))
    assert verdict("mixed-group-selection") is Verdict.BROKEN


def test_the_printed_accuracies_name_their_own_best():
    evidence = CLAIM["ustat-experiment-universal"].check().evidence
    assert [evidence[f"best G as printed, N={n}"] for n in (1024, 2048, 4096)] == [64, 64, 128]
