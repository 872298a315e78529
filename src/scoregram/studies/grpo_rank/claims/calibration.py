"""Random outcomes and proper scoring rules: what the standard deviation in GRPO does to stated probabilities.

We know the paper by its abstract only. The `place` of a claim is the sentence of the abstract that makes it.
"""

from functools import partial

import torch

from scoregram.advantages import constant_baseline, leave_one_out, mean_centered, standardized
from scoregram.studies.grpo_rank.claims.grounds import claim
from scoregram.studies.ledger import Finding, as_printed
from scoregram.theory import forecast_ascent, mean_forecast
from scoregram.types import Advantages, Rewards

CALIBRATION_PAPER = "arXiv:2508.11800"
_CHANCES = (0.25, 0.5, 0.75)
_SIZES = (2, 4)
_VALUES = (0.0, 0.75)
"""Values of the prompt that a critic might state: 0, and that of calibrated forecasts of a fair coin."""
_CLOSE = 0.01
"""Largest distance of a mean forecast from its limit, after the last step of the ascent."""


def _forecasts(estimator, size: int) -> dict[float, float]:
    """Chance of the outcome → mean stated probability after exact ascent."""
    ascent = partial(forecast_ascent, estimator, group_size=size, steps=120)
    return {chance: mean_forecast(ascent(chance=chance)) for chance in _CHANCES}


def overconfidence() -> Finding:
    """Mean stated probability after exact ascent with standardised advantages."""
    found = {size: _forecasts(standardized, size) for size in _SIZES}
    extreme = all(f[0.25] < _CLOSE and f[0.75] > 1 - _CLOSE and abs(f[0.5] - 0.5) < _CLOSE for f in found.values())
    return as_printed(
        extreme,
        {
            f"R = {size}: stated probability of an outcome of chance {chance}": stated
            for size, forecasts in found.items()
            for chance, stated in forecasts.items()
        },
    )


def critic_advantages(rewards: Rewards, *, value: float) -> Advantages:
    """Reward minus a critic's value of the prompt: PPO with `λ = 1` on rollouts of one token, before any clipping."""
    return constant_baseline(rewards, baselines=torch.full((len(rewards),), value, dtype=rewards.dtype))


def calibration() -> Finding:
    """Mean stated probability after exact ascent with mean-centred, with leave-one-out and with a critic's advantages."""
    critics = [(f"PPO, value {value}", partial(critic_advantages, value=value)) for value in _VALUES]
    evidence, away = {}, 0.0
    for name, estimator in (("without deviation", mean_centered), ("RLOO", leave_one_out), *critics):
        for size in _SIZES:
            off = max(abs(stated - chance) for chance, stated in _forecasts(estimator, size).items())
            evidence[f"{name}, R = {size}: largest distance from the chance"] = off
            away = max(away, off)
    return as_printed(away < _CLOSE, evidence)


CALIBRATION_CLAIMS = (
    claim(
        "calibration-deviation",
        "abstract, third sentence",
        "For random binary outcomes GRPO leads to stated probabilities that are too confident.",
        overconfidence,
        paper=CALIBRATION_PAPER,
    ),
    claim(
        "calibration-without",
        "abstract, third and fourth sentence",
        "PPO, RLOO, and GRPO without the standard deviation, lead to calibrated probabilities.",
        calibration,
        paper=CALIBRATION_PAPER,
    ),
)
"""Statements of Bereket and Leskovec on stated probabilities."""
