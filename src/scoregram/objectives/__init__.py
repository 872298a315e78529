"""Surrogate losses: pure functions from per-token log-probabilities to a scalar, and the weight each gives a score."""

from scoregram.objectives.aggregation import AGGREGATIONS, Aggregation, token_coefficients, token_weights
from scoregram.objectives.policy import (
    advantage_weights,
    clipped_ratio,
    clipped_sequence_ratio,
    reinforce,
    stopped_ratio,
    trajectory_ratio,
)
from scoregram.objectives.reference import (
    KL_TERMS,
    KLTerm,
    consistency_variance,
    consistency_weights,
    kl_penalty,
    kl_values,
    pair_preference,
    pair_preference_weights,
    preference_pairs,
)
from scoregram.objectives.table import OBJECTIVES, Objective
from scoregram.objectives.tokens import MAX_LOG_RATIO

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
