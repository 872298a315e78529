"""From a stream of rollouts to groups, in bounded memory.

A group is known by the name that the dump gives it, else by its prompt. Where a format writes groups in one piece, a
group ends when another begins: one group is in memory at a time. Where it does not, groups stay open until their step
ends, and at most `window` bytes of rollouts are held: beyond that, the group that has waited longest for a rollout is
closed. A rollout that comes after its group was closed begins another group, which is marked as `late`.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

from scoregram.integrations.dumps.record import DumpedRollout


@dataclass(frozen=True)
class DumpedGroup:
    """Rollouts of one prompt at one step."""

    number: int
    """Its place among all groups of the dump, from 0: the same whenever the dump is read with the same settings."""
    step: int
    """0 where the dump does not say."""
    position: int
    """Its place among the groups of its step, from 0."""
    rollouts: tuple[DumpedRollout, ...]
    late: bool = False
    """Rollouts of the same group, or of the same step, were closed before."""


def rank_of_group(number: int, ranks: int) -> int:
    """The process, of `ranks`, that measures group `number`: whole groups, dealt out in turn.

    Example:
        >>> [rank_of_group(number, 3) for number in range(7)]
        [0, 1, 2, 0, 1, 2, 0]
    """
    return number % ranks


def group_key(rollout: DumpedRollout) -> bytes:
    """What the rollouts of one group share within a step: the name of their group, else their prompt."""
    if rollout.group is not None:
        return digest(b"group", rollout.group.encode("utf-8", "surrogatepass"))
    return prompt_digest(rollout)


def prompt_digest(rollout: DumpedRollout) -> bytes:
    """Equal for equal prompt tokens, or equal text where there are no tokens."""
    if rollout.prompt_ids is not None:
        return digest(b"ids", rollout.prompt_ids.numpy().tobytes())
    written = rollout.prompt if isinstance(rollout.prompt, str) else repr(rollout.prompt)
    return digest(b"text", written.encode("utf-8", "surrogatepass"))


def digest(*parts: bytes) -> bytes:
    """Sixteen bytes that stand for the parts."""
    made = blake2b(digest_size=16)
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.digest()


def grouped(rollouts: Iterable[DumpedRollout], *, adjacent: bool, window: int, size: int = 0) -> Iterator[DumpedGroup]:
    """Groups in the order in which they are closed; those that a step leaves open, in the order in which they began.

    Args:
        rollouts: In the order of the dump.
        adjacent: Whether the rollouts of a group stand next to each other.
        window: Bytes of rollouts that are held at most, the group that is being read not counted.
        size: Rollouts of a complete group, if that is known: it is closed at once, and a further rollout of the same
            prompt begins another.
    """
    desk = _Desk(window)
    for rollout in rollouts:
        step = rollout.step or 0
        key = group_key(rollout)
        if step != desk.step or (adjacent and key not in desk.open):
            yield from desk.close_all()
        desk.take(step, key, rollout)
        if size and len(desk.open[key]) >= size:
            yield desk.close(key, complete=True)
        while desk.is_full():
            yield desk.close_oldest()
    yield from desk.close_all()


class _Desk:
    """Groups that are still open, least recently touched first."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.step = -1
        self.open: OrderedDict[bytes, list[DumpedRollout]] = OrderedDict()
        self.begun: dict[bytes, int] = {}
        self.sizes: Counter[bytes] = Counter()
        self.closed: set[bytes] = set()
        self.positions: Counter[int] = Counter()
        self.number = self.taken = 0
        self.is_late_step = False

    def take(self, step: int, key: bytes, rollout: DumpedRollout) -> None:
        if step != self.step:
            self.step, self.closed = step, set()
            self.is_late_step = self.positions[step] > 0
        self.taken += 1
        self.begun.setdefault(key, self.taken)
        self.open.setdefault(key, []).append(rollout)
        self.open.move_to_end(key)
        self.sizes[key] += rollout.size

    def is_full(self) -> bool:
        return len(self.open) > 1 and self.sizes.total() > self.window + self.sizes[next(reversed(self.open))]

    def close_oldest(self) -> DumpedGroup:
        return self.close(next(iter(self.open)))

    def close(self, key: bytes, *, complete: bool = False) -> DumpedGroup:
        rollouts = self.open.pop(key)
        del self.sizes[key], self.begun[key]
        late = key in self.closed or self.is_late_step
        if not complete:
            self.closed.add(key)
        made = DumpedGroup(self.number, self.step, self.positions[self.step], tuple(rollouts), late)
        self.positions[self.step] += 1
        self.number += 1
        return made

    def close_all(self) -> Iterator[DumpedGroup]:
        for key in sorted(self.open, key=self.begun.__getitem__):
            yield self.close(key)


def without_repeats(groups: Iterable[DumpedGroup]) -> Iterator[DumpedGroup]:
    """Groups less those that hold the very rollouts of a group of the step before.

    TRL writes the last batch of rollouts at every step that it logs, also while several steps train on one batch.
    """
    before, here, step = set[bytes](), set[bytes](), None
    for group in groups:
        if group.step != step:
            before, here, step = here, set(), group.step
        content = group_digest(group)
        here.add(content)
        if content not in before:
            yield group


def group_digest(group: DumpedGroup) -> bytes:
    """Equal for groups with the same prompt, completions and rewards."""
    each = [digest(prompt_digest(r), (r.completion or "").encode("utf-8", "surrogatepass")) for r in group.rollouts]
    return digest(*each, repr([rollout.reward for rollout in group.rollouts]).encode())
