"""Diagonal preconditioners: `K^D_ij = ⟨ψ_i, D ψ_j⟩` is the Gram of the scores times `√D`.

Adam divides every entry of a gradient by its own `√v̂ + ε`, so to first order its step changes `log π` of a held-out
rollout by `η Σ_i w_i ⟨ψ_i, D ψ_h⟩`, momentum aside. `D` acts on single entries of a weight, so it does not split into
the two factors of a product. But the engine forms the per-rollout gradients chunk by chunk anyway (`contract`), and
each chunk is multiplied by `√D` of the same entries before it is contracted. A parameter has one `D`, applied after all
its uses are added.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from scoregram.checks import fail, require_finite


class Diagonal:
    """The checked diagonal `D` of some parameters; gives `√D` of any part of one."""

    def __init__(self, given: Mapping[Tensor, Tensor], parameters: Mapping[str, Tensor]) -> None:
        """Take `D` by parameter, and the trainable parameters by name; entries of other parameters are not read.

        Raises:
            ScoregramError: If a parameter has no `D`, or one of another shape, or with an entry that is negative, NaN
                or infinite.
        """
        by_id = {id(parameter): diagonal for parameter, diagonal in given.items()}
        self._diagonals = {id(p): checked_diagonal(name, p, by_id.get(id(p))) for name, p in parameters.items()}

    def of(self, parameter_id: int) -> Tensor:
        """`D` of a parameter, in its shape."""
        return self._diagonals[parameter_id]

    def root(self, parameter: Tensor, view: Tensor, rows: Tensor | None, start: int, stop: int) -> Tensor:
        """`(stop - start, q)`: `√D` of rows `start … stop-1` of a region of a parameter, or of the chosen `rows`."""
        whole = self.of(id(parameter))  # in memory as the parameter is
        offset = view.storage_offset() - parameter.storage_offset() + whole.storage_offset()
        region = whole.as_strided(view.shape, view.stride(), offset)
        return wide_root(region[start:stop] if rows is None else region[rows[start:stop]])

    def flat_root(self, parameter: Tensor) -> Tensor:
        """`√D` of all entries of a parameter, flattened."""
        return wide_root(self.of(id(parameter)).reshape(-1))


def checked_diagonal(name: str, parameter: Tensor, given: Tensor | None) -> Tensor:
    """`D` of a parameter on its device, in memory as the parameter is, so that views of both have equal strides."""
    caller, remedy = "measure_gram", "Make one with adam_preconditioner(optimizer)."
    if given is None:
        fail(caller, "preconditioner must have an entry for every trainable parameter", f"none for {name}", remedy)
    if not isinstance(given, Tensor) or not given.is_floating_point():
        got = given.dtype if isinstance(given, Tensor) else type(given).__name__
        fail(caller, f"preconditioner of {name} must be a tensor of real numbers", got, remedy)
    if given.shape != parameter.shape:
        requirement = f"preconditioner of {name} must have the shape {tuple(parameter.shape)}"
        fail(caller, requirement, tuple(given.shape), "Pass one entry for each entry of the parameter.")
    given = require_finite(given.detach().to(parameter.device), name=f"preconditioner of {name}", caller=caller)
    if bool((given < 0).any()):
        least = f"{float(given.min()):g}"
        fail(caller, f"preconditioner of {name} must not be negative", least, "Pass a D with entries of 0 or more.")
    if given.stride() == parameter.stride():
        return given
    like = torch.empty_strided(parameter.shape, parameter.stride(), dtype=given.dtype, device=given.device)
    return like.copy_(given)


def wide_root(values: Tensor) -> Tensor:
    """`√D` in float32 or wider."""
    return values.to(torch.promote_types(values.dtype, torch.float32)).sqrt()


@torch.no_grad()
def adam_preconditioner(optimizer: torch.optim.Optimizer) -> dict[Tensor, Tensor]:
    """The diagonal that Adam's latest step multiplied its averaged gradient by: `D = 1 / (√v̂ + ε)`, by parameter.

    `v̂ = v / (1 - β₂^t)` is the bias-corrected mean square of the gradients; with `amsgrad`, `v` is its largest value so
    far. Each group's own `betas`, `eps` and `amsgrad` count. The step is `-η D m̂` with the averaged gradient `m̂`: the
    learning rate is not in `D`. If it differs between groups, multiply each `D` by the rate of its group.

    Args:
        optimizer: `torch.optim.Adam` or `AdamW`, after a step. Its state, and so `D`, includes the gradient of that
            step.

    Returns:
        A tensor of its shape for every parameter that requires gradients, a copy: later steps do not change it.

    Raises:
        ScoregramError: If it is another optimiser, or a parameter has no state yet.

    Reference:
        Adam. Kingma and Ba 2015, arXiv:1412.6980; AMSGrad. Reddi et al. 2018, arXiv:1904.09237.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = torch.optim.AdamW([weight], eps=0.0)
        >>> weight.grad = torch.tensor([0.5, -2.0])
        >>> optimizer.step()
        >>> adam_preconditioner(optimizer)[weight].round(decimals=4)
        tensor([2.0000, 0.5000])
    """
    caller = "adam_preconditioner"
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        got = type(optimizer).__name__
        remedy = "Pass that optimiser itself, without a wrapper, or write the diagonal of yours by hand."
        fail(caller, "optimizer must be torch.optim.Adam or AdamW", got, remedy)
    found: dict[Tensor, Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if not parameter.requires_grad:
                continue
            state = optimizer.state.get(parameter)
            if not state:
                got = f"none for parameter {place} of group {number}, shape {tuple(parameter.shape)}"
                remedy = "Take a step with the optimiser first; freeze parameters that never get a gradient."
                fail(caller, "every parameter that requires gradients must have a state", got, remedy)
            mean_square = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
            wide = mean_square.to(torch.promote_types(mean_square.dtype, torch.float32))  # 1/ε overflows float16
            correction = 1 - float(group["betas"][1]) ** float(state["step"])
            found[parameter] = 1 / ((wide / correction).sqrt() + group["eps"])
    return found
