"""The row of the table of estimators: what a claim means."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Level = Literal["group", "token", "turn"]


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """One estimator at its default options, and what is claimed about it.

    The claims speak of on-policy, i.i.d. rollouts, of every group size `R >= min_group` and of every reward law.
    `ĝ = (1/R) Σ_i Σ_t A_it ∇log π(a_it | s_it)` is the update of one prompt (a group's `A_i` stands on every token,
    a turn's on the tokens of the turn), `J` the expected undiscounted return of that prompt.
    """

    fn: Callable[..., Tensor]
    """`fn(rewards, *, observed=None, **needs)` for a group, `fn(rewards, *, mask, **needs)` for tokens and turns."""

    paper: str
    """Where it comes from."""

    level: Level
    """What an advantage belongs to: a rollout `(P, R)`, a token `(P, R, T)`, a turn `(P, R, H)`."""

    needs: tuple[str, ...] = ()
    """Keyword tensors beyond the rewards and the mask."""

    min_group: int = 2
    """The smallest `R` the function accepts."""

    couples_prompts: bool = False
    """The rewards of one prompt change the advantages of another."""

    unbiased: bool
    """`E[ĝ] = ∇J` exactly. Critics and cuts see the prefix only, prefix values come from independent fresh rollouts."""

    direction_exact: bool
    """`E[ĝ] = c ∇J` with `c > 0`; `c` may depend on the prompt, the rewards and `R`. Implied by `unbiased`."""

    row_sum_zero: bool
    """The advantages of a group sum to zero in every sample: `Σ_i A_i = 0`, `Σ_i Σ_t A_it = 0` over the mask."""

    uniform_credit: bool
    """All tokens, or turns, of a rollout get the same advantage in every sample."""

    scale_invariant: bool
    """`A(c r) = A(r)` for every `c > 0`, inputs that are rewards or values themselves scaled alike."""

    shift_invariant: bool
    """`A(r + b) = A(r)`: the same `b` on the last reward of every rollout, and on inputs that are rewards or values."""
