"""A local server over run folders: a list of runs, one run followed while it trains, several runs, and search.

It reads and never writes. A run is reached by its name in the list, so no path outside the folder can be asked for.
The page of a long run takes seconds. One thread makes pages; until a new one is finished, the last one is served.
"""

import json
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import yaml

from scoregram.checks import ScoregramError, fail
from scoregram.reading import Indicator, read_run
from scoregram.report.glass import Glass
from scoregram.report.page import LiveRun, live_block, live_document
from scoregram.report.run_page import RunPage, folder_content, run_page
from scoregram.report.several_page import several_page
from scoregram.runs import CONFIG_FILE, Run, open_run, require_path

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

SEARCH_DEPTH = 3
"""Folders below RUNS in which runs are looked for."""
FRESH_SECONDS = 60.0
"""A run whose metrics changed within this time is called running."""
MAKER_THREAD = "scoregram view"
"""Name of the thread that makes pages."""
PATIENCE = 0.05
"""Seconds that an answer waits for a page that is being made, before it serves the last one."""
SWITCH_SECONDS = 0.001
"""Longest time that the thread which makes pages keeps the interpreter while an answer waits for it. An answer changes
threads several times, so Python's usual 5 ms add up."""
MOST_KEPT = 12
"""Finished pages that are kept in memory: one of a long run takes 20 MB."""
MOST_HITS = 50
"""Hits that a search shows."""
READING_ERRORS = (ScoregramError, OSError, ValueError, KeyError, TypeError, pa.ArrowException, yaml.YAMLError)
"""Errors of a folder that is half written, foreign or damaged."""


@dataclass(frozen=True)
class RunRow:
    """A run in the list."""

    name: str
    state: str
    """`running`, `finished`, `stopped`, `empty`, or `cannot be read`."""
    facts: Mapping[str, str] = field(default_factory=dict)
    tiles: Sequence[Indicator] = ()
    finding: str = ""
    """The most important advice, or why the folder cannot be read."""


@dataclass(frozen=True)
class FinishedAnswer:
    """What was made from the files of a version."""

    version: str
    value: Any

    def result(self) -> Any:
        """The value; if making it failed, its exception is raised."""
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class AnswerMaker:
    """Makes answers that take long in one thread, the one asked for last first, and keeps those that are finished."""

    def __init__(self, patience: float | int) -> None:
        self.patience = patience
        self._finished: dict[Any, FinishedAnswer] = {}
        self._wanted: dict[Any, tuple[str, Callable[[], Any]]] = {}
        self._current: tuple[Any, str] | None = None
        """Key and version that the thread is making; None if there is no thread."""
        self._change = Condition()

    def newest(
        self, key: Any, version: str, make: Callable[[], Any], patience: float | int | None = None
    ) -> FinishedAnswer | None:
        """The newest finished answer, after waiting a moment for that of `version`; None before the first.

        Args:
            key: What is asked for.
            version: Changes whenever the answer does.
            make: Makes the answer.
            patience: Seconds to wait; that of the maker if None.
        """
        with self._change:
            if not self._has(key, version):
                if self._current != (key, version):
                    self._wanted.pop(key, None)
                    self._wanted[key] = version, make  # last, hence next
                if self._current is None:
                    self._current = key, version
                    Thread(target=self._work, name=MAKER_THREAD, daemon=True).start()
                wait = self.patience if patience is None else patience
                self._change.wait_for(lambda: self._has(key, version), wait)
            return self._finished.get(key)

    def _has(self, key: Any, version: str) -> bool:
        return key in self._finished and self._finished[key].version == version

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            key, version, make = job
            try:
                value = make()
            except Exception as error:  # raised again for whoever asks
                value = error
            with self._change:
                self._finished.pop(key, None)
                self._finished[key] = FinishedAnswer(version, value)
                while len(self._finished) > MOST_KEPT:
                    self._finished.pop(next(iter(self._finished)))
                self._change.notify_all()

    def _next_job(self) -> tuple[Any, str, Callable[[], Any]] | None:
        with self._change:
            if not self._wanted:
                self._current = None
                return None
            key, (version, make) = self._wanted.popitem()
            self._current = key, version
            return key, version, make


