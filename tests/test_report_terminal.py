import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from scoregram.exhibits import Estimate, Table, cell_text, number_text
from scoregram.report import show_table

TABLE = Table(
    "t",
    "Table [1]",
    "How to read it.",
    ("R", "effective rank of the stack", "null", "note"),
    ((2, Estimate(1.94, 1.9, 1.98), math.nan, "a [red] word"), (16, 2.41, None, "<b>")),
)


def printed(table: Table, width: int, *, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal)
    show_table(table, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@given(st.floats(1e-9, 1e9), st.sampled_from([-1, 1]))
def test_a_number_is_read_back_to_three_digits(size, sign):
    value = sign * size
    assert float(number_text(value, value)) == pytest.approx(value, rel=0.0051)


@given(st.floats(1e-2, 1e5), st.floats(0, 1), st.floats(0, 1))
def test_an_interval_has_the_decimals_of_its_largest_number(value, below, above):
    text = cell_text(Estimate(value, value * (1 - below), value * (1 + above)))
    middle, rest = text.split(" ", 1)
    numbers = [middle, *rest.strip("[]").split(", ")]
    assert len({len(number.partition(".")[2]) for number in numbers}) == 1
    assert float(numbers[2]) == pytest.approx(value * (1 + above), rel=0.0051)


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (None, ""),
        (7, "7"),
        (123456, "123456"),
        (True, "yes"),
        (0.0, "0"),
        (1234.5, "1234"),
        (math.nan, "–"),
        (math.inf, "∞"),
        (Estimate(math.nan), "–"),
        (Estimate(2.0, 1.0, math.inf), "2.00 [1.00, ∞]"),
        (Estimate(0.0, 0.0, 0.0), "0 [0, 0]"),
        (Estimate(-0.0001, -0.5, 0.5), "0.000 [-0.500, 0.500]"),
    ],
)
def test_cells(cell, text):
    assert cell_text(cell) == text


@pytest.mark.parametrize("width", [36, 48, 60, 80, 120])
def test_nothing_is_cut_off_at_any_width(width):
    out = printed(TABLE, width)
    assert max(map(len, out.splitlines())) <= width
    words = " ".join(out.split())
    for part in ("Table [1]", "How to read it.", "1.94", "[1.90, 1.98]", "–", "16", "2.41", "[red]", "<b>"):
        assert part in words


def test_a_file_gets_no_colours_and_a_terminal_a_dimmed_caption():
    assert "\x1b" not in printed(TABLE, 80)
    assert "\x1b[2mHow to read it.\x1b[0m" in printed(TABLE, 80, terminal=True)


def test_a_row_is_one_line_where_there_is_room():
    row = next(line for line in printed(TABLE, 80).splitlines() if "1.94" in line)
    assert row.split() == ["2", "1.94", "[1.90,", "1.98]", "–", "a", "[red]", "word"]


NUMBERS = Table(
    "wide",
    "Wide",
    "",
    ("name", *(f"column {place}" for place in range(9))),
    tuple(
        (f"a-long-name-of-row-{row}", *(Estimate(10.0 * row + place, -99.0, 99.9) for place in range(9)))
        for row in range(3)
    ),
)
"""Too wide for 80 characters, with the intervals below their values too."""


@pytest.mark.parametrize("width", [80, 88])
def test_columns_that_do_not_fit_are_printed_in_parts_behind_the_first(width):
    out = printed(NUMBERS, width)
    heads = [line.split() for line in out.splitlines() if "name" in line and "column" in line]
    assert [len(line) for line in heads] == [7, 7, 7]  # three columns each, where 88 has room for four, four and one
    assert max(map(len, out.splitlines())) <= width
    for row, each in enumerate(NUMBERS.rows):
        lines = [line.split() for line in out.splitlines() if line.split()[:1] == [each[0]]]
        assert [float(cell) for line in lines for cell in line[1:]] == [10 * row + place for place in range(9)]
    assert out.count("[-99.0, 99.9]") == 27


def test_rows_are_blocks_where_a_column_does_not_fit_beside_the_first():
    blocks = printed(NUMBERS, 34)
    assert max(map(len, blocks.splitlines())) <= 34 and blocks.count("column 7") == 3
    assert "a-long-name-of-row-2" in blocks


def test_a_name_is_never_broken_in_a_grid():
    table = Table("t", "t", "", ("estimator", "value"), (("reinforce++-baseline", Estimate(1.0, 0.5, 1.5)),))
    for width in range(34, 60):
        assert "reinforce++-baseline" in printed(table, width)


def test_an_empty_table_says_its_title():
    assert "Nothing" in printed(Table("t", "Nothing", "", ("a", "b"), ()), 80)
