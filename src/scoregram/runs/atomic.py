"""Writes that are complete or absent, whatever happens in between, and disk errors that say what to do.

A file is written under a temporary name, forced to the disk and renamed; then the folder is forced to the disk, so that
the new name outlives a power cut. A kill leaves at worst a temporary file behind.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scoregram.checks import fail
from scoregram.runs.layout import temporary_name

_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_NOT_A_FOLDER = {errno.ENOTDIR, errno.EEXIST, errno.ENOENT}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}


def remedy_for(code: int | None) -> str:
    """What a user can do about the disk error `code`."""
    if code in _FULL:
        return "Free some space or keep fewer checkpoints, then resume: what was complete before can still be read."
    if code == errno.EFBIG:
        return "Raise the limit on file size (`ulimit -f`), then resume: what was complete before can still be read."
    if code in _FORBIDDEN:
        return "Choose a folder that you may write to."
    if code in _NOT_A_FOLDER:
        return "Choose a path that is a folder inside folders, or that is not there yet."
    return "Check the disk, or choose a folder on another one."


@contextmanager
def disk_errors(path: Path, *, caller: str) -> Iterator[None]:
    """Within it, an `OSError` becomes a `ScoregramError` that names `path` and the remedy."""
    try:
        yield
    except OSError as error:
        fail(caller, f"{path} must be writable", error.strerror or str(error), remedy_for(error.errno))


def disk_is_full(error: BaseException | None) -> OSError | None:
    """The error of a full disk behind `error`, which libraries wrap in errors of their own; None if it is none."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _FULL | {errno.EFBIG}:
            return error
        if os.strerror(errno.ENOSPC) in str(error):
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        error = error.__cause__ or error.__context__
    return None


def require_space(folder: Path | str, needed: int, *, caller: str = "require_space") -> int:
    """Free bytes on the disk of `folder` (which need not exist yet), provided that there are `needed` of them.

    To be called before work begins: a disk that fills in the middle of a run costs the steps since the last checkpoint.

    Raises:
        ScoregramError: If there is less, with both numbers.
    """
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        fail(
            caller,
            f"{folder} needs {needed / 1e9:.3g} GB of free disk",
            f"{free / 1e9:.3g} GB",
            "Free some space, keep fewer checkpoints, or choose a folder on another disk.",
        )
    return free


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write every byte; the system may take them in several bites."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Make `path` hold `content`, or leave it as it was."""
    temporary = temporary_name(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            write_all(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Force the content of a file to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk, on systems where that can be asked for."""
    if os.name == "nt":
        return
    try:
        sync_file(folder)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def sync_tree(folder: Path) -> None:
    """Force a folder and everything in it to the disk."""
    for inside, _, names in os.walk(folder):
        for name in names:
            sync_file(Path(inside, name))
        sync_folder(Path(inside))


def make_folder(folder: Path) -> None:
    """Create a folder with its parents, each name forced to the disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def remove(path: Path) -> None:
    """Remove a file or a folder; a folder vanishes at once, under a temporary name, before it is emptied."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        vanishing = temporary_name(path)
        shutil.rmtree(vanishing, ignore_errors=True)
        path.replace(vanishing)
        sync_folder(path.parent)
        shutil.rmtree(vanishing)
    sync_folder(path.parent)
