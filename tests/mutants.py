"""Mutation of the code that results rest on: each mutant breaks one rule, and a test must fail. Run by `make mutants`.

A mutant is one edit of one source file. Some are derived here, from the tables of estimators and objectives and from
the checks of the ledger, so that a new row or claim has its mutants without further work. The others are written in
`mutations/AREA.txt`, below the `file` that they change and the `tests` that should notice them (`*` stands for any
part of a name):

    # what the edit breaks
    - the old text, which must occur exactly once in the file
    + the new text
    = why it changes nothing that can be observed, if it is equivalent

Where code changes, its edits change with it; a new rule gets an edit that breaks it. `mutant_runner.py` runs the tests
of a mutant until the first failure. Outcomes:

- killed: a test failed.
- survived: every test passed. Add a test that sees the difference; a mutant is never removed for this.
- equivalent: the edit changes nothing that can be observed, for the reason stated beside it. It does not run.
- undecided: no test failed within `--seconds`. It is not recorded.

The outcomes go to `benchmarks/results/mutants.json`; `--only AREA` replaces the rows of that area alone.
"""

import argparse
import ast
import datetime as dt
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from tests.mutant_code import TREE, Mutant, source_text
from tests.mutant_runner import KILLED, SURVIVED, UNDECIDED, Row, RunOptions, run_mutants

EDITS = Path(__file__).parent / "mutations"
RECORD = TREE / "benchmarks" / "results" / "mutants.json"
EQUIVALENT = "equivalent"


@cache
def _line_offsets(path: str) -> list[int]:
    lines = source_text(path).splitlines(keepends=True)
    return [0, *(sum(map(len, lines[: i + 1])) for i in range(len(lines)))]


def _span(path: str, node: ast.AST) -> tuple[int, int]:
    """First and last character of a node. Columns of `ast` count bytes of UTF-8."""
    offsets, lines = _line_offsets(path), source_text(path).splitlines()

    def at(line: int, column: int) -> int:
        return offsets[line - 1] + len(lines[line - 1].encode()[:column].decode())

    assert isinstance(node, ast.expr | ast.stmt)
    assert node.end_lineno is not None and node.end_col_offset is not None
    return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)


def _code(path: str, node: ast.AST) -> str:
    start, end = _span(path, node)
    return source_text(path)[start:end]


# Derived mutants: rows of tables.


@dataclass(frozen=True)
class ClaimsTable:
    """A literal table whose rows state booleans, and the test of each boolean."""

    area: str
    path: str
    table: str
    row_class: str
    test: str
    """Test of a claim; `{claim}` and `{row}` are filled in."""
    keywords: tuple[str, ...] = ()


TABLES = (
    ClaimsTable(
        "estimator claims",
        "advantages/table.py",
        "ESTIMATORS",
        "Estimator",
        "tests/test_estimator_claims.py::test_{claim}[{row}]",
    ),
    ClaimsTable(
        "objective claims",
        "objectives/table.py",
        "OBJECTIVES",
        "Objective",
        "tests/test_objectives_table.py::test_{claim}_claim[{row}]",
    ),
    ClaimsTable(
        "objective claims",
        "objectives/reference.py",
        "KL_TERMS",
        "KLTerm",
        "tests/test_objectives_kl.py::test_claims_by_enumeration_of_every_action",
        keywords=("{row}",),
    ),
    ClaimsTable(
        "objective claims",
        "objectives/aggregation.py",
        "AGGREGATIONS",
        "Aggregation",
        "tests/test_objectives_aggregation.py",
        keywords=("{row}", "refused"),
    ),
)


def table_rows(path: str, table: str) -> dict[str, ast.Call]:
    """Rows of a literal `MappingProxyType({...})` by name."""
    for node in ast.parse(source_text(path)).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if [_name(target) for target in targets] == [table]:
                return dict(_rows_of(node.value))
    raise SystemExit(f"mutants: {path} has no table {table}. Follow the change in {Path(__file__).name}.")


def _rows_of(value: ast.expr) -> Iterator[tuple[str, ast.Call]]:
    assert isinstance(value, ast.Call) and isinstance(value.args[0], ast.Dict)
    for key, row in zip(value.args[0].keys, value.args[0].values, strict=True):
        assert isinstance(key, ast.Constant) and isinstance(row, ast.Call)
        yield str(key.value), row


