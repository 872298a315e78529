"""How the Gram of a batch is cut into prompts."""

import torch
from torch import Tensor

from scoregram.checks import fail, require_finite, require_gram, require_group_size
from scoregram.types import BatchGram, BatchWeights, GroupGrams, PromptGram, PromptOf


def group_blocks(gram: BatchGram, group_size: int) -> GroupGrams:
    """Diagonal blocks of a batch Gram: the Gram of each prompt's own group.

    Rollouts are ordered prompt by prompt: rollout `i` belongs to prompt `i // R`.

    Returns:
        `(P, R, R)`, float64.

    Raises:
        ScoregramError: If `N` is not a multiple of `group_size`, or `gram` is not a Gram.

    Example:
        >>> group_blocks(torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0])), 2)[1]
        tensor([[3., 0.],
                [0., 4.]], dtype=torch.float64)
    """
    k = require_gram(gram, caller="group_blocks")
    if group_size < 1 or k.shape[0] % group_size:
        fail(
            "group_blocks",
            "the number of rollouts must be a multiple of the group size",
            f"{k.shape[0]} rollouts and group_size {group_size}",
            "Pass the rollouts of whole groups, prompt by prompt.",
        )
    prompts = k.shape[0] // group_size
    blocks = k.reshape(prompts, group_size, prompts, group_size)
    return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()  # (P, R, R)


def prompt_update_gram(gram: BatchGram, weights: BatchWeights, prompt_of: PromptOf) -> PromptGram:
    """Inner products between the updates that each prompt alone would make.

    `U_pq = ⟨u_p, u_q⟩ = Σ_{i∈p, j∈q} w_i w_j K_ij` with `u_p = Σ_{i∈p} w_i ψ_i`. Groups may differ in size.
    The sum of all entries is `|Σ w_i ψ_i|²`. It is a Gram again, so whatever reads a Gram reads prompts too.

    Args:
        gram: `(N, N)`.
        weights: `(N,)`. What multiplies each score in the update.
        prompt_of: `(N,)`. The prompt of each rollout, `0 … P-1`. A number that no rollout has is a zero update.

    Returns:
        `(P, P)`, float64.

    Raises:
        ScoregramError: If a prompt number is negative or not below `N`.
    """
    k, w = require_gram(gram, caller="prompt_update_gram"), require_weights(weights, gram, caller="prompt_update_gram")
    rows = weighted_membership(w, prompt_of, caller="prompt_update_gram")  # (P, N)
    u = rows @ k @ rows.mT
    return (u + u.mT) / 2


def weighted_membership(weights: Tensor, prompt_of: Tensor, *, caller: str) -> Tensor:
    """`(P, N)`: the weight of rollout `i` in the row of its prompt, zero elsewhere."""
    if prompt_of.shape != weights.shape:
        fail(
            caller,
            f"prompt_of must name one prompt for each of {weights.numel()} rollouts",
            tuple(prompt_of.shape),
            "Pass one integer per rollout.",
        )
    lowest, highest = int(prompt_of.min()), int(prompt_of.max())
    if lowest < 0 or highest >= weights.numel():
        fail(
            caller,
            f"prompt numbers must lie in 0 … {weights.numel() - 1}",
            f"{lowest} … {highest}",
            "Renumber them with torch.unique(ids, return_inverse=True)[1].",
        )
    rows = torch.zeros(highest + 1, weights.numel(), dtype=weights.dtype, device=weights.device)
    return rows.scatter(0, prompt_of.long()[None], weights[None])


def require_weights(weights: Tensor, gram: Tensor, *, caller: str) -> Tensor:
    """The weights in float64, finite and one for each rollout of the Gram."""
    if weights.shape != gram.shape[-1:]:
        fail(caller, f"needs one weight for each of {gram.shape[-1]} rollouts", tuple(weights.shape), "Flatten them.")
    return require_finite(weights.detach().double(), name="weights", caller=caller)


def require_blocks(blocks: Tensor, rewards: Tensor, *, at_least: int, caller: str) -> tuple[Tensor, Tensor]:
    """Gram blocks `(P, R, R)` and rewards `(P, R)` in float64, finite, symmetric and of one shape."""
    group_size = require_group_size(rewards, at_least=at_least, caller=caller)
    if rewards.ndim != 2 or rewards.shape[0] == 0 or blocks.shape != (*rewards.shape, group_size):
        fail(
            caller,
            "needs rewards (P, R) and Gram blocks (P, R, R) of at least one prompt",
            f"rewards {tuple(rewards.shape)} and blocks {tuple(blocks.shape)}",
            "Cut a batch Gram with group_blocks.",
        )
    r = require_finite(rewards.detach().double(), name="rewards", caller=caller)
    return torch.stack([require_gram(block, caller=caller) for block in blocks]), r
