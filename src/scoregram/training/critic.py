"""A critic: a network that predicts the return of a rollout from its tokens so far.

It is a copy of the initial policy with a scalar head in place of the output head, or that head alone on the hidden
states of the current policy. A copy trains what the policy trains: all weights, or the adapters on a frozen base.
Either way its gradient never reaches the policy, so the policy's update and its Gram are those of the policy gradient.
The head starts at zero, so the first values are 0.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scoregram.checks import fail, not_finite
from scoregram.policy import Policy
from scoregram.rollouts import Rollouts, micro_batches
from scoregram.tasks import Problem
from scoregram.training.config import TrainConfig


class ValueModel(nn.Module):
    """Values `(N, T)` of the prefix before every token."""

    def __init__(self, model: Any, *, shares_policy: bool) -> None:
        super().__init__()
        backbone = hidden_layers(model)
        # A list hides the policy's layers from `parameters` and `state_dict`.
        self._shared = [backbone] if shares_policy else []
        self.backbone = None if shares_policy else copy.deepcopy(backbone)
        like = next(backbone.parameters())
        width = model.config.get_text_config().hidden_size
        head = nn.utils.skip_init(nn.Linear, width, 1, device=like.device, dtype=torch.float32)  # draws no numbers
        self.head = head.requires_grad_(True)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """`V(s_t)` of the tokens before `t`, in float32; 0 for the first token of a row, which nothing precedes."""
        backbone = self._shared[0] if self.backbone is None else self.backbone
        with torch.set_grad_enabled(self.backbone is not None and torch.is_grad_enabled()):
            hidden = backbone(input_ids=input_ids, attention_mask=attention_mask.long(), use_cache=False)[0]
        values = self.head(hidden[:, :-1].float()).squeeze(2)
        return nn.functional.pad(values, (1, 0))


def hidden_layers(model: Any) -> nn.Module:
    """The part of a causal language model that computes its hidden states."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    inside = getattr(base, base.base_model_prefix, None) if hasattr(base, "base_model_prefix") else None
    if not isinstance(inside, nn.Module) or inside is base:
        remedy = "Choose an estimator without a critic."
        fail("train --estimator", "a critic needs a transformers model with hidden layers", type(base).__name__, remedy)
    return inside


@dataclass(frozen=True)
class ValueLoss:
    """Loss of the critic on the tokens of a step, and how well it predicted them before it learned."""

    loss: float
    """Mean of `clipped_errors` over the counted tokens."""
    explained_variance: float
    """`1 − Var(G − V) / Var(G)` over tokens: 1 for perfect values, 0 for a constant, below 0 for worse; `nan` if all
    returns are equal."""


class Critic:
    """Values for an estimator, learned by regression on the returns of every step.

    The target of every token is the reward of its rollout; if turns have rewards, the sum of those to come. A step of
    the critic minimises
    `½ max((V − G)², (V₀ + clip(V − V₀, ±c) − G)²)` with the values `V₀` before the step, as PPO does; rollouts without
    a reward are left out.
    """

    extra_rollouts: int | None = None
    old: Tensor
    """`(N, T)` values of the latest step, from before the critic learned from it."""

    def __init__(self, config: TrainConfig, policy: Policy, *, prompts_only: bool) -> None:
        """`prompts_only`: the value of the prompt is the baseline of a whole rollout, and nothing else is learned."""
        self.config = config
        self.policy = policy
        self.prompts_only = prompts_only
        self.model = ValueModel(policy.model, shares_policy=config.critic == "head")
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.critic_learning_rate, weight_decay=0.0
        )

    def inputs(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> dict[str, Tensor]:
        """`values` `(N, T)`, or `baselines` `(P,)`: the value of each prompt."""
        self.old = self.values(rollouts)
        if not self.prompts_only:
            return {"values": self.old.double().cpu()}
        starts = [here.start for here in rollouts.group_slices()]
        first = rollouts.prompt_lengths[starts].to(self.old.device)
        return {"baselines": self.old[starts, first].double().cpu()}

    @torch.no_grad()
    def values(self, rollouts: Rollouts) -> Tensor:
        """`(N, T)` values under the current critic."""
        return torch.cat([self._values(rollouts, here) for here in self._passes(rollouts)])

    def learn(self, rollouts: Rollouts) -> dict[str, float]:
        """Regress on the returns of the step; returns loss and explained variance, from before it learned.

        Raises:
            NotFiniteError: If a gradient is not finite; the critic keeps the weights that it had before it.
        """
        device = rollouts.input_ids.device
        returns = rewards_to_come(rollouts).to(device, torch.float32)
        counted = rollouts.completion_mask & ~returns.isnan()
        returns = returns.nan_to_num()  # the gradient of an error that does not count would be 0 · NaN
        if self.prompts_only:
            counted = counted & (counted.cumsum(1) == 1)
        before = value_loss(self.old, self.old, returns, counted, self.config.critic_clip)
        for _ in range(self.config.critic_updates if bool(counted.any()) else 0):
            for here in self._passes(rollouts):
                loss = clipped_errors(
                    self._values(rollouts, here), self.old[here], returns[here], self.config.critic_clip
                )
                (loss[counted[here]].sum() / counted.sum()).backward()
            norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm or math.inf))
            if not math.isfinite(norm):
                self.optimizer.zero_grad(set_to_none=True)
                remedy = "Lower --critic-learning-rate."
                not_finite("train", "the gradient of the critic must be finite", norm, remedy)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return {"credit/value_loss": before.loss, "credit/explained_variance": before.explained_variance}

    def state(self) -> dict[str, Any]:
        """Weights, without those of a frozen base, and optimiser."""
        frozen = {name for name, parameter in self.model.named_parameters() if not parameter.requires_grad}
        weights = {name: value for name, value in self.model.state_dict().items() if name not in frozen}
        return {"model": weights, "optimizer": self.optimizer.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from stored weights."""
        self.model.load_state_dict(self.model.state_dict() | state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _values(self, rollouts: Rollouts, here: slice) -> Tensor:
        """`(n, T)` values of some rows, with gradient."""
        with self.policy.computing():
            return self.model(rollouts.input_ids[here], rollouts.attention_mask[here])

    def _passes(self, rollouts: Rollouts) -> Iterator[slice]:
        """Rows that go through the critic together: as many as through the policy."""
        return micro_batches(rollouts.count, self.config.micro_batch_size)


def rewards_to_come(rollouts: Rollouts) -> Tensor:
    """`(N, T)` sum of the rewards at this token and after it; the rollout's reward if it comes at the end."""
    if rollouts.token_rewards is None:
        return rollouts.rewards[:, None].expand(rollouts.input_ids.shape)
    return rollouts.token_rewards.flip(1).cumsum(1).flip(1)


def clipped_errors(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """`½ max((V − G)², (V₀ + clip(V − V₀, ±c) − G)²)`; `½ (V − G)²` if `clip` is 0."""
    error = (values - returns).square()
    if clip:
        near = old + (values - old).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns).square())
    return error / 2


def value_loss(values: Tensor, old: Tensor, returns: Tensor, counted: Tensor, clip: float) -> ValueLoss:
    """The mean loss over the counted tokens, and their explained variance; `nan` where no token counts."""
    errors = clipped_errors(values, old, returns, clip)[counted].double()
    if not len(errors):
        return ValueLoss(float("nan"), float("nan"))
    spread = returns[counted].double().var(correction=0)
    left = (returns - values)[counted].double().var(correction=0)
    return ValueLoss(float(errors.mean()), float(1 - left / spread) if float(spread) > 0 else float("nan"))
