"""`config.yaml`, the settings of a run and its environment: write it, read it, compare it when a run is resumed."""

import hashlib
import math
import os
import platform
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import asdict, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath
from typing import Any

import torch
import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from scoregram import __version__
from scoregram.checks import fail
from scoregram.runs import disk
from scoregram.runs.disk import CONFIG_FILE, FORMAT_VERSION, require_known_version

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "peft",
    "accelerate",
    "numpy",
    "pyarrow",
    "triton",
    "trl",
    "vllm",
    "math-verify",
    "reasoning-gym",
)
"""Packages whose version can change a number; a package that is not installed is left out."""


def environment() -> dict[str, Any]:
    """Versions, source and machine of this process: everything besides the config that can change a run's numbers.

    No host name, no user name, no path.

    Returns:
        `python`, `scoregram`, `commit` and `dirty` (None outside a checkout of scoregram), `tree` (git's name for the
        source files as they are), `packages`, `platform`, `cpu`, `threads` of torch, `gpus` and `cuda`.
    """
    commit, dirty = source_commit()
    return {
        "python": platform.python_version(),
        "scoregram": __version__,
        "commit": commit,
        "dirty": dirty,
        "tree": source_tree(),
        "packages": {name: installed for name in PACKAGES if (installed := _package_version(name))},
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
    }


def source_commit(package: Path = Path(__file__).parent.parent) -> tuple[str | None, bool | None]:
    """Git commit of the source in `package`, and whether it has uncommitted changes; None if git does not track it.

    The environment variable `SCOREGRAM_COMMIT` names the commit of a source that was copied without its history, and
    `SCOREGRAM_TREE` the output of `git rev-parse HEAD:src/scoregram` there, which tells whether the copy was changed. A
    package that is installed inside another repository is not part of it: git must track its `__init__.py`.
    """
    if given := os.environ.get("SCOREGRAM_COMMIT"):
        tree = os.environ.get("SCOREGRAM_TREE")
        return given, None if not tree else tree != source_tree(package)
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    changes = _git(package, "status", "--porcelain", "--", ".")
    return _git(package, "rev-parse", "HEAD"), None if changes is None else changes != ""


def source_tree(folder: Path = Path(__file__).parent.parent) -> str:
    """Git's name for the source files in a folder as they are now, computed without git.

    It equals `git rev-parse COMMIT:src/scoregram` if and only if the files are those of the commit. So a run that was
    measured with an installed or copied package can still be tied to a commit, or be shown to be of none.
    """
    entries = []
    for path in folder.iterdir():
        if path.is_dir():
            if path.name != "__pycache__" and any(path.rglob("*")):
                entries.append((f"{path.name}/", b"40000", source_tree(path)))
        elif path.suffix != ".pyc":
            entries.append((path.name, b"100644", _git_object(b"blob", path.read_bytes())))  # no source is executable
    entries.sort(key=lambda entry: entry[0].encode())  # git sorts a folder as if its name ended in a slash
    rows = (mode + b" " + name.rstrip("/").encode() + b"\0" + bytes.fromhex(sha1) for name, mode, sha1 in entries)
    return _git_object(b"tree", b"".join(rows))


