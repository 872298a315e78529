"""Tests run on broken sources: one forked process a mutant, with the tests that execute the broken function.

A session imports and collects everything once, and runs every test once on the sources as they are. That run must be
green; it gives the processor time of each test and the functions that it calls. Each mutant then gets a fork of the
session, in which the code of the changed function is replaced. The tests that call it run first, the cheapest first.
This takes milliseconds where a fresh Python that imports torch, scoregram and the tests takes seconds.

A fork cannot show what an edit changes at import, nor in processes that a test starts. Such mutants run in a second
way: a process that has not imported scoregram yet imports a copy of `src/` with the edit in it.

- At import: the edit changes a constant, a class body or a default, or a function that runs while modules are imported.
- A row of a literal table is the exception: its new fields are written into the row that the tests hold.
"""

import contextlib
import dataclasses
import gc
import hashlib
import importlib
import json
import os
import pickle
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

from tests.mutant_code import PACKAGE, TREE, Mutant, Place, changed_functions, changed_rows, place, source_text

PACKAGES = (
    "torch",
    "torch.distributed.tensor",
    "transformers",
    "hypothesis",
    "jaxtyping",
    "rich.progress",
    "yaml",
    "tyro",
)
"""Imported before the forks."""
NOT_IMPORTED = ("pyarrow", "pandas", "datasets", "scoregram", "tests")
"""Never imported on behalf of the tests: pyarrow's threads do not survive a fork."""
KILLED, SURVIVED, UNDECIDED = "killed", "survived", "undecided"
STARTS = frozenset({"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty"})
"""Audit events of a test that starts a process."""

Row = dict[str, object]
"""What became of a mutant: area, name, file, outcome, processor seconds, and the test that failed first."""


@dataclass(frozen=True)
class RunOptions:
    """How mutants are run."""

    jobs: int = 2
    seconds: float = 3600
    """Processor time after which a mutant that no test has noticed yet is left undecided."""
    timings: Path | None = None
    """File that keeps the run without mutants, which is not repeated while sources and tests stay the same."""


# Processes.


@dataclass(frozen=True)
class Ended:
    """How a forked process ended."""

    status: int
    """Exit status, or minus the signal that ended it."""
    seconds: float
    """Processor time."""
    log: Path

    @property
    def timed_out(self) -> bool:
        """Whether a time limit ended it."""
        return self.status in {-signal.SIGXCPU, -signal.SIGALRM}


def limit_time(cpu: float) -> None:
    """End this process after `cpu` more seconds of processor time, or ten times as long by the clock."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime + cpu) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    signal.alarm(int(10 * cpu))


def start(task: Callable[[], int], log: Path) -> int:
    """Fork a process that runs `task` and exits with what it returns; its output goes to `log`."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    status = 3
    try:
        os.setsid()
        limit_time(3600)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        status = task()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def wait(pid: int, log: Path) -> Ended:
    """Wait for a process that `start` forked, and end what it left running."""
    _, status, used = os.wait4(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return Ended(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, log)


def pytest_session(source: Path, arguments: Sequence[str], plugin: object) -> int:
    """Run pytest in this process, with the package from `source`."""
    from hypothesis import Phase, settings

    sys.path.insert(0, str(source))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(source), str(TREE)])
    # One failing example is enough: it need not be the smallest.
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutants", deadline=None, max_examples=50, derandomize=True, phases=phases)
    # Shapes are not checked: a test has to notice, not an annotation, and half of the time is saved.
    flags = ["-o", "addopts=", "-m", "not slow and not gpu and not integration and not browser"]
    flags += ["-q", "--tb=line", "-p", "no:cacheprovider", "--hypothesis-profile=mutants", "--capture=sys"]
    # transformers has imported anyio, which brings a plugin of its own.
    flags += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-o", "tmp_path_retention_policy=none"]
    return int(pytest.main([*flags, *arguments], plugins=[plugin]))


# The session that has imported everything.


@dataclass(frozen=True)
class UnchangedTest:
    """A test on the sources as they are."""

    seconds: float
    """Processor time."""
    reached: frozenset[Place]
    """Functions of the package that it calls."""
    starts_processes: bool
    """Whether it starts processes, which import the package anew."""


class Tracer:
    """Notes the functions of the package that are called, in every thread."""

    def __init__(self) -> None:
        self.reached: set[Place] = set()
        self._prefix = str(PACKAGE)

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        """A call. Returns nothing, so that lines are not traced."""
        code = frame.f_code
        if code.co_filename.startswith(self._prefix) and code.co_flags & CO_OPTIMIZED:
            self.reached.add(place(code))

    def __enter__(self) -> "Tracer":
        threading.settrace(self)
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # pyright: ignore[reportArgumentType]


