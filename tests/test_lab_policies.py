import pytest
import torch

from scoregram.theory.lab.worlds import network_policy, tabular_policy
from tests.lab_cases import CASES, case


@pytest.mark.parametrize("key", CASES)
def test_each_state_has_a_distribution_over_the_actions_that_exist(key):
    at = case(*key)
    probs = at.truth.log_probs.exp()
    torch.testing.assert_close(probs.sum(dim=-1), torch.ones(len(probs), dtype=torch.float64))
    assert torch.equal(probs > 0, at.listing.action_mask)


def test_tabular_logits_are_the_parameters():
    at = case("output_only", "tabular")
    rebuilt, start = torch.full(at.listing.action_mask.shape, -torch.inf, dtype=torch.float64), 0
    for row, number in enumerate(at.listing.actions.tolist()):
        rebuilt[row, :number] = at.policy.parameters[start : start + number]
        start += number
    assert start == at.policy.parameters.numel()
    torch.testing.assert_close(at.truth.log_probs, rebuilt.log_softmax(dim=-1))


def test_network_shares_parameters_between_states():
    at = case("user_turns", "network")
    jacobian = torch.autograd.functional.jacobian(at.policy.log_probs, at.policy.parameters)
    touched = (jacobian.abs() > 0).any(dim=1).sum(dim=0)  # states that each parameter touches
    assert int(touched.max()) > len(at.listing.histories) // 2


@pytest.mark.parametrize("make", [tabular_policy, network_policy])
def test_the_generator_decides_and_the_global_state_is_left_alone(make):
    rows = case("stopping", "tabular").listing
    before = torch.random.get_rng_state()
    first, again, other = (make(rows, generator=torch.Generator().manual_seed(seed)).parameters for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(before, torch.random.get_rng_state())
