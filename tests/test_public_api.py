"""What a user may rely on: names that resolve, types that ship, one version, and a docstring on every function."""

import ast
import importlib
import inspect
import re
from importlib.metadata import version
from pathlib import Path
from types import FunctionType

import pytest

import scoregram

PACKAGE = Path(scoregram.__file__).parent
PURE_ROOMS = ("spectra", "statistics", "advantages", "objectives")
PURE_FILES = [path for room in PURE_ROOMS for path in sorted((PACKAGE / room).glob("*.py"))]


def stub_imports() -> dict[str, str]:
    """Name to module of what type checkers see at the top level."""
    body = ast.parse((PACKAGE / "__init__.pyi").read_text()).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or "": f"scoregram.{node.module}" for node in imports for alias in node.names}


def public_functions() -> list[FunctionType]:
    """Every function a pure room exports."""
    modules = [importlib.import_module(f"scoregram.{room}") for room in PURE_ROOMS]
    found = [getattr(module, name) for module in modules for name in module.__all__]
    return [fn for fn in found if inspect.isfunction(fn)]


@pytest.mark.parametrize(("name", "home"), stub_imports().items())
def test_every_public_name_resolves(name, home):
    assert getattr(scoregram, name) is getattr(importlib.import_module(home), name)


def test_the_stub_lists_the_public_names():
    assert sorted(stub_imports()) == scoregram.__all__ == dir(scoregram)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        scoregram.nonsense  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("room", PURE_ROOMS)
def test_a_room_exports_what_it_lists(room):
    module = importlib.import_module(f"scoregram.{room}")
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_types_ship():
    assert (PACKAGE / "py.typed").is_file()


def test_the_version_is_said_once():
    assert version("scoregram") == scoregram.__version__
    said = re.compile(rf"^\s*(__version__|version)\b.*['\"]{re.escape(scoregram.__version__)}['\"]", re.MULTILINE)
    root = PACKAGE.parent.parent
    sources = [path for path in [*PACKAGE.rglob("*.py"), root / "pyproject.toml"] if path.exists()]
    assert [path.name for path in sources if said.search(path.read_text())] == ["__init__.py"]


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower()))


@pytest.mark.parametrize("fn", public_functions(), ids=lambda fn: fn.__name__)
def test_the_first_line_says_more_than_the_name(fn):
    first = (inspect.getdoc(fn) or "").split("\n")[0]
    assert fn.__name__ not in first.split()
    assert len(words(first) - words(fn.__name__.replace("_", " ")) - {"a", "an", "the", "of"}) >= 2, first


@pytest.mark.parametrize("path", PURE_FILES, ids=lambda path: f"{path.parent.stem}-{path.stem}")
def test_everything_without_an_underscore_has_a_docstring(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name