def take_few_examples(item: pytest.Item) -> None:
    """Five examples of a property, the first of the fifty that a mutant has to pass."""
    from hypothesis import settings

    test, name = getattr(item, "obj", None), "_hypothesis_internal_use_settings"
    if (chosen := getattr(test, name, None)) is not None:
        setattr(test, name, settings(chosen, max_examples=min(5, chosen.max_examples)))


def warm_up_hypothesis() -> None:
    """A failing property: Hypothesis reads the constants of all imported sources once, which takes a second."""
    from hypothesis import given
    from hypothesis import strategies as st

    @given(st.floats(), st.integers(), st.lists(st.booleans()))
    def property_that_fails(x: float, n: int, flags: list[bool]) -> None:
        raise AssertionError(f"{x} {n} {flags}")

    with contextlib.suppress(AssertionError):
        property_that_fails()


def sources_digest(tests: Iterable[str]) -> str:
    """A hash of everything that decides how long tests take and what they call."""
    files = sorted([*PACKAGE.rglob("*.py"), *(TREE / "tests").glob("*.py")])
    content = [file.read_bytes() for file in files if not file.name.startswith("mutant")]
    return hashlib.sha256(b"\0".join([*content, *(test.encode() for test in tests)])).hexdigest()


@dataclass(frozen=True)
class Change:
    """What a mutant changes in a process that has imported the package."""

    codes: tuple[tuple[FunctionType, CodeType], ...] = ()
    """Functions, and the code that replaces theirs."""
    rows: tuple[tuple[object, object], ...] = ()
    """Rows of a table, and the rows whose fields replace theirs."""
    places: frozenset[Place] = frozenset()
    """Where the functions are defined; a test that calls none of them sees no difference."""

    def apply(self) -> None:
        """Change this process."""
        for function, code in self.codes:
            function.__code__ = code
        for row, new in self.rows:
            for field in dataclasses.fields(row):  # pyright: ignore[reportArgumentType]
                object.__setattr__(row, field.name, getattr(new, field.name))


def package_functions() -> dict[Place, list[FunctionType]]:
    """Every function of the package that this process has imported, by its place; several for a decorated one."""
    functions: dict[Place, list[FunctionType]] = defaultdict(list)
    gc.unfreeze()  # `conftest` has frozen what was imported, and the collector does not list frozen objects
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename.startswith(str(PACKAGE)):
            functions[place(thing.__code__)].append(thing)
    return functions


