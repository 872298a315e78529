"""One self-contained HTML file that opens from disk without a network.

The templates are jinja2's, with autoescape on: text from data is text. The content security policy of a page forbids
loading anything and allows only the two scripts of the page, by their hashes.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from scoregram import __version__
from scoregram.checks import fail
from scoregram.exhibits import Cell, Estimate, Table, cell_text, estimate_parts
from scoregram.reading import Curve, Indicator
from scoregram.report.figures import PLOTLY_CONFIG, Drawing, data_csv, data_table, is_wide, plotly_parts
from scoregram.report.words import linked_rollouts, marked_setting, marked_terms
from scoregram.runs import disk_errors, write_atomically

HERE = Path(__file__).parent
STATE_WORDS = {"good": "✓ good", "watch": "~ watch", "act": "! act", "unknown": "not known"}
"""Words of an indicator's state; the sign before it does not need colour."""
CARD_STATES = {"critical": "act", "warning": "watch", "note": "watch"}
"""Severity of a finding → its state on the scale of the indicators: a page has one scale of words."""


@dataclass(frozen=True)
class Section:
    """A part of a page: a title, text, and exhibits."""

    title: str
    text: str = ""
    """Plain text. Blank lines separate paragraphs; lines that begin with `- ` make a list."""
    exhibits: Sequence[Table | Drawing] = ()
    x_range: tuple[float, float] | None = None
    """If given, figures are small multiples that share this horizontal axis."""


@dataclass(frozen=True)
class PlacedSection:
    """A section with the ids of its elements in the document."""

    section: Section
    anchor: str
    exhibits: tuple[tuple[Table | Drawing, str], ...]
    """Each with its id."""

    @property
    def title(self) -> str:
        """Title of the section."""
        return self.section.title

    @property
    def text(self) -> str:
        """Text of the section."""
        return self.section.text

    @property
    def layout(self) -> str:
        """Class of the element that holds the exhibits: `multiples` are small figures in rows of three, or of four.

        Rows of four where rows of three would leave a figure alone in the last one.
        """
        if self.section.x_range is None:
            return "single"
        small = sum(not isinstance(one, Table) and not is_wide(one) for one in self.section.exhibits)
        return "multiples four" if small > 1 and small % 3 == 1 else "multiples"

    def figures(self) -> list[tuple[str, Drawing]]:
        """Id of the element to draw in, and the figure, in order."""
        return [(f"{anchor}-plot", one) for one, anchor in self.exhibits if not isinstance(one, Table)]


@dataclass(frozen=True)
class LiveRun:
    """A run that a page follows."""

    name: str
    """Name by which the server knows it."""
    version: str
    """Version of its files that the page shows."""


@dataclass(frozen=True)
class TextBlock:
    """A paragraph, or a list."""

    is_list: bool
    lines: list[str] = field(default_factory=list)


def write_page(
    path: Path,
    *,
    title: str,
    lead: str,
    sections: Sequence[Section],
    redo: str = "",
    trust: Sequence[tuple[str, str]] = (),
    answers: Sequence[tuple[str, str]] = (),
) -> Path:
    """Write a page of sections atomically; the same arguments give the same bytes.

    Args:
        path: File to write; its folder must exist.
        title: Title of the page.
        lead: The main result in one sentence, plain text.
        sections: In order.
        redo: The command that makes the page again, for its footer.
        trust: What a reader must know before using the numbers, shown below the lead: the word of each sentence (a key
            of `STATE_WORDS`) and the sentence.
        answers: Questions of a reader and their answers, shown before the contents.

    Returns:
        `path`.

    Raises:
        ScoregramError: If the file cannot be written, or there is a figure and plotly is not installed.
    """
    text = page(title=title, lead=lead, sections=sections, redo=redo, trust=trust, answers=answers)
    return write_document(path, text)


def write_document(path: Path, text: str) -> Path:
    """Write a document atomically.

    Raises:
        ScoregramError: If the file cannot be written.
    """
    with disk_errors(path, caller="report"):
        write_atomically(path, text.encode())
    return path


