"""Surrogate losses: pure functions from per-token log-probabilities to a scalar, and the weight each gives a score."""

from scoregram.objectives.aggregation import AGGREGATIONS, Aggregation, token_weights
from scoregram.objectives.coefficients import token_coefficients
from scoregram.objectives.kl import KL_TERMS, KLTerm, kl_penalty, kl_values
from scoregram.objectives.policy import (
    advantage_weights,
    clipped_ratio,
    clipped_sequence_ratio,
    reinforce,
    stopped_ratio,
    trajectory_ratio,
)
from scoregram.objectives.preference import pair_preference, pair_preference_weights, preference_pairs
from scoregram.objectives.ratio import MAX_LOG_RATIO
from scoregram.objectives.regularised import consistency_variance, consistency_weights
from scoregram.objectives.table import OBJECTIVES, Objective

__all__ = [
    "AGGREGATIONS",
    "KL_TERMS",
    "MAX_LOG_RATIO",
    "OBJECTIVES",
    "Aggregation",
    "KLTerm",
    "Objective",
    "advantage_weights",
    "clipped_ratio",
    "clipped_sequence_ratio",
    "consistency_variance",
    "consistency_weights",
    "kl_penalty",
    "kl_values",
    "pair_preference",
    "pair_preference_weights",
    "preference_pairs",
    "reinforce",
    "stopped_ratio",
    "token_coefficients",
    "token_weights",
    "trajectory_ratio",
]
