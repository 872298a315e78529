import base64
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scoregram import __version__
from scoregram.checks import ScoregramError
from scoregram.exhibits import Estimate, Figure, Series, Table
from scoregram.report import Section, write_page
from scoregram.report import page as page_module
from scoregram.report.page import page, templates
from scoregram.studies.grpo_rank.evidence import write_replication_report
from tests.report_cases import Page, contrast

pytest.importorskip("plotly")

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&amp;"
TABLE = Table("t", "A table", "Read the table so.", ("R", "rank"), ((2, Estimate(1.5, 1.25, 1.75)), (4, math.nan)))
FIGURE = Figure(
    "f",
    "A figure",
    "Read the figure so.",
    "step",
    "rank",
    (Series("a", (1.0, 2.0), (1.0, 2.0), (0.5, 1.5), (1.5, 2.5)),),
)
EVIL_TABLE = Table(EVIL, EVIL, EVIL, (EVIL, "n"), ((EVIL, 1),))
EVIL_FIGURE = Figure(EVIL, EVIL, EVIL, EVIL, EVIL, (Series(EVIL, (1.0,), (2.0,)), Series(EVIL, (1.0,), (2.0,))))
PLAIN = {"title": "Title", "lead": "Lead.", "sections": [Section("First", "Words.", (TABLE, FIGURE))]}
WICKED = {"title": EVIL, "lead": EVIL, "sections": [Section(EVIL, f"{EVIL}\n\n- {EVIL}", (EVIL_TABLE, EVIL_FIGURE))]}


@pytest.fixture(scope="module", params=[PLAIN, WICKED], ids=["plain", "wicked"])
def text(request) -> str:
    return page(**request.param, redo="scoregram report x")


@pytest.fixture(scope="module")
def parsed(text) -> Page:
    return Page(text)


def test_nothing_is_loaded_from_anywhere(parsed):
    loading = {"src", "srcset", "data", "action", "formaction", "poster", "background", "ping", "xlink:href"}
    ids = {attributes["id"] for _, attributes in parsed.elements if "id" in attributes}
    for tag, attributes in parsed.elements:
        assert not loading & attributes.keys(), tag
        assert "href" not in attributes or (attributes["href"][1:] in ids and attributes["href"][0] == "#")
        assert not any(name.startswith("on") for name in attributes)
    assert not {"link", "iframe", "object", "embed", "base", "img"} & {tag for tag, _ in parsed.elements}
    assert not re.search(r"url\(|@import|@font-face", parsed.text("style"))


def test_the_browser_is_told_to_load_nothing_and_run_these_scripts_alone(parsed):
    (policy,) = [attributes["content"] for attributes in parsed.named("meta") if "http-equiv" in attributes]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and rules.keys().isdisjoint({"connect-src", "font-src"})
    scripts = [text for tag, text in parsed.texts if tag == "script"]
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert rules["script-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert len(scripts) == 2  # plotly once, and what draws


def test_data_is_text_wherever_it_stands(parsed):
    assert len(parsed.named("script")) == 2 and not parsed.named("img")
    drawing = [text for tag, text in parsed.texts if tag == "script"][1]
    assert not re.search("[<>&]", drawing.split(";\n")[0])  # nothing there could close the element
    figures = json.loads(drawing.removeprefix("const page = ").split(";\n")[0])["figures"]
    ids = [attributes.get("id") for attributes in parsed.named("div")]
    assert [one["id"] for one in figures] == [one for one in ids if one and one.endswith("-plot")]
    assert all("<" not in part for part in (json.dumps(one["id"]) for one in figures))


def test_what_is_wicked_is_shown_as_it_is():
    shown = Page(page(**WICKED))
    for tags in (("title",), ("h1",), ("p",), ("h2",), ("li",), ("h3",), ("th",), ("figcaption",), ("a",)):
        assert EVIL in shown.text(*tags)
    assert any(EVIL in attributes.get("aria-label", "") for attributes in shown.named("div"))


def test_ids_are_unique_though_exhibits_share_theirs():
    same = [Section("s", "", (FIGURE, TABLE, FIGURE)), Section("s", "", (FIGURE,))]
    found = [
        attributes["id"]
        for _, attributes in Page(page(title="", lead="", sections=same)).elements
        if "id" in attributes
    ]
    assert len(found) == len(set(found)) and {"f", "f-2", "f-3"} <= set(found)


def test_tables_and_figures_can_be_read_without_eyes(parsed):
    assert all(attributes.get("scope") in ("col", "row") for attributes in parsed.named("th"))
    plots = [attributes for attributes in parsed.named("div") if attributes.get("class") == "plot"]
    assert len(plots) == len(parsed.named("figcaption")) == len(parsed.named("details")) == 1
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in plots)
    assert len(parsed.named("table")) == 2  # the table, and the numbers of the figure
    assert parsed.named("html") == [{"lang": "en"}] and len(parsed.named("h1")) == len(parsed.named("nav")) == 1