def page(
    *,
    title: str,
    lead: str,
    sections: Sequence[Section],
    redo: str = "",
    trust: Sequence[tuple[str, str]] = (),
    answers: Sequence[tuple[str, str]] = (),
    broad: bool = False,
) -> str:
    """The page as text; `broad` for small multiples, the other arguments as for `write_page`."""
    shown = {"title": title, "lead": lead, "trust": trust, "answers": answers, "broad": broad}
    return document("sections.html", sections, redo=redo, **shown)


def document(
    template: str,
    sections: Sequence[Section],
    *,
    data: Mapping[str, Any] | None = None,
    **shown: Any,
) -> str:
    """A whole document: a template filled with sections, their figures, and further values.

    Args:
        template: A file in `templates/`.
        sections: In order.
        data: What the script of the page needs besides figures; JSON values.
        shown: Further values of the template.
    """
    placed = placed_sections(sections)
    drawn = page_data(placed, data)
    scripts = [plotly_script(), _page_script(_safe_json(drawn))] if drawn["figures"] or data else []
    return _rendered(template, scripts, sections=placed, is_live=False, **shown)


def live_documents(
    template: str, sections: Sequence[Section], live: LiveRun, *, data: Mapping[str, Any] | None = None, **shown: Any
) -> tuple[str, str]:
    """A page that follows a run, and its update as JSON: `version`, new content of `main`, and `page`, data to draw.

    Args:
        template: As for `document`.
        sections: As for `document`.
        live: The run that the page follows by asking the server that it came from.
        data: As for `document`.
        shown: As for `document`.
    """
    placed = placed_sections(sections)
    drawn = _safe_json(page_data(placed, data))
    update = {"version": live.version, "main": live_block(template, sections=placed, **shown)}
    scripts = [plotly_script(), _page_script(drawn), _follow_script(live)]
    html = _rendered(template, scripts, sections=placed, is_live=True, **shown)
    return html, f'{_safe_json(update)[:-1]},"page":{drawn}}}'


def _follow_script(live: LiveRun) -> str:
    follow = (HERE / "live.js").read_text(encoding="utf-8")
    return f"const run = {_safe_json(live.name)};\nlet shownVersion = {_safe_json(live.version)};\n{follow}"


def live_block(template: str, **shown: Any) -> str:
    """The content of `main` alone."""
    found = templates().get_template(template)
    context = found.new_context({"scripts": (), "version": __version__, "is_live": True, **shown})
    return "".join(found.blocks["content"](context))


def live_document(template: str, *, script: str = "", **shown: Any) -> str:
    """A document of the server that draws no figure; `script` is a file of this package that it runs."""
    scripts = [(HERE / script).read_text(encoding="utf-8")] if script else []
    return _rendered(template, scripts, sections=(), redo="", is_live=True, **shown)


def page_data(placed: Sequence[PlacedSection], data: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the script of a page draws; JSON values."""
    figures = [figure_json(anchor, figure, one.section.x_range) for one in placed for anchor, figure in one.figures()]
    return {"figures": figures, **(data or {})}


def _rendered(template: str, scripts: Sequence[str], *, is_live: bool, **shown: Any) -> str:
    return (
        templates()
        .get_template(template)
        .render(
            scripts=[Markup(script) for script in scripts],  # nothing in them is markup: see `_safe_json`
            css=Markup((HERE / "page.css").read_text(encoding="utf-8")),
            policy=_policy(scripts, is_live),
            version=__version__,
            is_live=is_live,
            **shown,
        )
    )


@cache
def templates() -> jinja2.Environment:
    """The templates of this package; an unknown name in one of them is an error."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "as_setting": marked_setting,
        "blocks": text_blocks,
        "card_state": CARD_STATES.__getitem__,
        "data_table": data_table,
        "grid": table_grid,
        "is_table": lambda one: isinstance(one, Table),
        "is_wide": is_wide,
        "sparkline": sparkline,
        "state_word": STATE_WORDS.__getitem__,
        "terms": marked_terms,
        "to_rollouts": linked_rollouts,
    }
    return made


