"""The README's performance table, made from the records in `benchmarks/results`.

python benchmarks/table.py            print it
python benchmarks/table.py --write    put it into README.md
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- performance: begin -->", "<!-- performance: end -->"


def table(results: Path = HERE / "results") -> str:
    """The Gram with the training gradient at every size: time and peak memory relative to the plain step beside it."""
    lines = [
        "| machine | model | N | T | time / plain step | peak memory / plain step |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted(results.glob("*.json")):
        record = json.loads(path.read_text())
        about = record["settings"]
        model = f"{about['shape']} {about['dtype']}" + (f", LoRA {about['lora']}" if about["lora"] else "")
        machine = "1 CPU core" if about["threads"] else about["device"].removeprefix("NVIDIA ")
        floor = {(row["rollouts"], row["tokens"]): row for row in record["rows"] if row["way"] == "plain"}
        for row in record["rows"]:
            if row["way"] != "gram+gradient" or row["skipped"]:
                continue
            memory = row["peak_gib"] / floor[row["rollouts"], row["tokens"]]["peak_gib"]
            sizes = f"{row['rollouts']} | {row['tokens']}"
            lines.append(f"| {machine} | {model} | {sizes} | {row['ratio']:.2f} | {memory:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, or write it into the README."""
    if "--write" not in sys.argv:
        print(table())
        return
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")


if __name__ == "__main__":
    main()
