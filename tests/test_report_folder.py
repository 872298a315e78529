import json
import re

import pytest

from scoregram import cli
from scoregram.checks import ScoregramError
from scoregram.exhibits import Table, to_plain
from scoregram.studies.grpo_rank.evidence import write_replication_report
from scoregram.studies.page import read_replication, verdict_counts
from tests.report_cases import Page, write_run

pytest.importorskip("plotly")

EXHIBITS = [Table(name, f"Table {name}", "", ("a",), ((1,),)) for name in ("one", "two", "three")]
VERDICTS = [
    {
        "claim": "rank-2",
        "place": "Table 1",
        "statement": "The effective rank is about 2 <script>.",
        "verdict": "replicated only as the null predicts",
        "sentence": "It is 2.41, and the null 2.40.",
        "effect": {"name": "measured less null", "value": 0.01, "low": -0.02, "high": None},
        "seeds": [0, 1, 2],
        "model": "tiny",
        "task": "arithmetic",
    },
    {
        "claim": "c",
        "statement": "s",
        "verdict": "not replicated",
        "effect": {"R = 2": 1.5, "ends": [1, None]},
        "seeds": 1,
    },
]


def write_replication(folder, *, sections=None, **more):
    plain = {"exhibits": to_plain(EXHIBITS)} | ({} if sections is None else {"sections": sections})
    (folder / "exhibits.json").write_text(json.dumps(plain))
    (folder / "verdicts.json").write_text(json.dumps({"verdicts": VERDICTS} | more))
    (folder / "runs").mkdir()


def test_a_replication_shows_its_verdicts_and_every_exhibit(tmp_path):
    write_replication(tmp_path)
    path = write_replication_report(tmp_path)
    assert path == tmp_path / "report.html"
    page = Page(path.read_text())
    shown = page.text()
    assert "Of 2 independent statements: 1 replicated only as the null predicts, 1 not replicated." in shown
    assert "The effective rank is about 2 <script>." in shown and "measured less null 0.0100 [-0.0200, –]" in shown
    assert "tiny, arithmetic, 3 seeds" in shown and "R = 2: 1.50; ends: 1, –" in shown and "1 seed" in shown
    assert all(f"Table {name}" in shown for name in ("one", "two", "three")) and not page.named("script")


def test_the_lead_of_the_file_comes_first(tmp_path):
    write_replication(tmp_path, lead="The rank is what the null predicts.", title="Replication of 2606.29238")
    found = read_replication(tmp_path)
    assert (found.title, found.lead) == ("Replication of 2606.29238", "The rank is what the null predicts.")


def test_sections_group_exhibits_and_lose_none(tmp_path):
    write_replication(tmp_path, sections=[{"title": "B", "text": "t", "exhibits": ["three", "one"]}])
    sections = read_replication(tmp_path).sections
    assert [(one.title, [exhibit.id for exhibit in one.exhibits]) for one in sections] == [
        ("Verdicts", ["verdicts"]),
        ("B", ["three", "one"]),
        ("More", ["two"]),
    ]


def test_a_section_must_name_what_there_is(tmp_path):
    write_replication(tmp_path, sections=[{"title": "B", "exhibits": ["four"]}])
    with pytest.raises(ScoregramError, match=r"exhibits of one, three, two, got four"):
        write_replication_report(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"verdicts": 3}', '{"exhibits": []}'])
def test_a_spoilt_file_is_named(content, tmp_path):
    write_replication(tmp_path)
    (tmp_path / "verdicts.json").write_text(content)
    with pytest.raises(ScoregramError, match=r"report: .*verdicts\.json must"):
        write_replication_report(tmp_path)


def test_no_verdict_is_said():
    assert verdict_counts([]) == "No claim was judged."


def test_a_statement_counts_once_on_the_page():
    first = {"claim": "a", "verdict": "not replicated", "restates": None}
    rows = [{"claim": f"row {i}", "verdict": "not replicated", "restates": "a"} for i in range(3)]
    other = {"claim": "b", "verdict": "undecided"}
    counted = "Of 2 independent statements: 1 not replicated, 1 undecided"
    assert verdict_counts([first, *rows, other]) == f"{counted} (3 claims restate others)."
    assert verdict_counts([first, rows[0], other]) == f"{counted} (1 claim restates another)."
    assert verdict_counts([first, other]) == f"{counted}."
    assert verdict_counts(rows[:1]) == "Of 1 independent statement: 1 not replicated."  # what it restates is not there


def test_the_command_writes_a_run_and_prints_where(tmp_path, capsys):
    write_run(tmp_path / "run", steps=2)
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run' / 'report.html'}\n"
    assert cli.main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "a.html")]) == 0
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "run" / "report.html").read_bytes()


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda folder: None, "no such folder"),
        (lambda folder: folder.mkdir(), "an empty folder"),
        (lambda folder: folder.write_text(""), "a file"),
        (lambda folder: [folder.mkdir(), (folder / "exhibits.json").write_text("{}")], "exhibits.json"),
        (lambda folder: [folder.mkdir(), *((folder / f"{i}").mkdir() for i in range(10))], "0, .*, 7 and 2 more"),
    ],
)
def test_anything_else_is_refused_with_what_was_found(make, found, tmp_path, capsys):
    make(tmp_path / "x")
    assert cli.main(["report", str(tmp_path / "x")]) == 2
    expected = rf"scoregram: report: .*x must hold a run .* or a replication .*, got {found}\. Choose such a folder\.\n"
    assert re.fullmatch(expected, capsys.readouterr().err)
