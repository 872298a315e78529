"""Tables printed to a terminal or to redirected output."""

import textwrap
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from scoregram.exhibits import Cell, Estimate, Table, cell_text, estimate_parts

TEXT_WIDTH = 16
"""Least width of a text column."""

MOST_GRIDS = 3
"""Grids into which the columns of a wide table are split; rows of more would be hard to follow."""

BETWEEN, AROUND = 3, 2
"""Characters between two columns of a grid, and at its edges."""


def show_table(table: Table, console: Console) -> None:
    """Print title, rows and, dimmed, how to read them.

    Where the console is too narrow for a row, intervals go below their values. Where that is not enough, the columns
    are printed a few at a time, each time behind the first one; if that takes more than `MOST_GRIDS` grids, every row
    becomes a block of its own. Nothing is cut off.
    """
    console.print(Text(table.title, style="bold"))
    every = tuple(range(len(table.columns)))
    for between in (" ", "\n"):
        texts = [[_lines(cell, between) for cell in row] for row in table.rows]
        widths = [_least_width(table, texts, place) for place in every]
        if _grid_width(widths) <= console.width:
            parts = [every]
            break
    else:
        parts = _balanced_parts(widths, console.width)
    if 0 < len(parts) <= MOST_GRIDS:
        for places in parts:
            console.print(_grid(table, texts, widths, places))
    else:
        _print_blocks(table, console)
    if table.caption:
        console.print(Text(table.caption, style="dim"))
    console.print()


def _grid_width(widths: Sequence[int]) -> int:
    return sum(widths) + BETWEEN * (len(widths) - 1) + AROUND


def _balanced_parts(widths: Sequence[int], width: int) -> list[tuple[int, ...]]:
    """Columns of the fewest grids that fit, about equally wide; empty if a column does not fit beside the first."""
    fewest = len(_column_parts(widths, width))
    return next(parts for less in range(1, width + 1) if len(parts := _column_parts(widths, less)) == fewest)


def _column_parts(widths: Sequence[int], width: int) -> list[tuple[int, ...]]:
    """Columns of the grids of this width, filled one after the other, that each begin with the first column."""
    parts: list[tuple[int, ...]] = []
    for place in range(1, len(widths)):
        if parts and _grid_width([widths[at] for at in (*parts[-1], place)]) <= width:
            parts[-1] = (*parts[-1], place)
        elif _grid_width([widths[0], widths[place]]) <= width:
            parts.append((0, place))
        else:
            return []
    return parts


def _is_text(table: Table, place: int) -> bool:
    return any(isinstance(row[place], str) for row in table.rows)


def _least_width(table: Table, texts: list[list[str]], place: int) -> int:
    widest = max((len(line) for row in texts for line in row[place].split("\n")), default=0)
    words = max(map(len, table.columns[place].split()), default=1)
    if not _is_text(table, place):
        return max(words, widest)
    names = max((len(word) for row in texts for word in row[place].split()), default=0)
    return max(words, names, min(widest, TEXT_WIDTH))


def _grid(table: Table, texts: list[list[str]], widths: list[int], places: Sequence[int]) -> Grid:
    """The columns at some places as a grid."""
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, header_style="")
    for place in places:
        name, width = table.columns[place], widths[place]
        if _is_text(table, place):
            grid.add_column(Text(name), min_width=width, overflow="fold")
        else:  # the header is wrapped between words so that it does not widen the column
            grid.add_column(Text("\n".join(textwrap.wrap(name, width))), justify="right", no_wrap=True)
    for row in texts:
        grid.add_row(*(Text(row[place]) for place in places))  # rich would read brackets in a plain string as markup
    return grid


def _lines(cell: Cell, between: str) -> str:
    return between.join(estimate_parts(cell)) if isinstance(cell, Estimate) else cell_text(cell)


def _print_blocks(table: Table, console: Console) -> None:
    for row in table.rows:
        block = Grid.grid(padding=(0, 2))
        block.add_column(style="dim", max_width=console.width // 2)
        block.add_column(overflow="fold")
        for name, cell in zip(table.columns, row, strict=True):
            block.add_row(Text(name), Text(cell_text(cell)))
        console.print()
        console.print(block)
    console.print()