def _git_object(kind: bytes, content: bytes) -> str:
    return hashlib.sha1(kind + b" %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def commit_tree(commit: str, package: Path = Path(__file__).parent.parent) -> str | None:
    """Git's name for the source of this package at a commit; None where git does not know the commit."""
    return _git(package, "rev-parse", "--verify", "--quiet", f"{commit}:./")


def cpu_name() -> str:
    """Model name of the processor, as the operating system reports it."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text(errors="replace").splitlines() if listing.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(folder: Path, *words: str) -> str | None:
    """Output of a git command, None if it fails."""
    # Inside a git hook, GIT_DIR and other variables are set and would make git use the hook's repository.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20, env=clean, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def plain_values(value: Any, name: str = "config") -> Any:
    """`value` as YAML reads it back: mappings with string keys, lists, strings, numbers, booleans and None.

    Raises:
        ScoregramError: If it holds anything else; the error names the place.

    Example:
        >>> plain_values({"rollouts": (2, 4), "seed": 0})
        {'rollouts': [2, 4], 'seed': 0}
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {_key(key, name): plain_values(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(inner, f"{name}[{i}]") for i, inner in enumerate(value)]
    if isinstance(value, PurePath):
        return str(value)
    if value is None or type(value) in (bool, int, float) or (isinstance(value, str) and _is_unicode(value)):
        return value
    got = f"{type(value).__name__} {value!r}"
    return fail("RunWriter", f"{name} must be a number, a string, a list or a mapping", got, "Convert it.")


def _is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode `text`: it cannot encode lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _key(key: Any, name: str) -> str:
    if type(key) is not str:
        fail("RunWriter", f"the keys of {name} must be strings", repr(key), "Convert the key with str.")
    return key


def config_text(
    config: Mapping[str, Any],
    environment: Mapping[str, Any],
    resumed: Collection[Any] = (),
    remarks: Mapping[str, str] | None = None,
) -> bytes:
    """Content of `config.yaml`."""
    stored = {
        "schema": FORMAT_VERSION,
        "config": plain_values(config),
        "environment": plain_values(environment, "environment"),
    }
    if resumed:
        stored["resumed"] = plain_values(list(resumed), "resumed")
    if remarks:
        stored["remarks"] = plain_values(remarks, "remarks")
    return yaml.dump(stored, Dumper=_Dumper, sort_keys=False, allow_unicode=True).encode()


class _Dumper(yaml.SafeDumper):
    """YAML without anchors: a value that occurs twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # Only a quoted scalar can escape characters that YAML would drop or normalise.
    unprintable = not all(character.isprintable() or character == "\n" for character in text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if unprintable else None)


_Dumper.add_representer(str, _represent_text)


def require_run(folder: Path | str, *, caller: str = "open_run") -> Path:
    """`folder` as a Path; an error unless it holds a run whose metrics are a file and whose tables are folders."""
    root = disk.require_path(folder, caller=caller)
    if not (root / CONFIG_FILE).is_file():
        got = "a folder without it" if root.is_dir() else "a file" if root.exists() else "no such folder"
        fail(caller, f"{root} must be a run folder with a {CONFIG_FILE}", got, "Check the path.")
    for path in (root / name for name in (disk.METRICS, *disk.TABLE_FOLDERS, disk.CHECKPOINTS)):
        if path.exists() and path.is_dir() != (path.name != disk.METRICS):
            kinds = ("a file", "a folder") if path.name == disk.METRICS else ("a folder", "a file")
            fail(caller, f"{path} must be {kinds[0]}", kinds[1], "Restore it from a copy, or move it away.")
    return root


class _WithoutAliases(Composer):
    """Values of a YAML text without aliases, which scoregram never writes: nested ones would expand to any size."""

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):  # pyright: ignore[reportAttributeAccessIssue]
            raise yaml.YAMLError("an alias, which scoregram never writes")
        return super().compose_node(parent, index)


class _Loader(_WithoutAliases, yaml.SafeLoader):
    """Every text that PyYAML reads."""


if yaml.__with_libyaml__:
    from yaml._yaml import CParser

    class _FastLoader(_WithoutAliases, CParser, SafeConstructor, Resolver):
        """Text read by libyaml, composed in Python: libyaml's own composer overflows the stack on deep nesting."""

        def __init__(self, stream: str) -> None:
            CParser.__init__(self, stream)
            Composer.__init__(self)
            SafeConstructor.__init__(self)
            Resolver.__init__(self)

    _fastest_loader: Any = _FastLoader
else:
    _fastest_loader: Any = _Loader


def _loaded_yaml(text: str) -> Any:
    """Values of a YAML text: by libyaml, which is faster, unless it is absent or refuses the text.

    libyaml refuses some texts that PyYAML reads, such as escapes of lone surrogates.
    """
    try:
        return yaml.load(text, Loader=_fastest_loader)
    except yaml.YAMLError:
        return yaml.load(text, Loader=_Loader)


def read_config(root: Path) -> dict[str, Any]:
    """Content of a run's `config.yaml`, whose version this scoregram must know; absent sections are empty."""
    path = root / CONFIG_FILE
    try:
        stored = _loaded_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: UTF-8, dates, numbers of many digits
        reason = str(error).splitlines()[0]
        return fail("open_run", f"{path} must be YAML", reason, "Restore it from a copy.")
    if not isinstance(stored, dict) or not isinstance(stored.get("config"), dict):
        return fail("open_run", f"{path} must be written by scoregram", "something else", "Choose a run folder.")
    require_known_version(stored.get("schema"), path)
    sections = {"environment": {}, "resumed": [], "remarks": {}} | stored
    resumed, remarks = sections["resumed"], sections["remarks"]
    is_valid = {
        "environment": isinstance(sections["environment"], dict),
        "resumed": isinstance(resumed, list)
        and all(isinstance(e, dict) and {"step", "environment"} <= e.keys() for e in resumed),
        "remarks": isinstance(remarks, dict)
        and all(isinstance(text, str) for pair in remarks.items() for text in pair),
    }
    wrong = [name for name, valid in is_valid.items() if not valid]
    if wrong:
        got = f"an invalid section {wrong[0]}"
        fail("open_run", f"{path} must be written by scoregram", got, "Restore it from a copy.")
    return sections


def config_differences(
    stored: Mapping[str, Any], requested: Mapping[str, Any], may_differ: Collection[str] = ()
) -> list[str]:
    """One phrase for each value that differs between two configs, except under the top-level keys in `may_differ`.

    Example:
        >>> config_differences({"seed": 0, "optimiser": {"lr": 0.1}}, {"seed": 0, "optimiser": {"lr": 0.2}})
        ['optimiser.lr: 0.1 in the run, 0.2 requested']
    """
    left, right = (
        _flat({key: value for key, value in plain_values(config).items() if key not in may_differ})
        for config in (stored, requested)
    )
    absent = "nothing"
    return [
        f"{name}: {left.get(name, absent)} in the run, {right.get(name, absent)} requested"
        for name in sorted(left.keys() | right.keys())
        if name not in left or name not in right or not _same(left[name], right[name])
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name: value}
    return flat


def _same(left: Any, right: Any) -> bool:
    """Equality in which NaN equals NaN."""
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    both_nan = all(isinstance(value, float) and math.isnan(value) for value in (left, right))
    return both_nan or left == right
