"""A world of forecasts: the policy states the probability of a random outcome and a proper scoring rule rewards it.

All rollouts of a group forecast the *same* outcome `o`, drawn once: 1 with probability `p`, else 0. The policy does not
see it. The reward of the stated probability `q` is `1 − (q − o)²` (Brier). Its mean `1 − p(1 − p) − (q − p)²` is
largest at `q = p`: a policy gradient leads to the calibrated forecast.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from scoregram.checks import require_in_range
from scoregram.theory.lab.moments import Multisets, multisets
from scoregram.theory.lab.worlds import History, Transition, World

STATED = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Probabilities that the policy can state. All Brier scores are multiples of 1/16, hence exact in binary."""
Forecasts = Float[Tensor, " forecasts"]


def brier_score(stated: Tensor, outcome: float | int) -> Tensor:
    """`1 − (q − o)²`: 1 for a certain and right forecast, 0 for a certain and wrong one. Elementwise."""
    return 1 - (stated - outcome).square()


def forecast(chance: float) -> World:
    """The forecasts as a world: two prompts that look alike, the outcome being 1 in the first and 0 in the second."""
    require_in_range(chance, low=0.0, high=1.0, name="chance", caller="forecast")

    def outcomes(history: History, action: int) -> tuple[Transition, ...]:
        score = brier_score(torch.tensor(STATED[action], dtype=torch.float64), float(history[0] == 0))
        return (Transition(1.0, float(score), ends=True),)

    return World("forecast", (chance, 1 - chance), lambda history: len(STATED), outcomes)


def forecast_update(
    logits: Forecasts, estimator: Callable[[Tensor], Tensor], *, chance: float, group_size: int
) -> Forecasts:
    """Expected update of one logit per forecast, over the outcome and every group of forecasts.

    `E[(1/R) Σ_i A_i (e_{a_i} − π)]`, where the advantages `A` of a group come from its Brier scores. Exact: a sum over
    all multisets of `R` forecasts and both outcomes.

    Args:
        logits: `(A,)`, one for each of `STATED`.
        estimator: From rewards `(P, R)` to advantages `(P, R)`.
        chance: Probability `p` that the outcome is 1.
        group_size: `R`.
    """
    return _update(logits, *_expected_advantages(estimator, chance, group_size))


def _expected_advantages(
    estimator: Callable[[Tensor], Tensor], chance: float, group_size: int
) -> tuple[Multisets, Tensor]:
    """All multisets of forecasts, and their advantages `(G, R)` averaged over the outcome; they need no policy."""
    groups = multisets(len(STATED), group_size)
    stated = torch.tensor(STATED, dtype=torch.float64)[groups.members]  # (G, R)
    advantages = torch.zeros_like(stated)
    for outcome, weight in ((1, chance), (0, 1 - chance)):
        advantages = advantages + weight * estimator(brier_score(stated, outcome))
    return groups, advantages


def _update(logits: Forecasts, groups: Multisets, advantages: Tensor) -> Forecasts:
    policy = logits.softmax(dim=0)
    likelihood = groups.orders * policy[groups.members].prod(dim=-1)  # (G,)
    scores = torch.eye(len(STATED), dtype=torch.float64) - policy  # (A, A): row a is the score of forecast a
    return likelihood @ torch.einsum("gr,gra->ga", advantages, scores[groups.members]) / groups.members.shape[1]


def forecast_ascent(
    estimator: Callable[[Tensor], Tensor], *, chance: float, group_size: int, rate: float = 8.0, steps: int = 400
) -> Forecasts:
    """The policy, `(A,)`, after `steps` expected updates from the uniform policy."""
    logits = torch.zeros(len(STATED), dtype=torch.float64)
    fixed = _expected_advantages(estimator, chance, group_size)
    for _ in range(steps):
        logits = logits + rate * _update(logits, *fixed)
    return logits.softmax(dim=0)


def mean_forecast(policy: Forecasts) -> float:
    """`E[q]`, the mean stated probability. Reads: `p` for a calibrated policy; nearer to 0 or 1 than `p` if it is too
    confident.
    """
    return float(policy @ torch.tensor(STATED, dtype=torch.float64))
