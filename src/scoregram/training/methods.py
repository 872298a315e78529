"""The literal table of training methods: which advantage, which loss, and how a step is filled."""

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train, as a pair from the tables of estimators and objectives."""

    estimator: str
    """Key of `ESTIMATORS`."""
    objective: str
    """Key of `OBJECTIVES`."""
    dynamic_sampling: bool = False
    """Sample further prompts until the step is full of groups whose rewards differ."""
    about: str


METHODS: MappingProxyType[str, Method] = MappingProxyType(
    {
        "reinforce": Method(
            estimator="reinforce", objective="reinforce", about="the reward itself, without a baseline"
        ),
        "grpo-paper": Method(
            estimator="mean", objective="reinforce", about="reward minus the group's mean, summed tokens, no clip"
        ),
        "grpo": Method(
            estimator="grpo", objective="grpo", about="standardised reward, clipped ratio, mean over tokens"
        ),
        "grpo-trl": Method(estimator="grpo-trl", objective="dapo", about="as TRL's defaults: its eps, its token mean"),
        "grpo-verl": Method(estimator="grpo-verl", objective="dual_clip", about="as verl's defaults: token mean"),
        "grpo-openrlhf": Method(estimator="grpo-openrlhf", objective="grpo", about="as OpenRLHF's group_norm"),
        "grpo-nemo-rl": Method(
            estimator="grpo-nemo-rl", objective="dual_clip", about="as NeMo-RL: mean and deviation of the others"
        ),
        "grpo-prime-rl": Method(estimator="grpo-prime-rl", objective="dapo", about="as prime-rl: no deviation"),
        "rloo": Method(estimator="rloo", objective="reinforce", about="reward minus the mean of the others"),
        "dr-grpo": Method(estimator="mean", objective="dr_grpo", about="no deviation, one constant length for all"),
        "opo": Method(estimator="opo", objective="reinforce", about="length-weighted baseline"),
        "opo-loo": Method(estimator="opo-loo", objective="reinforce", about="length-weighted baseline of the others"),
        "optimal": Method(
            estimator="optimal", objective="reinforce", about="baseline weighted by the measured score norms"
        ),
        "optimal-loo": Method(
            estimator="optimal-loo", objective="reinforce", about="the same over the others, hence unbiased"
        ),
        "remax": Method(estimator="remax", objective="reinforce", about="reward minus that of the greedy rollout"),
        "reinforce++": Method(estimator="reinforce++", objective="grpo", about="reward whitened over the batch"),
        "reinforce++-baseline": Method(
            estimator="reinforce++-baseline", objective="grpo", about="centred in the group, whitened over the batch"
        ),
        "dapo": Method(
            estimator="dapo",
            objective="dapo",
            dynamic_sampling=True,
            about="only groups whose rewards differ, higher upper clip, token mean",
        ),
        "gspo": Method(estimator="grpo", objective="gspo", about="one clipped ratio per rollout"),
        "cispo": Method(estimator="grpo", objective="cispo", about="clipped importance weight without gradient"),
        "tic": Method(estimator="rloo", objective="tic", about="ratio of the whole rollout, clipped from above"),
    }
)
