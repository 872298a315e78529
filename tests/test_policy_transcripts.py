"""Transcripts: what the policy sampled, what it only read, and the rewards of turns."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from scoregram.checks import ScoregramError
from scoregram.policy import (
    Branches,
    Policy,
    SamplingConfig,
    play_branches,
    play_episodes,
    start_episodes,
    token_log_probs,
)
from scoregram.rollouts import Rollouts, concatenated_rollouts
from scoregram.tasks import Problem, Reply
from tests.training_cases import save_policy
from tests.turn_cases import ECHO, PROBLEMS, Echo, played_by_hand, policy_in

SAMPLING = SamplingConfig(max_new_tokens=4)
SEEDS = [[10 * prompt + index for index in range(4)] for prompt in range(len(PROBLEMS))]


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Policy:
    return policy_in(save_policy(tmp_path_factory.mktemp("policy")))


def played(policy: Policy, *, max_turns: int = 3, sampling: SamplingConfig = SAMPLING, seed: int = 0) -> Rollouts:
    groups = start_episodes(policy, ECHO, PROBLEMS, SEEDS)
    generator = torch.Generator().manual_seed(seed)
    return play_episodes(policy, groups, sampling=sampling, max_turns=max_turns, generator=generator)


@pytest.fixture(scope="module")
def rollouts(policy) -> Rollouts:
    return played(policy)


def test_a_transcript_alternates_between_turns_and_observations(policy, rollouts):
    stop = policy.stop_ids[0]
    assert rollouts.turn_ids is not None
    for row in range(rollouts.count):
        problem, seed = PROBLEMS[row // 4], SEEDS[row // 4][row % 4]
        expected, turns = [*policy.encode_prompt(problem.prompt)], played_by_hand(policy, rollouts, row, seed, problem)
        owners = [-1] * len(expected)
        for turn, (_, reply) in enumerate(turns):
            here = rollouts.completion_mask[row] & (rollouts.turn_ids[row] == turn)
            own = rollouts.input_ids[row][here].tolist()
            assert 1 <= len(own) <= 4 and stop not in own[:-1]
            read = [] if reply.done else policy.encode_observation(reply.observation)
            if not reply.done and own[-1] != stop:
                read = [stop, *read]  # the environment closes a turn that was cut off
            expected += own + read
            owners += [turn] * len(own) + [-1] * len(read)
        assert rollouts.token_ids()[row] == expected
        mask = rollouts.completion_mask[row, : len(owners)].tolist()
        assert mask == [owner >= 0 for owner in owners]
        assert turns[-1][1].done and bool(rollouts.finished[row])  # type: ignore[index]
        assert rollouts.completions[row] == policy.decode(expected[len(policy.encode_prompt(problem.prompt)) :])


class Broken(Echo):
    """An environment whose code fails at one place."""

    place = ""

    def __init__(self) -> None:
        self.fail("__init__")

    def fail(self, place: str) -> None:
        """Raise at the chosen place."""
        if self.place == place:
            raise KeyError("colour")

    def reset(self, problem: Problem, seed: int) -> str:
        """Show the prompt, or fail."""
        self.fail("reset")
        return super().reset(problem, seed)

    def step(self, text: str) -> Reply:
        """Repeat the text's length, or fail."""
        self.fail("step")
        return super().step(text)


@pytest.mark.parametrize(
    ("place", "note"),
    [
        ("__init__", "raised by the environment of task echo"),
        ("reset", "raised by Broken.reset"),
        ("step", "raised by Broken.step"),
    ],
)
def test_an_exception_of_an_environment_says_where_it_comes_from(policy, place, note, monkeypatch):
    def play() -> None:
        groups = start_episodes(policy, replace(ECHO, environment=Broken), PROBLEMS, SEEDS)
        play_episodes(policy, groups, sampling=SAMPLING, max_turns=3, generator=torch.Generator())

    monkeypatch.setattr(Broken, "place", place)
    with pytest.raises(KeyError) as caught:
        play()
    assert caught.value.__notes__ == [note]


