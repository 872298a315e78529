"""How a cell reads: the same digits in a terminal, on a page and under the pointer."""

import math

from scoregram.exhibits import Cell, Estimate

DIGITS = 3
"""Significant digits of a number that is not whole."""

UNDEFINED = "–"
"""What stands for `nan`."""

SMALLEST, LARGEST = 1e-3, 1e6
"""Sizes between which numbers are written without an exponent."""


def cell_text(cell: Cell) -> str:
    """A cell as text; None is empty, `nan` a dash.

    Example:
        >>> [cell_text(cell) for cell in (Estimate(2.406, 2.3, 2.52), 0.12345, 8, float("nan"), None, "R")]
        ['2.41 [2.30, 2.52]', '0.123', '8', '–', '', 'R']
    """
    if isinstance(cell, Estimate):
        return " ".join(estimate_parts(cell))
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return number_text(cell, cell)
    return "" if cell is None else str(cell)


def estimate_parts(estimate: Estimate) -> tuple[str, ...]:
    """The value and, where there is one, its interval in brackets, all with the same decimals."""
    known = [abs(number) for number in vars(estimate).values() if math.isfinite(number)]
    largest = max(known, default=math.nan)
    value = number_text(estimate.value, largest)
    if math.isnan(estimate.low) and math.isnan(estimate.high):
        return (value,)
    return value, f"[{number_text(estimate.low, largest)}, {number_text(estimate.high, largest)}]"


def number_text(value: float, like: float) -> str:
    """`value` with the decimals that give `like` three significant digits.

    Example:
        >>> number_text(9.996, 9.996), number_text(0.05, 12.0), number_text(-0.001, 1.0), number_text(3e-7, 3e-7)
        ('10.0', '0.1', '0.00', '3.00e-07')
    """
    if math.isnan(value):
        return UNDEFINED
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    size = abs(float(f"{like:.{DIGITS - 1}e}")) if math.isfinite(like) else 0.0  # 9.996 has the digits of 10
    if size == 0:
        return f"{value:.{DIGITS}g}"
    if not SMALLEST <= size < LARGEST:
        return f"{value:.{DIGITS - 1}e}"
    decimals = max(0, DIGITS - 1 - math.floor(math.log10(size)))
    return f"{round(value, decimals) + 0.0:.{decimals}f}"  # + 0.0: no minus before a zero
