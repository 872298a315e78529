import json
import math
from pathlib import Path

import pytest

import scoregram.report
from scoregram.checks import ScoregramError
from scoregram.exhibits import Estimate, Figure, Series
from scoregram.report.figures import (
    GREY,
    NULL_BAND,
    NULL_DASHES,
    NULL_WIDTH,
    PALETTE,
    PLOTLY_CONFIG,
    REFERENCE_HUE,
    data_table,
    has_null_band,
    plotly_parts,
    series_hues,
)
from scoregram.report.page import Section, page, plotly_script
from tests.report_cases import contrast

go = pytest.importorskip("plotly.graph_objects")

NAN = math.nan
X = (1.0, 2.0, 3.0, 4.0)


def figure(*series: Series, **changes) -> Figure:
    return Figure("f", "Title", "Caption.", "step", "rank", series, **changes)


def traces(*series: Series, **changes) -> list[dict]:
    return drawn(figure(*series, **changes))["data"]


def drawn(one: Figure) -> dict:
    """The parts of a figure, after plotly has validated them."""
    return json.loads(go.Figure(plotly_parts(one)).to_json())


def named(found: list[dict]) -> dict[str, dict]:
    return {trace["name"]: trace for trace in found if "name" in trace}


EIGHT = Series("R = 8", X, X)
FOUR = Series("R = 4", X, X)


def test_the_role_decides_the_line():
    found = named(
        traces(
            EIGHT,
            Series("R = 8, orthogonal", X, X, role="null"),
            Series("R = 8, shuffled", X, X, role="null"),
            Series("R = 8, least", X, X, role="bound"),
            Series("R = 8, paper", X, X, role="paper"),
        )
    )
    dash = {name: trace["line"]["dash"] for name, trace in found.items()}
    assert dash["R = 8"] == "solid" and dash["R = 8, least"] == "dot"
    assert dash["R = 8, orthogonal"] == NULL_DASHES[0]
    assert len({dash[name] for name in ("R = 8, orthogonal", "R = 8, shuffled", "R = 8, least")}) == 3
    assert found["R = 8, paper"]["marker"]["symbol"] == "diamond-open"
    assert found["R = 8, orthogonal"]["mode"] == "lines" and found["R = 8"]["mode"] == "lines+markers"


def test_a_null_is_drawn_above_the_curve_and_does_not_hide_it():
    parts = drawn(figure(Series("null", (1.0, 4.0), (2.0, 3.0), role="null"), EIGHT))
    curve, null = parts["data"]
    assert (curve["name"], null["name"]) == ("R = 8", "null")
    # narrower than a curve, with gaps: of a curve on the null both edges and the gaps show
    assert 0 < null["line"]["width"] < curve["line"]["width"] and null["line"]["dash"] == NULL_DASHES[0]
    (label,) = parts["layout"]["annotations"]
    assert (label["text"], label["y"], label["xref"], label["x"]) == ("null", 3.0, "paper", 1)
    two = (Series(name, X, X, role="null") for name in ("one", "two"))
    assert "annotations" not in drawn(figure(EIGHT, *two))["layout"]  # the legend tells them apart


def test_a_null_looks_the_same_in_every_figure_and_in_the_key():
    for others in ((), (Series("R = 8, least", X, X, role="bound"),)):
        null = named(traces(EIGHT, *others, Series("R = 8, null: if unrelated", X, X, role="null")))
        line = null["R = 8, null: if unrelated"]["line"]
        assert (line["color"], line["width"], line["dash"]) == (GREY, NULL_WIDTH, NULL_DASHES[0])
    css = (Path(scoregram.report.__file__).parent / "page.css").read_text()
    dash, gap = (int(part.removesuffix("px")) for part in NULL_DASHES[0].split(","))
    gradient = f"repeating-linear-gradient(90deg, var(--null) 0 {dash}px, transparent {dash}px {dash + gap}px)"
    assert f".key .null {{ background: {gradient}; }}" in css and f"--null: {GREY};" in css
    assert f".key .bound {{ border: 0; height: {NULL_WIDTH:g}px;" in css and f"--bound: {REFERENCE_HUE};" in css


def test_the_band_of_a_null_is_in_the_legend_and_that_of_a_curve_in_the_key():
    ends = ((0.0,) * 4, (5.0,) * 4)
    found = traces(Series("R = 8", X, X, *ends), Series("null", X, X, *ends, role="null"))
    bands = [one for one in found if one.get("fill") == "toself"]
    assert [(one.get("name"), one["showlegend"]) for one in bands] == [(None, False), (NULL_BAND, True)]
    with_band = figure(EIGHT, Series("null", X, X, *ends, role="null"))
    assert has_null_band(with_band) and not has_null_band(figure(EIGHT, Series("null", X, X, role="null")))


def test_a_logarithmic_axis_ends_at_its_ticks():
    axis = drawn(figure(Series("a", X, (35.0, 40.0, 60.0, 90.0)), y_log=True))["layout"]["yaxis"]
    assert axis["tickvals"] == [20, 50, 100]
    assert axis["range"][0] < math.log10(20) and math.log10(100) < axis["range"][1]


def test_an_axis_of_shares_spans_all_of_them():
    one = Figure("f", "", "", "share of prompts", "success rate", (Series("a", (0.25, 0.75), (0.0, 0.5)),))
    assert drawn(one)["layout"]["xaxis"]["range"] == [0, 1]


