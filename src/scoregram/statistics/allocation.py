"""How to spend a fixed number of rollouts: how many on each prompt, and how many on all of them.

The error of a prompt's leave-one-out gradient from `R` rollouts is `s/R + k/(R(R-1))` with `s = tr Σ_oracle` and
`k = σ² tr F + |g|²` (`leave_one_out_mse`). Both functions here minimise sums of it: `allocated_rollouts` over the
prompts of one step, `recommend_group_size` over one group size for all prompts.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from scoregram.checks import fail, require_finite, require_in_range, require_same_shape
from scoregram.statistics.noise import NoiseComponents
from scoregram.types import PerPrompt

PromptSizes = Int[Tensor, " prompts"]


def allocation_error(single_noise: PerPrompt, pair_noise: PerPrompt, sizes: PromptSizes) -> float:
    """Error of the mean of the prompts' gradients, for these prompts and `sizes` rollouts: `Σ_p MSE_p(R_p) / P²`.

    `MSE_p(R) = s_p/R + k_p/(R(R-1))`. Every prompt has the weight `1/P` whatever its number of rollouts, and the sizes
    must not depend on the rollouts themselves. Unbiased if the noises are, and independent of the sizes.

    Raises:
        ScoregramError: If a size is below 2, or the shapes differ.

    Example:
        >>> allocation_error(torch.tensor([4.0, 0.0]), torch.tensor([0.0, 2.0]), torch.tensor([4, 2]))
        0.5
    """
    s, k = _require_noises(single_noise, pair_noise, caller="allocation_error")
    r = require_same_shape(sizes, s, name="sizes", like_name="single_noise", caller="allocation_error").double()
    if not bool((r >= 2).all()):
        got = int(r.min())
        fail("allocation_error", "every prompt needs at least 2 rollouts", got, "Leave-one-out needs two.")
    return float((s / r + k / (r * (r - 1))).sum()) / len(s) ** 2


def allocated_rollouts(
    single_noise: PerPrompt, pair_noise: PerPrompt, total: int, *, least: int = 2, most: int | None = None
) -> PromptSizes:
    """The number of rollouts of each prompt that has the least error, `total` in all.

    Each further rollout goes to the prompt whose error it lowers most. The errors are convex in `R`, so this greedy
    rule is exactly optimal. For large `R` it is Neyman's allocation, `R_p ∝ √s_p`. Of equal gains the prompt with the
    fewest rollouts is served first, then the first one: equal noises give equal sizes.

    Args:
        single_noise: `(P,)` predicted `s_p`; a negative estimate counts as zero.
        pair_noise: `(P,)` predicted `k_p`; a negative estimate counts as zero.
        total: Rollouts of all prompts together.
        least: Smallest size, at least 2.
        most: Largest size; no limit by default.

    Raises:
        ScoregramError: If `total` lies outside `P·least … P·most`.

    Example:
        >>> allocated_rollouts(torch.tensor([9.0, 1.0, 0.0]), torch.zeros(3), 24).tolist()
        [16, 6, 2]
    """
    s, k = _require_noises(single_noise, pair_noise, caller="allocated_rollouts")
    prompts, largest = len(s), total if most is None else most
    if least < 2 or not prompts * least <= total <= prompts * largest:
        got = f"{total} rollouts of {prompts} prompts, least {least} and most {most}"
        fail("allocated_rollouts", "needs P·least <= total <= P·most and least >= 2", got, "Change the limits.")
    singles, pairs = s.clamp(min=0).tolist(), k.clamp(min=0).tolist()

    def entry(prompt: int, size: int) -> tuple[float, int, int]:
        gain = singles[prompt] / (size * (size + 1)) + 2 * pairs[prompt] / ((size - 1) * size * (size + 1))
        return -gain, size, prompt

    sizes = [least] * prompts
    waiting = [entry(prompt, least) for prompt in range(prompts) if least < largest]
    heapq.heapify(waiting)
    for _ in range(total - prompts * least):
        _, size, prompt = heapq.heappop(waiting)
        sizes[prompt] = size + 1
        if size + 1 < largest:
            heapq.heappush(waiting, entry(prompt, size + 1))
    return torch.tensor(sizes)


UNDIVIDED_GROUP = 4
"""Mean group size at which every prompt gets as many rollouts: fewer than 4 do not show the noise of a prompt."""


@dataclass(frozen=True)
class GroupSizeAdvice:
    """Whether another group size has less error at the same number of rollouts."""

    current: int
    recommended: int
    """`current`, or its neighbour among the choices in the direction of `best`."""
    best: int
    """The choice with the least predicted error."""
    error_ratio: float
    """Predicted error at `best` over that at `current`; `nan` if it cannot be predicted."""
    agreement: float
    """Share of resamples of the steps in which `best` has less error than `current`; `nan` without a prediction."""
    steps: int
    """Measured steps that the prediction is based on."""

    @property
    def sentence(self) -> str:
        """The decision and its reason in one line."""
        if math.isnan(self.error_ratio):
            return f"group size stays {self.current}: {self.steps} measured steps are too few to predict an error"
        if self.best == self.current:
            return f"group size stays {self.current}: it has the least predicted error ({self.steps} steps)"
        evidence = (
            f"groups of {self.best} have {self.error_ratio:.2f} of its error, "
            f"in {100 * self.agreement:.0f} % of resamples less ({self.steps} steps)"
        )
        if self.recommended == self.current:
            return f"group size stays {self.current}: {evidence}, too little to move"
        return f"group size {self.current} becomes {self.recommended}: {evidence}"

    def words(self, *, is_divided: bool) -> str:
        """`sentence`; where the rollouts of a step are divided among prompts, also that the next ones cannot be."""
        ends_division = is_divided and self.recommended != self.current and self.recommended <= UNDIVIDED_GROUP
        return self.sentence + (f"; groups of {UNDIVIDED_GROUP} are not divided unequally" if ends_division else "")


def recommend_group_size(
    components: Sequence[NoiseComponents],
    current: int,
    choices: Sequence[int],
    *,
    generator: torch.Generator,
    least_steps: int = 10,
    least_saving: float = 0.05,
    agreement: float = 0.9,
    resamples: int = 1000,
) -> GroupSizeAdvice:
    """One step from the current group size towards the one with the least error, if the evidence is clear.

    The error of `N` rollouts in groups of `R` is `(c1 R + c2 + c3/(R-1)) / N` (`mse_curve`). The components are
    averaged over the steps before any ratio is formed; an average below zero counts as zero. The size moves by one
    choice only if the best choice saves at least `least_saving` of the error, and has less error than the current size
    in at least the share `agreement` of resamples of the steps. So a size stays where two are about equally good.

    Args:
        components: From `noise_components`, one per measured step; at any group sizes, also different ones.
        current: The group size now; one of the choices.
        choices: Group sizes to choose from, at least 2.
        generator: Source of the resamples.
        least_steps: With fewer steps the size stays.
        least_saving: Share of the error that a move must save.
        agreement: Share of resamples that must agree.
        resamples: Number of resamples.

    Raises:
        ScoregramError: If `current` is not a choice, a choice is below 2, or a share lies outside `[0, 1]`.

    Example:
        >>> steps = [NoiseComponents(1.0, 0.01, 4.0, 9.0)] * 10
        >>> recommend_group_size(steps, 4, (4, 8, 16), generator=torch.Generator().manual_seed(0)).sentence
        'group size 4 becomes 8: groups of 16 have 0.68 of its error, in 100 % of resamples less (10 steps)'
    """
    caller, ordered = "recommend_group_size", sorted(set(choices))
    if current not in ordered or ordered[0] < 2:
        fail(caller, "choices must be at least 2 and include the current size", (current, ordered), "Add it.")
    require_in_range(least_saving, low=0.0, high=1.0, name="least_saving", caller=caller)
    require_in_range(agreement, low=0.0, high=1.0, name="agreement", caller=caller)
    if len(components) < least_steps:
        return GroupSizeAdvice(current, current, current, math.nan, math.nan, len(components))
    rows = torch.tensor(
        [(one.between_prompts, one.within_prompt, one.group_baseline) for one in components], dtype=torch.float64
    )
    errors = _errors_of_choices(rows.mean(0, keepdim=True), ordered)[0]
    now, best = ordered.index(current), int(errors.argmin())
    if not float(errors[now]) > 0:
        return GroupSizeAdvice(current, current, current, math.nan, math.nan, len(components))
    drawn = torch.randint(len(rows), (resamples, len(rows)), generator=generator, device=generator.device).cpu()
    resampled = _errors_of_choices(rows[drawn].mean(1), ordered)
    agreed = float((resampled[:, best] < resampled[:, now]).double().mean()) if best != now else 1.0
    ratio = float(errors[best] / errors[now])
    is_clear = ratio <= 1 - least_saving and agreed >= agreement
    there = now + (best > now) - (best < now) if is_clear else now
    return GroupSizeAdvice(current, ordered[there], ordered[best], ratio, agreed, len(components))


def _errors_of_choices(components: Tensor, sizes: Sequence[int]) -> Tensor:
    """`(S, choices)`: `c1 R + c2 + c3/(R-1)` for rows `(c1, c2, c3)`, negative averages counted as zero."""
    c1, c2, c3 = components.clamp(min=0).unbind(1)
    size = torch.tensor(sizes, dtype=torch.float64)
    return c1[:, None] * size + c2[:, None] + c3[:, None] / (size - 1)


def _require_noises(single: Tensor, pair: Tensor, *, caller: str) -> tuple[Tensor, Tensor]:
    """Both noises in float64; an error unless they are finite, of one shape, and of at least one prompt."""
    require_same_shape(pair, single, name="pair_noise", like_name="single_noise", caller=caller)
    if single.ndim != 1 or not len(single):
        fail(caller, "needs the noise (P,) of at least one prompt", tuple(single.shape), "Pass one number per prompt.")
    s = require_finite(single.detach().double(), name="single_noise", caller=caller)
    return s, require_finite(pair.detach().double(), name="pair_noise", caller=caller)