class MutantSession:
    """A pytest plugin: instead of running the collected tests, fork once for every mutant."""

    def __init__(
        self, mutants: Sequence[Mutant], folder: Path, send: Callable[[Row], None], options: RunOptions
    ) -> None:
        self.mutants, self.folder, self.send, self.options = mutants, folder, send, options
        self.at_import = Tracer()
        self.failed = ""
        self.functions: dict[Place, list[FunctionType]] = defaultdict(list)
        self.unchanged: dict[str, UnchangedTest] = {}
        self.items: dict[str, pytest.Item] = {}
        self.kills: Counter[tuple[str, str]] = Counter()

    def pytest_collection(self) -> None:
        """Note what runs at import."""
        self.at_import.__enter__()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember the first test that fails, in its call, setup or teardown."""
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Every test once, then every mutant."""
        self.at_import.__exit__()
        if session.testsfailed:
            raise SystemExit("mutants: the tests cannot be collected without any mutant.")
        self.functions = package_functions()
        warm_up_hypothesis()
        self.items = {item.nodeid: item for item in session.items if any(m.selects(item.nodeid) for m in self.mutants)}
        self.measure_unchanged()
        gc.collect()
        gc.freeze()  # shared with the forks, which copy what the collector touches
        running: dict[int, tuple[int, Path]] = {}
        for number, mutant in enumerate(self.mutants):
            change = self.change(mutant)
            tests = self.tests_of(mutant, change)
            if change is None:
                self.send({"number": number, "status": None, "tests": tests})
                continue
            log = self.folder / f"{number}.log"
            pid = start(lambda change=change, tests=tests, log=log: self.run_changed(change, tests, log), log)
            running[pid] = number, log
            if len(running) >= self.options.jobs:
                self.finish(running)
        while running:
            self.finish(running)
        return True

    def measure_unchanged(self) -> None:
        """Run every test on the sources as they are, in a fork; an error unless all pass."""
        log, found = self.folder / "unchanged.log", self.options.timings or self.folder / "unchanged.pickle"
        digest, seconds = sources_digest(self.items), 0.0
        if not found.is_file() or pickle.loads(found.read_bytes())[0] != digest:
            ended = wait(start(lambda: self.run_unchanged(found, digest), log), log)
            if ended.status != 0:
                raise SystemExit(f"mutants: a test fails without any mutant:\n{log.read_text()[-3000:]}")
            seconds = ended.seconds
        _, self.unchanged, imported = pickle.loads(found.read_bytes())
        for name in imported:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        self.send({"unchanged": list(self.unchanged), "seconds": seconds})

    def run_unchanged(self, found: Path, digest: str) -> int:
        """Time every test, and note the functions that it calls and what all of them import."""
        tests, imported = list(self.items), set(sys.modules)
        for item in self.items.values():
            take_few_examples(item)
        started: list[str] = []
        sys.addaudithook(lambda event, _: started.append(event) if event in STARTS else None)
        measured = {}
        for test, following in zip_longest(tests, tests[1:]):
            began, count = time.process_time(), len(started)
            with Tracer() as tracer:
                self.run_test(test, following)
            if self.failed:
                return 1
            seconds, starts_processes = time.process_time() - began, len(started) > count
            measured[test] = UnchangedTest(seconds, frozenset(tracer.reached), starts_processes)
        names = [name for name in sys.modules if name not in imported and name.split(".")[0] not in NOT_IMPORTED]
        found.write_bytes(pickle.dumps((digest, measured, names)))
        return 0

    def run_test(self, test: str, following: str | None) -> None:
        """Run one test; fixtures that the following one does not use are torn down."""
        item = self.items[test]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=self.items[following] if following else None)

    def run_changed(self, change: Change, tests: Sequence[str], log: Path) -> int:
        """Run tests on changed sources until one fails; 1 if one did, 2 if the time for a mutant was too short."""
        change.apply()
        began = time.process_time()
        for test, following in zip_longest(tests, tests[1:]):
            limit_time(20 + 20 * self.unchanged[test].seconds)
            self.run_test(test, following)
            if self.failed:
                log.with_suffix(".by").write_text(self.failed, encoding="utf-8")
                return 1
            if time.process_time() - began > self.options.seconds:
                return 2
        return 0

    def change(self, mutant: Mutant) -> Change | None:
        """What a mutant changes in this process; None if a fork cannot show it."""
        file = str(PACKAGE / mutant.path)
        old, new = (compile(text, file, "exec") for text in (source_text(mutant.path), mutant.source()))
        pairs = changed_functions(old, new)
        if pairs is None:
            rows = changed_rows(mutant)
            return Change(rows=tuple(rows)) if rows else None
        places = frozenset(place(code) for code, _ in pairs)
        codes = [(function, code) for before, code in pairs for function in self.functions[place(before)]]
        outermost = [before for before, _ in pairs if "<locals>" not in before.co_qualname]
        if places & self.at_import.reached or not all(self.functions[place(code)] for code in outermost):
            return None
        if any(len(function.__code__.co_freevars) != len(code.co_freevars) for function, code in codes):
            return None
        return Change(codes=tuple(codes), places=places)

    def tests_of(self, mutant: Mutant, change: Change | None) -> list[str]:
        """Tests that should notice a mutant: those that call what it changes come first, then the cheapest.

        A function of tests with many parameters comes back with each of them, so its next parameters come later. A test
        that does not call what changes may still see the difference: in the run without mutants an earlier test may
        have filled a cache or set up a fixture for it.
        """
        places = change.places if change else frozenset()
        seen: Counter[str] = Counter()

        def order(test: str) -> tuple[bool, float]:
            function, unchanged = test.partition("[")[0], self.unchanged[test]
            seen[function] += 1
            cost = unchanged.seconds * seen[function] / (1 + 4 * self.kills[mutant.path, test])
            return bool(places) and not places & unchanged.reached, cost

        chosen = [test for test in self.items if mutant.selects(test)]
        return sorted(sorted(chosen, key=lambda test: self.unchanged[test].seconds), key=order)

    def finish(self, running: dict[int, tuple[int, Path]]) -> None:
        """Wait for one of the forks and report how it ended."""
        pid = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid  # pyright: ignore[reportOptionalMemberAccess]
        number, log = running.pop(pid)
        ended = wait(pid, log)
        by = log.with_suffix(".by").read_text(encoding="utf-8") if ended.status == 1 else ""
        if ended.status not in {0, 1, 2} and not ended.timed_out:
            raise SystemExit(
                f"mutants: {self.mutants[number].name} ended with {ended.status}:\n{log.read_text()[-3000:]}"
            )
        self.kills[self.mutants[number].path, by] += 1
        mutant = self.mutants[number]
        tests = [t for t in self.items if mutant.selects(t) and self.unchanged[t].starts_processes]
        message = {"by": by, "seconds": ended.seconds, "tests": [] if ended.status else tests}
        self.send({"number": number, "status": ended.status, **message})
        for file in (log, log.with_suffix(".by")):
            file.unlink(missing_ok=True)


# The process that has imported nothing of the package.


