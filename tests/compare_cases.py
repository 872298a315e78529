"""Runs of a comparison, made by hand."""

from typing import Any

from scoregram.compare.results import RunResult
from scoregram.reading import GREEDY_TEST, RunReading


def run_of(seed: int, right: list[int], accuracies: list[float], **scalars: float) -> RunResult:
    lines: list[dict[str, Any]] = [
        {"step": step, "rollouts": 80 * step, "eval/accuracy": value, "time/step": 30.0 if step else 0.0}
        | ({"groups": 8} if step else {})
        for step, value in enumerate(accuracies)
    ]
    lines[-1] |= {"reward": 0.5, "gram/update_signal": 2.0, "gram/update_noise": 4.0} | scalars
    tests = {GREEDY_TEST: {len(lines) - 1: {f"p{place}": float(one) for place, one in enumerate(right)}}}
    return RunResult(seed, RunReading(config={"group_size": 8}, notes=(), lines=lines, groups=[], tests=tests))