def flipped_claims(table: ClaimsTable) -> Iterator[Mutant]:
    """Every boolean of every row of a table, turned into its opposite."""
    claims = [
        node.target.id
        for row_class in ast.walk(ast.parse(source_text(table.path)))
        if isinstance(row_class, ast.ClassDef) and row_class.name == table.row_class
        for node in row_class.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _name(node.annotation) == "bool"
    ]
    for name, row in table_rows(table.path, table.table).items():
        stated = {keyword.arg: keyword.value for keyword in row.keywords}
        for claim in claims:
            if claim in stated:
                start, end = _span(table.path, stated[claim])
                new = str(not ast.literal_eval(stated[claim]))
            else:
                start = end = _span(table.path, (row.keywords[-1].value if row.keywords else row.args[-1]))[1]
                new = f", {claim}=True"
            test = table.test.format(claim=claim, row=name)
            what = f"{table.table}[{name!r}].{claim} flipped"
            keywords = tuple(keyword.format(row=name) for keyword in table.keywords)
            yield Mutant(table.area, what, table.path, start, end, new, (test,), keywords)


def _name(node: ast.expr | None) -> str:
    return node.id if isinstance(node, ast.Name) else ""


# Derived mutants: results of functions.

ADVANTAGE_TESTS = {
    "advantages/group.py": "tests/test_advantages_group.py",
    "advantages/batch.py": "tests/test_advantages_group.py",
    "advantages/token.py": "tests/test_advantages_token.py",
    "advantages/turn.py": "tests/test_advantages_turn.py",
}
OBJECTIVE_TESTS = {
    "objectives/policy.py": ("tests/test_objectives_policy.py", "tests/test_objectives_table.py"),
    "objectives/reference.py": (
        "tests/test_objectives_kl.py",
        "tests/test_objectives_preference.py",
        "tests/test_objectives_regularised.py",
    ),
    "objectives/aggregation.py": ("tests/test_objectives_aggregation.py", "tests/test_objectives_policy.py"),
}


def functions(path: str) -> dict[str, ast.FunctionDef]:
    """Functions at the top level of a file."""
    return {node.name: node for node in ast.parse(source_text(path)).body if isinstance(node, ast.FunctionDef)}


def wrapped_result(
    area: str, what: str, path: str, function: ast.FunctionDef, before: str, tests: Sequence[str]
) -> Mutant:
    """What the last `return` of a function returns, with a factor or a function before it."""
    last = function.body[-1]
    assert isinstance(last, ast.Return) and last.value is not None, function.name
    start, end = _span(path, last.value)
    new = f"{before}({source_text(path)[start:end]})"
    return Mutant(area, f"{function.name}: {what}", path, start, end, new, tuple(tests))


def wrong_estimators() -> Iterator[Mutant]:
    """The advantages of every estimator of the table, all a hundredth too large, then those of the first rollout."""
    rows = table_rows("advantages/table.py", "ESTIMATORS")
    used = {_name(row.keywords[0].value) for row in rows.values()}
    first = "(lambda a: torch.cat([1.01 * a[:, :1], a[:, 1:]], dim=1))"
    for path, tests in ADVANTAGE_TESTS.items():
        for function in (f for f in functions(path).values() if f.name in used):
            yield wrapped_result("estimators", "1 % too large", path, function, "1.01 * ", [tests])
            yield wrapped_result("estimators", "first rollout 1 % off", path, function, first, [tests])


def wrong_objectives() -> Iterator[Mutant]:
    """Every loss, weight, KL term and aggregation, a hundredth too large."""
    for path, tests in OBJECTIVE_TESTS.items():
        for function in functions(path).values():
            if _annotation(function.returns) in {"Loss", "TokenWeights", "Tensor", "LogProbs"}:
                yield wrapped_result("objectives", "1 % too large", path, function, "1.01 * ", tests)


def _annotation(node: ast.expr | None) -> str:
    return "" if node is None else ast.unparse(node)


# Derived mutants: checks of the ledger.

