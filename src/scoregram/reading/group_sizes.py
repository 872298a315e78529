"""What a run recorded about its group size: decisions of `--group-size auto`, and recommendations of `attach`.

Both are scalars `control/…` in the line of their step, beside the noise that they follow from, so that they can be
computed again. A recommendation has `control/applied` = 0: the trainer went on with the size that it had.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from scoregram.exhibits import Estimate, cell_text
from scoregram.statistics import GroupSizeAdvice, NoiseComponents

GROUP_SIZE = "control/group_size"
"""Scalar of a step: its rollouts per prompt, where the run decides about them or recommends others."""
GROUP_SIZE_WINDOW = 20
"""Measured steps whose noise decides about the group size: the last ones before the decision."""
REPLAYED_SCALARS = ("gradient_squared", "between_prompts", "within_prompt", "group_baseline")
"""Scalars `control/…` of a step, the fields of `NoiseComponents`: decisions can be computed again from them."""
APPLIED = "control/applied"
"""0 at a recommendation that was not applied; absent at a decision."""
_FINDINGS = "control/{}_findings"
_SIGNAL = "control/rollout_signal"

_Line = Mapping[str, float | int | bool]


def replayed_scalars(components: NoiseComponents) -> dict[str, float | int]:
    """The noise of a step as scalars of its line."""
    return dict(zip((f"control/{name}" for name in REPLAYED_SCALARS), astuple(components), strict=True))


def replayed_components(line: Mapping[str, Any]) -> NoiseComponents | None:
    """The noise in the line of a step; None if it has none."""
    values = [line.get(f"control/{name}") for name in REPLAYED_SCALARS]
    known = [float(value) for value in values if value is not None]
    return NoiseComponents(*known) if len(known) == len(values) else None


def group_size_scalars(advice: GroupSizeAdvice) -> dict[str, float | int]:
    """A decision about the group size as scalars of its line."""
    return {
        "control/next_group_size": advice.recommended,
        "control/best_group_size": advice.best,
        "control/error_ratio": advice.error_ratio,
        "control/agreement": advice.agreement,
    }


def group_size_decisions(lines: Sequence[_Line]) -> list[tuple[int, GroupSizeAdvice]]:
    """Step and decision, in order, from the scalars `control/…` of a run; empty for a run that decided nothing.

    They equal those of `scoregram.training.replayed_advice`, which computes them again from the noise of the steps.

    Args:
        lines: The lines of `metrics.jsonl`. An undefined ratio is `nan`.

    Example:
        >>> decided = {"next_group_size": 8, "best_group_size": 16, "error_ratio": 0.8, "agreement": 1.0}
        >>> line = {"step": 1, "control/group_size": 4} | {f"control/{name}": value for name, value in decided.items()}
        >>> group_size_decisions([line | {"control/gradient_squared": 0.5}])[0][1].sentence
        'group size 4 becomes 8: groups of 16 have 0.80 of its error, in 100 % of resamples less (1 steps)'
    """
    found: list[tuple[int, GroupSizeAdvice]] = []
    measured = 0
    for line in lines:
        measured += "control/gradient_squared" in line
        if "control/next_group_size" not in line:
            continue
        advice = GroupSizeAdvice(
            current=int(line[GROUP_SIZE]),
            recommended=int(line["control/next_group_size"]),
            best=int(line["control/best_group_size"]),
            error_ratio=float(line.get("control/error_ratio", math.nan)),
            agreement=float(line.get("control/agreement", math.nan)),
            steps=min(measured, GROUP_SIZE_WINDOW),
        )
        found.append((int(line["step"]), advice))
    return found


@dataclass(frozen=True)
class BatchSizeAdvice:
    """Whether a step should have another number of rollouts."""

    current: int
    """Rollouts of a step now."""
    recommended: int
    rollout_signal: Estimate
    """Signal to noise of one rollout: 1 over the noise scale; 0 where no signal was resolved."""

    @property
    def noise_scale(self) -> Estimate:
        """Rollouts at which signal and noise are equal."""
        return inverse_estimate(self.rollout_signal)

    @property
    def sentence(self) -> str:
        """The recommendation and its reason in one line."""
        stay = f"rollouts per step stay {self.current}"
        if math.isnan(self.rollout_signal.low):
            return f"{stay}: too few steps are measured, with their self-checks passed, to know the noise scale"
        if not self.rollout_signal.high > 0:
            return f"{stay}: no signal that more of them could resolve; check the reward"
        reason = f"the noise scale is {cell_text(self.noise_scale)} rollouts"
        if self.recommended == self.current:
            return f"{stay}: {reason}"
        return f"rollouts per step {self.current} become {self.recommended}: {reason}"

    def scalars(self) -> dict[str, float | int]:
        """The recommendation as scalars of its line."""
        signal = self.rollout_signal
        ends = {_SIGNAL: signal.value, f"{_SIGNAL}_low": signal.low, f"{_SIGNAL}_high": signal.high}
        return {"control/batch_size": self.current, "control/next_batch_size": self.recommended} | ends


def inverse_estimate(estimate: Estimate) -> Estimate:
    """1 over an estimate that is not negative; of infinity 0, and of 0 infinity.

    Example:
        >>> inverse_estimate(Estimate(4.0, 2.0, math.inf))
        Estimate(value=0.25, low=0.0, high=0.5)
    """
    value, low, high = (
        math.nan if math.isnan(one) else 1 / one if one > 0 else math.inf
        for one in (estimate.value, estimate.high, estimate.low)
    )
    return Estimate(value, low, high)


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What a run of another trainer was recommended after a step, and did not apply."""

    step: int
    group_size: GroupSizeAdvice | None
    """None if the noise cannot be measured: rows of a loss, or groups below 4."""
    batch_size: BatchSizeAdvice | None
    findings: Mapping[str, int] = field(default_factory=dict)
    """Severity → number of findings of `scoregram advise`."""
    worst: str = ""
    """The worst finding about something else than these sizes, as a clause; empty if there is none, and if it was read
    from a run folder, whose scalars have no texts."""

    def scalars(self) -> dict[str, float | int]:
        """The recommendation as scalars of its line."""
        counts = {_FINDINGS.format(severity): count for severity, count in self.findings.items()}
        sizes = {} if self.group_size is None else {GROUP_SIZE: self.group_size.current}
        sizes |= {} if self.group_size is None else group_size_scalars(self.group_size)
        return {APPLIED: 0} | sizes | ({} if self.batch_size is None else self.batch_size.scalars()) | counts

    @property
    def sizes(self) -> str:
        """Both sizes with their reasons."""
        known = "; ".join(one.sentence for one in (self.group_size, self.batch_size) if one is not None)
        return known or "the noise of these steps cannot be measured"

    @property
    def sentence(self) -> str:
        """Both sizes with their reasons, and the worst finding, in one line."""
        count = sum(self.findings.values())
        found = self.worst or ("no other finding" if count else "no finding")
        return f"{self.sizes}; {found}"


def recorded_recommendations(lines: Sequence[_Line]) -> list[Recommendation]:
    """The recommendations of a run, in order, from the scalars `control/…` of its lines; empty if it got none."""
    sizes = dict(group_size_decisions(lines))
    return [
        Recommendation(
            step=int(line["step"]),
            group_size=sizes.get(int(line["step"])),
            batch_size=_recorded_batch_size(line),
            findings={
                severity: int(line[_FINDINGS.format(severity)])
                for severity in ("critical", "warning", "note")
                if _FINDINGS.format(severity) in line
            },
        )
        for line in lines
        if APPLIED in line
    ]


def _recorded_batch_size(line: _Line) -> BatchSizeAdvice | None:
    if "control/next_batch_size" not in line:
        return None
    ends = (float(line.get(f"{_SIGNAL}{end}", math.nan)) for end in ("", "_low", "_high"))
    return BatchSizeAdvice(int(line["control/batch_size"]), int(line["control/next_batch_size"]), Estimate(*ends))
