"""What estimators need besides rewards, and how the trainer obtains it: one source for each kind of input.

| source | inputs | costs |
|---|---|---|
| `GreedyRollouts` | rewards of greedy rollouts | one rollout per prompt |
| `BaselineRewards` | a constant, or the running mean of earlier rewards | nothing |
| `BestOf` | the `k` of pass@k | nothing |
| `VerifiedSteps` | process rewards: 1 for a right step, 0 for a wrong one | nothing, but the task must verify steps |
| `Critic` | values of prefixes, or of prompts, by a network that learns them | a second model, or its head |
| `LogitEnergies` | energy of the path to a token, `Σ_{s≤t} (1 − 2π_s + Σ_v π_sv²)`, in logits | a forward pass |
| `ScoreEnergies` | the same in all parameters, `|Σ_{s≤t} ∇log π_s|²` | a row of a Gram per distinct prefix |
| `HeadGrams` | a proxy of the Gram of a group: gradients in the last hidden states | a forward pass |
| `HeadFeatures` | a proxy of the gradient of a token: `(1 − π_t) h_t` | a forward pass |
| `TokenScores` | the exact gradients of tokens, up to a rotation: a root of their Gram | a row of a Gram per token |
| `PrefixRollouts` | Monte-Carlo values of prefixes, where segments start | `prefix_rollouts` per distinct prefix |

A source may learn from every step; its state is part of a checkpoint.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from scoregram.advantages import ESTIMATORS
from scoregram.checks import fail
from scoregram.gram import measure_gram
from scoregram.policy import Policy, SamplingConfig, sample_policy
from scoregram.rollouts import Rollouts, micro_batches
from scoregram.tasks import Problem, Task
from scoregram.training.collect import greedy_rewards, seeded_generator
from scoregram.training.config import TrainConfig
from scoregram.training.critic import Critic
from scoregram.training.methods import Method

ROWS_PER_PASS = 256
"""Rows that go through the model at a time for energies and features, where the config sets no micro-batch."""
ROWS_SAMPLED_AT_ONCE = 512
"""Most fresh rollouts of prefixes that are sampled at a time: the memory of their caches does not grow with a step."""
MOST_TOKEN_SCORES = 4096
"""Most completion tokens of a step whose exact Gram is measured: it has that many rows."""


@runtime_checkable
class InputSource(Protocol):
    """Supplies inputs of an estimator."""

    @property
    def extra_rollouts(self) -> int | None:
        """Rollouts that the latest step took on top of those it trains on; None for a source that samples none."""
        ...

    def inputs(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> dict[str, Tensor]:
        """The inputs for step `number`, by name; `token_rewards` `(N, T)` replaces the reward at the last token."""
        ...

    def learn(self, rollouts: Rollouts) -> dict[str, float]:
        """Learn from a step that was trained on; returns scalars for the metrics."""
        ...

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, plain numbers and tensors."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a stored state."""
        ...


