"""Figures drawn by plotly: the role of a series decides its line style; it has the hue of its measured partner."""

import csv
import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from scoregram.exhibits import Cell, Estimate, Figure, Series, Table, cell_text

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
"""Four colours of Okabe and Ito (blue, vermillion, bluish green, reddish purple) that show on white and on black;
colour-blind readers can tell them apart."""

GREY = "#808080"
"""Hue of series without a measured partner; null models are mixed with it."""

NULL_LABEL_ROOM = 26
"""Pixels on the right of a figure for the word at the end of its null."""

REFERENCE_HUE = "#00795c"
"""Hue of bounds without a measured partner, that of a target on a tile: a null is grey."""

NULL_WIDTH = 2.0
"""Width of a null, in a figure as in the key of the page: below that of a measured line, whose edges show beside it."""

NULL_DASHES = ("9px,6px", "15px,6px", "9px,4px,2px,4px", "15px,4px,2px,4px")
"""Dashes of several null models of one measured series; the key of the page shows the first."""

NULL_BAND = "band of the null"
"""Name, in the legend of a figure, of the interval around a null."""

SYMBOLS = ("circle", "square", "triangle-up", "cross", "x", "star")
"""Marker symbols; the next one is used each time the palette repeats."""

MOST_MARKED_POINTS = 25
"""A line with at most this many points has a marker at each of them."""

