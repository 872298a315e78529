"""The measured Gram and what came with it."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Gram:
    """Inner products of per-rollout scores over all trainable parameters."""

    matrix: Float[Tensor, "rollouts rollouts"]
    """`K_ij = ⟨ψ_i, ψ_j⟩`, float64, on the CPU. With within-group blocks only, `nan` between groups."""
    by_layer: Mapping[str, Float[Tensor, "rollouts rollouts"]]
    """The same for every module that owns trainable parameters; they add up to `matrix`.

    A tied parameter stands under the first module that owns it, cross terms between its uses included.
    """
    log_probs: Float[Tensor, "sequences tokens"]
    """Log-probability of every completion token of `input_ids`, 0 elsewhere."""
    replayed: tuple[str, ...] = ()
    """Parameters whose rows came from one backward pass per rollout."""
    notes: tuple[str, ...] = ()
    """What a reader of the numbers should know: dropout that was switched off, a generic route that was taken."""
    sketch: Float[Tensor, "rollouts features"] | None = None
    """A seeded sketch of each score, if asked for; see `scoregram.gram.sketch`."""
