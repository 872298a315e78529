"""Packages that import a module when one of its public names is first used.

`scoregram --help` and `import scoregram` must not load torch. A package that exports light names (configs) and heavy
ones (training) therefore lists them in a stub, `__init__.pyi`. Type checkers read the stub as it is; this module reads
from it, at run time, which module defines each name.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def lazy_exports(package: str, init_file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, from the lines `from .module import name` of its stub.

    A name must not be that of a submodule: Python sets the submodule as an attribute of the package when it is first
    imported, so the name would mean one or the other depending on what was imported before.
    """
    stub = ast.parse(Path(init_file).with_suffix(".pyi").read_text(encoding="utf-8"))
    homes = {
        alias.asname or alias.name: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
    }

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return load, lambda: sorted(homes), sorted(homes)
