"""Tables of the committed replications in Markdown, from `results/*/exhibits.json` and `verdicts.json`.

python results/table.py            print them
python results/table.py --write    write them between their marks in docs/replication.md
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGES = (HERE.parent / "docs" / "replication.md",)
TABLE_1 = ("R", "live groups", "rank, paper", "effective rank", "null: orthogonal", "null: shuffled", "null: unrelated")
TABLE_1_TOP = (
    *("R", "top-1, paper", "top-1 fraction", "top-1 orthogonal", "top-1 shuffled", "top-1 unrelated"),
    *("least possible", "most possible"),
)
WANTED = {
    "smollm2 table-1": ("smollm2-gsm8k", "table-1", TABLE_1),
    "smollm2 top-1": ("smollm2-gsm8k", "table-1", TABLE_1_TOP),
    "smollm2 accounting": ("smollm2-gsm8k", "accounting", None),
    "smollm2 by-right": ("smollm2-gsm8k", "by-right", None),
    "smollm2 by-temperature": ("smollm2-gsm8k", "by-temperature", None),
    "smollm2 by-layer": ("smollm2-gsm8k", "by-layer", None),
    "smollm2 by-estimator": ("smollm2-gsm8k", "by-estimator", None),
    "smollm2 variance": ("smollm2-gsm8k", "variance", None),
    "smollm2 group-size": ("smollm2-gsm8k", "group-size", None),
    "smollm2 prediction": ("smollm2-gsm8k", "prediction", None),
    "smollm2 at-fixed-k": ("smollm2-gsm8k", "at-fixed-k", None),
    "smollm2 trend": ("smollm2-gsm8k", "trend", None),
    "smollm2 turn-offset": ("smollm2-gsm8k", "turn-offset", None),
    "smollm2 turn-credit": ("smollm2-gsm8k", "turn-credit", None),
    "smollm2 verdicts": ("smollm2-gsm8k", None, None),
    "tiny settings": ("tiny-settings", "settings", None),
    "tiny variables": ("tiny-settings", "variables", None),
    "tiny explained": ("tiny-settings", "explained", None),
}
"""Mark → folder, exhibit (None for the verdicts), columns (None for all)."""


def rendered(mark: str) -> str:
    """The table for one mark."""
    folder, exhibit, columns = WANTED[mark]
    if exhibit is None:
        verdicts = json.loads((HERE / folder / "verdicts.json").read_text(encoding="utf-8"))["verdicts"]
        rows = [[one["claim"], one["statement"], f"**{one['verdict']}**. {one['sentence']}"] for one in verdicts]
        return markdown(["claim", "the paper says", "measured"], rows)
    exhibits = json.loads((HERE / folder / "exhibits.json").read_text(encoding="utf-8"))["exhibits"]
    table = next(one for one in exhibits if one["id"] == exhibit)
    names = list(columns or table["columns"])
    places = [table["columns"].index(name) for name in names]
    return markdown(names, [[cell_text(row[place]) for place in places] for row in table["rows"]])


def markdown(names: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def cell_text(cell: object) -> str:
    """A cell as text, an interval in brackets."""
    if isinstance(cell, dict):
        ends = "" if cell["low"] is None else f" [{number(cell['low'])}, {number(cell['high'])}]"
        return number(cell["value"]) + ends
    return number(cell) if isinstance(cell, float) or cell is None else str(cell)


def number(value: float | None) -> str:
    """A number with three decimals below 1, two below 1000, none above; empty if it is undefined."""
    if value is None:
        return ""
    digits = 3 if abs(value) < 0.9995 else 2 if abs(value) < 1000 else 0
    return f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0: no minus before a zero


def filled(text: str) -> str:
    """A page with the current table at each of its marks."""
    for mark in WANTED:
        begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
        if begin in text:
            before, rest = text.split(begin)
            text = f"{before}{begin}\n{rendered(mark)}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    if "--write" in sys.argv:
        for page in PAGES:
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        for wanted in WANTED:
            print(f"{wanted}\n\n{rendered(wanted)}\n")
