"""Which prompts to draw, and how much to trust each: importance sampling of prompts, and shrunk weights.

The gradient of a task is the mean `g = Σ_p g_p / M` over its `M` prompts. A step draws `n` of them and estimates each
`g_p` by `ĝ_p`, from a group of rollouts.
"""

import torch
from torch import Tensor

from scoregram.checks import fail, require_finite
from scoregram.types import PerPrompt

UNIFORM_SHARE = 0.25
"""Part of a draw that ignores what was measured: no prompt is drawn less often than a quarter of the mean, so no
weight exceeds 4."""


def inclusion_probabilities(second_moments: PerPrompt, count: int, *, uniform: float = UNIFORM_SHARE) -> Tensor:
    """`(M,)` probabilities `π_p ≤ 1`, with the sum `count`, that a prompt is in a step of `count` prompts.

    Drawn prompts get the weight `n / (M π_p)`, so the mean over a step is unbiased for `g` whatever the probabilities.
    If prompts are drawn independently, its error is least for `π_p ∝ √E|ĝ_p|²`. A share `uniform` of the probability is
    equal for all, because second moments are estimates. A prompt whose `π_p` would exceed 1 is always drawn, and the
    others share the rest. All equal if every second moment is 0.

    Raises:
        ScoregramError: If a moment is negative or not finite, or `count` is not in `1 … M`.

    Example:
        >>> inclusion_probabilities(torch.tensor([9.0, 1.0, 0.0, 0.0]), 2, uniform=0.5).tolist()
        [1.0, 0.5, 0.25, 0.25]
    """
    caller = "inclusion_probabilities"
    moments = require_finite(second_moments.double(), name="second_moments", caller=caller)
    prompts = len(moments)
    if not 1 <= count <= prompts or bool((moments < 0).any()):
        got = f"count {count} for {prompts} prompts, least moment {float(moments.min()) if prompts else 0:.3g}"
        fail(caller, "needs moments that are not negative, and count from 1 to their number", got, "Clamp them at 0.")
    roots = moments.sqrt()
    total = float(roots.sum())
    shares = uniform / prompts + (1 - uniform) * (roots / total if total > 0 else torch.full_like(roots, 1 / prompts))
    always = torch.zeros(prompts, dtype=torch.bool)
    while True:
        rest = shares * (count - int(always.sum())) / shares[~always].sum() if not bool(always.all()) else shares
        probabilities = torch.where(always, 1.0, rest)
        over = (probabilities > 1) & ~always
        if not bool(over.any()):
            return probabilities
        always |= over


def systematic_draw(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """Indices of the drawn prompts: `Σπ` of them, none twice, each with its probability.

    The prompts are put on a line in random order, each as long as its probability, and every point `u + k` of a comb
    with a random `u` in [0, 1) draws the prompt it falls on.

    Raises:
        ScoregramError: If the probabilities are not in [0, 1], or their sum is not a whole number of prompts.
    """
    total = float(probabilities.double().sum())
    if not bool(((probabilities >= 0) & (probabilities <= 1)).all()) or not total > 0.5 or abs(total % 1 - 0.5) < 0.499:
        remedy = "Take them from inclusion_probabilities."
        fail("systematic_draw", "needs probabilities with a whole sum", f"a sum of {total:.6g}", remedy)
    order = torch.randperm(len(probabilities), generator=generator)
    ends = probabilities[order].double().cumsum(0)
    count = int(ends[-1].round())
    points = torch.rand(1, generator=generator, dtype=torch.float64) + torch.arange(count)
    # rounding may leave the last point beyond the last end
    return order[torch.searchsorted(ends, points, right=True).clamp(max=len(order) - 1)]


def shrunk_weights(gradient_squared: PerPrompt, error: PerPrompt) -> PerPrompt:
    """`(P,)` factors `c_p = |g_p|² / (|g_p|² + MSE_p)`, divided by their mean.

    Up to that scale they are the factors with the least error `Σ_p E|c_p ĝ_p - g_p|²`, for unbiased `ĝ_p` with the
    error `MSE_p = E|ĝ_p - g_p|²`. The scale is left to the learning rate. Both arguments must come from other rollouts
    than `ĝ_p`. All ones if no prompt has a signal; a prompt without signal and error counts as fully known.

    Example:
        >>> shrunk_weights(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 3.0])).tolist()
        [1.6, 0.4]
    """
    signal, noise = (
        require_finite(value.double(), name=name, caller="shrunk_weights").clamp(min=0)
        for name, value in (("gradient_squared", gradient_squared), ("error", error))
    )
    total = signal + noise
    if not bool((signal > 0).any()):
        return torch.ones_like(total)
    factors = torch.where(total > 0, signal / total.clamp(min=torch.finfo(torch.float64).tiny), 1.0)
    return factors / factors.mean()
