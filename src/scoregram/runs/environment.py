"""Where a run was made: versions, source and machine, as far as they can change a number.

No host name, no user name, no path.
"""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from scoregram import __version__

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
"""Packages whose version can change a number; those that are absent are left out."""


def environment() -> dict[str, Any]:
    """What besides the config decides the numbers of a run, as plain values.

    Returns:
        `python`, `scoregram`, `commit` and `dirty` (None outside a checkout of scoregram), `packages`, `platform`,
        `cpu`, `threads` of torch, `gpus` and `cuda`.
    """
    commit, dirty = source_commit()
    return {
        "python": platform.python_version(),
        "scoregram": __version__,
        "commit": commit,
        "dirty": dirty,
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
    }


def source_commit(package: Path = Path(__file__).parent.parent) -> tuple[str | None, bool | None]:
    """Commit that the source of `package` stands at, and whether it differs from it; None where git does not keep it.

    `SCOREGRAM_COMMIT` in the environment names the commit of a source that was copied without its history. A package
    that is installed beside or inside somebody's repository is not part of it: the file must be tracked.
    """
    if given := os.environ.get("SCOREGRAM_COMMIT"):
        return given, None
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    changes = _git(package, "status", "--porcelain", "--", ".")
    return _git(package, "rev-parse", "HEAD"), None if changes is None else changes != ""


def cpu_name() -> str:
    """Model of the processor, as the system calls it."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text(errors="replace").splitlines() if listing.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(folder: Path, *words: str) -> str | None:
    """What git answers, None if it does not; variables of a surrounding git command do not mislead it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20, env=clean, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