class StatelessSource:
    """A source that learns nothing."""

    extra_rollouts: int | None = None

    def learn(self, rollouts: Rollouts) -> dict[str, float]:
        """Nothing."""
        return {}

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to load."""


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
        return {"greedy_rewards": greedy_rewards(self.policy, self.task, problems, self.sampling)}


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
class VerifiedSteps(StatelessSource):
    """Process rewards from a task that verifies steps: 1 at the last token of a right step, 0 of a wrong one."""

    policy: Policy
    task: Task

    def inputs(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> dict[str, Tensor]:
        """`token_rewards` and `step_ends`, both `(N, T)`.

        A completion in which the task finds no step counts as one wrong step.
        """
        assert self.task.steps is not None
        rewards = torch.zeros(rollouts.input_ids.shape, dtype=torch.float64)
        ends = torch.zeros(rollouts.input_ids.shape, dtype=torch.bool)
        owners = rollouts.group_ids.tolist()
        for row, places in enumerate(completion_places(rollouts)):
            if not places:
                continue
            reached = text_lengths(self.policy, rollouts.input_ids[row, places].tolist())
            for step in self.task.steps(problems[owners[row]], rollouts.completions[row]):
                token = places[min(sum(length < step.end for length in reached), len(places) - 1)]
                rewards[row, token], ends[row, token] = float(step.correct), True
            if not bool(ends[row].any()):
                ends[row, places[-1]] = True
        return {"token_rewards": rewards, "step_ends": ends}


def completion_places(rollouts: Rollouts) -> list[list[int]]:
    """Columns of the completion tokens of every rollout."""
    return [row.nonzero().squeeze(1).tolist() for row in rollouts.completion_mask.cpu()]


def text_lengths(policy: Policy, ids: Sequence[int]) -> list[int]:
    """Characters of the text after each token; a token that completes no character adds none."""
    return [len(policy.decode(ids[: count + 1])) for count in range(len(ids))]


# Monte-Carlo values


@dataclass(frozen=True, eq=False)
class PrefixRewards:
    """Rewards of fresh rollouts from the prefixes of a step."""

    starts: Tensor
    """`(N, T)` bool: the first token of every segment."""
    prefix_of: Tensor
    """`(N, T)` int64: where a segment starts, the row of `rewards` that continues the tokens before it; 0 elsewhere."""
    rewards: Tensor
    """`(prefixes, rollouts)` float64; equal prefixes share a row."""


@dataclass
class PrefixRollouts(StatelessSource):
    """Values of prefixes: the mean reward of fresh rollouts that continue them.

    A value is estimated where a segment starts. Equal prefixes, such as the prompt, share their rollouts. A prefix has
    the tokens left that its own rollout had, so that its value is that of the same game.
    """

    policy: Policy
    task: Task
    sampling: SamplingConfig
    config: TrainConfig
    every_token: bool
    """Whether every token is a segment of its own, whatever the config says."""

    purpose: str = "prefixes"
    """Stream of random numbers: other sources draw from others."""

    def inputs(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> dict[str, Tensor]:
        """`prefix_values` and `segment_starts`, both `(N, T)`."""
        drawn = self.draw(number, rollouts, problems)
        values = drawn.rewards.mean(1)[drawn.prefix_of]
        return {"prefix_values": torch.where(drawn.starts, values, 0.0), "segment_starts": drawn.starts}

    def draw(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> "PrefixRewards":
        """Continue every distinct prefix before a segment of these rollouts."""
        starts = self.segment_starts(rollouts, problems)
        ids, owners = rollouts.input_ids.tolist(), rollouts.group_ids.tolist()
        prompts = [int(length) for length in rollouts.prompt_lengths]
        real = rollouts.attention_mask.tolist()
        places: dict[tuple[int, tuple[int, ...]], int] = {}
        prefix_of = torch.zeros(rollouts.input_ids.shape, dtype=torch.int64)
        for row, place in starts.nonzero().tolist():
            before = tuple(token for token, is_real in zip(ids[row][:place], real[row][:place], strict=True) if is_real)
            prefix_of[row, place] = places.setdefault((owners[row], before), len(places))
        lengths = {owners[row]: prompts[row] for row in range(rollouts.count)}
        return PrefixRewards(starts, prefix_of, self.rewards(number, list(places), problems, lengths))

    def rewards(
        self,
        number: int,
        prefixes: Sequence[tuple[int, tuple[int, ...]]],
        problems: Sequence[Problem],
        prompt_lengths: Mapping[int, int],
    ) -> Tensor:
        """`(prefixes, prefix_rollouts)` rewards of rollouts that continue prefixes, each given with its problem."""
        copies, generator = self.config.prefix_rollouts, seeded_generator(self.config.seed, self.purpose, number)
        self.extra_rollouts = len(prefixes) * copies
        texts, columns = [], []
        for part in self.parts_in_context(prefixes, prompt_lengths):
            for completion in self.completions(part, prompt_lengths, generator):
                texts.append(self.policy.decode(completion))
                columns.append(completion)
        each = [problems[problem] for problem, _ in prefixes for _ in range(copies)]
        rewards = self.task.rewards(each, texts, completion_ids=columns)
        if any(reward is None for reward in rewards):
            remedy = "Pass a reward function that judges every rollout."
            fail("train", "values of prefixes need a reward for every rollout that continues them", "None", remedy)
        return torch.tensor(rewards, dtype=torch.float64).view(len(prefixes), copies)

    def parts_in_context(
        self, prefixes: Sequence[tuple[int, tuple[int, ...]]], prompt_lengths: Mapping[int, int]
    ) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
        """The prefixes in order, in parts of at most `ROWS_SAMPLED_AT_ONCE` rollouts that fit into the context.

        All prefixes of a part are continued by as many tokens as its shortest completion has left, so a long prefix
        beside a short one needs more positions than its own completion.
        """
        size, limit = max(1, ROWS_SAMPLED_AT_ONCE // self.config.prefix_rollouts), self.sampling.max_new_tokens
        part: list[tuple[int, tuple[int, ...]]] = []
        longest, least = 0, limit
        for problem, ids in prefixes:
            done = len(ids) - prompt_lengths[problem]
            positions = max(longest, len(ids)) + limit - min(least, done)
            if len(part) == size or (part and positions > self.policy.context):
                yield part
                part, longest, least = [], 0, limit
            part.append((problem, ids))
            longest, least = max(longest, len(ids)), min(least, done)
        if part:
            yield part

    def completions(
        self,
        prefixes: Sequence[tuple[int, tuple[int, ...]]],
        prompt_lengths: Mapping[int, int],
        generator: torch.Generator,
    ) -> Iterator[list[int]]:
        """Token ids of whole completions, `prefix_rollouts` for each prefix: what the prefix has of it, continued."""
        copies, limit = self.config.prefix_rollouts, self.sampling.max_new_tokens
        done = [len(ids) - prompt_lengths[problem] for problem, ids in prefixes]
        fresh = sample_policy(
            self.policy,
            [list(ids) for _, ids in prefixes],
            rollouts_per_prompt=copies,
            sampling=replace(self.sampling, max_new_tokens=limit - min(done)),
            generator=generator,
        )
        for row, continued in enumerate(fresh.completion_ids()):
            problem, ids = prefixes[row // copies]
            yield [*ids[prompt_lengths[problem] :], *continued][:limit]

    def segment_starts(self, rollouts: Rollouts, problems: Sequence[Problem]) -> Tensor:
        """`(N, T)` bool: the first completion token, and each token after a cut.

        A cut depends on the tokens before it alone: the end of a step or a line, an unlikely token, or a fixed number
        of tokens.
        """
        if self.every_token:
            return rollouts.completion_mask.cpu()
        starts = torch.zeros(rollouts.input_ids.shape, dtype=torch.bool)
        owners = rollouts.group_ids.tolist()
        for row, places in enumerate(completion_places(rollouts)):
            if not places:
                continue
            ends = self.cuts(rollouts, row, places, problems[owners[row]])
            starts[row, [places[0], *(places[end + 1] for end in ends if end + 1 < len(places))]] = True
        return starts

    def cuts(self, rollouts: Rollouts, row: int, places: Sequence[int], problem: Problem) -> list[int]:
        """Completion tokens after which a rollout is cut, counted from its first one."""
        if self.config.segments == "even":
            size = self.config.segment_tokens
            return list(range(size - 1, len(places), size))
        if self.config.segments == "unlikely":
            assert rollouts.log_probs is not None
            chances = rollouts.log_probs[row, list(places)].exp().tolist()
            return [index for index, chance in enumerate(chances) if chance < self.config.segment_probability]
        reached = text_lengths(self.policy, rollouts.input_ids[row, list(places)].tolist())
        text = rollouts.completions[row]
        if self.task.steps is not None:
            ends = [step.end for step in self.task.steps(problem, text)]
        else:
            ends = [index + 1 for index, character in enumerate(text) if character == "\n"]
        return sorted({sum(length < end for length in reached) for end in ends})


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
        """`path_energies` `(N, T)`, 0 outside the completion. Equal prefixes are measured once."""
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


def input_sources(method: Method, config: TrainConfig, policy: Policy, task: Task) -> list[InputSource]:
    """The sources that a method's estimator needs.

    Raises:
        ScoregramError: If the task cannot supply an input.
    """
    needs = set(ESTIMATORS[method.estimator].needs)
    sampling = config.sampling(task.max_new_tokens)
    sources: list[InputSource] = []
    if "greedy_rewards" in needs:
        sources.append(GreedyRollouts(policy, task, sampling))
    if "baselines" in needs and method.learned_baseline:
        sources.append(Critic(config, policy, prompts_only=True))
    elif "baselines" in needs:
        sources.append(BaselineRewards(config.baseline, config.baseline_decay))
    if "best_of" in needs:
        if config.best_of > config.starting_group_size:
            got = f"best_of {config.best_of} and group_size {config.starting_group_size}"
            fail("train --best-of", "must be at most group_size", got, "Lower it, or raise --group-size.")
        sources.append(BestOf(config.best_of))
    if "values" in needs:
        sources.append(Critic(config, policy, prompts_only=False))
    if "step_ends" in needs:
        if task.steps is None:
            remedy = "Train on arithmetic, or choose another estimator."
            fail("train --estimator", f"{method.estimator} needs a task that verifies steps", task.name, remedy)
        sources.append(VerifiedSteps(policy, task))
    if "prefix_values" in needs:
        if task.environment is not None:
            remedy = "Choose another estimator."
            fail("train --estimator", f"{method.estimator} needs a task of one turn", task.name, remedy)
        sources.append(PrefixRollouts(policy, task, sampling, config, every_token="segment_starts" not in needs))
    if "path_energies" in needs:
        sources.append((ScoreEnergies if method.exact_geometry else LogitEnergies)(policy, config))
    if "score_grams" in needs and not method.exact_geometry:  # the exact Gram comes from the update itself
        sources.append(HeadGrams(policy, config))
    if "token_features" in needs:
        sources.append((TokenScores if method.exact_geometry else HeadFeatures)(policy, config))
    if method.branches and sources:
        remedy = "Leave --estimator out, or choose another method."
        requirement = f"{config.method} takes an estimator that needs only the rollouts"
        fail("train --estimator", requirement, method.estimator, remedy)
    if config.critic_warmup and not any(isinstance(source, Critic) for source in sources):
        remedy = "Leave it out, or train with ppo, ppo-monte-carlo or reinforce-critic."
        fail("train --critic-warmup", "needs a method with a critic", f"estimator {method.estimator}", remedy)
    return sources
