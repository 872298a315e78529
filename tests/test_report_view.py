"""The local server: what it lists, what it follows, and what it does not give away."""

import asyncio
import json
import re
import shutil
import threading
import time
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
import torch

from scoregram import cli
from scoregram.checks import ScoregramError
from scoregram.report import view
from scoregram.report.view import (
    MOST_HITS,
    MOST_KEPT,
    AnswerMaker,
    RunLibrary,
    listening_socket,
    serve_runs,
    view_app,
)
from scoregram.runs import RunWriter, UpdateRecord
from tests.report_cases import CONFIG, Page, write_run

pytest.importorskip("plotly")
pytest.importorskip("starlette")

EVIL = "<img src=x onerror=\"document.title='broken into'\">"


def ask(app, address: str, host: str = "localhost", method: str = "GET") -> tuple[int, str]:
    """Status and body of an answer, without a network."""
    parts, sent = urlsplit(address), []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    path = parts.path
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": parts.query.encode(),
        "headers": [(b"host", host.encode())],
        "http_version": "1.1",
        "scheme": "http",
        "server": (host, 80),
        "client": ("127.0.0.1", 1),
        "root_path": "",
    }
    asyncio.run(app(scope, receive, send))
    body = b"".join(one.get("body", b"") for one in sent if one["type"] == "http.response.body")
    return sent[0]["status"], body.decode()


@pytest.fixture(autouse=True)
def no_page_is_made_after_its_test():
    """A page that is still being made would run beside the next test, and draw from its random numbers."""
    yield
    for thread in threading.enumerate():
        if thread.name == view.MAKER_THREAD:
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("view")
    folder = root / "runs"
    write_run(folder / "good", text=EVIL)
    write_run(folder / "deep" / "other", steps=2)
    RunWriter.create(folder / "empty", CONFIG, environment={}).close()
    (folder / "foreign").mkdir()
    (folder / "foreign" / "config.yaml").write_text("- not\n- a run\n")
    (folder / "no-run").mkdir()
    shutil.copytree(folder / "good", folder / "broken")
    next((folder / "broken" / "groups").iterdir()).write_bytes(b"torn")
    write_run(root / "secret", steps=1)
    (folder / "link").symlink_to(root / "secret")
    return folder


@pytest.fixture(scope="module")
def app(runs):
    return view_app(runs, patience=60)


def test_every_run_is_listed_and_what_cannot_be_read_says_why(runs, app):
    assert RunLibrary(runs).names() == ["broken", "deep/other", "empty", "foreign", "good"]
    library = RunLibrary(runs, patience=60)
    states = {name: library.row(name).state for name in library.names()}
    assert states["good"] == "running" and states["empty"] == "empty"
    assert states["broken"] == states["foreign"] == "cannot be read"
    status, text = ask(app, "/")
    page = Page(text)
    assert status == 200 and "deep/other" in page.text("a") and "test accuracy 0.25 → 0.75" in page.text("td")
    assert page.text("td").count("cannot be read") == 2


def test_a_folder_that_is_a_run_is_its_own_list(runs):
    assert RunLibrary(runs / "good").names() == ["."]
    assert ask(view_app(runs / "good", patience=60), "/run/.")[0] == 200


def test_a_run_has_its_page_and_its_content(app, runs):
    status, text = ask(app, "/run/good")
    page = Page(text)
    assert status == 200 and "connect-src 'self'" in text and len(page.named("script")) == 3
    status, text = ask(app, "/content/good")
    content = json.loads(text)
    assert status == 200 and content["page"]["glass"] and content["page"]["figures"]
    assert "<img" not in content["main"] and "learning" in content["main"]
    assert content["version"] == json.loads(ask(app, "/version/good")[1])["version"]


def test_a_run_that_grows_has_another_version(tmp_path):
    write_run(tmp_path / "run", steps=2)
    app = view_app(tmp_path, patience=60)
    before = json.loads(ask(app, "/content/run")[1])
    with RunWriter.resume(tmp_path / "run", None, environment={"python": "3"}) as writer:
        writer.write_metrics(3, {"reward": 0.5})
    after = json.loads(ask(app, "/content/run")[1])
    assert before["version"] != after["version"] and "3 trained" in after["main"] and "2 trained" in before["main"]


