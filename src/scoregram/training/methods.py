"""The table of training methods, without heavy imports."""

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Method:
    """A training method: an advantage estimator, a loss, and how a step is filled."""

    estimator: str
    """Key of `ESTIMATORS`."""
    objective: str
    """Key of `OBJECTIVES`."""
    dynamic_sampling: bool = False
    """Sample further prompts until the step is full of live groups."""
    learned_baseline: bool = False
    """Whether the estimator's baselines are the values of a critic, instead of a running mean."""
    exact_geometry: bool = False
    """Whether energies of paths, Grams and features of tokens come from exact scores, instead of a proxy."""
    drafts: bool = False
    """Sample drafts first; the rollouts of the step refine the best draft of their prompt."""
    branches: bool = False
    """Whether a group is several candidates for one turn of one episode, instead of several episodes."""
    gae_lambda: float | None = None
    """λ of generalised advantage estimation; None for the estimator's own."""
    clip_low: float | None = None
    """How far a ratio may fall below 1 before the loss clips it; None for the loss's own."""
    clip_high: float | None = None
    """How far a ratio may rise above 1; None for the loss's own."""
    about: str


METHODS: MappingProxyType[str, Method] = MappingProxyType(
    {
        "reinforce-baseline": Method(
            estimator="constant", objective="reinforce", about="reward minus the running mean of earlier rewards"
        ),
        "reinforce-critic": Method(
            estimator="constant",
            objective="reinforce",
            learned_baseline=True,
            about="reward minus the learned value of the prompt",
        ),
        "ppo": Method(estimator="gae", objective="ppo", about="a critic's values, GAE with λ = 0.95, clipped ratio"),
        "ppo-whitened": Method(
            estimator="gae-whitened",
            objective="ppo",
            about="as ppo, with the advantages whitened over all tokens of the batch, as in TRL and verl",
        ),
        "ppo-monte-carlo": Method(
            estimator="gae-monte-carlo", objective="ppo", about="reward minus a critic's value of the prefix: λ = 1"
        ),
        "grpo-process": Method(
            estimator="grpo-process", objective="grpo", about="process rewards: every verified step is rewarded"
        ),
        "vineppo": Method(
            estimator="spo-chain", objective="grpo", about="gain in Monte-Carlo value over each step of the solution"
        ),
        "reinforce": Method(
            estimator="reinforce", objective="reinforce", about="the reward itself, without a baseline"
        ),
        "grpo-paper": Method(
            estimator="mean", objective="reinforce", about="reward minus the group's mean, summed tokens, no clip"
        ),
        "grpo": Method(
            estimator="grpo", objective="grpo", about="standardised reward, clipped ratio, mean over tokens"
        ),
        "grpo-trl": Method(estimator="grpo-trl", objective="ppo", about="as TRL's defaults: its eps, its token mean"),
        "grpo-verl": Method(estimator="grpo-verl", objective="dual_clip", about="as verl's defaults: token mean"),
        "grpo-openrlhf": Method(estimator="grpo-openrlhf", objective="grpo", about="as OpenRLHF's group_norm"),
        "grpo-nemo-rl": Method(
            estimator="grpo-nemo-rl", objective="ppo", about="as NeMo-RL: statistics of the other rollouts"
        ),
        "grpo-prime-rl": Method(
            estimator="grpo-prime-rl", objective="dapo", about="as prime-rl: reward minus the group's mean"
        ),
        "rloo": Method(estimator="rloo", objective="reinforce", about="reward minus the mean of the other rollouts"),
        "dr-grpo": Method(
            estimator="mean", objective="dr_grpo", about="reward minus the group's mean, token sum over a constant"
        ),
        "opo": Method(estimator="opo", objective="reinforce", about="length-weighted baseline"),
        "opo-loo": Method(
            estimator="opo-loo", objective="reinforce", about="length-weighted baseline from the other rollouts"
        ),
        "optimal": Method(
            estimator="optimal", objective="reinforce", about="baseline weighted by the measured score norms"
        ),
        "optimal-loo": Method(
            estimator="optimal-loo", objective="reinforce", about="the same from the other rollouts, hence unbiased"
        ),
        "optimal-token": Method(
            estimator="optimal-token",
            objective="reinforce",
            about="a baseline for every token, weighted by a proxy of the gradient so far",
        ),
        "optimal-token-exact": Method(
            estimator="optimal-token",
            objective="reinforce",
            exact_geometry=True,
            about="the same weighted by the exact norm of the gradient so far",
        ),
        "optimal-token-loo": Method(
            estimator="optimal-token-loo",
            objective="reinforce",
            exact_geometry=True,
            about="the same from the other rollouts, hence unbiased",
        ),
        "salt": Method(
            estimator="salt",
            objective="grpo",
            about="grpo with more weight outside the directions that its rollouts share, by a proxy of K",
        ),
        "salt-exact": Method(
            estimator="salt", objective="grpo", exact_geometry=True, about="the same with the exact K of each group"
        ),
        "g2rl": Method(
            estimator="g2rl",
            objective="grpo",
            about="grpo on rewards scaled up where a rollout's gradient is new to its group, by a proxy of K",
        ),
        "g2rl-exact": Method(
            estimator="g2rl", objective="grpo", exact_geometry=True, about="the same with the exact K of each group"
        ),
        "delta": Method(
            estimator="delta",
            objective="dapo",
            about="more credit for tokens whose gradient tells right rollouts from wrong ones, by a proxy",
        ),
        "delta-exact": Method(
            estimator="delta",
            objective="dapo",
            exact_geometry=True,
            about="the same with the exact K of the tokens of a step",
        ),
        "remax": Method(
            estimator="remax", objective="reinforce", about="reward minus the reward of the greedy rollout"
        ),
        "reinforce++": Method(
            estimator="reinforce++", objective="ppo", about="reward whitened over the batch, token mean"
        ),
        "reinforce++-baseline": Method(
            estimator="reinforce++-baseline", objective="ppo", about="centred in the group, whitened over the batch"
        ),
        "dapo": Method(
            estimator="dapo",
            objective="dapo",
            dynamic_sampling=True,
            about="only groups whose rewards differ, higher upper clip, token mean",
        ),
        "igrpo": Method(
            estimator="grpo",
            objective="grpo",
            drafts=True,
            about="grpo on refinements: the best of some drafts is shown in the prompt",
        ),
        "gspo": Method(estimator="grpo", objective="gspo", about="one clipped ratio per rollout"),
        "cispo": Method(estimator="grpo", objective="cispo", about="clipped importance weight without gradient"),
        "agro": Method(
            estimator="rloo",
            objective="agro",
            about="variance of the KL-regularised reward within a group, for rollouts of any policy",
        ),
        "dpo": Method(
            estimator="mean",
            objective="dpo",
            about="preference of the best over the worst rollout of a group",
        ),
        "turn-mean": Method(
            estimator="turn-mean",
            objective="reinforce",
            about="per turn: rewards to come minus their mean at this turn",
        ),
        "turn-rloo": Method(
            estimator="turn-rloo",
            objective="reinforce",
            about="per turn: rewards to come minus their mean over the other rollouts at this turn",
        ),
        "mt-grpo": Method(
            estimator="mt-grpo",
            objective="grpo",
            about="per turn: standardised reward of the turn plus that of the outcome",
        ),
        "gigpo": Method(
            estimator="gigpo",
            objective="grpo",
            about="per turn: standardised return plus standardised rewards to come among equal observations",
        ),
        "tl-grpo": Method(
            estimator="same-state",
            objective="grpo",
            branches=True,
            about="standardised reward of candidates for one turn, drawn from the same history",
        ),
        "tic": Method(
            estimator="rloo",
            objective="tic",
            about="ratio of the whole rollout, clipped from above; its pairing with rloo's advantages is ours",
        ),
        "tic-length": Method(estimator="tic", objective="tic", about="the same with standardised rewards per token"),
        "awr": Method(
            estimator="grpo",
            objective="awr",
            about="advantage-weighted regression: imitate rollouts with weight exp(advantage), at most 20",
        ),
        "pass-at-k": Method(
            estimator="max-at-k",
            objective="reinforce",
            about="what a rollout adds to the best reward of k rollouts: the gradient of pass@k",
        ),
    }
)

REFERENCE_STRENGTHS: MappingProxyType[str, float] = MappingProxyType({"agro": 0.1, "dpo": 0.1})
"""Losses that compare the policy with the initial one, and the `beta` of each if none is given."""
