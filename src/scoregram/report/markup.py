"""Pieces of a page as HTML. Whatever comes from data passes through `escape`."""

import math
import re
from collections.abc import Sequence
from html import escape

from scoregram.exhibits import Cell, Estimate, Exhibit, Figure, Table
from scoregram.report.figures import data_table
from scoregram.report.numbers import cell_text, estimate_parts


def paragraphs(text: str) -> str:
    """Plain text as HTML: blank lines part paragraphs; a paragraph whose lines all begin with `- ` is a list.

    Example:
        >>> paragraphs("a < b")
        '<p>a &lt; b</p>'
    """
    blocks = [block.strip() for block in re.split(r"\n\s*\n", text) if block.strip()]
    return "\n".join(_listed(block) if _is_list(block) else f"<p>{escape(block)}</p>" for block in blocks)


def table_block(table: Table, anchor: str) -> str:
    """A table under its title, with how to read it."""
    caption = f'<p class="caption">{escape(table.caption)}</p>' if table.caption else ""
    return f'<h3 id="{anchor}">{escape(table.title)}</h3>\n{_scrolling(table, f"{anchor}-table")}\n{caption}'


def figure_block(figure: Figure, anchor: str) -> str:
    """A place for plotly to draw in, how to read it, and the same numbers as a table."""
    label = escape(f"{figure.title}. {figure.caption} The same numbers follow as a table.", quote=True)
    data = _scrolling(data_table(figure), f"{anchor}-data")
    return (
        f'<figure>\n<h3 id="{anchor}">{escape(figure.title)}</h3>\n'
        f'<div class="plot" id="{anchor}-plot" role="img" aria-label="{label}"></div>\n'
        f'<figcaption class="caption">{escape(figure.caption)}</figcaption>\n'
        f"<details><summary>Data as table</summary>\n{data}\n</details>\n</figure>"
    )


def exhibit_block(exhibit: Exhibit, anchor: str) -> str:
    """A table or a figure."""
    return table_block(exhibit, anchor) if isinstance(exhibit, Table) else figure_block(exhibit, anchor)


def identifier(text: str) -> str:
    """Text as an id that needs no escaping anywhere.

    Example:
        >>> identifier("R = 8 <b>")
        'r-8-b'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "exhibit"


def _is_list(block: str) -> bool:
    return all(line.lstrip().startswith("- ") for line in block.splitlines())


def _listed(block: str) -> str:
    items = "\n".join(f"<li>{escape(line.lstrip()[2:])}</li>" for line in block.splitlines())
    return f"<ul>\n{items}\n</ul>"


def _scrolling(table: Table, anchor: str) -> str:
    """A table that scrolls by itself where the page is narrow, by keyboard too."""
    label = escape(table.title, quote=True)
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{label}" id="{anchor}">{_table(table)}</div>'


def _table(table: Table) -> str:
    numeric = [not any(isinstance(row[place], str) for row in table.rows) for place in range(len(table.columns))]
    heads = "".join(
        f'<th scope="col"{_right(right)}>{escape(name)}</th>'
        for name, right in zip(table.columns, numeric, strict=True)
    )
    rows = "\n".join(f"<tr>{_row(row, numeric)}</tr>" for row in table.rows)
    return f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"


def _row(row: Sequence[Cell], numeric: Sequence[bool]) -> str:
    first, *rest = zip(row, numeric, strict=True)
    head = f'<th scope="row"{_right(first[1])}>{_cell(first[0])}</th>'
    return head + "".join(f"<td{_right(right)}>{_cell(cell)}</td>" for cell, right in rest)


def _right(right: bool) -> str:
    return ' class="n"' if right else ""


def _cell(cell: Cell) -> str:
    if isinstance(cell, Estimate) and len(parts := estimate_parts(cell)) == 2:
        return f'{escape(parts[0])} <span class="interval">{escape(parts[1])}</span>'
    value = cell.value if isinstance(cell, Estimate) else cell
    if isinstance(value, float) and math.isnan(value):
        return f'<span title="undefined">{cell_text(cell)}</span>'
    return escape(cell_text(cell))
