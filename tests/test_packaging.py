"""What each room imports against what the package and its extras install."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "scoregram"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    "advice": ("trackers",),
    "bench": ("bench",),
    "integrations": ("trl",),
    "policy": ("peft",),
    "report": ("report", "view"),
    "studies": ("report", "sign"),
    "tasks": ("data", "math", "reasoning-gym"),
    "training": ("peft", "trackers"),
}
"""Extras whose packages a room may import; every other room works with the package alone."""
IMPORTED_AS = {"pyyaml": "yaml"}
BROUGHT_ALONG = {"tensorboard": {"google"}}
"""Packages that one of ours always installs: protobuf, whose exception TensorBoard lets through."""
HOSTS = {
    "gram": {"triton"},
    "integrations": {"verl", "skyrl", "prime_rl"},
    "policy": {"triton", "vllm"},
    "reading": {"pandas"},
    "bench": {"bergson", "dattri", "dattri_llm"},
}
"""Packages that no extra installs: frameworks that import scoregram, triton (part of torch on a GPU), vllm, pandas,
which `to_pandas` asks for in one sentence, and libraries that `bench gram` compares with and skips if missing."""


def installed_by(extra: str | None) -> set[str]:
    """Names of the modules that the package installs, alone or with an extra and the extras that it names."""
    lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    found: set[str] = set()
    for line in lines:
        name, inner = re.match(r"([\w.-]+)(?:\[([\w,-]+)\])?", line).groups()  # type: ignore[union-attr]
        if name == "scoregram":
            found |= set().union(*map(installed_by, inner.split(",")))
        else:
            found |= {IMPORTED_AS.get(name, name.replace("-", "_")), *BROUGHT_ALONG.get(name, ())}
    return found


def imported_packages(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere, `import_module` included, except Python's own and this one."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names += [
                each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
            ]
    return {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"scoregram"}


@pytest.mark.parametrize("room", sorted({path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*.py")}))
def test_every_import_of_a_room_is_installed_with_its_extras(room):
    files = [SOURCE / room] if room.endswith(".py") else (SOURCE / room).rglob("*.py")
    imported = set().union(*map(imported_packages, files))
    declared = installed_by(None).union(*map(installed_by, EXTRAS.get(room, ())), HOSTS.get(room, set()))
    assert imported - declared == set()


def test_the_first_line_of_the_readme_installs_what_its_commands_need():
    """`attach` in a script, then `scoregram report` and `scoregram view` on its folder."""
    line = re.search(r"^pip install .*'\.\[([\w,-]+)\]'", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert line is not None
    installed = set().union(*map(installed_by, line[1].split(",")))
    assert installed >= installed_by("trl") | installed_by("report") | installed_by("view")


def test_no_page_installs_from_an_index_what_comes_from_a_checkout():
    """`pip install 'scoregram[extra]'` adds packages to a scoregram that is installed; it cannot install scoregram."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    assert [
        page.name for page in pages if re.search(r"^ *pip install '?scoregram", page.read_text(), re.MULTILINE)
    ] == []


def test_every_extra_belongs_to_a_room_or_to_one_that_does():
    named = {extra for extras in EXTRAS.values() for extra in extras}
    assert named <= PROJECT["optional-dependencies"].keys()
    assert PROJECT["optional-dependencies"].keys() - named == {"dev", "hf", "replicate"}


def test_an_import_that_the_developers_environment_may_lack_is_marked_for_pyright():
    installed = installed_by(None) | installed_by("dev") | {"tests"}
    unmarked = []
    for path in [*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        lines = path.read_text().splitlines()
        if any("pyright: reportMissingImports=false" in line for line in lines):
            continue
        for number, line in enumerate(lines, 1):
            name = re.match(r"\s*(?:from|import) (\w+)\S* *(?:import|as|#|$)", line)
            known = not name or name[1] in installed | {"scoregram"} or name[1] in sys.stdlib_module_names
            if not known and "pyright: ignore[reportMissingImports]" not in line:
                unmarked.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert unmarked == []