PLOTLY_CONFIG = {
    "displaylogo": False,
    "modeBarButtons": [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    "plotlyServerURL": "",
    "responsive": True,
    "showSendToCloud": False,
    "showTips": False,
}
"""Options of plotly on the page; by default it has a button that uploads the data."""


SEQUENTIAL = ((0.0, "#f2f5f9"), (0.5, "#6aaed6"), (1.0, "#08306b"))
"""Colours of a heat map of shares, from 0 upward: lightness alone tells them apart. The page has others for a dark
scheme."""
DIVERGING = ((0.0, "#d55e00"), (0.5, "#ffffff"), (1.0, "#0072b2"))
"""Colours of a heat map of cosines: orange below 0, white at 0, blue above. The page has others for a dark scheme."""
MULTIPLE_HEIGHT, FULL_HEIGHT = 260, 400
"""Heights of a figure, in pixels."""
MAP_HEIGHT = 340
"""Height of a map of cosines, whose rows are as many as its columns."""
HEAT_ROW, HEAT_MARGIN = 16, 60
"""Height of a row of a heat map, so that the names of rows do not touch, and of what is below the rows."""
LEGEND_ROW = 22
"""Height for each series beyond two, whose names need a row of their own."""


@dataclass(frozen=True)
class StackedFigure(Figure):
    """Shares that add up to 1, stacked."""


@dataclass(frozen=True)
class HeatMap:
    """A matrix as colours: one row per `y`, one column per `x`."""

    id: str
    title: str
    caption: str
    """How to read it."""
    x_title: str
    y_title: str
    x: tuple[float, ...]
    y: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    """`values[row][column]`, 0 or more; `nan` where undefined."""
    z_title: str = ""
    """What the colours are, beside their scale."""


@dataclass(frozen=True)
class CosineMap(HeatMap):
    """Cosines between the steps of a run: the numbers `x` on both axes, colours that diverge from 0."""

    limit: float = 1.0
    """Size of a cosine that has the full colour."""


@dataclass(frozen=True)
class PromptMap(HeatMap):
    """Numbers of either sign between the prompts `y`, whose numbers are `x`: rows and columns, colours from 0."""

    limit: float = 1.0
    """Size of a number that has the full colour."""


Drawing = Figure | HeatMap
"""Everything that plotly draws on a page."""


def is_wide(figure: Drawing | Table) -> bool:
    """Whether a figure needs a whole row: a heat map whose rows have long names."""
    return isinstance(figure, HeatMap) and not isinstance(figure, CosineMap) and max(map(len, figure.y), default=0) > 4


def has_null_band(figure: Drawing | Table) -> bool:
    """Whether a figure has a null with an interval, which is drawn as a grey band."""
    return isinstance(figure, Figure) and any(one.role == "null" and bool(one.low) for one in figure.series)


def plotly_parts(figure: Drawing, *, x_range: tuple[float, float] | None = None) -> dict[str, Any]:
    """`data` and `layout` of the plotly figure. Title and caption are not part of it: the page shows them as text.

    Measured series are solid with a band, the values behind a mean pale points, null models dashed and greyed, bounds
    dotted in colour, the paper's numbers open diamonds. A series named `R = 8, …` has the hue of the measured series
    `R = 8`. Text is escaped, because plotly interprets some HTML.

    Args:
        figure: What to draw.
        x_range: Draw a small figure whose axis of steps has these ends.
    """
    if isinstance(figure, HeatMap):
        return {"data": [{"type": "heatmap"} | _heat(figure)], "layout": _heat_layout(figure, x_range)}
    if isinstance(figure, StackedFigure):
        traces = [_area(one, place, figure.x_title) for place, one in enumerate(figure.series)]
    else:
        traces = _line_traces(figure)
    known = [{name: value for name, value in trace.items() if value is not None} for trace in traces]
    return {"data": [{"type": "scatter"} | trace for trace in known], "layout": _layout(figure, x_range)}


def _line_traces(figure: Figure) -> list[dict[str, Any]]:
    hues = series_hues(figure.series)
    dashes = _dashes(figure.series)
    traces: list[dict[str, Any]] = []
    above: list[dict[str, Any]] = []  # nulls, drawn last: a curve must not hide them
    for place, one in enumerate(figure.series):
        shown = _positive_series(one, figure) if figure.y_log else one
        colour, symbol = hues[place]
        band = _band(shown, colour)
        if band is not None and one.role == "null":  # the key explains the bands of measured lines
            band |= {"name": NULL_BAND, "showlegend": True}
        traces += [] if band is None else [band | {"legendgroup": str(place)}]
        style = _style(shown, colour, symbol, dashes[place])
        points = _points(shown, one, figure.x_title)
        line = style | points | {"name": html.escape(one.name), "legendgroup": str(place)}
        (above if one.role == "null" else traces).append(line)
    return traces + above


def _null_label(figure: Figure) -> list[dict[str, Any]]:
    """The word at the end of the null, right of the figure; none if there are several nulls or none."""
    nulls = [one for one in figure.series if one.role == "null"]
    known = [y for one in nulls for y in one.y if math.isfinite(y)]
    if len(nulls) != 1 or not known or (figure.y_log and known[-1] <= 0):
        return []
    height = math.log10(known[-1]) if figure.y_log else known[-1]
    place = {"x": 1, "xref": "paper", "xanchor": "left", "xshift": 3, "y": height, "yanchor": "middle"}
    return [place | {"text": "null", "showarrow": False, "font": {"size": 11, "color": GREY}}]


def data_table(figure: Drawing) -> Table:
    """The numbers of a figure as a table: one row per `x`, or per point where a series has several at one `x`."""
    if isinstance(figure, HeatMap):
        rows = [(_whole(x), *(row[place] for row in figure.values)) for place, x in enumerate(figure.x)]
        return Table(f"{figure.id}-data", figure.title, "", (figure.x_title, *figure.y), tuple(rows))
    if any(len(set(one.x)) < len(one.x) for one in figure.series):
        columns: tuple[str, ...] = ("series", figure.x_title, figure.y_title)
        rows = [
            (one.name, _whole(x), cell) for one in figure.series for x, cell in zip(one.x, _cells(one), strict=True)
        ]
        return Table(f"{figure.id}-data", figure.title, "", columns, tuple(rows))
    places = sorted({x for one in figure.series for x in one.x})
    known = [dict(zip(one.x, _cells(one), strict=True)) for one in figure.series]
    columns = (figure.x_title, *(one.name for one in figure.series))
    return Table(
        f"{figure.id}-data",
        figure.title,
        "",
        columns,
        tuple((_whole(x), *(cells.get(x) for cells in known)) for x in places),
    )


def data_csv(table: Table) -> str:
    """A table as CSV with all digits: a column with intervals becomes three, `nan` is empty."""
    bounded = [any(isinstance(row[place], Estimate) for row in table.rows) for place in range(len(table.columns))]
    ends = ("", ", low", ", high")
    names = [
        name + end for name, wide in zip(table.columns, bounded, strict=True) for end in (ends if wide else ends[:1])
    ]
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow(names)
    for row in table.rows:
        cells: list[Cell] = []
        for cell, wide in zip(row, bounded, strict=True):
            if wide:
                cells += [cell.value, cell.low, cell.high] if isinstance(cell, Estimate) else [cell, None, None]
            else:
                cells.append(cell)
        writer.writerow(["" if isinstance(cell, float) and math.isnan(cell) else cell for cell in cells])
    return made.getvalue()


def series_hues(series: Sequence[Series]) -> list[tuple[str, str]]:
    """Colour and mark of every series, in order: its measured partner's hue, greyed for null models.

    Plain grey if all null models belong to one measured series.
    """
    measured = [one.name for one in series if one.role == "measured"]
    families = [_family(one.name, measured) for one in series]
    coloured = dict.fromkeys(measured) | dict.fromkeys(
        family for family, one in zip(families, series, strict=True) if one.role == "paper"
    )
    place = {family: number for number, family in enumerate(coloured)}
    made = []
    for family, one in zip(families, series, strict=True):
        number = place.get(family)
        alone = REFERENCE_HUE if one.role == "bound" else GREY
        hue = alone if number is None else PALETTE[number % len(PALETTE)]
        symbol = SYMBOLS[(number or 0) // len(PALETTE) % len(SYMBOLS)]
        tint = mixed_colour(hue, GREY, 0.8) if len(place) > 1 else GREY
        made.append((tint if one.role == "null" else hue, symbol))
    return made


def mixed_colour(colour: str, other: str, share: float) -> str:
    """`colour` mixed with a share of `other`, both as `#RRGGBB`.

    Example:
        >>> mixed_colour("#000000", "#ff8000", 0.5)
        '#804000'
    """
    pairs = zip(_channels(colour), _channels(other), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def _channels(colour: str) -> list[int]:
    return [int(colour[start : start + 2], 16) for start in (1, 3, 5)]


def _family(name: str, measured: Sequence[str]) -> str:
    partners = [one for one in measured if name == one or name.startswith(f"{one}, ")]
    return max(partners, key=len) if partners else name.split(", ")[0]


def _dashes(series: Sequence[Series]) -> list[str]:
    measured = [one.name for one in series if one.role == "measured"]
    seen: dict[str, int] = {}
    made = []
    for one in series:
        if one.role != "null":
            made.append({"measured": "solid", "raw": "solid", "bound": "dot", "paper": "dashdot"}[one.role])
            continue
        family = _family(one.name, measured)
        number = seen[family if family in measured else ""] = seen.get(family if family in measured else "", -1) + 1
        made.append(NULL_DASHES[number % len(NULL_DASHES)])
    return made


def _style(one: Series, colour: str, symbol: str, dash: str) -> dict[str, Any]:
    if one.role == "raw":
        return {"mode": "markers", "marker": {"size": 4, "color": colour, "opacity": 0.3}, "showlegend": False}
    if one.role == "paper":
        marker = {"size": 10, "symbol": "diamond-open", "color": colour, "line": {"width": 2, "color": colour}}
    elif one.points:
        marker = {"size": 7, "symbol": symbol, "color": colour, "opacity": 0.85}
    else:
        marker = {"size": _mark_sizes(one), "symbol": symbol, "color": colour}
    if one.points:
        return {"mode": "markers", "marker": marker}
    width = {"measured": 2.6, "null": NULL_WIDTH, "bound": 1.6, "paper": 1.4}[one.role]
    marked = marker["size"] if isinstance(marker["size"], list) else [marker["size"]]
    mode = "lines+markers" if any(marked) else "lines"
    return {"mode": mode, "marker": marker, "line": {"color": colour, "width": width, "dash": dash}}


def _mark_sizes(one: Series) -> float | list[float]:
    """Marker sizes on a line: all points if they are few, else only isolated points, which no line would show."""
    if one.role == "measured" and len(one.y) <= MOST_MARKED_POINTS:
        return 5.0
    return [5.0 if alone else 0.0 for alone in _isolated_points(one.y)]


def _isolated_points(values: Sequence[float]) -> list[bool]:
    there = [False, *map(math.isfinite, values), False]
    return [there[i] and not there[i - 1] and not there[i + 1] for i in range(1, len(there) - 1)]


def _points(shown: Series, original: Series, x_title: str) -> dict[str, Any]:
    hover = [
        f"{html.escape(x_title)}: {cell_text(_whole(x))}<br>{html.escape(cell_text(cell))}"
        for x, cell in zip(original.x, _cells(original), strict=True)
    ]
    return {
        "x": _plain(shown.x),
        "y": _plain(shown.y),
        "customdata": hover,
        "hovertemplate": "%{customdata}<extra>%{fullData.name}</extra>",
        "error_y": _error_bars(shown),
    }


def _error_bars(one: Series) -> dict[str, Any] | None:
    """Intervals of points, and of a line's points that stand alone, where a band has no width."""
    if not one.low or not one.high:
        return None
    wanted = [True] * len(one.y) if one.points else _isolated_points(_band_values(one))
    above = [high - y if want else math.nan for want, high, y in zip(wanted, one.high, one.y, strict=True)]
    below = [y - low if want else math.nan for want, low, y in zip(wanted, one.low, one.y, strict=True)]
    if not any(map(math.isfinite, above + below)):
        return None
    ends = {
        "array": [max(0.0, end) for end in _finite_or_zero(above)],
        "arrayminus": [max(0.0, end) for end in _finite_or_zero(below)],
    }
    return {"type": "data", "symmetric": False, "thickness": 1.2, "width": 3} | ends


def _finite_or_zero(values: Sequence[float]) -> list[float]:
    return [value if math.isfinite(value) else 0.0 for value in values]


def _band_values(one: Series) -> list[float]:
    return [low + high + y for low, high, y in zip(one.low, one.high, one.y, strict=True)]


def _band(one: Series, colour: str) -> dict[str, Any] | None:
    """The interval of a line as a shaded polygon, one for every stretch without a gap."""
    if one.points or not one.low or not one.high:
        return None
    defined = [math.isfinite(value) for value in _band_values(one)]
    xs: list[float | None] = []
    ys: list[float | None] = []
    for there, members in groupby(range(len(defined)), key=lambda i: defined[i]):
        stretch = list(members)
        if there and len(stretch) > 1:
            xs += [*(one.x[i] for i in stretch), *(one.x[i] for i in reversed(stretch)), None]
            ys += [*(one.high[i] for i in stretch), *(one.low[i] for i in reversed(stretch)), None]
    if not xs:
        return None
    red, green, blue = _channels(colour)
    fill = {"fill": "toself", "fillcolor": f"rgba({red},{green},{blue},0.18)"}
    return {"x": xs, "y": ys, "mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"} | fill


def _positive_series(one: Series, figure: Figure) -> Series:
    """The series on a logarithmic axis: ends of intervals at or below zero move to the least positive number."""
    seen = [v for each in figure.series for v in (*each.y, *each.low, *each.high) if math.isfinite(v) and v > 0]
    least = min(seen, default=1.0)
    y = tuple(v if v > 0 else math.nan for v in one.y)
    low, high = (tuple(max(v, least) if math.isfinite(v) else v for v in ends) for ends in (one.low, one.high))
    return Series(one.name, one.x, y, low, high, one.role, one.points)


AXIS = {"automargin": True, "zeroline": False, "showline": True, "ticks": "outside", "gridcolor": "#dddddd"}


def _area(one: Series, place: int, x_title: str) -> dict[str, Any]:
    colour = PALETTE[place % len(PALETTE)]
    red, green, blue = _channels(colour)
    fill = {"stackgroup": "one", "fillcolor": f"rgba({red},{green},{blue},0.55)", "line": {"width": 1, "color": colour}}
    points = {name: value for name, value in _points(one, one, x_title).items() if name != "error_y"}
    return {"name": html.escape(one.name), "mode": "lines", **fill, **points}


def _heat(figure: HeatMap) -> dict[str, Any]:
    bar: dict[str, Any] = {"thickness": 10, "outlinewidth": 0}
    if figure.z_title:
        bar["title"] = {"text": html.escape(figure.z_title), "side": "right"}
    if isinstance(figure, CosineMap | PromptMap):
        is_cosine = isinstance(figure, CosineMap)
        shown = "cosine %{z:.3f}" if is_cosine else f"{html.escape(figure.z_title)} %{{z:.3g}}"
        return {
            "x": _plain(figure.x),
            "y": _plain(figure.x) if is_cosine else [html.escape(name) for name in figure.y],
            "z": [_plain(row) for row in figure.values],
            "colorscale": [list(stop) for stop in DIVERGING],
            "zmin": -figure.limit,
            "zmax": figure.limit,
            "meta": "diverging",  # the page's script replaces the colours in a dark scheme
            "hovertemplate": f"{html.escape(figure.x_title)}s %{{x}} and %{{y}}: {shown}<extra></extra>",
            "colorbar": bar,
        }
    return {
        "x": _plain(figure.x),
        "y": [html.escape(name) for name in figure.y],
        "z": [_plain(row) for row in figure.values],
        "colorscale": [list(stop) for stop in SEQUENTIAL],
        "zmin": 0,
        "meta": "sequential",
        "hovertemplate": f"{html.escape(figure.x_title)} %{{x}}<br>%{{y}}: %{{z:.3f}}<extra></extra>",
        "colorbar": bar,
    }


def _heat_layout(figure: HeatMap, x_range: tuple[float, float] | None) -> dict[str, Any]:
    plain = _layout(Figure(figure.id, "", "", figure.x_title, figure.y_title, ()), x_range)
    if isinstance(figure, CosineMap):  # both axes end with the cells
        axis = {"automargin": True, "zeroline": False, "ticks": "outside", "showgrid": False}
        x, y = (axis | {"title": {"text": html.escape(name)}} for name in (figure.x_title, figure.y_title))
        return plain | {"height": max(plain["height"], MAP_HEIGHT), "showlegend": False, "xaxis": x, "yaxis": y}
    columns = {"xaxis": plain["xaxis"] | {"tick0": 1, "dtick": 1}} if isinstance(figure, PromptMap) else {}
    return plain | {
        "height": max(plain["height"], HEAT_MARGIN + HEAT_ROW * len(figure.y)),
        "showlegend": False,
        "yaxis": AXIS
        | {"title": {"text": "" if is_wide(figure) else html.escape(figure.y_title)}, "type": "category", "dtick": 1},
        **columns,
    }


def _layout(figure: Figure, x_range: tuple[float, float] | None = None) -> dict[str, Any]:
    axis, is_small = AXIS, x_range is not None
    shared = {"range": list(x_range)} if x_range is not None and figure.x_title == "step" else {}
    if figure.x_title.startswith("share of"):
        shared = {"range": [0, 1]}
    labels = _null_label(figure)
    return {
        "height": (MULTIPLE_HEIGHT if is_small else FULL_HEIGHT) + LEGEND_ROW * max(0, _legend_entries(figure) - 2),
        "margin": {"l": 10, "r": 14 + (NULL_LABEL_ROOM if labels else 0), "t": 10, "b": 10},
        "annotations": labels,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 11 if is_small else 13, "color": "#222222"},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "itemwidth": 46},
        "showlegend": True,
        "hovermode": "closest",
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#808080", "activecolor": "#404040"},
        "hoverlabel": {"bgcolor": "#ffffff", "font": {"color": "#222222"}, "namelength": -1},
        "xaxis": axis | {"title": {"text": html.escape(figure.x_title)}} | _x_ticks(figure) | shared,
        "yaxis": axis | {"title": {"text": html.escape(figure.y_title)}} | _y_ticks(figure, is_small),
    }


def _legend_entries(figure: Figure) -> int:
    return has_null_band(figure) + sum(one.role != "raw" for one in figure.series)


def _y_ticks(figure: Figure, is_small: bool = False) -> dict[str, Any]:
    """Few readable ticks on a logarithmic axis, which ends at ticks; the linear axis of a small figure contains 0."""
    if not figure.y_log:
        return {"type": "linear", "rangemode": "tozero" if is_small else "normal"}
    seen = [y for one in figure.series for y in (*one.y, *one.low, *one.high) if math.isfinite(y) and y > 0]
    ticks = log_ticks(min(seen), max(seen)) if seen else []
    ends = {"range": [math.log10(ticks[0]) - 0.05, math.log10(ticks[-1]) + 0.05]} if ticks else {}
    return {"type": "log", "tickmode": "array", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]} | ends