CLAIMS = "studies/grpo_rank/claims"
CLAIM_TESTS = {
    "announcements": ("limits",),
    "calibration": ("calibration",),
    "companions": ("companions",),
    "derivation": ("derivation", "credit"),
    "discussion": ("discussion", "abstract"),
    "limits": ("limits",),
    "multiturn": ("multiturn",),
    "rank": ("rank", "sparsity", "table"),
    "structure": ("structure", "concentration"),
    "ustatistic": ("ustatistic",),
}
EXCLUSIVE = {
    "_baseline_collapses_credit",
    "_best_in_the_limit",
    "_bias",
    "_bound_table",
    "_linear_growth",
    "_optimal_without_assumption",
    "_parity",
    "_row",
    "_subtract_the_value",
    "_vacuous_labels",
    "_values_without_a_critic",
    "clipping_leaves_structure",
    "collapsed_advantage",
    "curriculum",
    "diminishing_returns",
    "ineffective_rollouts",
    "max_rank",
    "no_new_dimensions",
    "output_set",
    "performative_optimum",
    "rank_falls_with_spread",
    "rank_two",
    "row_two",
    "small_near_the_ends",
    "specific_to_grpo",
    "two_directions_a_step",
    "vanish_together",
    "which_step_matters",
}
"""Checks whose corrected statement contradicts the printed one, so that no run can make both true."""
FINDINGS = {"as_printed", "corrected", "refuted", "unsupported", "to_be_measured"}


def wrong_ledger_checks() -> Iterator[Mutant]:
    """The facts that every check hands over: made to say what the verdict needs, and made to say the opposite."""
    for module, tests in CLAIM_TESTS.items():
        path, files = f"{CLAIMS}/{module}.py", tuple(f"tests/test_claims_{name}.py" for name in (*tests, "facts"))
        for function in functions(path).values():
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and _name(call.func) in FINDINGS:
                    yield from _wrong_facts(path, function.name, call, files)


def _wrong_facts(path: str, check: str, call: ast.Call, tests: tuple[str, ...]) -> Iterator[Mutant]:
    facts: dict[str, ast.expr] = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    facts = {name: facts[name] for name in ("printed", "truth") if name in facts} or {"ok": call.args[0]}
    for name, value in facts.items():
        start, end = _span(path, value)
        passes = str(name != "printed")
        why = "the corrected statement contradicts the printed one" if check in EXCLUSIVE and name == "printed" else ""
        yield Mutant("ledger", f"{check}: {name} is always {passes}", path, start, end, passes, tests, equivalent=why)
        opposite = f"not ({_code(path, value)})"
        yield Mutant("ledger", f"{check}: {name} is negated", path, start, end, opposite, tests)


# Mutants that are written down.


def test_files(pattern: str) -> list[str]:
    """Files of tests by name, where `*` stands for any part of it; an error if there is none."""
    folder = Path(__file__).parent
    found = sorted(f"tests/{file.name}" for file in folder.glob(f"{pattern}.py"))
    if not found:
        raise SystemExit(f"mutants: there is no tests/{pattern}.py. Follow the change in {EDITS.name}/.")
    return found


def written_edits(only: str) -> Iterator[Mutant]:
    """The mutants of `mutations/`; an error that lists every old text that does not occur exactly once.

    Areas that do not begin with `only` are not looked for in the code.
    """
    lost = []
    for file in sorted(EDITS.glob("*.txt")):
        path, tests = "", ()
        for block in re.split(r"\n(?=# |file |tests )", file.read_text(encoding="utf-8")):
            head, *lines = block.rstrip("\n").split("\n")
            kind, _, rest = head.partition(" ")
            if kind == "file":
                path = rest
            elif kind == "tests":
                tests = tuple(test for name in rest.split() for test in test_files(name))
            else:
                old, new, why = ("\n".join(line[2:] for line in lines if line[:1] == sign) for sign in "-+=")
                at, count = source_text(path).find(old), source_text(path).count(old)
                if count == 1:
                    yield Mutant(file.stem, rest, path, at, at + len(old), new, tests, equivalent=why)
                elif file.stem.startswith(only):
                    lost.append(f"{file.name}: {rest}: {count} times in {path}:\n{old}")
    if lost:
        raise SystemExit("mutants: the table must follow the code; these texts must occur once:\n" + "\n".join(lost))