def test_a_page_that_is_followed_gets_new_cosines_between_steps(tmp_path):
    write_run(tmp_path / "run", steps=4, sketched=True)
    app = view_app(tmp_path, patience=60)
    before = json.loads(ask(app, "/content/run")[1])
    with RunWriter.resume(tmp_path / "run", None, environment={"python": "3"}) as writer:
        writer.write_updates(5, [UpdateRecord(step=5, sketch=torch.ones(64))])
    after = json.loads(ask(app, "/content/run")[1])
    figures = [{one["id"]: one for one in each["page"]["figures"]} for each in (before, after)]
    shown = [each["update-cosines-plot"]["data"][0]["x"] for each in figures]
    assert before["version"] != after["version"] and shown == [[1, 2, 3, 4], [1, 2, 3, 4, 5]]


def test_the_last_page_is_served_while_a_new_one_is_made(tmp_path, monkeypatch):
    write_run(tmp_path / "run", steps=2)
    app, release, began = view_app(tmp_path, patience=0.0), threading.Event(), []
    slow = view.run_page

    def waiting(run):
        began.append(time.perf_counter())
        assert release.wait(60)
        return slow(run)

    monkeypatch.setattr(view, "run_page", waiting)
    status, text = ask(app, "/run/run")
    assert status == 200 and "Reading the run" in Page(text).text("h1")
    assert "being read" in Page(ask(app, "/")[1]).text("td") and ask(app, "/content/run")[0] == 202
    release.set()
    first = until(lambda: ask(app, "/content/run"), lambda answer: answer[0] == 200)
    version = json.loads(first[1])["version"]
    assert ask(app, f"/content/run?have={quote(version)}")[0] == 202
    release.clear()
    with RunWriter.resume(tmp_path / "run", None, environment={"python": "3"}) as writer:
        writer.write_metrics(3, {"reward": 0.5})
    assert "2 trained" in ask(app, "/run/run")[1]  # the last one, while the new one is being made
    assert ask(app, f"/content/run?have={quote(version)}")[0] == 202
    release.set()
    after = until(lambda: ask(app, f"/content/run?have={quote(version)}"), lambda answer: answer[0] == 200)
    assert "3 trained" in json.loads(after[1])["main"] and len(began) == 2


