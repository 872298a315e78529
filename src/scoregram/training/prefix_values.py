"""Values of prefixes: the mean reward of fresh rollouts, or exact where the task has one right solution.

`PrefixRollouts` estimates them for any task of one turn. `SolutionValues` computes them from the policy itself, and
`ExactValues` gives them to any estimator that takes values. A run with them shows what an estimator would do with a
perfect critic. That is not the least variance: the baseline of least variance weights returns by squared scores.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor

from scoregram.checks import fail
from scoregram.policy import Policy, SamplingConfig, sample_policy, token_log_probs
from scoregram.rollouts import Rollouts
from scoregram.tasks import Problem, Task
from scoregram.training.collect import seeded_generator
from scoregram.training.config import TrainConfig
from scoregram.training.critic import rewards_to_come, value_loss
from scoregram.training.input_source import StatelessSource, completion_places, text_lengths

ROWS_SAMPLED_AT_ONCE = 512
"""Most fresh rollouts of prefixes that are sampled at a time: the memory of their caches does not grow with a step."""
EXACT_TRUTH_REMEDY = "Choose sampled, or train tiny on arithmetic."
LARGEST_VOCABULARY = 4096
"""Vocabularies up to this size are searched for tokens of several characters; larger ones always have some."""


@dataclass(frozen=True, eq=False)
class PrefixRewards:
    """Rewards of fresh rollouts from the prefixes of a step."""

    starts: Tensor
    """`(N, T)` bool: the first token of every segment."""
    prefix_of: Tensor
    """`(N, T)` int64: where a segment starts, the row of `rewards` that continues the tokens before it; 0 elsewhere."""
    rewards: Tensor
    """`(prefixes, rollouts)` float64; equal prefixes share a row."""


@dataclass(frozen=True)
class Segments:
    """Where rollouts are cut into segments, each with one value at its start."""

    policy: Policy
    task: Task
    config: TrainConfig
    every_token: bool
    """Whether every token is a segment of its own, whatever the config says."""

    def starts(self, rollouts: Rollouts, problems: Sequence[Problem]) -> Tensor:
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
            ends = [step.end for step in self.task.verified_steps(problem, text) if not step.final]
        else:
            ends = [index + 1 for index, character in enumerate(text) if character == "\n"]
        return sorted({sum(length < end for length in reached) for end in ends})


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
    segments: Segments
    purpose: str = "prefixes"
    """Stream of random numbers: other sources draw from others."""

    def inputs(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> dict[str, Tensor]:
        """`prefix_values` and `segment_starts`, both `(N, T)`."""
        drawn = self.draw(number, rollouts, problems)
        values = drawn.rewards.mean(1)[drawn.prefix_of]
        return {"prefix_values": torch.where(drawn.starts, values, 0.0), "segment_starts": drawn.starts}

    def draw(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> PrefixRewards:
        """Continue every distinct prefix before a segment of these rollouts."""
        starts = self.segments.starts(rollouts, problems)
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
            got = f"None for {sum(reward is None for reward in rewards)} of {len(rewards)}"
            fail("train", "values of prefixes need a reward for every rollout that continues them", got, remedy)
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


@dataclass
class SolutionValues:
    """Exact values where one right solution exists: `V(prefix) = π(rest of the right solution | prefix)`.

    The value of a prefix is the probability that the policy continues it to the right solution, token by token, and
    then stops; 0 once a token differs. One forward pass over the right solution of every problem gives all values. This
    definition is ours. It differs from the expected reward by completions that reach the right answer through an error;
    `CreditTruth.agreement` is the share of the rollouts for which the two agree.
    """

    policy: Policy
    task: Task
    temperature: float
    limit: int
    """Longest completion, in tokens."""

    def prefix_values(self, rollouts: Rollouts, problems: Sequence[Problem]) -> list[list[float]]:
        """For every rollout the value before each of its completion tokens, and after the last one."""
        solutions = [self.solution_tokens(problem) for problem in problems]
        rows, lengths = rollouts.token_ids(), rollouts.prompt_lengths.tolist()
        prompts = [rows[here.start][: lengths[here.start]] for here in rollouts.group_slices()]
        values = self.values(prompts, solutions)
        stops = set(self.policy.stop_ids)
        found = []
        for row, (owner, places) in enumerate(
            zip(rollouts.group_ids.tolist(), completion_places(rollouts), strict=True)
        ):
            known, written = values[owner], rollouts.input_ids[row, places].tolist()
            right = matching_tokens(written, solutions[owner], stops)
            found.append(
                [known[min(place, len(known) - 1)] if place <= right else 0.0 for place in range(len(written) + 1)]
            )
        return found

    def solution_tokens(self, problem: Problem) -> list[int]:
        """Tokens of the right solution, without the stop token."""
        assert self.task.solution is not None
        return list(self.policy.tokenizer(self.task.solution(problem), add_special_tokens=False)["input_ids"])

    @torch.no_grad()
    def values(self, prompts: Sequence[Sequence[int]], solutions: Sequence[Sequence[int]]) -> list[list[float]]:
        """For every prompt the value before each token of its right solution and stop token, and 1 after the last."""
        by_stop = torch.stack([self.log_probs(prompts, solutions, stop) for stop in self.policy.stop_ids])
        found = []
        for row, (prompt, solution) in enumerate(zip(prompts, solutions, strict=True)):
            end = len(prompt) + len(solution)
            tokens = [*by_stop[0, row, len(prompt) : end].tolist(), float(by_stop[:, row, end].logsumexp(0))]
            rest = torch.tensor(tokens[: self.limit], dtype=torch.float64).flip(0).cumsum(0).flip(0).exp()
            is_possible = len(solution) <= self.limit
            found.append([*(rest if is_possible else torch.zeros_like(rest)).tolist(), float(is_possible)])
        return found

    def log_probs(self, prompts: Sequence[Sequence[int]], solutions: Sequence[Sequence[int]], stop: int) -> Tensor:
        """`(P, T)` log-probabilities of right solutions that end with this stop token."""
        rows = [[*prompt, *solution, stop] for prompt, solution in zip(prompts, solutions, strict=True)]
        device = next(self.policy.model.parameters()).device
        ids = torch.full((len(rows), max(map(len, rows))), self.policy.pad_id, dtype=torch.int64)
        real, scored = (torch.zeros(ids.shape, dtype=torch.bool) for _ in range(2))
        for row, (prompt, tokens) in enumerate(zip(prompts, rows, strict=True)):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            real[row, : len(tokens)] = True
            scored[row, len(prompt) : len(tokens)] = True
        with self.policy.computing():
            given = (ids.to(device), real.to(device), scored.to(device))
            return token_log_probs(self.policy.model, *given, temperature=self.temperature).double().cpu()


@dataclass
class ExactValues(StatelessSource):
    """The values that an estimator takes, exact, in place of those of a critic or of fresh rollouts."""

    values: SolutionValues
    segments: Segments | None
    """None for an estimator without segments."""
    latest: Tensor | None = None
    """`(N, T)` values of the latest step."""

    def inputs(self, number: int, rollouts: Rollouts, problems: Sequence[Problem]) -> dict[str, Tensor]:
        """`values` and `prefix_values`, the same `(N, T)`, `baselines` `(P,)`, and `segment_starts` `(N, T)`."""
        values = self.values.prefix_values(rollouts, problems)
        table = torch.zeros(rollouts.input_ids.shape, dtype=torch.float64)
        for row, places in enumerate(completion_places(rollouts)):
            table[row, places] = torch.tensor(values[row][:-1], dtype=torch.float64)
        self.latest = table
        baselines = torch.tensor([values[here.start][0] for here in rollouts.group_slices()], dtype=torch.float64)
        found = {"values": table, "prefix_values": table, "baselines": baselines}
        return found if self.segments is None else found | {"segment_starts": self.segments.starts(rollouts, problems)}

    def learn(self, rollouts: Rollouts) -> dict[str, float]:
        """Returns how much of the rewards the true values explain, over all tokens: the limit of a critic."""
        assert self.latest is not None
        returns = rewards_to_come(rollouts).cpu()
        counted = rollouts.completion_mask.cpu() & ~returns.isnan()
        found = value_loss(self.latest, self.latest, returns.nan_to_num(), counted, 0.0)
        return {"credit/explained_variance": found.explained_variance}


def matching_tokens(completion: Sequence[int], solution: Sequence[int], stops: set[int]) -> int:
    """How many tokens a completion shares with the right solution and its stop, from the start.

    Example:
        >>> matching_tokens([4, 1, 7], [4, 1, 5], {0}), matching_tokens([4, 1, 0], [4, 1], {0})
        (2, 3)
    """
    for place, token in enumerate(completion):
        is_right = token == solution[place] if place < len(solution) else place == len(solution) and token in stops
        if not is_right:
            return place
    return len(completion)


def exact_task_obstacle(config: TrainConfig, task: Task) -> str | None:
    """Why exact values are not possible with any policy, None if they may be."""
    if task.solution is None:
        return f"task {task.name}, which has many right solutions"
    if config.reward is not None:
        return f"reward {config.reward}, which may reward other solutions"
    if config.top_k or config.top_p < 1:
        return "top_k or top_p, which change the probabilities of tokens"
    return None


def exact_obstacle(config: TrainConfig, policy: Policy, task: Task) -> str | None:
    """Why exact values are not possible, None if they are."""
    obstacle = exact_task_obstacle(config, task)
    if obstacle is not None:
        return obstacle
    size = len(policy.tokenizer)
    if size > LARGEST_VOCABULARY or any(len(policy.decode([token])) > 1 for token in range(size)):
        return "a tokenizer with several characters per token, which writes a solution in many ways"
    return None


def require_exact(config: TrainConfig, policy: Policy, task: Task, *, option: str, remedy: str) -> None:
    """Raise if exact values are not possible."""
    obstacle = exact_obstacle(config, policy, task)
    if obstacle is not None:
        fail_exact(option, obstacle, remedy)


def fail_exact(option: str, obstacle: str, remedy: str) -> NoReturn:
    """Raise, as exact values are not possible."""
    requirement = "exact values need a task and a policy with one right token sequence"
    fail(f"train --{option}", requirement, obstacle, remedy)
