"""What may import what, what an import may load, and how large a file may grow: read from the source itself."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import scoregram

PACKAGE = Path(scoregram.__file__).parent
TESTS = Path(__file__).parent
FILES = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}

FLOORS = (
    {"lazy", "errors", "types", "checks", "groups", "machine", "terminal", "distributed"},
    {"rollouts", "spectra", "statistics", "advantages", "objectives", "tasks", "runs", "exhibits"},
    {"theory", "gram", "policy", "bootstrap"},
    {"reading"},
    {"training"},
    {"advice"},
    {"integrations"},
    {"report"},
    {"bench", "studies", "compare"},
    {"cli"},
    {"__main__"},
)
"""Rooms from the ground up. A room may import itself and every floor below it, never its neighbours."""

GROUND = ("lazy", "errors", "types", "checks", "groups", "machine", "terminal", "distributed")
"""The order on the ground floor, whose rooms are single files."""

HEAVY = ("torch", "transformers", "datasets", "trl", "peft", "plotly", "matplotlib", "flask", "uvicorn")
LONGEST_FILE = 600
SMALL_FILE = 100
STUBS = sorted(PACKAGE.rglob("__init__.pyi"))
ROOMS = {path.parent.name for path in PACKAGE.rglob("__init__.py")}
NAMELESS = {"utils", "util", "common", "helpers", "helper", "misc"}


def floor(room: str) -> int:
    return next(level for level, rooms in enumerate(FLOORS) if room in rooms)


@cache
def text_of(path: Path) -> str:
    """A file, read once for all tests."""
    return path.read_text()


@cache
def imports_in(source: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Every import of a file, inside functions too."""
    return tuple(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom))


@cache
def imported_modules(source: str) -> frozenset[str]:
    """Every module of this package that a file imports, inside functions too."""
    found: set[str] = set()
    for node in imports_in(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            names = {alias.name for alias in node.names}
            found |= {f"scoregram.{name}" for name in names} if module == "scoregram" else {module}
    return frozenset(module for module in found if module.split(".")[0] == "scoregram")


def may_import(importer: str, imported: str) -> bool:
    if imported in GROUND and importer in GROUND:
        return GROUND.index(imported) < GROUND.index(importer)
    return imported == importer or floor(imported) < floor(importer)


@pytest.mark.parametrize("name", [name for name in FILES if name != "__init__"])
def test_imports_point_down(name):
    room = name.split("/")[0]
    for module in imported_modules(text_of(FILES[name])) - {"scoregram.__version__"}:
        assert may_import(room, module.split(".")[1]), f"{name} imports {module}"


def test_every_room_has_a_floor():
    rooms = {name.split("/")[0] for name in FILES} - {"__init__"}
    assert rooms <= set().union(*FLOORS)


def test_the_package_itself_imports_no_room():
    assert imported_modules(FILES["__init__"].read_text()) == {"scoregram.lazy"}


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("studies/")])
def test_nothing_but_a_command_imports_a_study(name):
    source = text_of(FILES[name])
    studies = {module for module in imported_modules(source) if module.split(".")[1] == "studies"}
    body = ast.parse(source).body if studies else []
    at_the_top = {node.module for node in body if isinstance(node, ast.ImportFrom) and node.module in studies}
    assert studies <= ({"scoregram.studies"} if name == "cli" else set()) and at_the_top == set()


def test_what_studies_share_knows_no_study():
    studies = {path.parent.name for path in PACKAGE.glob("studies/*/__init__.py")}
    shared = [name for name in FILES if name.startswith("studies/") and name.count("/") == 1]
    imported = set().union(*(imported_modules(text_of(FILES[name])) for name in shared))
    assert studies and not {module for module in imported if studies & set(module.split("."))}


@pytest.mark.parametrize("name", FILES)
def test_other_rooms_are_imported_through_their_front_door(name):
    room = name.split("/")[0]
    doors = [module.split(".") for module in imported_modules(text_of(FILES[name]))]
    assert [door for door in doors if len(door) > 2 and door[1] != room] == []


