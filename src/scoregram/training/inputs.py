"""What estimators need besides rewards, and how the trainer obtains it: one source for each kind of input.

| source | inputs | costs |
|---|---|---|
| `GreedyRollouts` | rewards of greedy rollouts | one rollout per prompt |
| `BaselineRewards` | a constant, or the running mean of earlier rewards | nothing |
| `BestOf` | the `k` of pass@k | nothing |
| `StepScores` | process rewards: the score of every step | a verifier of the task, or `--step-scores` |
| `Critic` | values of prefixes, or of prompts, by a network that learns them | a second model, or its head |
| `LogitEnergies` | energy of the path to a token, `Σ_{s≤t} (1 − 2π_s + Σ_v π_sv²)`, in logits | a forward pass |
| `ScoreEnergies` | the same in all parameters, `|Σ_{s≤t} ∇log π_s|²` | a row of a Gram per token |
| `HeadGrams` | a proxy of the Gram of a group: gradients in the last hidden states | a forward pass |
| `HeadFeatures` | a proxy of the gradient of a token: `(1 − π_t) h_t` | a forward pass |
| `TokenScores` | the exact gradients of tokens, up to a rotation: a root of their Gram | a row of a Gram per token |
| `PrefixRollouts` | Monte-Carlo values of prefixes, where segments start | `prefix_rollouts` per distinct prefix |
| `ExactValues` | exact values, in place of those of a critic or of fresh rollouts | a forward pass, a task for it |

A source may learn from every step; its state is part of a checkpoint.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scoregram.advantages import ESTIMATORS
from scoregram.checks import fail
from scoregram.gram import measure_gram
from scoregram.policy import Policy, SamplingConfig
from scoregram.rollouts import Rollouts, micro_batches
from scoregram.tasks import Problem, Task
from scoregram.training.collect import greedy_rewards
from scoregram.training.config import TrainConfig
from scoregram.training.credit import has_critic, takes_values
from scoregram.training.critic import Critic
from scoregram.training.input_source import InputSource, StatelessSource, completion_places, text_lengths
from scoregram.training.methods import Method
from scoregram.training.prefix_values import (
    ExactValues,
    PrefixRollouts,
    Segments,
    SolutionValues,
    exact_task_obstacle,
    fail_exact,
    require_exact,
)

ROWS_PER_PASS = 256
"""Rows that go through the model at a time for energies and features, where the config sets no micro-batch."""
EXACT_VALUES_REMEDY = "Leave it out, or train tiny on arithmetic-strict."
MOST_TOKEN_SCORES = 4096
"""Most completion tokens of a step whose exact Gram is measured: it has that many rows."""


# Baselines


@dataclass
class GreedyRollouts(StatelessSource):
    """The reward of the greedy rollout of every prompt, as in ReMax."""

    policy: Policy
    task: Task
    sampling: SamplingConfig

    def inputs(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> dict[str, Tensor]:
        """`greedy_rewards` `(P,)`."""
        self.extra_rollouts = len(problems)
        rewards = greedy_rewards(self.policy, self.task, problems, self.sampling)
        if bool(rewards.isnan().any()):
            remedy = "Pass a reward function that judges every rollout."
            got = f"None for {int(rewards.isnan().sum())} of {len(problems)}"
            fail("train", "greedy baselines need a reward for every greedy rollout", got, remedy)
        return {"greedy_rewards": rewards}


@dataclass
class BaselineRewards:
    """A baseline that the rollouts of the step do not influence: a constant, or the running mean of earlier rewards.

    The running mean is `b ← d b + (1 - d) mean(r)`, corrected for its start at 0 as in Adam; before the first step
    it is 0. Because it depends on earlier steps only, the update stays unbiased.
    """

    constant: float | None
    decay: float
    total: float = 0.0
    weight: float = 0.0
    extra_rollouts: int | None = None

    @property
    def value(self) -> float:
        """The baseline of the next step."""
        if self.constant is not None:
            return self.constant
        return self.total / self.weight if self.weight else 0.0

    def inputs(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> dict[str, Tensor]:
        """`baselines` `(P,)`, all equal."""
        return {"baselines": torch.full((len(rollouts.group_sizes),), self.value, dtype=torch.float64)}

    def learn(self, rollouts: Rollouts) -> dict[str, float]:
        """Move the running mean towards the mean reward of the step; returns the baseline that the step had."""
        used, mean = self.value, rollouts.rewards.nanmean()
        if bool(mean.isfinite()):
            self.total = self.decay * self.total + (1 - self.decay) * float(mean)
            self.weight = self.decay * self.weight + (1 - self.decay)
        return {"credit/baseline": used}

    def state(self) -> dict[str, Any]:
        """The running mean."""
        return {"total": self.total, "weight": self.weight}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue the running mean."""
        self.total, self.weight = float(state["total"]), float(state["weight"])


