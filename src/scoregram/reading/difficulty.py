"""How hard the prompts of a run are, what chance makes of it, and which share of groups is live at another size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scoregram.bootstrap import mean_estimate
from scoregram.checks import fail
from scoregram.exhibits import Estimate
from scoregram.reading.group import alike_chance, step_stretches
from scoregram.reading.run import RunReading
from scoregram.statistics import mixed_probability

WANTED_LIVE = 0.8
"""Share of live groups that a group size aims at where no Gram says more."""
LARGEST_ADVISED_GROUP = 1024
CHANCE_QUANTILE = 1.645
"""One-sided 95 % quantile of the normal law: beyond it, more groups are alike than chance makes."""
LEFT_OUT_KINDS = ("all wrong", "all right", "all wrong or all right")
"""Kinds of groups whose prompts can be left out."""
PAIR_QUANTILE = 1.751
"""One-sided 96 % quantile. The number of right pairs is skewed: at 95 % the test would err in up to 5.6 %."""


@dataclass(frozen=True)
class SuccessLaw:
    """How success rates vary between prompts: a Beta law with the mean and the spread of the observed ones.

    The rate of one prompt, from 8 rollouts, says little about groups of 32: a prompt that was never solved may have any
    small rate. Chances that follow from the law of all prompts respect what was seen: if a share `d` of groups of `R`
    is dead, groups of `nR` are dead with a chance of at least `dⁿ`. The mean is that of all steps, the spread that
    between prompts of the same steps.
    """

    mean: float
    concentration: float
    """`a + b` of the Beta law: infinite if all prompts are alike, 0 if each is always or never solved."""

    @staticmethod
    def of(*stretches: Sequence[tuple[int, int]]) -> "SuccessLaw | None":
        """The law from right rollouts and all rollouts of each prompt, in one or several stretches of steps.

        In a stretch, the share of right pairs is `E p²` for two rollouts of one prompt and `(E p)²` for two of
        different prompts, both without bias. Their difference is the spread between prompts; a success rate that
        changes from stretch to stretch does not enter it. All prompts count as alike unless more pairs of one prompt
        are right than chance makes (`pairs_exceed_chance`). None if no prompt has two rollouts.

        Example:
            >>> SuccessLaw.of([(0, 4), (4, 4)]), SuccessLaw.of([(0, 4)], [(4, 4)])
            (SuccessLaw(mean=0.5, concentration=0.0), SuccessLaw(mean=0.5, concentration=inf))
        """
        rollouts = sum(count for counts in stretches for _, count in counts)
        if not any(count > 1 for counts in stretches for _, count in counts):
            return None
        mean = sum(right for counts in stretches for right, _ in counts) / rollouts
        parts = [(sum(count for _, count in counts) / rollouts, *_spread_and_mixed(counts)) for counts in stretches]
        spread, mixed = (sum(part[0] * part[place] for part in parts) for place in (1, 2))
        differ = spread > 0 and pairs_exceed_chance(stretches)
        return SuccessLaw(mean, max(mixed, 0.0) / spread if differ else math.inf)

    def live_share(self, size: int) -> float:
        """Expected share of live groups of a size."""
        if math.isinf(self.concentration):
            return mixed_probability(self.mean, size)
        whole = self.concentration
        return max(1 - sum(rising_ratio(part, whole, size) for part in self._parts()), 0.0)

    def live_if_kept(self, size: int, left_out: str) -> float:
        """Chance that a prompt's group is live if an earlier one of this size was not of the kind that is left out.

        `(ℓ - Σ_k P(live, k)) / (1 - Σ_k P(k))` over the kinds that are left out, with the live share `ℓ` and
        `P(live, all wrong) = P(wrong) - P(wrong twice) - P(wrong, then right)`. The live share if all prompts are
        alike; `nan` if every prompt would be left out. `left_out` is one of `LEFT_OUT_KINDS`.
        """
        if left_out not in LEFT_OUT_KINDS:
            kinds = ", ".join(LEFT_OUT_KINDS)
            fail("live_if_kept", f"left_out must be one of {kinds}", left_out, "Check the spelling.")
        if math.isinf(self.concentration):
            return self.live_share(size)
        whole, (right, wrong) = self.concentration, self._parts()
        if not whole:  # each prompt is always or never solved
            kept = self.mean * ("all right" not in left_out) + (1 - self.mean) * ("all wrong" not in left_out)
            return 0.0 if kept > 0 else math.nan
        mixed = rising_ratio(right, whole, size) * rising_ratio(wrong, whole + size, size)
        live, kept = self.live_share(size), 1.0
        for kind, part in (("all right", right), ("all wrong", wrong)):
            if kind in left_out:
                once = rising_ratio(part, whole, size)
                live -= once - rising_ratio(part, whole, 2 * size) - mixed
                kept -= once
        return max(live, 0.0) / kept if kept > 0 else math.nan

    def _parts(self) -> tuple[float, float]:
        """`a` and `b` of the Beta law."""
        return self.mean * self.concentration, (1 - self.mean) * self.concentration


def _spread_and_mixed(counts: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Variance of the success rates of a stretch, and the mean of `p (1 - p)`; 0 where no pair of rollouts tells."""
    right, rollouts = (sum(one) for one in zip(*counts, strict=True))
    pairs = sum(count * (count - 1) for _, count in counts)
    apart = rollouts**2 - sum(count**2 for _, count in counts)
    same = sum(one * (one - 1) for one, _ in counts) / pairs if pairs else math.nan  # E p²
    across = (right**2 - sum(one**2 for one, _ in counts)) / apart if apart else same  # (E p)²
    return (same - across, right / rollouts - same) if pairs else (0.0, 0.0)


