import contextlib
import itertools
import math

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.objectives import AGGREGATIONS, token_weights

LENGTHS = [lengths for lengths in itertools.product(range(4), repeat=3) if any(lengths)]


def mask_of(lengths, tokens=3):
    return torch.tensor([[t < n for t in range(tokens)] for n in lengths])


def weights(name, lengths):
    return token_weights(mask_of(lengths), name, length=7 if AGGREGATIONS[name].needs_length else None)


def weight_by_definition(name, lengths, i):
    n = len(lengths)
    return {
        "token_sum": 1 / n,
        "sequence_mean": 1 / (n * lengths[i]),
        "constant": 1 / (n * 7),
        "token_mean": 1 / sum(lengths),
    }[name]


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_every_token_gets_the_stated_weight(name):
    for lengths in LENGTHS:
        for (i, t), weight in zip(itertools.product(range(3), range(3)), weights(name, lengths).flatten(), strict=True):
            expected = weight_by_definition(name, lengths, i) if t < lengths[i] else 0.0
            assert float(weight) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_claims_by_enumeration_of_all_lengths(name):
    row = AGGREGATIONS[name]
    equal_tokens = equal_rollouts = True
    for lengths in LENGTHS:
        w, mask = weights(name, lengths), mask_of(lengths)
        totals = w.sum(dim=-1)[mask.any(dim=-1)]
        equal_tokens &= bool(torch.allclose(w[mask], w[mask][0], rtol=1e-14, atol=0))
        equal_rollouts &= bool(torch.allclose(totals, totals[0], rtol=1e-14, atol=0))
    firsts = {float(weights(name, (2, a, b))[0, 0]) for a, b in itertools.product(range(4), repeat=2)}
    assert (equal_tokens, equal_rollouts) == (row.equal_tokens, row.equal_rollouts)
    assert (len(firsts) > 1) == row.couples_rollouts


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_needs_length_claim(name):
    """One of the two calls is refused: the one without the length, or the one with it."""
    needed, unused = True, True
    with contextlib.suppress(ScoregramError):
        token_weights(mask_of((1, 2, 3)), name)
        needed = False
    with contextlib.suppress(ScoregramError):
        token_weights(mask_of((1, 2, 3)), name, length=7)
        unused = False
    assert (needed, unused) == (AGGREGATIONS[name].needs_length, not AGGREGATIONS[name].needs_length)


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_without_completion_tokens_there_is_no_weight(name):
    assert bool((weights(name, (0, 0, 0)) == 0).all())


@pytest.mark.parametrize(
    ("name", "length", "part"),
    [
        ("constant", None, "length must be a positive number, got None"),
        ("constant", 0, "got 0"),
        ("constant", -1.0, "got -1"),
        ("constant", math.nan, "got nan"),
        ("constant", math.inf, "got inf"),
        ("token_sum", 7, "takes no length, got 7"),
        ("mean", None, "constant, sequence_mean, token_mean, token_sum"),
    ],
)
def test_what_would_be_ignored_or_wrong_is_refused(name, length, part):
    with pytest.raises(ScoregramError, match=part):
        token_weights(mask_of((1, 2, 3)), name, length=length)
