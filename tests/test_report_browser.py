"""The page in a real browser, from disk, with every name of the network unknown to it."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from scoregram.exhibits import Estimate, Figure, Series, Table
from scoregram.report import Section, write_page, write_report, write_several_report
from scoregram.report.run_page import run_page
from scoregram.runs import open_run
from tests.report_cases import write_run

pytest.importorskip("plotly")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")]

EVIL = "<img src=x onerror=\"document.title='broken into'\"><script>document.title='broken into'</script>"


RIGHT_TO_LEFT = "שלום עולם 🙂"


def opened(path: Path, home: Path, *more: str) -> tuple[str, str]:
    """The document of a file after its scripts have run, and what they said on the console."""
    return opened_address(path.as_uri(), home, *more)


def opened_address(address: str, home: Path, *more: str) -> tuple[str, str]:
    """The document at an address, which has no network but this machine's, and what it said on the console."""
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={home}",
        "--enable-logging=stderr",
        "--v=0",
    ]
    offline = [
        "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
        "--virtual-time-budget=10000",
        "--window-size=1000,1200",
    ]
    command = [str(CHROMIUM), *options, *offline, *more, "--dump-dom", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return done.stdout, said


def body(document: str) -> str:
    return re.sub(r"<script>.*?</script>", "", document, flags=re.DOTALL)


def test_every_figure_of_a_run_is_drawn_and_nothing_is_complained_about(tmp_path):
    write_run(tmp_path / "run", text=EVIL + RIGHT_TO_LEFT)
    document, said = opened(write_report(tmp_path / "run"), tmp_path / "home")
    assert said == ""
    drawn = body(document)
    plots = re.findall(r'<div class="plot[^"]*" id="([^"]+)"', drawn)
    assert len(plots) == 19 and {"glass-gram", "glass-batch", "interference-plot"} <= set(plots)
    assert drawn.count('class="main-svg"') >= len(plots)
    assert 'class="js-line"' in drawn and "null: if unrelated" in drawn


def test_a_step_under_the_glass_shows_texts_as_text(tmp_path):
    write_run(tmp_path / "run", text=EVIL + RIGHT_TO_LEFT + "x" * 5000)
    document, said = opened(write_report(tmp_path / "run"), tmp_path / "home")
    drawn = body(document)
    assert said == "" and "broken into" not in re.findall(r"<title>(.*?)</title>", document)[0]
    assert "<img" not in drawn and drawn.count('<article class="rollout">') == 4
    assert "completion" in drawn and RIGHT_TO_LEFT in drawn and "more characters)" in drawn
    assert 'class="token"' in drawn and drawn.count("of the update of the step") == 4
    assert "Shares are of the update of the whole step; this group has" in drawn


def test_shares_of_a_group_alone_say_so(tmp_path):
    write_run(tmp_path / "run")  # no Gram between prompts is stored
    document, said = opened(write_report(tmp_path / "run"), tmp_path / "home")
    drawn = body(document)
    assert said == "" and "Shares are of the update of this group alone and add up to 100 %" in drawn
    assert "of the update of the group" in drawn and "of the update of the step<" not in drawn


def test_the_advice_to_read_rollouts_leads_to_a_truncated_one(tmp_path):
    write_run(tmp_path / "run", text="some text")
    page = run_page(open_run(tmp_path / "run"))
    steps = page.glass.steps
    for rollout in (one for step in steps for group in step["groups"] for one in group["rollouts"]):
        rollout["finished"] = True
    steps[1]["groups"][2]["rollouts"][0]["finished"] = False
    html = replace(page, answers=(("What next?", "Read some truncated rollouts: x"),)).html()
    click = "<script>document.querySelector('a.to-rollouts').click()</script></body>"
    # the page's own policy would stop the script that clicks
    path = tmp_path / "clicked.html"
    path.write_text(re.sub(r"<meta http-equiv[^>]*>", "", html).replace("</body>", click))
    document, said = opened(path, tmp_path / "home")
    shown = body(document)
    assert said == "" and f'for="glass-step">{steps[1]["step"]}</output>' in shown and shown.count("cut off<") == 1


def test_an_expected_answer_is_shown_as_text_and_only_where_it_is_known(tmp_path):
    write_run(tmp_path / "run", text="some text")
    page = run_page(open_run(tmp_path / "run"))
    path = tmp_path / "page.html"
    path.write_text(page.html())
    document, said = opened(path, tmp_path / "home")
    assert said == "" and re.search(r'id="glass-answer" hidden=""', body(document))
    for group in (group for step in page.glass.steps for group in step["groups"]):
        group["answer"] = "<i>42</i>"
    path.write_text(page.html())
    document, said = opened(path, tmp_path / "home")
    assert said == "" and "<b>Expected answer: </b>&lt;i&gt;42&lt;/i&gt;</p>" in body(document).replace(' class=""', "")


@pytest.mark.parametrize(
    ("plot", "place", "light", "dark"),
    [("update-cosines", 1, "#ffffff", "#1d2025"), ("spectrum", 0, "#f2f5f9", "#1d2025")],
)
def test_maps_are_drawn_in_the_colours_of_the_scheme_and_of_paper(tmp_path, plot, place, light, dark):
    write_run(tmp_path / "run", steps=12, sketched=True)
    page = write_report(tmp_path / "run")
    document, said = opened(page, tmp_path / "home")
    drawn = body(document)
    assert said == "" and {"update-cosines-plot", "cosine-decay-plot"} <= set(re.findall(r'id="([^"]+-plot)"', drawn))
    # the page's own policy would stop the script that asks
    middle = f"byId('{plot}-plot')._fullData[0].colorscale[{place}][1]"
    ask = f"const seen = [{middle}]; onbeforeprint(); seen.push({middle}); onafterprint(); seen.push({middle});"
    asked = f"<script>{ask} document.title = seen.join(' ')</script></body>"
    path = tmp_path / "asked.html"
    path.write_text(re.sub(r"<meta http-equiv[^>]*>", "", page.read_text()).replace("</body>", asked))
    for scheme, expected in (((), [light] * 3), (("--blink-settings=preferredColorScheme=0",), [dark, light, dark])):
        document, said = opened(path, tmp_path / "home", *scheme)
        colours = re.findall(r"<title>(.*?)</title>", document)[0].split()
        assert said == "" and colours == expected


def test_several_runs_are_drawn_together(tmp_path):
    for name in ("one", "two"):
        write_run(tmp_path / name)
    path = write_several_report([tmp_path / "one", tmp_path / "two"], tmp_path / "runs.html")
    document, said = opened(path, tmp_path / "home")
    assert said == "" and body(document).count('class="main-svg"') >= 6


def test_data_never_runs(tmp_path):
    figure = Figure(EVIL, EVIL, EVIL, EVIL, EVIL, (Series(EVIL, (1.0, 2.0), (1.0, 2.0)),))
    table = Table(EVIL, EVIL, EVIL, (EVIL,), ((EVIL,), (Estimate(1.0, 0.5, 2.0),)))
    path = write_page(tmp_path / "p.html", title="Title", lead=EVIL, sections=[Section(EVIL, EVIL, [table, figure])])
    document, said = opened(path, tmp_path / "home")
    assert said == "" and "<title>Title</title>" in document
    assert "<img" not in body(document) and 'class="js-line"' in document


def test_the_policy_stops_what_would_slip_through(tmp_path):
    path = write_page(tmp_path / "p.html", title="Title", lead="", sections=[])
    smuggled = "<script>document.title='broken into'</script><img src='https://example.org/x.png'></main>"
    path.write_text(path.read_text().replace("</main>", smuggled))
    document, said = opened(path, tmp_path / "home")
    assert "<title>Title</title>" in document and "Content Security Policy" in said