def pairs_exceed_chance(stretches: Sequence[Sequence[tuple[int, int]]]) -> bool:
    """Whether more pairs of rollouts of one prompt are right than chance makes: a one-sided test at 5 %.

    By the exact mean and variance of their number if all prompts of a stretch are equally hard, given its right
    rollouts, a normal law (`PAIR_QUANTILE`) and half a pair of correction.
    """
    found = mean = variance = 0.0
    for counts in stretches:
        right, rollouts = (sum(one) for one in zip(*counts, strict=True))
        found += sum(one * (one - 1) for one, _ in counts) / 2
        pairs = sum(count * (count - 1) for _, count in counts) / 2
        touching = sum(count * (count - 1) * (count - 2) for _, count in counts)  # two pairs with one rollout in common
        two, three, four = (alike_chance(right, rollouts, count) for count in (2, 3, 4))
        expected = pairs * two
        mean += expected
        variance += expected + touching * three + (pairs**2 - pairs - touching) * four - expected**2
    return variance > 0 and found - 0.5 - mean > PAIR_QUANTILE * math.sqrt(variance)


def rising_ratio(part: float, whole: float, count: int) -> float:
    """`Π_{i < n} (part + i) / (whole + i)`: the chance of `n` equal outcomes in a row under a Beta law."""
    return math.prod((part + i) / (whole + i) if whole + i else 1.0 for i in range(count))


def group_size_for(law: SuccessLaw) -> int | None:
    """Least group size at which a share `WANTED_LIVE` of groups is expected to be live; None if none up to 1024 is.

    Example:
        >>> group_size_for(SuccessLaw(0.5, math.inf)), group_size_for(SuccessLaw(0.0, math.inf))
        (4, None)
    """
    sizes = range(2, LARGEST_ADVISED_GROUP + 1)
    return next((size for size in sizes if law.live_share(size) >= WANTED_LIVE), None)


HALF_RIGHT, FEWEST_HALF_RIGHT = (0.25, 0.75), 3
"""Share of right rollouts of a step that counts as about half, and how many such steps say what it is worth."""


@dataclass(frozen=True)
class HalfRight:
    """Share of live groups at steps of a run of which about half of the rollouts were right."""

    live: Estimate
    steps: int


def half_right_steps(run: RunReading) -> HalfRight | None:
    """Share of live groups at the steps at which 25 to 75 % of the rollouts were right; None below three such steps.

    Only for rewards of 0 and 1: a graded reward is no share of right rollouts.
    """
    if run.is_graded or not run.has_whole_groups:
        return None
    least, most = HALF_RIGHT
    rewards = {line["step"]: float(line.get("scoregram/reward", line.get("reward", math.nan))) for line in run.lines}
    found = [share for step, share in zip(*run.live_share, strict=True) if least <= rewards.get(step, 0.0) <= most]
    known = [share for share in found if not math.isnan(share)]
    return HalfRight(mean_estimate(known), len(known)) if len(known) >= FEWEST_HALF_RIGHT else None


def live_rates(size: int, wanted: float) -> tuple[float, float] | None:
    """Least and largest success rate at which a share `wanted` of the groups of a size is live; None if none is.

    Solves `1 - p^R - (1-p)^R = wanted` by bisection. It is the same at `p` and `1 - p`.

    Example:
        >>> [round(rate, 3) for rate in live_rates(3, 0.5) or ()], live_rates(2, 0.8)
        ([0.211, 0.789], None)
    """
    if mixed_probability(0.5, size) < wanted:
        return None
    low, high = 0.0, 0.5
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if mixed_probability(middle, size) >= wanted else (middle, high)
    return high, 1 - high


