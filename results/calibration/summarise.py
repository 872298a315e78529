"""The tables of this page and of docs/training.md, from calibration.json.

python summarise.py            print the tables
python summarise.py --write    put them between their marks in README.md and docs/training.md

*Claimed* is the mean confidence `max(q, 1 − q)` of the forecasts `q` of a step, *actual* the mean true chance of the
outcome that the policy called likelier, *overconfidence* their difference, *distance* the mean of `|q − chance|`.
Intervals are 95 %, Student's t over seeds.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from scoregram.bootstrap import t_mean
from scoregram.exhibits import cell_text

HERE = Path(__file__).parent
PAGES = (HERE / "README.md", HERE.parent.parent / "docs" / "training.md")
COLUMNS = ("claimed", "actual", "overconfidence", "distance from the chance")
"""Columns of a block of steps in the record, after its last step."""
SHOWN_BLOCKS = (0, 1, 2, 4, 9)
"""Blocks of ten steps that the course shows."""


@cache
def stored() -> Mapping[str, Sequence[Sequence[Sequence[float]]]]:
    """Method → seed → block of ten steps → last step and the values of `COLUMNS`."""
    return json.loads((HERE / "calibration.json").read_text(encoding="utf-8"))


def end_table() -> str:
    """Means over the last block."""
    rows = [
        [method, *(cell_text(t_mean([blocks[-1][1 + place] for blocks in runs])) for place in range(len(COLUMNS)))]
        for method, runs in stored().items()
    ]
    return markdown(("method", *COLUMNS), rows)


def course_table() -> str:
    """Overconfidence over training."""
    place = 1 + COLUMNS.index("overconfidence")
    rows = [
        [method, *(cell_text(t_mean([blocks[block][place] for blocks in runs])) for block in SHOWN_BLOCKS)]
        for method, runs in stored().items()
    ]
    first = next(iter(stored().values()))[0]
    heads = [f"steps {first[block][0] - 9:g} to {first[block][0]:g}" for block in SHOWN_BLOCKS]
    return markdown(("overconfidence", *heads), rows)


def markdown(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [names, ["---"] * len(names), *rows])


TABLES: Mapping[str, Callable[[], str]] = {"calibration end": end_table, "calibration course": course_table}


def filled(text: str) -> str:
    """A page with every table that it has a mark for computed anew."""
    for mark, make in TABLES.items():
        begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
        if begin in text:
            head, rest = text.split(begin)
            text = f"{head}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    """Print the tables, or write them into the pages."""
    if "--write" in sys.argv:
        for page in PAGES:
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n\n".join(f"{mark}\n\n{make()}" for mark, make in TABLES.items()))


if __name__ == "__main__":
    main()