@dataclass(frozen=True)
class ServedRun:
    """The page of a run as it is sent, made once per version."""

    html: bytes
    content: bytes
    """The update of a page that follows the run, as JSON."""


class RunLibrary:
    """The runs below one folder, each read again only when its files have changed."""

    def __init__(self, root: Path, patience: float | int = PATIENCE) -> None:
        self.root = root.resolve()
        self.maker = AnswerMaker(patience)
        self._rows: dict[str, tuple[str, RunPage | Exception]] = {}
        """Name → version and what the list shows of it; without its figures and steps, which take the memory."""

    def names(self) -> list[str]:
        """Path of every run below the folder, relative to it; `.` if the folder itself is a run."""
        if (self.root / CONFIG_FILE).is_file():
            return ["."]
        found, level = [], [self.root]
        for _ in range(SEARCH_DEPTH):
            below = sorted(path for folder in level for path in _folders(folder))
            found += [path for path in below if (path / CONFIG_FILE).is_file()]
            level = [path for path in below if not (path / CONFIG_FILE).is_file()]
        return sorted(path.relative_to(self.root).as_posix() for path in found)

    def open(self, name: str) -> Run:
        """The run of this name.

        Raises:
            KeyError: If the list has no such name.
            ScoregramError: If the folder holds no readable run.
        """
        if name not in self.names():
            raise KeyError(name)
        return open_run(self.root / name)

    def version(self, name: str) -> str:
        """A text that changes whenever the run has grown.

        Raises:
            KeyError: If the list has no such name.
        """
        if name not in self.names():
            raise KeyError(name)
        folder = self.root / name
        files = (folder / part for part in (CONFIG_FILE, "metrics.jsonl", "groups", "rollouts", "batches", "updates"))
        stats = [path.stat() if path.exists() else None for path in files]
        return "-".join("0" if one is None else f"{one.st_mtime_ns}.{one.st_size}" for one in stats)

    def served(self, name: str, patience: float | int | None = None) -> FinishedAnswer | None:
        """The newest finished page of a run, a `ServedRun`; None before the first. A newer one is begun if needed.

        Raises:
            KeyError: If the list has no such name.
        """
        version = self.version(name)
        return self.maker.newest(name, version, lambda: self._serve(name, version), patience)

    def _serve(self, name: str, version: str) -> ServedRun:
        try:
            page = run_page(self.open(name))
        except READING_ERRORS as error:
            self._rows[name] = version, error
            raise
        self._rows[name] = version, replace(page, sections=(), glass=Glass([], ""))
        html, content = page.served(LiveRun(name, version))
        return ServedRun(html.encode(), content.encode())

    def compared(self, names: Sequence[str]) -> FinishedAnswer | None:
        """The newest finished page of several runs, as text; None before the first.

        Raises:
            KeyError: If the list lacks one of the names.
        """
        version = " ".join(map(self.version, names))
        return self.maker.newest(
            tuple(names), version, lambda: several_page({name: read_run(self.open(name)) for name in names})
        )

    def row(self, name: str, patience: float | int | None = None) -> RunRow:
        """A run in the list; a folder that cannot be read says why, and one not read yet says so."""
        known = self._rows.get(name)
        if known is None or known[0] != self.version(name):
            self.served(name, patience)
            known = self._rows.get(name)
        if known is None:
            return RunRow(name, "being read")
        page = known[1]
        if isinstance(page, Exception):
            return RunRow(name, "cannot be read", finding=str(page) or type(page).__name__)
        advice = page.cards[0].sentence if page.cards else ""
        return RunRow(name, self._state(name, page), dict(page.facts), page.tiles, advice)

    def rows(self) -> list[RunRow]:
        """All runs of the list; those that are being read are waited for once, not one after the other."""
        deadline = time.monotonic() + self.maker.patience
        return [self.row(name, max(0.0, deadline - time.monotonic())) for name in self.names()]

    def _state(self, name: str, page: RunPage) -> str:
        metrics = self.root / name / "metrics.jsonl"
        if not metrics.is_file() or not page.progress.steps:
            return "empty"
        if page.progress.is_finished:
            return "finished"
        return "running" if time.time() - metrics.stat().st_mtime < FRESH_SECONDS else "stopped"

    def search(self, text: str) -> list[dict[str, Any]]:
        """Prompts and rollouts that contain a text, whatever its case; at most 50."""
        hits: list[dict[str, Any]] = []
        for name in self.names() if text else ():
            try:
                for table in self.open(name).rollout_texts():
                    hits += [{"run": name, **row} for row in matching_rows(table, text, MOST_HITS - len(hits))]
                    if len(hits) >= MOST_HITS:
                        return hits
            except READING_ERRORS:
                continue  # the list says that it cannot be read
        return hits


