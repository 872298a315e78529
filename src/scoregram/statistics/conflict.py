"""Do the prompts of a batch pull together, or against each other?"""

import math
from dataclasses import dataclass

import torch

from scoregram.statistics.blocks import prompt_update_gram
from scoregram.statistics.update import cosines_unchecked
from scoregram.types import BatchGram, BatchWeights, PromptGram, PromptOf


@dataclass(frozen=True)
class PromptConflict:
    """How the prompts' own updates `u_p` stand to each other."""

    cosines: PromptGram
    """`(P, P)`: cosine between `u_p` and `u_q`; `nan` for a prompt that does not pull."""
    conflicting: float
    """Share of the pairs of pulling prompts with a negative cosine; `nan` with fewer than two pulling prompts."""
    cancelled: float
    """Share of the energy that conflict takes away; `nan` if no prompt pulls."""


def prompt_conflict(
    gram: BatchGram, weights: BatchWeights, prompt_of: PromptOf, *, rtol: float = 1e-6
) -> PromptConflict:
    """Conflict between the prompts of one update: cosines, share of opposed pairs, energy they cancel.

    With `U_pq = ⟨u_p, u_q⟩`, the squared update norm is what adds up less what is opposed, `Σ U = E₊ - E₋`, where
    `E₊ = Σ_p U_pp + Σ_{p≠q} max(U_pq, 0)` and `E₋ = Σ_{p≠q} max(-U_pq, 0)`; `cancelled = E₋ / E₊`.
    Reads: `0` no two prompts disagree; `1` the prompts annul each other and the update is zero. Under independent
    noise about half of the pairs conflict, so read `conflicting` against `1/2`, not against zero.

    A prompt pulls if its own squared norm exceeds `rtol` times `Σ_{i,j∈p} |w_i w_j K_ij|`, and two prompts conflict
    if their cosine is below `-rtol`: rounding does not count as a direction.

    Example:
        >>> weights, prompt_of = torch.tensor([1.0, 1.0]), torch.tensor([0, 1])
        >>> prompt_conflict(torch.tensor([[1.0, -0.5], [-0.5, 1.0]]), weights, prompt_of).cancelled
        0.5
    """
    u = prompt_update_gram(gram, weights, prompt_of)
    magnitude = _absolute_energy(gram, weights, prompt_of)
    pulls = u.diagonal() > rtol * magnitude
    u = u * (pulls[:, None] & pulls[None, :])
    cosines = cosines_unchecked(u).clamp(-1.0, 1.0)  # a nearly cancelled update of rounded K may leave the range
    rows, columns = torch.triu_indices(*u.shape, offset=1)
    pairs = cosines[rows, columns]
    pairs = pairs[~pairs.isnan()]
    opposed = 2 * float(u[rows, columns].clamp(max=0.0).neg().sum())
    aligned = float(u.diagonal().sum()) + 2 * float(u[rows, columns].clamp(min=0.0).sum())
    return PromptConflict(
        cosines=cosines,
        conflicting=float((pairs < -rtol).double().mean()) if pairs.numel() else math.nan,
        cancelled=min(opposed / aligned, 1.0) if aligned > 0 else math.nan,
    )


def _absolute_energy(gram: BatchGram, weights: BatchWeights, prompt_of: PromptOf) -> torch.Tensor:
    """`Σ_{i,j∈p} |w_i w_j K_ij|` of each prompt, against which its energy is judged."""
    return prompt_update_gram(gram.abs(), weights.abs(), prompt_of).diagonal()