@dataclass(frozen=True, kw_only=True)
class OutcomeCounts:
    """How groups of one size ended whose rewards are all 0 or 1."""

    groups: int
    size: int
    right: int
    """Right rollouts of all groups together."""
    all_wrong: int
    all_right: int
    stretches: tuple["OutcomeCounts", ...] = ()
    """The same groups by stretches of consecutive steps, if there are several. Chance is computed within each: a
    success rate that changes in time must not look like prompts that differ."""

    @property
    def success_rate(self) -> float:
        """Share of right rollouts."""
        return self.right / (self.groups * self.size)

    def chance_share(self, kind: str) -> float:
        """Share of `all wrong` or `all right` groups that chance makes if the prompts of a stretch are equally hard.

        Given `S` right rollouts among the `N` of a stretch, every arrangement is then equally likely, so a group of `R`
        has none of them with the chance `Π_{i<R} (N-S-i) / (N-i)`, about `(1-p)^R`. No success rate need be known for
        that.
        """
        return sum(part.groups * part._chance(kind, self.size) for part in self.stretches or (self,)) / self.groups

    @property
    def dead_chance_share(self) -> float:
        """Share of dead groups that chance makes if the prompts of a stretch are equally hard."""
        return self.chance_share("all wrong") + self.chance_share("all right")

    def exceeds_chance(self, kind: str) -> bool:
        """Whether more groups are `all wrong`, or `all right`, than chance makes: a one-sided test at 5 %.

        By the exact mean and variance of their number given the right rollouts of each stretch, a normal law and half
        a group of correction.
        """
        found = {"all wrong": self.all_wrong, "all right": self.all_right}[kind]
        moments = [part._moments(kind) for part in self.stretches or (self,)]
        mean, variance = (sum(values) for values in zip(*moments, strict=True))
        return variance > 0 and found - 0.5 - mean > CHANCE_QUANTILE * math.sqrt(variance)

    def _moments(self, kind: str) -> tuple[float, float]:
        """Mean and variance of the number of groups of a kind by chance, given the right rollouts."""
        mean = self.groups * self._chance(kind, self.size)
        pairs = self.groups * (self.groups - 1) * self._chance(kind, 2 * self.size)
        return mean, mean + pairs - mean**2

    def _chance(self, kind: str, count: int) -> float:
        """Chance that `count` given rollouts are all of one kind."""
        rollouts = self.groups * self.size
        alike = {"all wrong": rollouts - self.right, "all right": self.right}
        return alike_chance(alike[kind], rollouts, count)


def last_outcomes(run: RunReading) -> OutcomeCounts | None:
    """Outcomes of the groups of the last third, from every step that logged them; None unless all rewards are 0 or 1.

    None also if groups differ in size, or a stored group of the last third has a reward that is missing.
    """
    size = run.group_size
    if size is None or not run.success_counts() or any(group.size != size for group in run.last_groups):
        return None
    kinds = ("groups/all_wrong", "groups/all_right")
    lines = [line for line in run.last_lines if line.get("groups", 0) > 0 and all(kind in line for kind in kinds)]
    rewards = [float(line.get("scoregram/reward", line.get("reward", math.nan))) for line in lines]
    if not lines or any(map(math.isnan, rewards)):
        return None
    steps = [
        OutcomeCounts(
            groups=int(line["groups"]),
            size=size,
            right=round(line["groups"] * reward * size),
            all_wrong=round(line["groups"] * line["groups/all_wrong"]),
            all_right=round(line["groups"] * line["groups/all_right"]),
        )
        for line, reward in zip(lines, rewards, strict=True)
    ]
    stretches = [joined_outcomes(steps[part]) for part in step_stretches([one.groups for one in steps])]
    return replace(joined_outcomes(stretches), stretches=tuple(stretches) if len(stretches) > 1 else ())


def joined_outcomes(parts: Sequence[OutcomeCounts]) -> OutcomeCounts:
    """The outcomes of several sets of groups together, as one set."""
    return OutcomeCounts(
        size=parts[0].size,
        groups=sum(part.groups for part in parts),
        right=sum(part.right for part in parts),
        all_wrong=sum(part.all_wrong for part in parts),
        all_right=sum(part.all_right for part in parts),
    )


def divisors(batch: float | int) -> list[int]:
    """Group sizes from 2 on that divide the rollouts of a step into two prompts or more; none if they vary.

    Example:
        >>> divisors(12), divisors(12.5), divisors(math.nan)
        ([2, 3, 4, 6], [], [])
    """
    if not math.isfinite(batch) or batch != round(batch):
        return []
    rollouts = round(batch)
    return [size for size in range(2, rollouts // 2 + 1) if rollouts % size == 0]
