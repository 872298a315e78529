"""Preconditions, with one wording of error messages for the whole library.

Every message reads `<caller>: <requirement>, got <actual>. <What to do.>`
"""

from typing import NoReturn

from torch import Tensor

from scoregram.errors import NotFiniteError as NotFiniteError
from scoregram.errors import ScoregramError as ScoregramError
from scoregram.errors import fail as fail
from scoregram.errors import listed as listed
from scoregram.errors import lookup as lookup
from scoregram.errors import spelling_remedy as spelling_remedy

ROUNDING_STEPS = 4
"""Rewards that differ by at most this many rounding steps of the largest one count as equal, in every package."""


def not_finite(caller: str, requirement: str, got: object, remedy: str) -> NoReturn:
    """Raise a `NotFiniteError` with the same wording."""
    raise NotFiniteError(f"{caller}: {requirement}, got {got}. {remedy}")


def require_tensor(values: object, *, name: str, caller: str) -> None:
    """Raise unless `values` is a tensor."""
    if not isinstance(values, Tensor):
        fail(caller, f"{name} must be a tensor", type(values).__name__, "Convert it with torch.as_tensor.")


def require_group_size(rewards: Tensor, *, at_least: int, caller: str) -> int:
    """Size `R` of the last axis; an error if it is below `at_least`."""
    group_size = rewards.shape[-1] if rewards.ndim else 0
    if group_size < at_least:
        fail(
            caller,
            f"needs at least {at_least} rollout{'s' * (at_least > 1)} per prompt",
            f"a group of {group_size} (shape {tuple(rewards.shape)})",
            "Sample more rollouts per prompt or choose an estimator that needs fewer.",
        )
    return group_size


def require_finite(values: Tensor, *, name: str, caller: str, remedy: str = "Repair or drop these values.") -> Tensor:
    """`values` unchanged; an error that names the first element that is not finite."""
    # a NaN or infinity anywhere makes the sum so, and summing is ten times as fast as asking every element
    if values.is_floating_point() and not bool(values.sum().isfinite()) and not bool(values.isfinite().all()):
        at = tuple(int(i) for i in (~values.isfinite()).nonzero()[0])
        not_finite(caller, f"{name} must be finite", f"{values[at].item()} at index {at}", remedy)
    return values


def require_same_shape(values: Tensor, like: Tensor, *, name: str, like_name: str, caller: str) -> Tensor:
    """`values` unchanged; an error unless it has the shape of `like`."""
    if values.shape != like.shape:
        requirement = f"{name} must have the shape of {like_name} {tuple(like.shape)}"
        fail(caller, requirement, tuple(values.shape), "Pass one value for each.")
    return values


def require_in_range(
    value: float,
    *,
    low: float,
    high: float,
    name: str,
    caller: str,
    remedy: str = "Choose a value inside the range.",
) -> float:
    """`value` unchanged; an error unless `low <= value <= high` (NaN is an error too)."""
    if not low <= value <= high:
        fail(caller, f"{name} must lie in [{low:g}, {high:g}]", value, remedy)
    return value


SYMMETRY_RTOL = 1e-6
"""Largest asymmetry of a Gram, relative to its largest entry."""


def require_gram(gram: Tensor, *, caller: str, rtol: float = SYMMETRY_RTOL) -> Tensor:
    """The Gram in float64; an error unless it is square, finite, symmetric and has no negative diagonal.

    Asymmetry is measured relative to the largest entry: `|K - Kᵀ| <= rtol · max|K|`.
    """
    require_tensor(gram, name="a Gram", caller=caller)
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or gram.shape[0] == 0:
        fail(caller, "a Gram must be square and not empty", tuple(gram.shape), "Pass K of shape (R, R).")
    k = require_finite(gram.detach().double(), name="the Gram", caller=caller)
    is_even = k.equal(k.mT)  # as read from a triangle; much faster than the size of the asymmetry
    if not is_even and float((k - k.mT).abs().max()) > rtol * float(k.abs().max()):
        worst = float((k - k.mT).abs().max())
        fail(caller, "a Gram must be symmetric", f"|K - Kᵀ| up to {worst:g}", "Pass K = ΨΨᵀ, or (K + Kᵀ)/2.")
    if float(k.diagonal().min()) < 0:
        i = int(k.diagonal().argmin())
        fail(caller, "squared norms K_ii must not be negative", f"K[{i},{i}] = {float(k[i, i]):g}", "Pass K = ΨΨᵀ.")
    return k if is_even else (k + k.mT) / 2


def require_grams(grams: Tensor, *, caller: str) -> Tensor:
    """`require_gram` for every Gram of a stack `(P, R, R)`, checked at once; the error is that of the first bad one."""
    if grams.ndim != 3 or grams.shape[1] != grams.shape[2] or grams.shape[1] == 0:
        fail(caller, "Grams must be square and not empty", tuple(grams.shape), "Pass K of shape (P, R, R).")
    k = grams.detach().double()
    asymmetry, largest = (
        (k - k.mT).abs().amax((-2, -1)),
        k.abs().amax((-2, -1)),
    )  # (P,): nan and inf fail the test below
    is_valid = (asymmetry <= SYMMETRY_RTOL * largest) & (k.diagonal(dim1=-2, dim2=-1) >= 0).all(-1) & largest.isfinite()
    for gram in k[~is_valid]:
        require_gram(gram, caller=caller)
    return (k + k.mT) / 2