def placed_sections(sections: Sequence[Section]) -> list[PlacedSection]:
    """Sections with a unique HTML id for every exhibit: its own id, with a number if that is taken."""
    taken: set[str] = set()
    made = []
    for number, section in enumerate(sections):
        exhibits = []
        for exhibit in section.exhibits:
            wanted = anchor = identifier(exhibit.id)
            again = 1
            while anchor in taken:
                again += 1
                anchor = f"{wanted}-{again}"
            taken.add(anchor)
            exhibits.append((exhibit, anchor))
        made.append(PlacedSection(section, f"section-{number}", tuple(exhibits)))
    return made


def figure_json(anchor: str, figure: Drawing, x_range: tuple[float, float] | None = None) -> dict[str, Any]:
    """What the script of the page draws, and the numbers as CSV."""
    return {
        "id": anchor,
        **plotly_parts(figure, x_range=x_range),
        "config": PLOTLY_CONFIG,
        "csv": data_csv(data_table(figure)),
    }


@cache
def plotly_script() -> str:
    """The browser library that draws figures, from the installed package, without importing the package itself.

    Raises:
        ScoregramError: If plotly is not installed.
    """
    found = find_spec("plotly")
    if found is None or not found.submodule_search_locations:
        fail("report", "figures need plotly", "no such package", "Install it: pip install 'scoregram[report]'.")
    folder = Path(found.submodule_search_locations[0])
    return (folder / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def _page_script(data: str) -> str:
    """The script of the page, from its data as JSON."""
    return f"const page = {data};\n{(HERE / 'page.js').read_text(encoding='utf-8')}drawPage(page);\n"


def _safe_json(data: Any) -> str:
    """JSON in which nothing can close the script element around it."""
    if isinstance(data, list) and data and isinstance(data[0], dict):
        return f"[{','.join(map(_safe_json, data))}]"  # one by one: other threads of the server can answer in between
    if isinstance(data, dict) and any(isinstance(value, list) for value in data.values()):
        return "{" + ",".join(f"{_plain_json(str(name))}:{_safe_json(value)}" for name, value in data.items()) + "}"
    return _plain_json(data)


def _plain_json(data: Any) -> str:
    plain = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(scripts: Sequence[str], is_live: bool) -> str:
    """The content security policy: nothing may be loaded; a live page may ask its own server."""
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts) or "'none'"
    rules = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"
    rules += "; connect-src 'self'; form-action 'self'" if is_live else ""
    return Markup(rules)  # hashes are base64, so an attribute can hold them


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def text_blocks(text: str) -> list[TextBlock]:
    r"""Plain text as paragraphs and lists: blank lines separate them; a list's lines all begin with `- `.

    Example:
        >>> [(block.is_list, block.lines) for block in text_blocks("a < b\n\n- c\n- d")]
        [(False, ['a < b']), (True, ['c', 'd'])]
    """
    blocks = [block.strip() for block in re.split(r"\n\s*\n", text) if block.strip()]
    made = []
    for block in blocks:
        lines = [line.lstrip() for line in block.splitlines()]
        is_list = all(line.startswith("- ") for line in lines)
        made.append(TextBlock(is_list, [line[2:] for line in lines] if is_list else [block]))
    return made