def test_rewards_are_those_of_the_environment(policy, rollouts):
    assert rollouts.token_rewards is not None and rollouts.turn_ids is not None
    for row in range(rollouts.count):
        turns = played_by_hand(policy, rollouts, row, SEEDS[row // 4][row % 4], PROBLEMS[row // 4])
        paid = [reply.reward + reply.outcome for _, reply in turns]
        assert rollouts.turn_rewards[row, : len(turns)].tolist() == paid
        assert rollouts.turn_mask[row].tolist() == [turn < len(turns) for turn in range(3)]
        assert float(rollouts.rewards[row]) == pytest.approx(sum(paid))
        assert float(rollouts.reward_parts["outcome"][row]) == sum(reply.outcome for _, reply in turns)
        assert float(rollouts.reward_parts["turns"][row]) == pytest.approx(sum(reply.reward for _, reply in turns))
        places = rollouts.token_rewards[row].nonzero().flatten().tolist()
        own = [rollouts.completion_mask[row] & (rollouts.turn_ids[row] == turn) for turn in range(len(turns))]
        assert set(places) <= {int(mask.nonzero()[-1]) for mask in own}


@pytest.mark.filterwarnings("ignore::scoregram.policy.draw.BiasedSamplingWarning")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_log_probabilities_are_those_of_the_whole_transcript(tmp_path, dtype, temperature):
    policy = policy_in(save_policy(tmp_path), dtype)
    rollouts = played(policy, sampling=replace(SAMPLING, temperature=temperature))
    whole = token_log_probs(
        policy.model,
        rollouts.input_ids,
        rollouts.attention_mask,
        rollouts.completion_mask,
        temperature=temperature,
    )
    assert rollouts.log_probs is not None
    torch.testing.assert_close(rollouts.log_probs.double(), whole.detach().double(), rtol=1e-5, atol=2e-6)
    assert not bool(rollouts.log_probs[~rollouts.completion_mask].any())


def test_one_seed_gives_the_same_transcripts(policy, rollouts):
    again, other = played(policy), played(policy, seed=1)
    assert torch.equal(again.input_ids, rollouts.input_ids)
    assert other.token_ids() != rollouts.token_ids()


def test_episodes_are_cut_off_at_their_limits(policy, rollouts):
    short = played(policy, max_turns=2)
    assert short.turn_mask.shape[1] == 2
    assert bool(short.finished.any()) and not bool(short.finished.all())  # type: ignore[union-attr]
    cut = ~short.finished  # type: ignore[operator]
    ends = short.attention_mask.sum(1) - 1
    assert bool(short.completion_mask[cut].gather(1, ends[cut][:, None]).all())  # no observation after the last turn
    prompt = len(policy.encode_prompt(PROBLEMS[0].prompt))
    narrow = replace(policy, context=prompt + 2 * 4)  # a second turn never fits behind an observation of four tokens
    assert played(narrow).turn_mask.shape[1] <= 2
    assert int(played(narrow).attention_mask.sum(1).max()) <= narrow.context


def test_greedy_episodes_need_no_generator(policy):
    groups = start_episodes(policy, ECHO, PROBLEMS, [[3, 3]] * len(PROBLEMS))
    greedy = replace(SAMPLING, temperature=0.0)
    rollouts = play_episodes(policy, groups, sampling=greedy, max_turns=3, generator=None)
    rows = rollouts.token_ids()
    assert rows[::2] == rows[1::2]


def test_transcripts_can_be_joined_and_selected(policy, rollouts):
    joined = concatenated_rollouts([rollouts, played(policy, max_turns=1)], policy.pad_id)
    assert joined.turn_rewards[: rollouts.count].tolist() == rollouts.turn_rewards.tolist()
    kept = torch.zeros(rollouts.count, dtype=torch.bool)
    kept[[0, 5]] = True
    chosen = rollouts.select(kept)
    wide = chosen.turn_rewards.shape[1]
    assert chosen.turn_rewards.tolist() == rollouts.turn_rewards[kept][:, :wide].tolist()


# Branches


def branched(policy: Policy) -> Branches:
    bases = [group[0] for group in start_episodes(policy, ECHO, PROBLEMS, SEEDS)]
    generator = torch.Generator().manual_seed(0)
    return play_branches(policy, bases, candidates=3, sampling=SAMPLING, max_turns=3, generator=generator)


def test_candidates_of_a_turn_share_their_history_and_the_first_continues_it(policy):
    branches = branched(policy)
    rollouts, owners = branches.candidates, branches.owners
    assert owners == sorted(owners) and set(owners) == set(range(5))
    assert rollouts.count == 3 * len(owners)
    ids = rollouts.token_ids()
    for group, here in enumerate(rollouts.group_slices()):
        start = int(rollouts.prompt_lengths[here.start])
        histories = {tuple(ids[row][:start]) for row in range(here.start, here.stop)}
        assert len(histories) == 1
        for row in range(here.start, here.stop):
            mask = rollouts.completion_mask[row]
            assert int(mask.sum()) == len(ids[row]) - start and not bool(mask[:start].any())
        is_first = group == 0 or owners[group] != owners[group - 1]
        if is_first:
            assert ids[here.start][:start] == policy.encode_prompt(PROBLEMS[owners[group]].prompt)
        else:
            before = ids[rollouts.group_slices()[group - 1].start]
            assert ids[here.start][: len(before)] == before


def test_the_episodes_of_branches_are_their_first_candidates(policy):
    """Turn by turn: the tokens of the last history with its turn, and the rewards."""
    branches = branched(policy)
    ids, played = branches.candidates.token_ids(), branches.episodes
    firsts = [here.start for here in branches.candidates.group_slices()]
    assert played.count == 5 and max(map(branches.owners.count, range(5))) > 1
    for episode in range(5):
        rows = [row for row, owner in zip(firsts, branches.owners, strict=True) if owner == episode]
        assert played.token_ids()[episode] == ids[rows[-1]]
        assert int(played.turn_mask[episode].sum()) == len(rows)
        assert played.turn_rewards[episode, : len(rows)].tolist() == branches.candidates.rewards[rows].tolist()


def test_the_reward_of_a_candidate_is_that_of_its_turn(policy):
    branches = branched(policy)
    rollouts, owners = branches.candidates, branches.owners
    for group, here in enumerate(rollouts.group_slices()):
        turn = owners[:group].count(owners[group])
        for row in range(here.start, here.stop):
            environment = Echo()
            environment.reset(PROBLEMS[0], 0)
            environment.turns = turn
            reply = environment.step(rollouts.completions[row])
            assert float(rollouts.rewards[row]) == reply.reward + reply.outcome
            assert bool(rollouts.finished[row]) == reply.done  # type: ignore[index]


# Environments that break the interface


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        ("[1]", "environment: Wrong.step must return a Reply, got str. Return Reply"),
        (Reply(reward=math.nan), "the rewards of Wrong.step must be finite, got reward nan and outcome 0.0"),
        (Reply(outcome=1.0), "Wrong.step must give an outcome with the last turn only, got outcome 1.0 before the end"),
    ],
)
def test_a_wrong_reply_is_refused(policy, reply, says):
    class Wrong(Echo):
        def step(self, text: str) -> Any:
            return reply

    groups = start_episodes(policy, replace(ECHO, environment=Wrong), PROBLEMS, SEEDS)
    with pytest.raises(ScoregramError, match=says):
        play_episodes(policy, groups, sampling=SAMPLING, max_turns=3, generator=None)


def test_a_random_first_text_is_refused(policy):
    class Restless(Echo):
        def reset(self, problem, seed):
            return f"{problem.prompt}{seed}"

    with pytest.raises(ScoregramError, match="the rollouts of echo/0 must start with one text, got 4 texts"):
        start_episodes(policy, replace(ECHO, environment=Restless), PROBLEMS, SEEDS)


def test_chat_observations_are_user_messages(policy):
    each = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>\n{% endfor %}"
    policy.tokenizer.chat_template = each + "{% if add_generation_prompt %}<assistant>{% endif %}"
    try:
        chat = replace(policy, chat=True)
        read = policy.tokenizer.decode(chat.encode_observation("=41;"))
        # The stop token of the policy's turn, <|end|>, is already there.
        assert read == "\n<user>=41;<|end|>\n<assistant>"
    finally:
        policy.tokenizer.chat_template = None
