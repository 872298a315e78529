"""Groups from a stream: complete where memory allows, told apart where it does not, and never more held than asked."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scoregram.checks import ScoregramError
from scoregram.integrations.dumps.grouping import (
    DumpedGroup,
    group_key,
    prompt_digest,
    rank_of_group,
    rollout_groups,
    without_repeated_groups,
)
from scoregram.integrations.dumps.records import DumpedRollout, Location

WIDE = 1 << 40


def rollout(prompt: str = "a", *, step: int | None = 0, line: int = 1, **fields) -> DumpedRollout:
    return DumpedRollout(location=Location(Path("x"), line), step=step, prompt=prompt, completion=str(line), **fields)


def stream(prompts: str, step: int = 0) -> list[DumpedRollout]:
    return [rollout(prompt, step=step, line=line) for line, prompt in enumerate(prompts, start=1)]


def written(groups: list[DumpedGroup]) -> list[str]:
    return ["".join(str(one.prompt) for one in group.rollouts) for group in groups]


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abcd")), max_size=30))
def test_with_room_for_a_step_groups_are_those_of_a_dictionary(pairs):
    pairs = sorted(pairs, key=lambda pair: pair[0])  # steps in order, groups scattered inside them
    rollouts = [rollout(prompt, step=step, line=line) for line, (step, prompt) in enumerate(pairs)]
    expected = defaultdict(list)
    for one in rollouts:
        expected[one.step, one.prompt].append(one.location.line)
    found = list(rollout_groups(rollouts, adjacent=False, window=WIDE))
    made = {(g.step, g.rollouts[0].prompt): [one.location.line for one in g.rollouts] for g in found}
    assert made == expected and len(found) == len(expected)
    assert [group.number for group in found] == list(range(len(found)))
    assert not any(group.late for group in found)
    for step in range(3):
        assert [g.position for g in found if g.step == step] == list(range(sum(g.step == step for g in found)))


@given(st.text("abc", max_size=30), st.integers(0, 5000))
def test_nothing_is_lost_and_little_is_held_whatever_the_window(prompts, window):
    held, most = 0, 0
    one_size = rollout().size

    def counted():
        nonlocal held, most
        for one in stream(prompts):
            held += 1
            most = max(most, held)
            yield one

    found = []
    for group in rollout_groups(counted(), adjacent=False, window=window):
        held -= len(group.rollouts)
        found.append(group)
    assert sorted(one.location.line for group in found for one in group.rollouts) == list(range(1, len(prompts) + 1))
    largest = max((prompts.count(prompt) for prompt in prompts), default=0)
    assert most <= window // one_size + largest + 1
    seen = set()
    for group in found:  # a group that was closed before and goes on is marked
        assert group.late == (group.rollouts[0].prompt in seen)
        seen.add(group.rollouts[0].prompt)


def test_adjacent_groups_end_where_another_begins():
    found = list(rollout_groups(stream("aabba"), adjacent=True, window=WIDE))
    assert written(found) == ["aa", "bb", "a"]
    assert [group.late for group in found] == [False, False, True]


@pytest.mark.parametrize("adjacent", [False, True])
def test_a_known_size_closes_groups_and_tells_two_of_one_prompt_apart(adjacent):
    found = list(rollout_groups(stream("aaaabbc"), adjacent=adjacent, window=WIDE, size=2))
    assert written(found) == ["aa", "aa", "bb", "c"] and not any(group.late for group in found)
    scattered = list(rollout_groups(stream("abab"), adjacent=False, window=WIDE, size=2))
    assert written(scattered) == ["aa", "bb"]


@pytest.mark.parametrize(("rollouts", "adjacent"), [("aaaabbbb", True), ("aaaabbbb", False), ("abababab", False)])
def test_a_size_that_does_not_divide_the_rollouts_of_a_prompt_is_refused(rollouts, adjacent):
    with pytest.raises(
        ScoregramError, match=r"measure --group-size: must divide .*, got 1 left over for the prompt at .*line"
    ):
        list(rollout_groups(stream(rollouts), adjacent=adjacent, window=WIDE, size=3))


def test_a_step_that_comes_back_is_late_and_goes_on_counting():
    found = list(rollout_groups([*stream("a", 1), *stream("b", 2), *stream("c", 1)], adjacent=False, window=WIDE))
    assert [(g.step, g.position, g.late) for g in found] == [(1, 0, False), (2, 0, False), (1, 1, True)]


def test_the_group_that_waited_longest_is_closed_first():
    window = 2 * rollout().size + 10
    assert written(list(rollout_groups(stream("abacad"), adjacent=False, window=window))) == ["b", "c", "aaa", "d"]


def test_a_name_comes_before_the_prompt_and_tokens_before_text():
    named = [rollout("a", group="x"), rollout("b", group="x"), rollout("a", group="y")]
    assert group_key(named[0]) == group_key(named[1]) != group_key(named[2])
    assert group_key(rollout("x")) != group_key(rollout("a", group="x"))
    tokens = [rollout("a", prompt_ids=torch.tensor([1])), rollout("b", prompt_ids=torch.tensor([1]))]
    assert prompt_digest(tokens[0]) == prompt_digest(tokens[1]) != prompt_digest(rollout("a"))
    assert prompt_digest(rollout("a\udcff")) != prompt_digest(rollout("a"))  # text that UTF-8 cannot hold


def test_rollouts_written_again_under_the_next_step_are_dropped():
    def step(number: int, completions: str, reward: float = 1.0) -> DumpedGroup:
        rollouts = [
            DumpedRollout(location=Location(Path("x"), 1), prompt="p", completion=text, reward=reward)
            for text in completions
        ]
        return DumpedGroup(number, number, 0, tuple(rollouts))

    steps = [step(1, "ab"), step(2, "ab"), step(3, "ab"), step(4, "ac"), step(5, "ab"), step(6, "ab", 0.0)]
    assert [group.step for group in without_repeated_groups(steps)] == [1, 4, 5, 6]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_share_all_groups_evenly(ranks):
    owners = [rank_of_group(number, ranks) for number in range(24)]
    assert all(owners.count(rank) == 24 // ranks for rank in range(ranks))