def identifier(text: str) -> str:
    """Text as an HTML id that needs no escaping.

    Example:
        >>> identifier("R = 8 <b>")
        'r-8-b'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "exhibit"


def numeric_columns(table: Table) -> list[bool]:
    """Whether a column holds no text, so that it is aligned on the right."""
    return [not any(isinstance(row[place], str) for row in table.rows) for place in range(len(table.columns))]


def table_grid(table: Table) -> Markup:
    """A table as HTML; a page has thousands of cells, for which a template takes several times as long."""
    sides = [' class="n"' if numeric else "" for numeric in numeric_columns(table)]
    heads = "".join(
        f'<th scope="col"{side}>{escape(name)}</th>' for name, side in zip(table.columns, sides, strict=True)
    )
    rows = [
        "".join(
            f'<th scope="row"{side}>{cell_html(cell)}</th>' if not place else f"<td{side}>{cell_html(cell)}</td>"
            for place, (cell, side) in enumerate(zip(row, sides, strict=True))
        )
        for row in table.rows
    ]
    body = "".join(f"<tr>{row}</tr>\n" for row in rows)
    return Markup(f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>")


def cell_html(cell: Cell) -> Markup:
    """Escaped text of a cell: its value and, where there is one, its interval."""
    parts = estimate_parts(cell) if isinstance(cell, Estimate) else (cell_text(cell),)
    if len(parts) == 2:
        return Markup(f'{escape(parts[0])} <span class="interval">{escape(parts[1])}</span>')
    return Markup(f'<span title="undefined">{escape(parts[0])}</span>') if is_undefined(cell) else escape(parts[0])


def is_undefined(cell: Cell) -> bool:
    """Whether a cell is a number that is `nan`."""
    value = cell.value if isinstance(cell, Estimate) else cell
    return isinstance(value, float) and math.isnan(value)


BOX = (200, 80)
"""Width and height of the drawing of a tile, in units that the page stretches to the tile."""


def sparkline(indicator: Indicator) -> dict[str, Any] | None:
    """The drawing of a tile in a box of 200 by 80: line, band, ticks, target, and a second line if there is one.

    Values that are not smoothed are dots too: a few evaluations are no continuous curve. None without two values.
    """
    curve, other = indicator.curve, indicator.beside
    known = _known_points(curve)
    if len(known) < 2:
        return None
    both = [*known, *_known_points(other)]
    target = indicator.target
    # the band of a running mean may leave the box: wide intervals must not press the line flat
    ends = [y for drawn in (curve, other) if not drawn.is_smoothed for y in (*drawn.low, *drawn.high)]
    heights = [y for _, y in both] + [y for y in (target, *indicator.scale, *ends) if math.isfinite(y)]
    low, high = min(heights), max(heights)
    left, right = min(x for x, _ in both), max(x for x, _ in both)
    width, full = BOX

    def place(x: float, y: float) -> tuple[str, float]:
        share = (min(max(y, low), high) - low) / (high - low) if high > low else 0.5
        return f"{width * (x - left) / (right - left):.1f}", round(full - 2 - (full - 4) * share, 1)

    def line(drawn: Curve) -> str:
        return " ".join(f"{x},{y}" for x, y in (place(*point) for point in _known_points(drawn)))

    mean = f"mean of {curve.window} steps" if curve.is_smoothed else ""
    return {
        "points": line(curve),
        "dots": [] if curve.is_smoothed else [place(*point) for point in known],
        "band": _band_outline(curve, place),
        "beside": line(other),
        "beside_band": _band_outline(other, place),
        "beside_dots": [] if other.is_smoothed else [place(*point) for point in _known_points(other)],
        "target": place(left, target)[1] if math.isfinite(target) else None,
        "ticks": [(place(left, tick)[1], f"{tick:g}") for tick in round_ticks(low, high)],
        "first": f"step {left:g}",
        "last": f"step {right:g}",
        "mean": mean,
    }


def _known_points(curve: Curve) -> list[tuple[float, float]]:
    return [(x, y) for x, y in zip(curve.steps, curve.mean, strict=True) if math.isfinite(y)]


def _band_outline(curve: Curve, place: Callable[[float, float], tuple[str, float]]) -> str:
    """The band of a curve as the corners of a polygon; empty if it has none."""
    ends = [(x, low, high) for x, low, high in zip(curve.steps, curve.low, curve.high, strict=True) if low <= high]
    if len(ends) < 2:
        return ""
    corners = [place(x, high) for x, _, high in ends] + [place(x, low) for x, low, _ in reversed(ends)]
    return " ".join(f"{x},{y}" for x, y in corners)


def round_ticks(low: float, high: float) -> list[float]:
    """Three or a few more round numbers within a range: multiples of 5, 2 or 1 times a power of ten.

    Example:
        >>> round_ticks(0.0, 1.0), round_ticks(-0.1, 1.7), round_ticks(0.0, 0.1), round_ticks(2.0, 2.0)
        ([0.0, 0.5, 1.0], [0.0, 0.5, 1.0, 1.5], [0.0, 0.05, 0.1], [2.0])
    """
    if not high > low:
        return [low]
    power = math.floor(math.log10(high - low))
    for step in (digit * 10.0**exponent for exponent in (power, power - 1) for digit in (5, 2, 1)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first >= 2:
            return [float(f"{number * step:.12g}") for number in range(first, last + 1)]
    return [low, high]
