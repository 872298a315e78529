"""What a mutant changes in a running process, and the page shows the record of the last run."""

import gc
import inspect
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from scoregram.gram import row_gram
from tests.mutant_code import Mutant, changed_functions, place
from tests.mutant_runner import package_functions
from tests.mutants import RECORD, all_mutants

PAGE = (Path(__file__).parents[1] / "docs" / "trust.md").read_text(encoding="utf-8")
SOURCE = """
LIMIT = 3

def double(x):
    return 2 * x

class Counter:
    step = 1

    def count(self, xs):
        return sum(self.step for _ in xs)

def outer(n):
    def inner(x):
        return x + n
    return inner
"""


def changed_names(new: str) -> list[str] | None:
    changed = changed_functions(compile(SOURCE, "a.py", "exec"), compile(new, "a.py", "exec"))
    return None if changed is None else [old.co_qualname for old, _ in changed]


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("2 * x", "3 * x", ["double"]),
        ("2 * x", "2.0 * x", ["double"]),  # equal constants of another type
        ("return 2 * x", "y = x\n    return 2 * y", ["double"]),
        ("self.step for", "2 for", ["Counter.count", "Counter.count.<locals>.<genexpr>"]),
        ("x + n", "x - n", ["outer", "outer.<locals>.inner"]),
        ("\nclass", "\n\n\nclass", []),  # lines that move change nothing
        ("LIMIT = 3", "LIMIT = 4", None),
        ("step = 1", "step = 2", None),
        ("def double(x)", "def double(x=1)", None),
    ],
)
def test_the_functions_that_an_edit_changes(old, new, names):
    assert SOURCE.count(old) == 1
    assert changed_names(SOURCE.replace(old, new)) == names


def test_functions_are_found_although_the_suite_has_frozen_them():
    """Else every mutant of a function needs an import of its own, and all of its tests, the cheapest first."""
    gc.freeze()
    place_of_row_gram = place(inspect.unwrap(row_gram).__code__)
    assert inspect.unwrap(row_gram) in package_functions()[place_of_row_gram]


def test_a_mutant_selects_files_tests_and_names():
    mutant = Mutant(
        "area", "name", "a.py", 0, 0, "", ("tests/test_a.py", "tests/test_b.py::test_x"), ("[k2]", "refused")
    )
    chosen = ["tests/test_a.py::test_y[k2]", "tests/test_b.py::test_x[k2]", "tests/test_a.py::test_refused"]
    others = ["tests/test_a.py::test_y[k1]", "tests/test_b.py::test_x2[k2]", "tests/test_c.py::test_refused"]
    assert [test for test in [*chosen, *others] if mutant.selects(test)] == chosen


def test_the_page_shows_the_record():
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert record["counts"] == {
        area: dict(Counter(row["outcome"] for row in record["rows"] if row["area"] == area))
        for area in record["counts"]
    }
    shown = re.findall(r"^\| ([a-z ]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|", PAGE, re.MULTILINE)
    table = {area: [int(figure.replace(",", "")) for figure in figures] for area, *figures in shown}
    kinds = ("killed", "survived", "equivalent")
    rows = {area: [counts.get(kind, 0) for kind in kinds] for area, counts in record["counts"].items()}
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    assert table == {area: [sum(row), *row] for area, row in rows.items()}


def test_the_record_names_every_edit():
    """`make mutants MUTANT_FLAGS=--survivors` runs those that it lacks."""
    recorded = {(row["area"], row["name"]) for row in json.loads(RECORD.read_text(encoding="utf-8"))["rows"]}
    assert [f"{one.area}: {one.name}" for one in all_mutants("") if (one.area, one.name) not in recorded] == []