def test_the_words_are_there():
    shown = Page(page(**PLAIN, redo="scoregram report x")).text()
    for part in ("Title", "Lead.", "First", "Words.", "Read the table so.", "Read the figure so.", "Contents"):
        assert part in shown
    assert "1.50 [1.25, 1.75]" in shown and "–" in shown and __version__ in shown and "scoregram report x" in shown


def test_the_same_input_gives_the_same_bytes_in_another_process():
    code = "import hashlib, tests.test_report_page as t; print(hashlib.sha256(t.page(**t.PLAIN).encode()).hexdigest())"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == hashlib.sha256(page(**PLAIN).encode()).hexdigest()


def test_it_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    assert write_page(path, **PLAIN) == path and path.read_text() == page(**PLAIN)

    def refused(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("scoregram.runs.disk.write_all", refused)
    with pytest.raises(ScoregramError, match="Free some space"):
        write_page(path, title="Other", lead="", sections=[])
    assert path.read_text() == page(**PLAIN) and [one.name for one in tmp_path.iterdir()] == ["page.html"]


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(ScoregramError, match=r"report: .*must be writable, got No such file"):
        write_page(tmp_path / "no" / "page.html", title="", lead="", sections=[])


def test_a_page_without_figures_needs_no_plotly(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    text = page(title="t", lead="l", sections=[Section("s", "", (TABLE,))])
    assert len(text) < 20_000 and not Page(text).named("script")


def test_every_template_of_the_package_can_be_parsed():
    found = templates().list_templates()
    assert {"base.html", "macros.html", "run.html", "runs.html", "sections.html", "glass.html"} <= set(found)
    for name in found:
        templates().get_template(name)
    assert templates().autoescape is True


COLOURS = re.compile(r"--(\w+): (#[0-9a-f]{6});")


@pytest.mark.parametrize("scheme", [0, 1, 2], ids=["light", "dark", "print"])
@pytest.mark.parametrize("name", ["good", "watch", "act", "unknown", "soft", "ink", "accent"])
def test_words_can_be_read_in_every_scheme(name, scheme):
    """WCAG 2 asks for a contrast of 4.5 between text and ground."""
    css = (Path(page_module.__file__).parent / "page.css").read_text()
    schemes = [dict(COLOURS.findall(block)) for block in re.findall(r":root \{(.*?)\n *\}", css, re.DOTALL)]
    colours = schemes[0] | schemes[scheme]
    assert len(schemes) == 3
    for ground in ("paper", "tint"):
        assert contrast(colours[name], colours[ground]) > 4.5, ground


def test_a_study_answers_the_reader_before_its_contents(tmp_path):
    study = Path(__file__).parents[1] / "results" / "smollm2-gsm8k"
    text = write_replication_report(study, tmp_path / "page.html").read_text()
    asked = ["What was claimed?", "What did we do?", "What did we see?", "What does it not show?"]
    shown = Page(text)
    assert [shown.text("dt").index(question) for question in asked] == sorted(map(shown.text("dt").index, asked))
    assert text.index("is not replicated here") < text.index(asked[0]) < text.index(asked[-1]) < text.index("Contents")
    answers = shown.text("dd")
    assert (
        "groups of 2, 4, 8, 16 rollouts, 3 seeds each, 60 steps of 128" in answers
        and "Of 6 independent statements:" in answers
    )


def test_an_answer_is_text():
    assert EVIL not in page(title="t", lead="l", sections=[], answers=[(EVIL, EVIL)])
