"""A mutant, and what its edit changes in a process that has imported the package."""

import ast
import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType

TREE = Path(__file__).parent.parent
PACKAGE = TREE / "src" / "scoregram"
Place = tuple[str, str, int]
"""File, qualified name and first line of a function."""


@dataclass(frozen=True)
class Mutant:
    """One edit of one source file, and the tests that should notice it."""

    area: str
    name: str
    path: str
    """File inside `src/scoregram`."""
    start: int
    end: int
    """Characters `start` to `end` of the file are replaced."""
    new: str
    tests: tuple[str, ...]
    """Files or tests, as pytest names them."""
    keywords: tuple[str, ...] = ()
    """Only the tests whose name contains one of these; all of them if empty."""
    equivalent: str = ""
    """Why no test can notice it; empty for a mutant that must be killed."""

    def source(self) -> str:
        """The file after the edit."""
        text = source_text(self.path)
        return text[: self.start] + self.new + text[self.end :]

    def selects(self, test: str) -> bool:
        """Whether a test is one of those that should notice the edit."""
        file, _, name = test.partition("::")
        is_listed = any(test == listed or file == listed or test.startswith(f"{listed}[") for listed in self.tests)
        return is_listed and (not self.keywords or any(keyword in name for keyword in self.keywords))


@cache
def source_text(path: str) -> str:
    """A file of the package."""
    return (PACKAGE / path).read_text(encoding="utf-8")


def changed_functions(old: CodeType, new: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    """Functions whose code differs, as pairs of old and new code; None if a module or class body differs itself."""
    pairs = list(zip(_nested(old), _nested(new), strict=False))
    if old.co_flags & CO_OPTIMIZED:  # a function, a lambda or a comprehension
        if _is_same(old, new):
            return []
        inner = [changed_functions(*pair) or [] for pair in pairs]
        return [(old, new), *(pair for changed in inner for pair in changed)]
    if not _is_same(old, new, deep=False):
        return None
    inner = [changed_functions(*pair) for pair in pairs]
    return None if None in inner else [pair for changed in inner for pair in changed or []]


def _nested(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _is_same(old: CodeType, new: CodeType, *, deep: bool = True) -> bool:
    """Whether two codes do the same; their line numbers may differ."""
    fields = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags", "co_exceptiontable")
    counts = ("co_argcount", "co_kwonlyargcount", "co_posonlyargcount")
    if any(getattr(old, name) != getattr(new, name) for name in (*fields, *counts)):
        return False
    constants = [[repr(c) for c in code.co_consts if not isinstance(c, CodeType)] for code in (old, new)]
    inner = _nested(old), _nested(new)
    if constants[0] != constants[1] or [c.co_name for c in inner[0]] != [c.co_name for c in inner[1]]:
        return False
    return not deep or all(_is_same(*pair) for pair in zip(*inner, strict=True))


def place(code: CodeType) -> Place:
    """Where a function is defined."""
    return code.co_filename, code.co_qualname, code.co_firstlineno


def changed_rows(mutant: Mutant) -> list[tuple[object, object]] | None:
    """Rows of a literal table that differ, as pairs of the imported and the new row; None if anything else differs."""
    old, new = (ast.parse(text).body for text in (source_text(mutant.path), mutant.source()))
    changed = [pair for pair in zip(old, new, strict=False) if ast.dump(pair[0]) != ast.dump(pair[1])]
    if len(old) != len(new) or len(changed) != 1 or not isinstance(changed[0][1], ast.Assign | ast.AnnAssign):
        return None
    statement = changed[0][1]
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    if not isinstance(target, ast.Name) or statement.value is None:
        return None
    names = vars(sys.modules[".".join(["scoregram", *Path(mutant.path).with_suffix("").parts])])
    before = names[target.id]
    after = eval(compile(ast.Expression(statement.value), mutant.path, "eval"), names)
    if not isinstance(before, Mapping) or list(before) != list(after):
        return None
    rows = [row for table in (before, after) for row in table.values()]
    if not all(dataclasses.is_dataclass(row) and type(row) is type(rows[0]) for row in rows):
        return None
    return [(before[name], after[name]) for name in before if before[name] != after[name]]
