"""One self-contained HTML file that opens from disk without a network.

Its content security policy forbids loading anything and allows only the two scripts of the page, by their hashes.
Text from data is escaped.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from scoregram import __version__
from scoregram.exhibits import Cell, Estimate, Exhibit, Figure, Table, cell_text, estimate_parts
from scoregram.report.figures import PLOTLY_CONFIG, data_table, plotly_figure
from scoregram.runs import disk_errors, write_atomically

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Section:
    """A part of a page: a title, text, and exhibits below each other."""

    title: str
    text: str = ""
    """Plain text. Blank lines separate paragraphs; lines that begin with `- ` make a list."""
    exhibits: Sequence[Exhibit] = ()


def write_page(
    path: Path, *, title: str, lead: str, sections: Sequence[Section], redo: str = "", trust: Sequence[str] = ()
) -> Path:
    """Write the page atomically; the same arguments give the same bytes.

    Args:
        path: File to write; its folder must exist.
        title: Title of the page.
        lead: The main result in one sentence, plain text.
        sections: In order.
        redo: The command that makes the page again, for its footer.
        trust: What a reader must know before using the numbers, a sentence each, shown below the lead.

    Returns:
        `path`.

    Raises:
        ScoregramError: If the file cannot be written, or there is a figure and plotly is not installed.
    """
    content = page(title=title, lead=lead, sections=sections, redo=redo, trust=trust).encode()
    with disk_errors(path, caller="report"):
        write_atomically(path, content)
    return path


def page(*, title: str, lead: str, sections: Sequence[Section], redo: str = "", trust: Sequence[str] = ()) -> str:
    """The page as text."""
    ids = _exhibit_ids(sections)
    figures = [
        (f"{anchor}-plot", exhibit)
        for section, row in zip(sections, ids, strict=True)
        for exhibit, anchor in zip(section.exhibits, row, strict=True)
        if isinstance(exhibit, Figure)
    ]
    scripts = [_plotly(), _drawing(figures)] if figures else []
    body = "\n".join(_section(section, number, ids[number]) for number, section in enumerate(sections))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{(HERE / 'page.css').read_text(encoding='utf-8')}</style>\n</head>\n"
        f'<body>\n<main>\n<header>\n<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n'
        f"{_trust(trust)}</header>\n"
        f"{_contents(sections, ids)}\n{_without_scripts(figures)}{body}\n{_footer(redo)}\n</main>\n"
        + "".join(f"<script>{script}</script>\n" for script in scripts)
        + "</body>\n</html>\n"
    )


def _trust(sentences: Sequence[str]) -> str:
    listed = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<ul class="trust" aria-label="How far to trust these numbers">{listed}</ul>\n' if listed else ""


def _exhibit_ids(sections: Sequence[Section]) -> list[list[str]]:
    """A unique HTML id for every exhibit: its own id, with a number if that is taken."""
    taken: set[str] = set()
    made = []
    for section in sections:
        row = []
        for exhibit in section.exhibits:
            wanted = anchor = identifier(exhibit.id)
            number = 1
            while anchor in taken:
                number += 1
                anchor = f"{wanted}-{number}"
            taken.add(anchor)
            row.append(anchor)
        made.append(row)
    return made


def _section(section: Section, number: int, ids: Sequence[str]) -> str:
    exhibits = "\n".join(exhibit_block(exhibit, anchor) for exhibit, anchor in zip(section.exhibits, ids, strict=True))
    head = f'<section aria-labelledby="section-{number}">\n<h2 id="section-{number}">{escape(section.title)}</h2>'
    return f"{head}\n{paragraphs(section.text)}\n{exhibits}\n</section>"


def _contents(sections: Sequence[Section], ids: Sequence[Sequence[str]]) -> str:
    items = []
    for number, (section, row) in enumerate(zip(sections, ids, strict=True)):
        links = "".join(
            f'<li><a href="#{anchor}">{escape(exhibit.title)}</a></li>'
            for exhibit, anchor in zip(section.exhibits, row, strict=True)
        )
        below = f"<ul>{links}</ul>" if links else ""
        items.append(f'<li><a href="#section-{number}">{escape(section.title)}</a>{below}</li>')
    listed = "\n".join(items)
    return f'<nav aria-labelledby="contents">\n<h2 id="contents">Contents</h2>\n<ol>\n{listed}\n</ol>\n</nav>'


def _without_scripts(figures: Sequence[tuple[str, Figure]]) -> str:
    if not figures:
        return ""
    return "<noscript><p>Figures are drawn by JavaScript; without it, open “Data as table” below each.</p></noscript>\n"


def _footer(redo: str) -> str:
    again = f" Make it again with <code>{escape(redo)}</code>." if redo else ""
    return (
        f"<footer><p>Written by scoregram {escape(__version__)}.{again} Nothing is loaded from a network.</p></footer>"
    )


def _plotly() -> str:
    from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingImports]

    return get_plotlyjs()


def _drawing(figures: Sequence[tuple[str, Figure]]) -> str:
    """The script that draws every figure; data inside it is escaped so that it cannot close the script element."""
    config = json.dumps(PLOTLY_CONFIG)
    specs = []
    for anchor, figure in figures:
        parts = plotly_figure(figure).to_plotly_json()
        plain = json.dumps({"id": anchor, "data": parts["data"], "layout": parts["layout"]}, allow_nan=False)
        specs.append(plain[:-1] + f', "config": {config}}}')
    data = "[\n" + ",\n".join(specs) + "\n]"
    safe = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f"const figures = {safe};\n{(HERE / 'page.js').read_text(encoding='utf-8')}"


def _policy(scripts: Sequence[str]) -> str:
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts) or "'none'"
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def paragraphs(text: str) -> str:
    """Plain text as HTML: blank lines separate paragraphs; a paragraph whose lines all begin with `- ` is a list.

    Example:
        >>> paragraphs("a < b")
        '<p>a &lt; b</p>'
    """
    blocks = [block.strip() for block in re.split(r"\n\s*\n", text) if block.strip()]
    return "\n".join(_list_block(block) if _is_list(block) else f"<p>{escape(block)}</p>" for block in blocks)


def table_block(table: Table, anchor: str) -> str:
    """A table under its title, with how to read it."""
    caption = f'<p class="caption">{escape(table.caption)}</p>' if table.caption else ""
    return f'<h3 id="{anchor}">{escape(table.title)}</h3>\n{_scrolling_table(table, f"{anchor}-table")}\n{caption}'


def figure_block(figure: Figure, anchor: str) -> str:
    """An element for plotly to draw in, the caption, and the same numbers as a table."""
    label = escape(f"{figure.title}. {figure.caption} The same numbers follow as a table.", quote=True)
    data = _scrolling_table(data_table(figure), f"{anchor}-data")
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
    """Text as an HTML id that needs no escaping.

    Example:
        >>> identifier("R = 8 <b>")
        'r-8-b'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "exhibit"


def _is_list(block: str) -> bool:
    return all(line.lstrip().startswith("- ") for line in block.splitlines())


def _list_block(block: str) -> str:
    items = "\n".join(f"<li>{escape(line.lstrip()[2:])}</li>" for line in block.splitlines())
    return f"<ul>\n{items}\n</ul>"


def _scrolling_table(table: Table, anchor: str) -> str:
    """A table that scrolls on its own on a narrow page, also by keyboard."""
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