def all_mutants(only: str) -> list[Mutant]:
    """Every mutant, in the order in which they run."""
    derived = [*wrong_estimators(), *wrong_objectives(), *(m for table in TABLES for m in flipped_claims(table))]
    mutants = [*derived, *wrong_ledger_checks(), *written_edits(only)]
    twice = [key for key, count in Counter((m.area, m.name) for m in mutants).items() if count > 1]
    return [mutant for mutant in mutants if (mutant.area, mutant.name) not in twice] + _numbered(mutants, twice)


def _numbered(mutants: Sequence[Mutant], twice: Sequence[tuple[str, str]]) -> list[Mutant]:
    """Mutants of one name, told apart by a number: a check with two verdicts."""
    seen: Counter[tuple[str, str]] = Counter()
    named = []
    for mutant in mutants:
        if (key := (mutant.area, mutant.name)) in twice:
            seen[key] += 1
            named.append(replace(mutant, name=f"{mutant.name} ({seen[key]})"))
    return named


def write_record(rows: Iterable[Row], mutants: Sequence[Mutant], path: Path) -> dict[str, object]:
    """Merge rows into the record, drop rows of mutants that are no longer in the table, and count by area."""
    old = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    by_key = {(row["area"], row["name"]): row for row in [*old, *rows]}
    order = [(mutant.area, mutant.name) for mutant in mutants]
    kept = [by_key[key] for key in order if key in by_key]
    areas = {
        area: {what: count for what in (KILLED, SURVIVED, EQUIVALENT) if (count := _count(kept, area, what))}
        for area in dict.fromkeys(str(row["area"]) for row in kept)
    }
    record = {"date": dt.datetime.now(dt.UTC).date().isoformat(), "counts": areas, "rows": kept}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return record


def _count(rows: Iterable[Row], area: str, what: str) -> int:
    return sum(row["area"] == area and row["outcome"] == what for row in rows)


def main() -> int:
    """Break the code, one rule at a time, and see that a test fails; 0 if every mutant was killed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--only", default="", help="an area, or the beginning of one")
    parser.add_argument("--name", default="", help="part of a mutant's name")
    parser.add_argument("--survivors", action="store_true", help="only those that the record does not show as killed")
    parser.add_argument("--also", nargs="*", default=[], help="further test files, for edits that survived the listed")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3600, help="leave a mutant undecided after this time")
    parser.add_argument("--timings", type=Path, help="file that keeps the run without mutants for the next call")
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args()
    everyone = all_mutants(options.only)
    chosen = [m for m in everyone if m.area.startswith(options.only) and options.name in m.name]
    if options.survivors:
        recorded = json.loads(options.record.read_text(encoding="utf-8"))["rows"]
        killed = {(row["area"], row["name"]) for row in recorded if row["outcome"] != SURVIVED}
        chosen = [mutant for mutant in chosen if (mutant.area, mutant.name) not in killed]
    for mutant in chosen:
        ast.parse(mutant.source(), filename=f"{mutant.path} after {mutant.name!r}")
    also = tuple(test for name in options.also for test in test_files(name))
    chosen = [replace(mutant, tests=mutant.tests + also) for mutant in chosen]
    if options.list or not chosen:
        print("\n".join(f"{m.area}: {m.name} ({m.path})" for m in chosen) or "no mutant of that name")
        return 0 if chosen else 2
    rows: list[Row] = [
        {"area": m.area, "name": m.name, "file": m.path, "outcome": EQUIVALENT, "why": m.equivalent}
        for m in chosen
        if m.equivalent
    ]
    run_options = RunOptions(options.jobs, options.seconds, options.timings)
    for row in run_mutants([m for m in chosen if not m.equivalent], run_options):
        rows += [row] if row["outcome"] != UNDECIDED else []
        print(f"{row['outcome']:9} {row['seconds']:6} s  {row['area']}: {row['name']}", flush=True)
        write_record(rows, everyone, options.record)  # after each: a run that is stopped keeps what it found
    record = write_record(rows, everyone, options.record)
    print(json.dumps(record["counts"], indent=1))
    survivors = [row for row in rows if row["outcome"] == SURVIVED]
    print(f"{len(survivors)} of {len(rows)} survived; written to {options.record}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