@pytest.mark.parametrize("stub", STUBS, ids=lambda path: path.parent.name)
def test_no_lazy_name_is_that_of_a_submodule(stub):
    names = {
        alias.name
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert names & {path.stem for path in stub.parent.iterdir()} == set()


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("from scoregram.spectra import stable_rank", {"scoregram.spectra"}),
        ("from scoregram import theory", {"scoregram.theory"}),
        ("def f():\n    import scoregram.cli", {"scoregram.cli"}),
        ("import torch", set()),
    ],
)
def test_every_form_of_import_is_seen(source, seen):
    assert imported_modules(source) == seen


@pytest.mark.parametrize(
    ("importer", "imported"),
    [("spectra", "theory"), ("spectra", "statistics"), ("gram", "theory"), ("theory", "cli"), ("errors", "checks")],
)
def test_up_and_sideways_are_refused(importer, imported):
    assert not may_import(importer, imported)


def loaded_after(code: str) -> set[str]:
    """Heavy packages among the modules of a fresh interpreter that ran `code`."""
    report = f"import sys\n{code}\nprint(*sorted(set({HEAVY!r}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_after("import scoregram; dir(scoregram)") == set()


ASK_FOR_HELP = """
import scoregram.cli
try:
    scoregram.cli.main(["--help"])
except SystemExit as end:
    assert not end.code
"""


def test_help_loads_nothing_heavy():
    assert loaded_after(ASK_FOR_HELP) == set()


def test_a_name_loads_what_it_needs():
    assert "torch" in loaded_after("import scoregram; scoregram.estimate")


def defined_names(source: str) -> set[str]:
    """Public functions, classes and constants that a file defines."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


def test_a_public_name_exists_once():
    homes: dict[str, list[str]] = {}
    for file, path in FILES.items():
        for name in defined_names(text_of(path)):
            homes.setdefault(name, []).append(file)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def importers(module: str) -> list[str]:
    """Files that import a module of their own room; a stub or an `__init__` that exports from it is one of them."""
    room = module.rpartition("/")[0]
    dotted = "scoregram." + module.replace("/", ".")
    found = [name for name, path in FILES.items() if name != module and imports_from(text_of(path), dotted)]
    stubs = [path for path in STUBS if path.parent.relative_to(PACKAGE).as_posix() in room]
    below = module.rpartition("/")[2]
    return found + [
        path.parent.name for path in stubs if re.search(rf"^from \.(\w+\.)*{below} import", text_of(path), re.M)
    ]


def imports_from(source: str, module: str) -> bool:
    """Whether a file imports a module, or names from it."""
    package, _, name = module.rpartition(".")
    return any(home == module or (home == package and name in names) for home, names in imported_names(source))


@cache
def imported_names(source: str) -> list[tuple[str | None, set[str]]]:
    """Module and names of every `from module import names` in a file."""
    nodes = [node for node in imports_in(source) if isinstance(node, ast.ImportFrom)]
    return [(node.module, {one.name for one in node.names}) for node in nodes]


@pytest.mark.parametrize("name", [name for name in FILES if "/" in name and not name.endswith("__init__")])
def test_a_small_file_with_one_importer_lives_with_it(name):
    """Kernels stay apart: they import Triton, which a CPU build of torch does not have."""
    if len(text_of(FILES[name]).splitlines()) >= SMALL_FILE or name.endswith("triton_kernels"):
        return
    inside = importers(name)
    assert len(inside) != 1 or inside[0].endswith("__init__") or inside[0] in ROOMS, (
        f"{name} is imported by {inside[0]} alone"
    )


@pytest.mark.parametrize("path", [*FILES.values(), *sorted(TESTS.glob("*.py"))], ids=lambda path: path.stem)
def test_a_file_is_one_idea(path):
    assert len(text_of(path).splitlines()) <= LONGEST_FILE
    assert path.stem not in NAMELESS
