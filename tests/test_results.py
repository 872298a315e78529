"""The committed results: their tables stand in the pages, their records verify, and the shipped copies are the same."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest

from scoregram.runs.disk import CHECKSUMS, damaged_files
from scoregram.studies.grpo_rank.evidence import recompute
from scoregram.studies.grpo_rank.verdicts import SHIPPED, measured_verdicts
from scoregram.studies.record import RECORD
from scoregram.studies.verification import recorded_differences, verify

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
RECORDS = sorted(RESULTS.glob(f"*/{RECORD}"))
UNSIGNED = sorted(
    {path.parent for path in RESULTS.glob("*/*") if path.suffix != ".pyc"} - {path.parent for path in RECORDS}
)


def load_script(name: str = "table"):
    spec = importlib.util.spec_from_file_location(f"results_{name}", RESULTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_records():
    assert RECORDS


@pytest.mark.parametrize("folder", UNSIGNED, ids=lambda path: path.name)
def test_every_file_of_measurements_is_listed_with_its_hash(folder):
    """A signed record lists its own; `sha256sum --check SHA256SUMS` repeats this for the others."""
    measured = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in {".md", ".py", ".pyc"})
    names = {str(path.relative_to(folder)) for path in measured} - {CHECKSUMS}
    lines = (folder / CHECKSUMS).read_text(encoding="utf-8").splitlines()
    assert {line.split("  ")[1] for line in lines if not line.endswith(".py")} == names
    assert not damaged_files(folder)


def test_the_replication_page_shows_the_recorded_tables():
    text = (ROOT / "docs/replication.md").read_text(encoding="utf-8")
    assert "<!-- smollm2 table-1: begin -->" in text
    assert load_script().filled(text) == text, "run python results/table.py --write"


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.parent.name)
def test_every_figure_is_drawn_from_the_recorded_data(record):
    script = load_script("figures")
    for figure in script.figures(record.parent):
        drawn = (record.parent / "figures" / f"{figure['id']}.svg").read_text(encoding="utf-8")
        assert script.digest(figure) in drawn, "run python results/figures.py"


@pytest.mark.slow
@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.parent.name)
def test_records_verify_down_to_the_grams(record):
    found = verify(record, recompute=recompute)
    assert found.passed, "\n".join(found.lines())


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.parent.name)
def test_the_shipped_copy_is_the_record(record):
    assert (SHIPPED / f"{record.parent.name}.json").read_bytes() == record.read_bytes()
    claims = {one["claim"] for one in json.loads(record.read_text())["content"]["verdicts"]}
    assert claims <= measured_verdicts().keys()


def test_the_page_announces_number_and_key_of_the_signed_record():
    record = json.loads((RESULTS / "smollm2-gsm8k" / RECORD).read_text(encoding="utf-8"))
    page = (ROOT / "docs/replication.md").read_text(encoding="utf-8")
    assert record["signature"]["public_key"] == record["content"]["signer"]
    for announced in (record["number"], record["content"]["signer"], record["content"]["key_id"]):
        assert f"| `{announced}` |" in page
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"`{record['number']}`" in readme and f"`{record['content']['signer']}`" in readme
    assert not [path for path in ROOT.rglob("*.pem") if ".venv" not in path.parts], "no private key is committed"


@pytest.mark.slow  # runs in `make test-results`
def test_the_snippet_of_the_page_redoes_table_1(monkeypatch, capsys):
    page = (ROOT / "docs/replication.md").read_text(encoding="utf-8")
    code = page.split("Table 1 needs nothing but numpy:")[1].split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line]) <= 10
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [ast.unparse(node) for node in imports] == ["import numpy as np"]
    monkeypatch.chdir(ROOT)
    exec(code, {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    exhibits = json.loads((RESULTS / "smollm2-gsm8k" / "exhibits.json").read_text(encoding="utf-8"))["exhibits"]
    table = next(one for one in exhibits if one["id"] == "table-1")
    wanted = ("R", "live groups", "effective rank", "top-1 fraction")
    rows = [[row[table["columns"].index(name)] for name in wanted] for row in table["rows"]]
    for (size, live, rank, top), found in zip(rows, printed, strict=True):
        assert found[:2] == [str(size), live.split()[0]]
        assert [float(value) for value in found[2:]] == pytest.approx([rank["value"], top["value"]], abs=1e-4)


@pytest.mark.slow  # runs in `make test-results`
def test_the_tables_of_many_settings_follow_from_their_grams():
    script = load_script("tiny_settings")
    stored = json.loads((script.HERE / "exhibits.json").read_text(encoding="utf-8"))["exhibits"]
    assert recorded_differences(stored, json.loads(json.dumps(script.tables())), "table") == []


@pytest.mark.slow
def test_no_text_of_the_data_set_is_there():
    from scoregram.runs import open_run

    for folder in [path.parent for path in RESULTS.rglob("config.yaml")]:
        run = open_run(folder)
        assert all(group.prompt is None for group in run.groups(layers=False))
        assert not list(run.rollouts())
