"""Credit against true advantages: by hand, by numpy, and averaged over every pattern of noise."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoregram.statistics import credit_fidelity

NUMBERS = st.floats(-3, 3, allow_nan=False)


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_by_hand():
    """Four tokens, the second decisive; credit 2 on it and 1 on the first."""
    found = credit_fidelity(tensor([1.0, 2.0, 0.0, 0.0]), tensor([0.0, 1.0, 0.0, 0.005]))
    assert found.filler_tokens == 3 / 4 and found.filler_share == pytest.approx(1 / 3)
    assert found.error == pytest.approx(math.sqrt((1 + 1 + 0 + 0.005**2) / 4))


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=8))
def test_correlation_is_that_of_numpy(pairs):
    credit, truth = np.array(pairs).T
    if min(credit.std(), truth.std()) < 1e-3:
        return
    found = credit_fidelity(tensor(credit), tensor(truth))
    assert found.correlation == pytest.approx(np.corrcoef(credit, truth)[0, 1], abs=1e-9)


def test_noise_is_taken_out_of_the_squared_error_on_average():
    """Every pattern of signs of independent noise `± s`: the corrected square is unbiased."""
    credit, truth, sizes = [0.3, -1.0, 2.0], [0.5, 0.0, -0.4], [0.2, 0.1, 0.3]
    squares = []
    for signs in product((-1, 1), repeat=3):
        seen = [a + sign * s for a, sign, s in zip(truth, signs, sizes, strict=True)]
        difference = tensor(credit) - tensor(seen)
        corrected = float(difference.square().mean()) - float(tensor(sizes).square().mean())
        found = credit_fidelity(tensor(credit), tensor(seen), variances=tensor(sizes).square())
        assert found.error == pytest.approx(math.sqrt(max(corrected, 0)))
        squares.append(corrected)
    exact = credit_fidelity(tensor(credit), tensor(truth)).error ** 2
    assert sum(squares) / len(squares) == pytest.approx(exact)


def test_noise_is_taken_out_of_the_correlation():
    """Many tokens with noise of known variance: the correlation is that of the truth, not the attenuated one."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=200_000)
    credit = truth + rng.normal(size=len(truth))  # correlation 1/√2
    seen = truth + 2 * rng.normal(size=len(truth))
    found = credit_fidelity(tensor(credit), tensor(seen), variances=torch.full((len(truth),), 4.0, dtype=torch.float64))
    # The standard error of a correlation of n pairs is below 1/√n; the correction multiplies it by √5.
    assert found.correlation == pytest.approx(1 / math.sqrt(2), abs=5 * math.sqrt(5 / len(truth)))
    assert math.isnan(found.filler_share) and math.isnan(found.filler_tokens)


def test_degenerate_cases():
    none = credit_fidelity(tensor([0.0, 0.0]), tensor([0.5, -0.5]))
    assert math.isnan(none.correlation) and math.isnan(none.filler_share) and none.error == 0.5
    assert math.isnan(credit_fidelity(tensor([]), tensor([])).error)
    noisy = credit_fidelity(tensor([1.0, 2.0]), tensor([0.1, 0.0]), variances=tensor([9.0, 9.0]))
    assert math.isnan(noisy.correlation)
