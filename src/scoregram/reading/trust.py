"""How far the numbers of a run can be trusted: its self-checks, its tokens, its remarks, and how much was measured.

No mean includes a step whose self-check failed. If there is one in the last third, the means from the Gram over the
last third are withheld: the steps that passed are a biased sample.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from scoregram.bootstrap import FEWEST
from scoregram.reading.group import StoredGroup
from scoregram.reading.noise import MEASURED, last_third_size
from scoregram.runs import CHECK_PASSED, has_failed_check

CHECK_COLUMN = "check_passed"
"""Statistic of a group: 1 if the self-check of its step was within the tolerance, else 0."""
CHECK_ERROR, CHECK_ROLLOUTS = "check/relative_error", "check/rollouts"
"""Scalars of a step that was checked; the last is the number of rollouts compared with the trainer's own gradient."""
TrustState = Literal["good", "watch", "act"]
"""The word of a sentence on trust, on the scale of the indicators."""
SHOWN_STEPS = 8
"""Failed steps that a sentence lists."""


@dataclass(frozen=True, kw_only=True)
class Trust:
    """What a reader must know before using the numbers of a run."""

    measured: int
    """Steps whose scores were measured: those that logged it, and those with a stored Gram."""
    errors: Mapping[int, float] = field(default_factory=dict)
    """Step → relative error of its self-check, `nan` if nothing could be compared; empty without self-checks."""
    failed: frozenset[int] = frozenset()
    """Steps whose self-check failed or could not be made."""
    norm_only: frozenset[int] = frozenset()
    """Steps whose check compares the gradient's norm with `wᵀKw` and nothing with the trainer's own gradient."""
    approximate: float = 0.0
    """Share of the rollouts whose text was tokenised again."""
    has_tokens: bool = False
    """Whether the source says if its token ids are the sampled ones."""
    remarks: Mapping[str, str] = field(default_factory=dict)
    """Kind → sentence, as stored with the run."""

    @property
    def worst_error(self) -> float:
        """Largest relative error of a self-check; `nan` if none could be made."""
        return max((error for error in self.errors.values() if not math.isnan(error)), default=math.nan)

    @property
    def is_approximate(self) -> bool:
        """Whether the tokens of some rollout may differ from the sampled ones."""
        return self.approximate > 0 or "approximate" in self.remarks

    @property
    def last_measured(self) -> int:
        """Steps in the last third of the measured ones: those that `run_noise` pools."""
        return last_third_size(self.measured)

    @property
    def has_few_steps(self) -> bool:
        """Whether some steps were measured, but too few in their last third for conclusions on noise or trends."""
        return 0 < self.last_measured < FEWEST

    @property
    def mark(self) -> str:
        """Suffix for the name of every number from a Gram that is not exact; empty if all are."""
        words = ["approximate"] * self.is_approximate + ["model in doubt"] * ("model" in self.remarks)
        return f" ({', '.join(words)})" if words else ""

    @property
    def doubt(self) -> str:
        """Why a number from a Gram may differ from the number for the run's own rollouts; empty without `mark`."""
        told = ["Tokens of re-tokenised text may differ from the sampled ones."] * self.is_approximate
        told += ["The model may not be the policy that sampled the rollouts."] * ("model" in self.remarks)
        return " ".join(told)

    def marked(self, sentence: str) -> str:
        """A sentence about numbers from a Gram, with `mark` before its full stop.

        Example:
            >>> Trust(measured=1, approximate=0.5).marked("One rollout has 90% of the energy.")
            'One rollout has 90% of the energy (approximate).'
        """
        return f"{sentence[:-1]}{self.mark}." if sentence.endswith(".") else f"{sentence}{self.mark}"

    def sentences(self) -> list[str]:
        """One sentence each on self-checks if there were any, tokens and measured steps, then every remark."""
        return [sentence for _, sentence in self.judged_sentences()]

    def judged_sentences(self) -> list[tuple[TrustState, str]]:
        """`sentences`, each with its word: `good`, `watch` for what to keep in mind, `act` for a failed self-check."""
        said: list[tuple[TrustState, str]] = []
        if self.errors or self.failed:
            said.append(("act" if self.failed else "good", self.check_sentence()))
        if self.is_approximate and "approximate" not in self.remarks:
            told = f"Approximate: {self.approximate:.1%} of the rollouts are text that was tokenised again."
            said.append(("watch", told))
        elif self.has_tokens and not self.is_approximate:
            said.append(("good", "Exact: all token ids are the sampled ones."))
        if self.has_few_steps:
            steps = "step" if self.measured == 1 else "steps"
            told = f"Gradients were measured at {self.measured} {steps}; conclusions on noise need "
            told += f"{3 * FEWEST - 2}, of which the last {FEWEST} are pooled. "
            said.append(("watch", told + "Rewards and lengths come from every logged step."))
        return said + [("watch", remark) for remark in self.remarks.values()]

    def check_sentence(self) -> str:
        """How many self-checks passed, the worst error, and how many used the trainer's own gradient if not all did.

        For a run with self-checks.
        """
        worst = "" if math.isnan(self.worst_error) else f", worst relative error {self.worst_error:.2g}"
        count = len(self.errors)
        if self.norm_only:
            worst += f"; {count - len(self.norm_only)} of them were compared with the trainer's own gradient"
        if not self.failed:
            return f"Self-check passed at {count} of {count} measured steps{worst}."
        shown = ", ".join(map(str, sorted(self.failed)[:SHOWN_STEPS])) + ", …" * (len(self.failed) > SHOWN_STEPS)
        return (
            f"Self-check passed at {count - len(self.failed)} of {count} measured steps{worst}. It failed or could not "
            f"be made at step {shown}: no mean includes numbers from the Gram of such steps."
        )


def trust_of(
    lines: Sequence[Mapping[str, float | int | bool]],
    groups: Iterable[StoredGroup],
    remarks: Mapping[str, str],
) -> Trust:
    """The trust in a run, from the scalars of its steps, its training groups and its remarks."""
    errors = {int(line["step"]): float(line.get(CHECK_ERROR, math.nan)) for line in lines if CHECK_PASSED in line}
    failed = {int(line["step"]) for line in lines if has_failed_check(line)}
    norm_only = {int(line["step"]) for line in lines if line.get(CHECK_ROLLOUTS, 1) == 0}
    measured = {int(line["step"]) for line in lines if MEASURED in line}
    exact, rollouts = 0.0, 0
    for group in groups:
        statistics, step = group.record.statistics, group.record.step
        if group.record.gram is not None:
            measured.add(step)
        if CHECK_COLUMN in statistics:
            errors.setdefault(step, math.nan)  # the line of a killed run may be missing
            failed |= {step} if statistics[CHECK_COLUMN] != 1 else set()
        if "exact" in statistics:
            exact += float(statistics["exact"]) * group.size
            rollouts += group.size
    return Trust(
        measured=len(measured),
        errors=errors,
        failed=frozenset(failed),
        norm_only=frozenset(norm_only),
        approximate=1 - exact / rollouts if rollouts else 0.0,
        has_tokens=rollouts > 0,
        remarks=dict(remarks),
    )