def runs_document(root: Path, rows: Sequence[RunRow]) -> str:
    """The list of runs, which asks for itself every two seconds."""
    return live_document("runs.html", script="list.js", title="Runs", rows=rows, root=str(root))


def runs_content(root: Path, rows: Sequence[RunRow]) -> str:
    """The content of the list alone."""
    return live_block("runs.html", title="Runs", rows=rows, root=str(root))


def matching_rows(table: pa.Table, text: str, most: int) -> list[dict[str, Any]]:
    """Rows whose prompt or completion contains the text, whatever its case."""
    wanted = text.casefold()
    texts = zip(table["prompt"].to_pylist(), table["completion"].to_pylist(), strict=True)
    places = [place for place, pair in enumerate(texts) if any(wanted in (one or "").casefold() for one in pair)]
    return table.take(places[:most]).to_pylist()


def _folders(folder: Path) -> list[Path]:
    """Folders directly below, without links, which could lead outside, and without hidden ones."""
    try:
        return [
            path
            for path in folder.iterdir()
            if path.is_dir() and not path.is_symlink() and not path.name.startswith(".")
        ]
    except OSError:
        return []


class RunSite:
    """The pages about the runs below a folder: a method for each address."""

    def __init__(self, root: Path, patience: float | int = PATIENCE) -> None:
        self.root = root
        """The folder as it was named, for the heading of the list."""
        self.library = RunLibrary(root, patience)

    def routes(self) -> "list[Route]":
        """Every address and what answers it; a name may contain slashes."""
        from starlette.routing import Route

        return [
            Route("/", self.runs),
            Route("/rows", self.rows),
            Route("/run/{name:path}", self.run),
            Route("/content/{name:path}", self.content),
            Route("/version/{name:path}", self.version),
            Route("/compare", self.compare),
            Route("/search", self.search),
        ]

    def runs(self, request: "Request") -> "Response":
        """The list of runs."""
        return html_answer(runs_document(self.root, self.library.rows()))

    def rows(self, request: "Request") -> "Response":
        """The content of the list alone, as JSON."""
        return json_answer(json.dumps({"main": runs_content(self.root, self.library.rows())}))

    def run(self, request: "Request") -> "Response":
        """The page of a run."""
        return answer_or_reason(lambda: first_or_waiting(self.library.served(named(request)), lambda made: made.html))

    def content(self, request: "Request") -> "Response":
        """The update of a page that follows a run, as JSON; 202 if nothing newer than `have` is finished."""

        def update() -> "Response":
            found = self.library.served(named(request))
            if found is None or found.version == request.query_params.get("have"):
                return html_answer("", status=202)
            return json_answer(found.result().content)

        return answer_or_reason(update)

    def version(self, request: "Request") -> "Response":
        """The version of a run's files, as JSON."""
        return answer_or_reason(lambda: json_answer(json.dumps({"version": self.library.version(named(request))})))

    def compare(self, request: "Request") -> "Response":
        """The page of several runs; a run that is named twice counts once."""
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        return answer_or_reason(lambda: first_or_waiting(self.library.compared(names), str))

    def search(self, request: "Request") -> "Response":
        """Prompts and rollouts that contain a text."""
        text = request.query_params.get("q", "")
        hits = self.library.search(text)
        return html_answer(live_document("search.html", title="Search", text=text, hits=hits, most=MOST_HITS))