class SourceCopy:
    """A copy of `src/`, to which one mutant at a time is applied."""

    def __init__(self, folder: Path) -> None:
        self.src = folder / "src"
        shutil.copytree(TREE / "src", self.src)  # with the compiled files: the times of the sources are kept

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """The copy with the edit. Its time is new, so that Python does not read the compiled original."""
        path = self.src / "scoregram" / mutant.path
        path.write_text(mutant.source(), encoding="utf-8")
        later = (PACKAGE / mutant.path).stat().st_mtime + 100
        os.utime(path, (later, later))
        yield
        shutil.copy2(PACKAGE / mutant.path, path)


class ChosenTests:
    """A pytest plugin: the given tests in the given order, and those that only the mutant has; stop at a failure."""

    def __init__(self, chosen: Sequence[str], known: Iterable[str], by: Path) -> None:
        self.order = {test: i for i, test in enumerate(chosen)}
        self.left_out, self.by = set(known) - set(chosen), by

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Drop the tests that cannot notice the mutant."""
        kept = [item for item in items if item.nodeid not in self.left_out]
        items[:] = sorted(kept, key=lambda item: self.order.get(item.nodeid, len(self.order)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported notices the mutant."""
        if report.failed and not self.by.exists():
            self.by.write_text(report.nodeid, encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write down the first failure."""
        if report.failed and not self.by.exists():
            self.by.write_text(report.nodeid, encoding="utf-8")


def run_at_import(mutant: Mutant, tests: Sequence[str], known: Sequence[str], copy: SourceCopy, folder: Path) -> Row:
    """Import a copy of the sources with the edit in it, and run tests until one fails."""
    log, by = folder / "import.log", folder / "import.by"
    by.unlink(missing_ok=True)
    files = sorted({test.split("::")[0] for test in tests or mutant.tests})
    plugin = ChosenTests(tests, known, by)
    with copy.mutated(mutant):
        ended = wait(start(lambda: pytest_session(copy.src, ["-x", *files], plugin), log), log)
    if not (ended.timed_out or ended.status == 0 or (ended.status in {1, 2} and by.exists())):
        raise SystemExit(f"mutants: pytest ended with {ended.status} for {mutant.name}:\n{log.read_text()[-3000:]}")
    failed = by.read_text(encoding="utf-8") if by.exists() else ""
    return row_of(mutant, 1 if failed else ended.status, failed, ended.seconds)


def row_of(mutant: Mutant, status: int, by: str, seconds: float) -> Row:
    """The row of a mutant: what became of it."""
    row: Row = {"area": mutant.area, "name": mutant.name, "file": mutant.path}
    if status in {0, 2}:
        return row | {"outcome": UNDECIDED if status else SURVIVED, "seconds": round(seconds, 2)}
    return row | {"outcome": KILLED, "by": by or "the time limit", "seconds": round(seconds, 2)}


def run_mutants(mutants: Sequence[Mutant], options: RunOptions) -> Iterator[Row]:
    """Rows of the mutants as they end."""
    for name in PACKAGES:  # imported once, before the forks
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    os.chdir(TREE)
    with tempfile.TemporaryDirectory() as name:
        folder, known, left = Path(name), list[str](), list[tuple[Mutant, list[str]]]()
        for message in session_messages(mutants, folder, options):
            if "unchanged" in message:
                known = message["unchanged"]
                print(f"{len(known)} tests pass without any mutant, {message['seconds']:.0f} s", flush=True)
                continue
            mutant = mutants[message["number"]]
            if message["status"] is not None and not message["tests"]:
                yield row_of(mutant, message["status"], message["by"], message["seconds"])
            else:
                left.append((mutant, message["tests"]))
        print(f"{len(left)} mutants need an import of their own", flush=True)
        copy = SourceCopy(folder)
        sys.dont_write_bytecode = True  # no mutant may replace the compiled originals
        for mutant, tests in left:
            yield run_at_import(mutant, tests, known, copy, folder)


def session_messages(mutants: Sequence[Mutant], folder: Path, options: RunOptions) -> Iterator[dict[str, Any]]:
    """What a forked `MutantSession` reports, as it goes."""
    reader, writer = os.pipe()
    files = sorted({test.split("::")[0] for mutant in mutants for test in mutant.tests})

    def session() -> int:
        os.close(reader)
        with os.fdopen(writer, "w", encoding="utf-8") as pipe:

            def send(message: Row) -> None:
                print(json.dumps(message), file=pipe, flush=True)

            return pytest_session(TREE / "src", files, MutantSession(mutants, folder, send, options))

    log = folder / "session.log"
    pid = start(session, log)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        yield from map(json.loads, pipe)
    if wait(pid, log).status != 0:
        raise SystemExit(f"mutants: the session of the tests failed:\n{log.read_text()[-5000:]}")
