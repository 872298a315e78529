"""The decisions of `--group-size auto`, as a run recorded them: from and to which group size, and why."""

import math
from collections.abc import Mapping, Sequence

from scoregram.statistics import GroupSizeAdvice

GROUP_SIZE_WINDOW = 20
"""Measured steps whose noise decides about the group size: the last ones before the decision."""


def group_size_decisions(lines: Sequence[Mapping[str, float | int | bool]]) -> list[tuple[int, GroupSizeAdvice]]:
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
            current=int(line["control/group_size"]),
            recommended=int(line["control/next_group_size"]),
            best=int(line["control/best_group_size"]),
            error_ratio=float(line.get("control/error_ratio", math.nan)),
            agreement=float(line.get("control/agreement", math.nan)),
            steps=min(measured, GROUP_SIZE_WINDOW),
        )
        found.append((int(line["step"]), advice))
    return found