def log_ticks(low: float, high: float) -> list[float]:
    """Ticks that cover `low` to `high` on a logarithmic axis: 1, 2 and 5 of each decade, or powers of ten if many.

    Example:
        >>> log_ticks(0.3, 4.0), log_ticks(1.0, 2e5)
        ([0.2, 0.5, 1.0, 2.0, 5.0], [1.0, 10.0, 100.0, 1000.0, 10000.0, 100000.0, 1000000.0])
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last - first > 3:
        every = math.ceil((last - first) / 7)
        return [10.0**power for power in range(first, last + every, every)]
    ticks = [float(f"{digit}e{power}") for power in range(first, last + 1) for digit in (1, 2, 5)]
    below = max((tick for tick in ticks if tick <= low), default=ticks[0])
    above = min((tick for tick in ticks if tick >= high), default=ticks[-1])
    return [tick for tick in ticks if below <= tick <= above]


def _x_ticks(figure: Figure) -> dict[str, Any]:
    """Ticks at the values themselves on a short logarithmic axis, at whole numbers on a short axis of counts."""
    places = sorted({x for one in figure.series for x in one.x if math.isfinite(x)})
    kind: dict[str, Any] = {"type": "log" if figure.x_log else "linear"}
    if figure.x_log and 0 < len(places) <= 10:
        return kind | {"tickmode": "array", "tickvals": places, "ticktext": [cell_text(_whole(x)) for x in places]}
    if figure.x_log and places:
        ticks = log_ticks(places[0], places[-1])
        return kind | {"tickmode": "array", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    whole = all(x == round(x) for x in places) and places and places[-1] - places[0] <= 20
    close = whole and all(b - a >= 1 for a, b in pairwise(places))
    return kind | ({"tick0": 0, "dtick": 1 if places[-1] - places[0] <= 12 else 2} if close else {})


def _plain(values: Sequence[float]) -> list[float | int | None]:
    return [_whole(value) if math.isfinite(value) else None for value in values]


def _whole(value: float) -> float | int:
    return int(value) if math.isfinite(value) and value == round(value) else value


def _cells(one: Series) -> list[Estimate]:
    nothing = (math.nan,) * len(one.y)
    return [Estimate(*ends) for ends in zip(one.y, one.low or nothing, one.high or nothing, strict=True)]