def test_a_null_has_the_hue_of_its_measured_partner_and_others_are_grey():
    series = (
        Series("R = 8, orthogonal", X, X, role="null"),
        EIGHT,
        FOUR,
        Series("R = 4, orthogonal", X, X, role="null"),
        Series("elsewhere", X, X, role="null"),
        Series("R = 80", X, X, role="null"),
        Series("R = 4, paper", X, X, role="paper"),
    )
    eight_null, eight, four, four_null, elsewhere, eighty, paper = [hue for hue, _ in series_hues(series)]
    assert (eight, four) == PALETTE[:2] and paper == four
    assert eight_null not in (eight, four_null) and four_null != four
    assert elsewhere == eighty == "#808080"  # R = 80 is no partner of R = 8


def test_colours_show_on_white_and_on_black():
    for colour in PALETTE:
        assert contrast(colour, "#ffffff") > 2 and contrast(colour, "#14161a") > 2
    for colour in PALETTE[:4]:  # as many as a figure usually has
        assert contrast(colour, "#ffffff") > 3 and contrast(colour, "#14161a") > 3


def test_further_rounds_of_the_palette_have_other_marks():
    series = [Series(f"s{i}", X, X) for i in range(2 * len(PALETTE))]
    assert len(set(series_hues(series))) == len(series)


def test_the_band_is_the_interval_and_stops_at_gaps():
    x, y = (0.0, 1.0, 2.0, 3.0, 4.0), (1.0, 2.0, NAN, 4.0, 5.0)
    line = Series("a", x, y, (0.0, 1.0, 1.0, 3.0, 4.0), (2.0, 3.0, 3.0, 5.0, 6.0))
    band, main = traces(line)
    assert band["x"] == [0, 1, 1, 0, None, 3, 4, 4, 3, None]
    assert band["y"] == [2, 3, 1, 0, None, 5, 6, 4, 3, None]
    assert band["legendgroup"] == main["legendgroup"] and band["hoverinfo"] == "skip" and not band["showlegend"]
    assert main["y"] == [1, 2, None, 4, 5] and "error_y" not in main


def test_points_and_a_lonely_step_have_error_bars():
    (cloud,) = traces(Series("a", (1.0, 2.0), (2.0, 3.0), (1.0, NAN), (4.0, NAN), points=True))
    assert cloud["mode"] == "markers"
    assert cloud["error_y"]["array"] == [2, 0] and cloud["error_y"]["arrayminus"] == [1, 0]
    (lonely,) = traces(Series("a", (1.0,), (2.0,), (1.0,), (4.0,)))
    assert lonely["error_y"]["array"] == [2] and lonely["error_y"]["arrayminus"] == [1]


def test_a_point_between_gaps_is_marked_on_a_long_line():
    y = [1.0] * 100
    y[49] = y[51] = NAN
    (main,) = traces(Series("a", tuple(map(float, range(100))), tuple(y)))
    assert [i for i, size in enumerate(main["marker"]["size"]) if size] == [50]


def test_hover_tells_value_and_interval_and_data_cannot_be_markup():
    line = Series("<a href='javascript:1'>", (1.0, 2.0), (0.5, NAN), (0.25, NAN), (0.75, NAN))
    main = traces(line)[-1]
    assert main["customdata"] == ["step: 1<br>0.500 [0.250, 0.750]", "step: 2<br>–"]
    assert main["name"] == "&lt;a href=&#x27;javascript:1&#x27;&gt;"


def test_logarithmic_axes_keep_what_is_not_positive_off_the_drawing():
    line = Series("a", (2.0, 8.0), (1.0, 0.1), (-1.0, 0.05), (2.0, 0.2))
    plain = drawn(figure(line, Series("b", (2.0,), (-1.0,)), x_log=True, y_log=True))
    assert plain["layout"]["xaxis"]["type"] == plain["layout"]["yaxis"]["type"] == "log"
    assert plain["layout"]["xaxis"]["tickvals"] == [2, 8]
    assert plain["data"][0]["y"] == [2, 0.2, 0.05, 0.05, None]  # the end below zero lies at the least positive number
    assert plain["data"][2]["y"] == [None]


def test_no_button_sends_data_away():
    assert (
        PLOTLY_CONFIG["showSendToCloud"] is False
        and PLOTLY_CONFIG["displaylogo"] is False
        and PLOTLY_CONFIG["plotlyServerURL"] == ""
    )
    assert PLOTLY_CONFIG["modeBarButtons"] == [["toImage", "zoom2d", "pan2d", "resetScale2d"]]


def test_every_number_is_in_the_table():
    other = Series("b", (2.0, 5.0), (7.0, 8.0))
    table = data_table(figure(Series("a", (1.0, 2.0), (3.0, 4.0), (2.0, 3.0), (4.0, 5.0)), other))
    assert table.columns == ("step", "a", "b")
    assert table.rows[0][:2] == (1, Estimate(3.0, 2.0, 4.0)) and table.rows[0][2] is None
    assert [row[0] for row in table.rows] == [1, 2, 5]


def test_a_cloud_with_several_points_at_one_place_has_a_row_for_each():
    table = data_table(figure(Series("a", (1.0, 1.0), (3.0, 4.0), points=True)))
    assert table.columns == ("series", "step", "rank") and len(table.rows) == 2


def test_without_plotly_the_error_says_what_to_install(monkeypatch):
    plotly_script.cache_clear()
    monkeypatch.setattr("scoregram.report.page.find_spec", lambda name: None)
    with pytest.raises(ScoregramError, match=r"pip install 'scoregram\[report\]'"):
        page(title="t", lead="l", sections=[Section("s", "", (figure(EIGHT),))])