def named(request: "Request") -> str:
    """Name of the run that a request asks for."""
    return request.path_params["name"]


def html_answer(text: bytes | str, *, status: int = 200, refresh: bool = False) -> "Response":
    """An HTML page; with `refresh` the browser asks for it again after a second."""
    from starlette.responses import HTMLResponse

    return HTMLResponse(text, status_code=status, headers={"Refresh": "1"} if refresh else None)


def json_answer(text: bytes | str) -> "Response":
    """An answer that is JSON already."""
    from starlette.responses import Response

    return Response(text, media_type="application/json")


def first_or_waiting(found: FinishedAnswer | None, text: Callable[[Any], bytes | str]) -> "Response":
    """The page, or while the first one is being made, a page that loads itself again."""
    if found is None:
        return html_answer(live_document("waiting.html", title="Reading the run"), refresh=True)
    return html_answer(text(found.result()))


def answer_or_reason(make: Callable[[], "Response"]) -> "Response":
    """The answer, or a page that says that there is no such run, or why it cannot be read."""
    try:
        return make()
    except KeyError:
        return html_answer(live_document("sorry.html", title="No such run", why="No such run."), status=404)
    except READING_ERRORS as error:
        why = str(error) or type(error).__name__
        return html_answer(live_document("sorry.html", title="Cannot be read", why=why), status=422)


def view_app(
    root: Path, hosts: Sequence[str] = ("127.0.0.1", "localhost"), patience: float | int = PATIENCE
) -> "Starlette":
    """The server as an ASGI application.

    Args:
        root: Folder of the runs, or one run.
        hosts: Names under which the browser may ask, so that no other web site can read through it.
        patience: Seconds that an answer waits for a page that is being made.

    Raises:
        ScoregramError: If starlette is not installed.
    """
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
    except ImportError as missing:
        fail("view", "the server needs starlette and uvicorn", missing, "Install them: pip install 'scoregram[view]'.")
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))]
    return Starlette(routes=RunSite(root, patience).routes(), middleware=middleware)


def serve_runs(root: Path, *, host: str = "127.0.0.1", port: int = 8642) -> None:
    """Serve the runs below a folder until interrupted; prints the address.

    Raises:
        ScoregramError: If the folder does not exist, the address cannot be used, or starlette or uvicorn is missing.
    """
    if not require_path(root, caller="view").is_dir():
        remedy = "Name the folder that holds your runs."
        if root.exists():
            remedy = f"Name the folder that it is in: scoregram view {shlex.quote(str(root.parent))}"
        fail("view", f"{root} must be a folder of runs", folder_content(root), remedy)
    if not 0 <= port <= 65535:
        fail("view", "--port must be from 0 to 65535", port, "Choose another.")
    app = view_app(root, hosts=("127.0.0.1", "localhost", "[::1]", host) if host != "0.0.0.0" else ("*",))
    import uvicorn

    sys.setswitchinterval(SWITCH_SECONDS)
    with listening_socket(host, port) as listening:
        print(f"http://{host}:{listening.getsockname()[1]}/  (stop with Ctrl-C)", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens on an address; port 0 takes a free one.

    Raises:
        ScoregramError: If the host is unknown or the port is in use.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        got = f"{host} and {port}: {error.strerror}"
        return fail("view", "--host and --port must be an address to listen on", got, "Choose another port or host.")
