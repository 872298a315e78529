"""How much of the update of a step each prompt has, beside what its rewards alone would give it.

The share `⟨u_p, u⟩ / |u|²` of a prompt follows from K between all rollouts and their weights, and is stored with its
group. Its null is the share that it would have if the scores of all rollouts had one norm and were at right angles, and
the rewards of every prompt one range. A live group among dead ones has a large share under the null too.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from scoregram.bootstrap import FEWEST
from scoregram.reading.group import StoredGroup
from scoregram.reading.run import RunReading

FEWEST_LIVE = 3
"""Prompts with a gradient that a step needs: of two, one has half of the update by chance."""
ONE_IN = 16
"""Share of the prompts with a gradient that counts as a few: one in 16, one alone below 32."""


@dataclass(frozen=True, eq=False)
class PromptShare:
    """A group, its share in the squared norm of the update of its step, and its null."""

    group: StoredGroup
    share: float
    """Negative if it points against the update, above 1 if others do."""
    null: float
    """`advantage_power` of the group over that of the step."""

    @property
    def capped(self) -> float:
        """The share, at most 1: where the others nearly cancel, a mean over steps would be that of one step."""
        return min(self.share, 1.0)


@dataclass(frozen=True, eq=False)
class StepShares:
    """The prompts of a step that have a gradient, the largest share first."""

    step: int
    prompts: tuple[PromptShare, ...]

    @cached_property
    def few(self) -> tuple[PromptShare, ...]:
        """The prompt with the largest share; of 32 prompts or more, one in 16 of them."""
        return self.prompts[: max(1, len(self.prompts) // ONE_IN)]

    @property
    def share(self) -> float:
        """Share of these few together, at most 1."""
        return min(1.0, sum(one.share for one in self.few))

    @property
    def null(self) -> float:
        """Null of these few together."""
        return sum(one.null for one in self.few)


def step_shares(groups: Iterable[StoredGroup]) -> list[StepShares]:
    """The shares of every step in which all groups have one, and at least `FEWEST_LIVE` of them a gradient."""
    by_step: dict[int, list[StoredGroup]] = {}
    for group in groups:
        by_step.setdefault(group.record.step, []).append(group)
    found = []
    for step, several in sorted(by_step.items()):
        live = [group for group in several if group.advantage_power > 0]
        total = sum(group.advantage_power for group in live)
        shares = [PromptShare(one, one.update_share, one.advantage_power / total) for one in live]
        if len(live) >= FEWEST_LIVE and all(one.share == one.share for one in shares):  # no `nan`
            found.append(StepShares(step, tuple(sorted(shares, key=lambda one: -one.share))))
    return found


def returning_prompts(run: RunReading) -> dict[str, list[PromptShare]]:
    """Prompt → its shares at the steps of a run, of those that were live at `FEWEST` of them or more.

    Without the steps whose self-check failed.
    """
    found: dict[str, list[PromptShare]] = {}
    for step in step_shares(group for group in run.groups if group.record.step not in run.trust.failed):
        for one in step.prompts:
            found.setdefault(one.group.record.prompt_id, []).append(one)
    return {name: shares for name, shares in found.items() if len(shares) >= FEWEST}
