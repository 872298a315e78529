"""Tables printed to a terminal or to redirected output."""

import textwrap

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from scoregram.exhibits import Cell, Estimate, Table, cell_text, estimate_parts

TEXT_WIDTH = 16
"""Least width of a text column."""

BETWEEN, AROUND = 3, 2
"""Characters between two columns of a grid, and at its edges."""


def show_table(table: Table, console: Console) -> None:
    """Print title, rows and, dimmed, how to read them.

    Where the console is too narrow for a row, intervals go below their values; where that is not enough, every row
    becomes a block of its own. Nothing is cut off.
    """
    console.print(Text(table.title, style="bold"))
    for between in (" ", "\n"):
        texts = [[_lines(cell, between) for cell in row] for row in table.rows]
        widths = [_least_width(table, texts, place) for place in range(len(table.columns))]
        if sum(widths) + BETWEEN * (len(widths) - 1) + AROUND <= console.width:
            console.print(_grid(table, texts, widths))
            break
    else:
        _print_blocks(table, console)
    if table.caption:
        console.print(Text(table.caption, style="dim"))
    console.print()


def _is_text(table: Table, place: int) -> bool:
    return any(isinstance(row[place], str) for row in table.rows)


def _least_width(table: Table, texts: list[list[str]], place: int) -> int:
    widest = max((len(line) for row in texts for line in row[place].split("\n")), default=0)
    words = max(map(len, table.columns[place].split()), default=1)
    return max(words, min(widest, TEXT_WIDTH) if _is_text(table, place) else widest)


def _grid(table: Table, texts: list[list[str]], widths: list[int]) -> Grid:
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, header_style="")
    for place, (name, width) in enumerate(zip(table.columns, widths, strict=True)):
        if _is_text(table, place):
            grid.add_column(Text(name), min_width=width, overflow="fold")
        else:  # the header is wrapped between words so that it does not widen the column
            grid.add_column(Text("\n".join(textwrap.wrap(name, width))), justify="right", no_wrap=True)
    for row in texts:
        grid.add_row(*map(Text, row))  # rich would read brackets in a plain string as markup
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
