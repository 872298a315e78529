"""A local server over run folders: a list of runs, one run followed while it trains, several runs, and search.

It reads and never writes. A run is reached by its name in the list, so no path outside the folder can be asked for.
"""

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import yaml

from scoregram.checks import ScoregramError, fail
from scoregram.reading import Indicator, read_run
from scoregram.report.page import live_document
from scoregram.report.run_page import RunPage, run_page
from scoregram.report.several_page import several_page
from scoregram.runs import CONFIG_FILE, Run, open_run

if TYPE_CHECKING:
    from starlette.applications import Starlette

DEEPEST = 3
"""Folders below RUNS in which runs are looked for."""
FRESH_SECONDS = 60.0
"""A run whose metrics changed within this time is called running."""
MOST_HITS = 50
"""Hits that a search shows."""
BROKEN = (ScoregramError, OSError, ValueError, KeyError, TypeError, pa.ArrowException, yaml.YAMLError)
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


class RunLibrary:
    """The runs below one folder, each read again only when its files have changed."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._pages: dict[str, tuple[str, RunPage]] = {}
        self._lock = Lock()

    def names(self) -> list[str]:
        """Path of every run below the folder, relative to it; `.` if the folder itself is a run."""
        if (self.root / CONFIG_FILE).is_file():
            return ["."]
        found, level = [], [self.root]
        for _ in range(DEEPEST):
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
        files = (folder / part for part in (CONFIG_FILE, "metrics.jsonl", "groups", "rollouts", "batches"))
        stats = [path.stat() if path.exists() else None for path in files]
        return "-".join("0" if one is None else f"{one.st_mtime_ns}.{one.st_size}" for one in stats)

    def page(self, name: str) -> tuple[str, RunPage]:
        """Version and page of a run; computed once per version."""
        version = self.version(name)
        with self._lock:
            known = self._pages.get(name)
            if known is None or known[0] != version:
                known = self._pages[name] = version, run_page(self.open(name))
        return known

    def row(self, name: str) -> RunRow:
        """A run in the list; a folder that cannot be read says why."""
        try:
            _, page = self.page(name)
        except BROKEN as error:
            return RunRow(name, "cannot be read", finding=str(error) or type(error).__name__)
        advice = page.cards[0].sentence if page.cards else ""
        return RunRow(name, self._state(name, page), dict(page.facts), page.tiles, advice)

    def _state(self, name: str, page: RunPage) -> str:
        metrics = self.root / name / "metrics.jsonl"
        if not metrics.is_file() or not page.steps:
            return "empty"
        if page.planned_steps and page.steps >= page.planned_steps:
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
            except BROKEN:
                continue  # the list says that it cannot be read
        return hits


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


def view_app(root: Path, hosts: Sequence[str] = ("127.0.0.1", "localhost")) -> "Starlette":
    """The server as an ASGI application.

    Args:
        root: Folder of the runs, or one run.
        hosts: Names under which the browser may ask, so that no other web site can read through it.

    Raises:
        ScoregramError: If starlette is not installed.
    """
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.requests import Request
        from starlette.responses import HTMLResponse, JSONResponse, Response
        from starlette.routing import Route
    except ImportError as missing:
        fail("view", "the server needs starlette and uvicorn", missing, "Install them: pip install 'scoregram[view]'.")
    library = RunLibrary(root)

    def runs(request: Request) -> Response:
        rows = [library.row(name) for name in library.names()]
        return HTMLResponse(live_document("runs.html", title="Runs", rows=rows, root=str(root)))

    def run(request: Request) -> Response:
        name = request.path_params["name"]
        return _answer(lambda: HTMLResponse(library.page(name)[1].html(live=name)))

    def content(request: Request) -> Response:
        def made() -> Response:
            version, page = library.page(request.path_params["name"])
            return JSONResponse({"version": version, **page.content()})

        return _answer(made)

    def version(request: Request) -> Response:
        return _answer(lambda: JSONResponse({"version": library.version(request.path_params["name"])}))

    def compare(request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        return _answer(lambda: HTMLResponse(several_page({name: read_run(library.open(name)) for name in names})))

    def search(request: Request) -> Response:
        text = request.query_params.get("q", "")
        shown = live_document("search.html", title="Search", text=text, hits=library.search(text), most=MOST_HITS)
        return HTMLResponse(shown)

    def _answer(make: Any) -> Response:
        try:
            return make()
        except KeyError:
            return HTMLResponse(live_document("sorry.html", title="No such run", why="No such run."), status_code=404)
        except BROKEN as error:
            why = str(error) or type(error).__name__
            return HTMLResponse(live_document("sorry.html", title="Cannot be read", why=why), status_code=422)

    routes = [
        Route("/", runs),
        Route("/run/{name:path}", run),
        Route("/content/{name:path}", content),
        Route("/version/{name:path}", version),
        Route("/compare", compare),
        Route("/search", search),
    ]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))])


def serve_runs(root: Path, *, host: str = "127.0.0.1", port: int = 8642) -> None:
    """Serve the runs below a folder until interrupted; prints the address.

    Raises:
        ScoregramError: If the folder does not exist, the address cannot be used, or starlette or uvicorn is missing.
    """
    if not root.is_dir():
        fail("view", f"{root} must be a folder of runs", "no such folder", "Name the folder that holds your runs.")
    if not 0 <= port <= 65535:
        fail("view", "--port must be from 0 to 65535", port, "Choose another.")
    app = view_app(root, hosts=("127.0.0.1", "localhost", "[::1]", host) if host != "0.0.0.0" else ("*",))
    import uvicorn

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
