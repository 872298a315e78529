"""From a stream of rollouts to a stream of groups, in bounded memory.

A group is identified by the name that the dump gives it, else by its prompt. Where a format writes the rollouts of a
group next to each other, a group ends when another begins, and one group is in memory at a time. Otherwise groups stay
open until their step ends, and at most `window` bytes of rollouts are held: beyond that, the group that has waited
longest for a rollout is closed. A rollout that arrives after its group was closed begins another group, marked `late`.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

from scoregram.checks import fail
from scoregram.integrations.dumps.records import DumpedRollout


@dataclass(frozen=True)
class DumpedGroup:
    """Rollouts of one prompt at one step."""

    number: int
    """Its position among all groups of the dump, from 0: the same whenever the dump is read with the same settings."""
    step: int
    """0 where the dump has none."""
    position: int
    """Its position among the groups of its step, from 0."""
    rollouts: tuple[DumpedRollout, ...]
    late: bool = False
    """Whether an earlier part of this group, or of this step, was closed before."""


def rank_of_group(number: int, ranks: int) -> int:
    """The rank, of `ranks` processes, that measures group `number`: whole groups, round-robin.

    Example:
        >>> [rank_of_group(number, 3) for number in range(7)]
        [0, 1, 2, 0, 1, 2, 0]
    """
    return number % ranks


def group_key(rollout: DumpedRollout) -> bytes:
    """What the rollouts of one group share within a step: the name of their group, else their prompt."""
    if rollout.group is not None:
        return _digest(b"group", rollout.group.encode("utf-8", "surrogatepass"))
    return prompt_digest(rollout)


def prompt_digest(rollout: DumpedRollout) -> bytes:
    """Equal for equal prompt tokens, or for equal text where there are no tokens."""
    if rollout.prompt_ids is not None:
        return _digest(b"ids", rollout.prompt_ids.numpy().tobytes())
    text = rollout.prompt if isinstance(rollout.prompt, str) else repr(rollout.prompt)
    return _digest(b"text", text.encode("utf-8", "surrogatepass"))


def _digest(*parts: bytes) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def rollout_groups(
    rollouts: Iterable[DumpedRollout], *, adjacent: bool, window: int, size: int = 0
) -> Iterator[DumpedGroup]:
    """Groups in the order in which they are closed; at the end of a step, in the order in which they began.

    Args:
        rollouts: In the order of the dump.
        adjacent: Whether the rollouts of a group are next to each other.
        window: Most bytes of rollouts to hold, not counting the group that is being read.
        size: Rollouts of a complete group, if known: such a group is closed at once, and a further rollout of the same
            prompt begins another.

    Raises:
        ScoregramError: If `size` splits the rollouts of a prompt at one step into complete groups and a rest.
    """
    groups = _OpenGroups(window)
    for rollout in rollouts:
        step = rollout.step or 0
        key = group_key(rollout)
        if step != groups.step or (adjacent and key not in groups.open):
            yield from groups.close_all()
        groups.add(step, key, rollout)
        if size and len(groups.open[key]) >= size:
            yield groups.close(key, complete=True)
        while groups.is_full():
            yield groups.close(next(iter(groups.open)))
    yield from groups.close_all()


class _OpenGroups:
    """Groups that may still get rollouts, least recently extended first."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.step = -1
        self.open: OrderedDict[bytes, list[DumpedRollout]] = OrderedDict()
        self.begun: dict[bytes, int] = {}
        self.sizes: Counter[bytes] = Counter()
        self.closed: set[bytes] = set()
        self.completed: set[bytes] = set()
        """Closed because they had all their rollouts."""
        self.positions: Counter[int] = Counter()
        self.number = self.added = 0
        self.is_late_step = False

    def add(self, step: int, key: bytes, rollout: DumpedRollout) -> None:
        if step != self.step:
            self.step, self.closed, self.completed = step, set(), set()
            self.is_late_step = self.positions[step] > 0
        self.added += 1
        self.begun.setdefault(key, self.added)
        self.open.setdefault(key, []).append(rollout)
        self.open.move_to_end(key)
        self.sizes[key] += rollout.size

    def is_full(self) -> bool:
        # the most recently extended group is exempt: one group larger than the window must still be read whole
        return len(self.open) > 1 and self.sizes.total() > self.window + self.sizes[next(reversed(self.open))]

    def close(self, key: bytes, *, complete: bool = False) -> DumpedGroup:
        rollouts = self.open.pop(key)
        del self.sizes[key], self.begun[key]
        late = key in self.closed or self.is_late_step
        if not complete and key in self.completed:
            got = f"{len(rollouts)} left over for the prompt at {rollouts[0].location}"
            remedy = "Pass the number of rollouts per prompt, or omit it; then measure again with --overwrite."
            fail("measure --group-size", "must divide the rollouts of a prompt at one step", got, remedy)
        (self.completed if complete else self.closed).add(key)
        group = DumpedGroup(self.number, self.step, self.positions[self.step], tuple(rollouts), late)
        self.positions[self.step] += 1
        self.number += 1
        return group

    def close_all(self) -> Iterator[DumpedGroup]:
        for key in sorted(self.open, key=self.begun.__getitem__):
            yield self.close(key)


def without_repeated_groups(groups: Iterable[DumpedGroup]) -> Iterator[DumpedGroup]:
    """Groups, except those with the same rollouts as a group of the step before.

    TRL writes the last batch of rollouts at every step that it logs, also while several steps train on one batch.
    """
    before, here, step = set[bytes](), set[bytes](), None
    for group in groups:
        if group.step != step:
            before, here, step = here, set(), group.step
        content = _group_digest(group)
        here.add(content)
        if content not in before:
            yield group


def _group_digest(group: DumpedGroup) -> bytes:
    """Equal for groups with the same prompts, completions and rewards."""
    each = [_digest(prompt_digest(r), (r.completion or "").encode("utf-8", "surrogatepass")) for r in group.rollouts]
    return _digest(*each, repr([rollout.reward for rollout in group.rollouts]).encode())