@dataclass
class BestOf(StatelessSource):
    """The `k` of pass@k, the same for every prompt."""

    count: int

    def inputs(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> dict[str, Tensor]:
        """`best_of` `(P,)`."""
        return {"best_of": torch.full((len(rollouts.group_sizes),), self.count)}


# Process rewards


@dataclass
class StepScores(StatelessSource):
    """Process rewards: the score of each step at its last token, 1 or 0 if the task verifies steps itself."""

    policy: Policy
    task: Task

    def inputs(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> dict[str, Tensor]:
        """`token_rewards` and `step_ends`, both `(N, T)`.

        A completion without a step counts as one step with score 0. Of steps that end within one token the last counts.
        """
        rewards = torch.zeros(rollouts.input_ids.shape, dtype=torch.float64)
        ends = torch.zeros(rollouts.input_ids.shape, dtype=torch.bool)
        each = [problems[owner] for owner in rollouts.group_ids.tolist()]
        scored = self.task.scored_steps(each, rollouts.completions, completion_ids=rollouts.completion_ids())
        for row, places in enumerate(completion_places(rollouts)):
            if not places:
                continue
            reached = text_lengths(self.policy, rollouts.input_ids[row, places].tolist())
            for step in scored[row]:
                token = places[min(sum(length < step.end for length in reached), len(places) - 1)]
                rewards[row, token], ends[row, token] = step.score, True
            if not bool(ends[row].any()):
                ends[row, places[-1]] = True
        return {"token_rewards": rewards, "step_ends": ends}


# Energies of paths


@dataclass
class LogitEnergies(StatelessSource):
    """Energies of paths from the policy's probabilities alone: squared gradients with respect to the logits.

    It is the proxy of the optimal token baseline (arXiv:2602.07078) as verl computes it.
    """

    policy: Policy
    config: TrainConfig

    @torch.no_grad()
    def inputs(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> dict[str, Tensor]:
        """`path_energies` `(N, T)`, 0 outside the completion."""
        parts = [self._energies(rollouts, here) for here in forward_passes(self.config, rollouts.count)]
        return {"path_energies": torch.cat(parts).cumsum(1) * rollouts.completion_mask.cpu()}

    def _energies(self, rollouts: Rollouts, here: slice) -> Tensor:
        """`(n, T)` squared norm of the gradient of each completion token's log-probability in its logits."""
        ids, mask = rollouts.input_ids[here], rollouts.completion_mask[here]
        with self.policy.computing():
            logits = self.policy.model(input_ids=ids, attention_mask=rollouts.attention_mask[here].long()).logits
        chances = (logits[:, :-1].float() / self.config.temperature).softmax(2)  # of the tokens from the second one on
        taken = chances.gather(2, ids[:, 1:, None]).squeeze(2)
        energies = 1 - 2 * taken + chances.square().sum(2)
        return torch.nn.functional.pad(energies, (1, 0)).double().cpu().clamp_min(0) * mask.cpu()


def forward_passes(config: TrainConfig, rows: int) -> Iterator[slice]:
    """The rows of each forward pass: a micro-batch, or `ROWS_PER_PASS` if the config sets none.

    A pass holds the logits of all its tokens, prompts included.
    """
    return micro_batches(rows, config.micro_batch_size or ROWS_PER_PASS)


@dataclass
class ScoreEnergies(StatelessSource):
    """Energies of paths over all parameters, which the logits are a proxy of: the diagonal of the Gram of prefixes."""

    policy: Policy
    config: TrainConfig

    def inputs(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> dict[str, Tensor]:
        """`path_energies` `(N, T)`, 0 outside the completion."""
        mask = rollouts.completion_mask
        rows, places = mask.nonzero(as_tuple=True)
        energies = torch.zeros(mask.shape, dtype=torch.float64)
        for here in micro_batches(len(rows), ROWS_PER_PASS):
            owners, ends = rows[here], places[here]
            energies[owners.cpu(), ends.cpu()] = self._prefix_energies(rollouts, owners, ends).cpu()
        return {"path_energies": energies}

    def _prefix_energies(self, rollouts: Rollouts, owners: Tensor, ends: Tensor) -> Tensor:
        """`(n,)` squared norms of the scores of rollouts that are cut after a token."""
        ids, completion, attention = prefixes_of(rollouts, owners, ends, self.policy.pad_id)
        with self.policy.computing():
            gram = measure_gram(
                self.policy.model, ids, completion, attention, temperature=self.config.temperature, group_size=1
            )
        return gram.matrix.diagonal()


def prefixes_of(rollouts: Rollouts, owners: Tensor, ends: Tensor, pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rollouts cut after a token: ids, completion and attention mask, `(n, T)` each; equal prefixes are equal rows."""
    kept = torch.arange(rollouts.input_ids.shape[1], device=ends.device) <= ends[:, None]  # (n, T)
    ids = torch.where(kept, rollouts.input_ids[owners], pad_id)
    return ids, rollouts.completion_mask[owners] & kept, rollouts.attention_mask[owners] & kept


# Geometry of gradients


@dataclass
class HeadGrams(StatelessSource):
    """A proxy of the Gram of every group: inner products of `Φ_i = Σ_t ∇_h log π_it`, with `h` the last hidden state.

    `∇_h log π = W'(e_y − π)/temperature` with the output embeddings `W`, as in G2RL (arXiv:2512.15687).
    """

    policy: Policy
    config: TrainConfig

    @torch.no_grad()
    def inputs(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> dict[str, Tensor]:
        """`score_grams` `(P, R, R)` float64."""
        parts = [self._sensitivities(rollouts, here) for here in forward_passes(self.config, rollouts.count)]
        features = torch.cat(parts).view(len(rollouts.group_sizes), -1, parts[0].shape[1])  # (P, R, H)
        return {"score_grams": features @ features.mT}

    def _sensitivities(self, rollouts: Rollouts, here: slice) -> Tensor:
        """`(n, H)` sums over completion tokens."""
        ids, mask = rollouts.input_ids[here], rollouts.completion_mask[here]
        with self.policy.computing():
            logits = self.policy.model(input_ids=ids, attention_mask=rollouts.attention_mask[here].long()).logits
        chances = (logits[:, :-1].float() / self.config.temperature).softmax(2)
        counted = mask[:, 1:].float()
        surprise = -torch.einsum("ntv,nt->nv", chances, counted).scatter_add(1, ids[:, 1:], -counted)  # Σ_t (e_y − π)
        weight = self.policy.model.get_output_embeddings().weight.float()  # (V, H)
        return (surprise @ weight / self.config.temperature).double().cpu()


@dataclass
class HeadFeatures(StatelessSource):
    """A proxy of the gradient of every token: `(1 − π_t) h_t`, its part in the output embedding of the token itself.

    It is that of DelTA's code (arXiv:2605.21467).
    """

    policy: Policy
    config: TrainConfig

    @torch.no_grad()
    def inputs(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> dict[str, Tensor]:
        """`token_features` `(N, T, H)`, 0 outside the completion."""
        parts = [self._features(rollouts, here) for here in forward_passes(self.config, rollouts.count)]
        return {"token_features": torch.cat(parts)}

    def _features(self, rollouts: Rollouts, here: slice) -> Tensor:
        """`(n, T, H)` features of some rollouts, 0 for the first token of a row, which nothing predicts."""
        ids, mask = rollouts.input_ids[here], rollouts.completion_mask[here]
        attention = rollouts.attention_mask[here].long()
        with self.policy.computing():
            out = self.policy.model(input_ids=ids, attention_mask=attention, output_hidden_states=True)
        log_probs = (out.logits[:, :-1].float() / self.config.temperature).log_softmax(2)
        chances = log_probs.gather(2, ids[:, 1:, None]).exp()  # (n, T-1, 1)
        features = (1 - chances) * out.hidden_states[-1][:, :-1].float()
        return torch.nn.functional.pad(features, (0, 0, 1, 0)).cpu() * mask.cpu()[..., None]


@dataclass
class TokenScores(StatelessSource):
    """The gradient of every token's log-probability over all parameters, up to a rotation: a root of their Gram."""

    policy: Policy
    config: TrainConfig

    def inputs(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> dict[str, Tensor]:
        """`token_features` `(N, T, M)` for `M` completion tokens, 0 outside the completion.

        Raises:
            ScoregramError: If the step has more than `MOST_TOKEN_SCORES` completion tokens.
        """
        owners, ends = rollouts.completion_mask.nonzero(as_tuple=True)
        if len(ends) > MOST_TOKEN_SCORES:
            remedy = "Train with delta, lower --batch-size, or shorten the completions."
            requirement = f"exact gradients of tokens need a step of at most {MOST_TOKEN_SCORES} completion tokens"
            fail("train --method", requirement, len(ends), remedy)
        ids, completion, attention = prefixes_of(rollouts, owners, ends, self.policy.pad_id)
        completion &= torch.arange(ids.shape[1], device=ends.device) == ends[:, None]  # the last token alone
        with self.policy.computing():
            gram = measure_gram(self.policy.model, ids, completion, attention, temperature=self.config.temperature)
        sizes, vectors = torch.linalg.eigh(gram.matrix.double().cpu())
        features = torch.zeros(*rollouts.completion_mask.shape, len(ends), dtype=torch.float64)
        features[owners.cpu(), ends.cpu()] = vectors * sizes.clamp_min(0).sqrt()
        return {"token_features": features}


def require_inputs(method: Method, config: TrainConfig, task: Task) -> None:
    """Raise if the settings or the task cannot supply what the method's estimator needs; no policy is needed for this.

    Raises:
        ScoregramError: It names the option that chose the estimator, `--method` or `--estimator`.
    """
    needs = set(ESTIMATORS[method.estimator].needs)
    option, chosen = ("method", config.method) if config.estimator is None else ("estimator", config.estimator)
    if config.exact_values and takes_values(method):
        obstacle = exact_task_obstacle(config, task)
        if obstacle is not None:
            fail_exact("exact-values", obstacle, EXACT_VALUES_REMEDY)
        if not task.rewards_solution_alone:
            requirement = "needs a task that rewards the right solution alone"
            fail("train --exact-values", requirement, task.name, EXACT_VALUES_REMEDY)
    has_turns = task.environment is not None
    if "prefix_values" in needs and not config.exact_values and has_turns:
        remedy = f"Choose another {option}."
        fail(f"train --{option}", f"{chosen} needs a task of one turn", task.name, remedy)
    if "step_ends" in needs and (has_turns or (task.steps is None and task.step_scores is None)):
        remedy = f"Choose another {option}." if has_turns else "Give --step-scores module:function."
        fail(f"train --{option}", f"{chosen} needs a task that verifies steps", task.name, remedy)
    if "best_of" in needs and config.best_of > config.starting_group_size:
        got = f"best_of {config.best_of} and group_size {config.starting_group_size}"
        fail("train --best-of", "must be at most group_size", got, "Lower it, or raise --group-size.")
    supplied = {"greedy_rewards", "baselines", "best_of", "step_ends", "path_energies", "token_features"}
    has_sources = takes_values(method) or bool(needs & supplied)
    if method.branches and (has_sources or ("score_grams" in needs and not method.exact_geometry)):
        remedy = "Leave --estimator out, or choose another method."
        requirement = f"{config.method} takes an estimator that needs only the rollouts"
        fail("train --estimator", requirement, method.estimator, remedy)
    if config.critic_warmup and not has_critic(config):
        remedy = "Leave it out, or give it to ppo, ppo-monte-carlo or reinforce-critic alone."
        fail("train --critic-warmup", "needs a method with a critic", f"estimator {method.estimator}", remedy)


def input_sources(method: Method, config: TrainConfig, policy: Policy, task: Task) -> list[InputSource]:
    """The sources that a method's estimator needs.

    Raises:
        ScoregramError: If the task cannot supply an input.
    """
    require_inputs(method, config, task)
    needs = set(ESTIMATORS[method.estimator].needs)
    sampling = config.sampling(task.max_new_tokens)
    sources: list[InputSource] = []
    if "greedy_rewards" in needs:
        sources.append(GreedyRollouts(policy, task, sampling))
    if takes_values(method):
        sources.append(value_source(method, config, policy, task))
    elif "baselines" in needs:
        sources.append(BaselineRewards(config.baseline, config.baseline_decay))
    if "best_of" in needs:
        sources.append(BestOf(config.best_of))
    if "step_ends" in needs:
        sources.append(StepScores(policy, task))
    if "path_energies" in needs:
        sources.append((ScoreEnergies if method.exact_geometry else LogitEnergies)(policy, config))
    if "score_grams" in needs and not method.exact_geometry:  # the exact Gram comes from the update itself
        sources.append(HeadGrams(policy, config))
    if "token_features" in needs:
        sources.append((TokenScores if method.exact_geometry else HeadFeatures)(policy, config))
    return sources


def value_source(method: Method, config: TrainConfig, policy: Policy, task: Task) -> InputSource:
    """The source of the values that an estimator takes: a critic, fresh rollouts, or exact values in their place.

    Raises:
        ScoregramError: If the task or the policy has no such values.
    """
    needs, sampling = set(ESTIMATORS[method.estimator].needs), config.sampling(task.max_new_tokens)
    segments = Segments(policy, task, config, every_token="segment_starts" not in needs)
    if config.exact_values:
        require_exact(config, policy, task, option="exact-values", remedy=EXACT_VALUES_REMEDY)
        values = SolutionValues(policy, task, config.temperature, sampling.max_new_tokens)
        return ExactValues(values, segments if "segment_starts" in needs else None)
    if "prefix_values" not in needs:
        return Critic(config, policy, prompts_only="baselines" in needs)
    return PrefixRollouts(policy, task, sampling, config, segments)
