"""How far sampling strays from the policy that is scored: the mean score under truncated or tempered sampling."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from scoregram.checks import fail
from scoregram.policy.config import SamplingConfig
from scoregram.policy.draw import truncation
from scoregram.policy.log_probs import completion_logits
from scoregram.policy.modes import evaluating
from scoregram.rollouts import Rollouts


class BiasedSamplingWarning(UserWarning):
    """Rollouts are not drawn from the policy whose scores are taken, so that scores do not average to zero."""


def warn_of_bias(sampling: SamplingConfig, *, stacklevel: int = 2) -> None:
    """Say so, once per place in the code, if scores of the drawn rollouts will not average to zero.

    `E[∇ log π] = 0` holds for rollouts drawn from `π` itself. Sampling at temperature `τ` draws from `π_τ`, whose own
    scores do average to zero: score at the same temperature and nothing is lost. Under top-k or top-p no temperature
    helps. Greedy rollouts are not warned of: they are for evaluation and baselines, and nobody scores them.
    """
    if sampling.truncates:
        warnings.warn(
            "sample: top-k and top-p never draw some tokens that the policy would, so that scores do not average to "
            "zero (E[ψ] ≠ 0) and policy gradients are biased; score_mean_bias measures by how much.",
            BiasedSamplingWarning,
            stacklevel + 1,
        )
    elif sampling.temperature not in (0, 1):
        warnings.warn(
            f"sample: at temperature {sampling.temperature:g} scores average to zero (E[ψ] = 0) only if they are taken "
            f"at temperature {sampling.temperature:g} too; those of the policy at temperature 1 do not.",
            BiasedSamplingWarning,
            stacklevel + 1,
        )


@dataclass(frozen=True)
class ScoreBias:
    """The mean score at the positions of some rollouts, one entry per token, 0 outside completions."""

    total_variation: Float[Tensor, "batch tokens"]
    """`½ Σ_a |q(a) - π(a)|`: the probability by which the drawn token is another than the policy would draw; 0 … 1."""
    logit_norm: Float[Tensor, "batch tokens"]
    """`|E_q[∇_logits log π]| = |q - π| / τ`: length of the mean score with respect to the logits; 0 without bias."""
    completion_mask: Bool[Tensor, "batch tokens"]

    @property
    def mean_total_variation(self) -> float:
        """Average over completion tokens; `nan` if there are none."""
        return float(self.total_variation[self.completion_mask].mean())

    @property
    def mean_logit_norm(self) -> float:
        """Average over completion tokens; `nan` if there are none."""
        return float(self.logit_norm[self.completion_mask].mean())


def score_mean_bias(
    model: Any, rollouts: Rollouts, sampling: SamplingConfig, *, scored_temperature: float = 1.0
) -> ScoreBias:
    """How large the mean score is at every position of given rollouts, exactly: no sampling is involved.

    A token drawn from `q` (tempered by `sampling`, then truncated) and scored under `π = softmax(logits / τ)` has the
    mean score `E_q[∇_logits log π(a)] = (q - π) / τ` with respect to the logits, in float32 or wider. It is zero at
    every position if and only if `q = π`: no truncation, and the same temperature for sampling and scoring. The
    gradient with respect to the parameters is this vector times the Jacobian of the logits.

    Args:
        model: A causal language model.
        rollouts: Texts whose completion positions are looked at.
        sampling: How tokens are drawn; temperature 0 puts all of `q` on the most probable token.
        scored_temperature: `τ`, the temperature at which scores are taken.

    Raises:
        ScoregramError: If `scored_temperature` is not positive.
    """
    if not scored_temperature > 0:
        fail("score_mean_bias", "scored_temperature must be positive", scored_temperature, "Pass 1 for the policy.")
    ids, mask = rollouts.input_ids, rollouts.completion_mask
    variation, norm = (torch.zeros(ids.shape, device=ids.device) for _ in range(2))
    with evaluating(model):
        for row in range(len(ids)):  # one at a time: whole distributions are large
            here = slice(row, row + 1)
            logits = completion_logits(model, ids[here], rollouts.attention_mask[here], mask[here])
            difference = behaviour(logits, sampling) - (logits / scored_temperature).softmax(1)
            variation[row, mask[row]] = difference.abs().sum(1).float() / 2
            norm[row, mask[row]] = difference.norm(dim=1).float() / scored_temperature
    return ScoreBias(variation, norm, mask)


def behaviour(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """`(n, V)` probabilities with which tokens are drawn."""
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(1), logits.shape[1]).to(logits.dtype)
    scores = logits / sampling.temperature
    return scores.masked_fill(~truncation(scores, sampling.top_k, sampling.top_p), -torch.inf).softmax(1)