def until(ask_again, is_enough):
    """The first answer that is enough."""
    deadline = time.monotonic() + 60
    while not is_enough(answer := ask_again()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return answer


def test_answers_asked_for_last_are_made_first_and_few_are_kept():
    maker, release, made = AnswerMaker(patience=0.0), threading.Event(), []

    began = threading.Event()

    def job(key):
        return lambda: (began.set(), release.wait(60), made.append(key), key)[-1]

    for key in range(MOST_KEPT + 3):
        assert maker.newest(key, "1", job(key)) is None
        assert began.wait(60)
    assert maker.newest(0, "1", job("again")) is None  # it is being made
    release.set()
    until(lambda: len(made), lambda count: count == MOST_KEPT + 3)
    assert made == [0, *range(MOST_KEPT + 2, 0, -1)]
    found = maker.newest(1, "1", job("again"), patience=60)
    assert found is not None and found.result() == 1 and "again" not in made
    gone = maker.newest(0, "1", job("again"), patience=60)
    assert gone is not None and gone.result() == "again"


def test_an_answer_that_fails_fails_for_whoever_asks():
    found = AnswerMaker(patience=60).newest("key", "1", lambda: 1 / 0)
    assert found is not None
    with pytest.raises(ZeroDivisionError):
        found.result()


def test_the_list_can_be_asked_for_alone(app):
    status, text = ask(app, "/rows")
    main = json.loads(text)["main"]
    assert status == 200 and "deep/other" in main and "<html" not in main and "<img" not in main


@pytest.mark.parametrize(
    "name", ["../secret", "link", "good/../../secret", "/etc", "no-run", "nowhere", "..", "deep", "%2e%2e/secret"]
)
@pytest.mark.parametrize("door", ["run", "content", "version"])
def test_nothing_outside_the_list_can_be_reached(door, name, app):
    assert ask(app, f"/{door}/{name}")[0] == 404
    assert ask(app, f"/compare?run={quote(name)}")[0] == 404


def test_a_damaged_run_does_not_break_the_rest(app):
    status, text = ask(app, "/run/foreign")
    assert status == 422 and "Cannot be read" in Page(text).text("h1")
    assert ask(app, "/run/broken")[0] == 422 and ask(app, "/run/deep/other")[0] == 200


def test_runs_are_compared(app):
    status, text = ask(app, "/compare?run=good&run=deep/other&run=good")
    assert status == 200 and "2 runs side by side" in Page(text).text("h1")


def test_texts_are_found_whatever_their_case_and_shown_as_text(app):
    status, text = ask(app, "/search?q=COMPLETION%201.2")
    page = Page(text)
    assert status == 200 and page.text("pre").count("completion 1.2 " + EVIL) == 12  # of good and of broken
    assert not page.named("img") and page.text("p").startswith("12 prompts and rollouts contain it")
    assert Page(ask(app, "/search?q=prompt")[1]).text("pre").count("completion") == MOST_HITS
    assert "0 prompts" in Page(ask(app, "/search?q=")[1]).text("p")
    assert Page(ask(app, f"/search?q={quote(EVIL)}")[1]).text("h1").endswith(EVIL)


def test_only_this_machine_may_ask_and_only_to_read(app, runs):
    assert ask(app, "/", host="evil.example")[0] == 400
    assert ask(view_app(runs, hosts=("box",)), "/", host="box")[0] == 200
    for method in ("POST", "PUT", "DELETE"):
        assert ask(app, "/run/good", method=method)[0] == 405


@pytest.mark.parametrize(
    ("options", "said"),
    [(["nowhere"], "must be a folder of runs"), ([".", "--port", "70000"], "--port must be from 0 to 65535")],
)
def test_a_wrong_option_is_one_sentence(options, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["view", *options]) == 2
    assert re.fullmatch(rf"scoregram: view: .*{re.escape(said)}.*\n", capsys.readouterr().err)


def test_a_file_is_called_a_file_and_its_folder_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ScoregramError, match=rf"got a file\. .*scoregram view {re.escape(str(tmp_path))}"):
        serve_runs(tmp_path / "metrics.jsonl")
    with pytest.raises(ScoregramError, match="got no such folder"):
        serve_runs(tmp_path / "absent")


def test_without_starlette_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "starlette.applications", None)
    with pytest.raises(ScoregramError, match=r"pip install 'scoregram\[view\]'"):
        serve_runs(tmp_path)


def test_an_address_that_cannot_be_used_is_an_error(tmp_path):
    with listening_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert port > 0
        with pytest.raises(
            ScoregramError, match=rf"view: --host and --port must be .*, got 127.0.0.1 and {port}: .+in use"
        ):
            serve_runs(tmp_path, port=port)
    with pytest.raises(ScoregramError, match=r"got nosuchhost.invalid and 0: .+ Choose another"):
        serve_runs(tmp_path, host="nosuchhost.invalid", port=0)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_a_training_that_goes_on_appears_without_a_reload(tmp_path: Path):
    import uvicorn

    from tests.test_report_browser import opened_address

    write_run(tmp_path / "runs" / "one", steps=2, text=EVIL)
    # the browser's clock is virtual: it would ask ten times before a busy machine has made one page
    app, asked = view_app(tmp_path / "runs", patience=2.0), []

    async def growing(scope, receive, send):
        if scope["type"] == "http" and scope["path"].startswith("/version"):
            asked.append(scope["path"])
            if len(asked) == 2:
                with RunWriter.resume(tmp_path / "runs" / "one", None, environment={"python": "3"}) as writer:
                    writer.write_metrics(3, {"reward": 0.5})
        await app(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(growing, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        document, said = opened_address(f"http://127.0.0.1:{port}/run/one", tmp_path / "home")
    finally:
        server.should_exit = True
        thread.join()
    assert len(asked) > 2 and "3 trained" in document and "<title>one</title>" in document
    assert said == "" and 'class="main-svg"' in document
