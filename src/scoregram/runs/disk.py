"""The run folder on disk: its file names, writes that survive a kill at any moment, and the lock of its writer.

A file is written under a temporary name, synced with `fsync` and renamed. Then its folder is synced, so that the new
name survives a power cut. A kill leaves a temporary file behind and never half a file.
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scoregram.checks import ScoregramError, fail

try:
    import fcntl
except ImportError:  # Windows has no flock
    fcntl = None

FORMAT_VERSION = 1
"""Version of the folder's layout and of its tables; raised when an older reader would misread a newer run.

`config.yaml` stores it under `schema`, a Parquet file under `scoregram.schema` in its metadata.
"""

CONFIG_FILE = "config.yaml"
METRICS = "metrics.jsonl"
GROUPS = "groups"
BATCHES = "batches"
ROLLOUTS = "rollouts"
UPDATES = "updates"
CHECKPOINTS = "checkpoints"
TRACKER_LOGS = "trackers"
CHECKSUMS = "SHA256SUMS"
REPORT = "report.html"
TABLE_FOLDERS = (GROUPS, BATCHES, ROLLOUTS, UPDATES)
"""Folders of part files."""
RUN_FILES = (CONFIG_FILE, METRICS, *TABLE_FOLDERS, CHECKPOINTS, TRACKER_LOGS, REPORT)
"""Everything that scoregram writes into a run folder, and everything that overwriting a run removes."""

TEMPORARY = ".partial-"
"""Prefix of the name of every unfinished file. The dot hides it from `*.parquet` and from readers of datasets."""

LARGEST_STEP = 10**9 - 1
"""File names hold nine digits of the step, so that they sort as the steps do."""

_PART = re.compile(r"step-(\d{9})-(\d{3,})\.parquet")
_CHECKPOINT = re.compile(r"step-(0|[1-9]\d*)")

_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_NOT_A_FOLDER = {errno.ENOTDIR, errno.EEXIST, errno.ENOENT}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}


def require_known_version(version: object, path: Path) -> None:
    """Raise for a file that a newer scoregram wrote, and for one that scoregram did not write."""
    if not isinstance(version, int) or version < 1:
        fail("open_run", f"{path} must be written by scoregram", f"schema {version!r}", "Choose a run folder.")
    if version > FORMAT_VERSION:
        remedy = "A newer scoregram wrote this run: upgrade with pip install --upgrade scoregram."
        fail("open_run", f"{path} must have schema {FORMAT_VERSION} or older", version, remedy)


def temporary_name(path: Path) -> Path:
    """Path under which `path` is written until it is complete: in the same folder, so that renaming is atomic."""
    return path.with_name(TEMPORARY + path.name)


def part_name(step: int, part: int) -> str:
    """File name of part number `part` of a step; names sort by step, then by part.

    Example:
        >>> part_name(42, 0)
        'step-000000042-000.parquet'
    """
    return f"step-{step:09d}-{part:03d}.parquet"


def parts(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of every complete part file in one of `TABLE_FOLDERS`, ordered by step, then by part."""
    matches = [(_PART.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ())]
    return sorted((int(match[1]), path) for match, path in matches if match)


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after `step`."""
    return f"step-{step}"


def checkpoints(folder: Path) -> dict[int, Path]:
    """Step → folder of every complete checkpoint of a run, ordered by step."""
    inside = folder / CHECKPOINTS
    matches = {path: _CHECKPOINT.fullmatch(path.name) for path in (inside.iterdir() if inside.is_dir() else ())}
    return dict(sorted((int(match[1]), path) for path, match in matches.items() if match and path.is_dir()))


def temporaries(folder: Path) -> Iterator[Path]:
    """Every unfinished file or folder that a killed writer left in a run."""
    for inside in (folder, *(folder / name for name in TABLE_FOLDERS), folder / CHECKPOINTS):
        if inside.is_dir():
            yield from sorted(inside.glob(f"{TEMPORARY}*"))


def remedy_for(code: int | None) -> str:
    """What the user can do about the disk error `code`."""
    if code in _FULL:
        return "Free some space or keep fewer checkpoints, then resume: all complete files can still be read."
    if code == errno.EFBIG:
        return "Raise the limit on file size (`ulimit -f`), then resume: all complete files can still be read."
    if code in _FORBIDDEN:
        return "Choose a folder that you may write to."
    if code == errno.ENAMETOOLONG:
        return "Choose a shorter path: most disks allow 255 bytes for each name in a path, and 4096 for the path."
    if code == errno.EISDIR:
        return "A folder has the name of this file: choose another name, or move the folder away."
    if code in _NOT_A_FOLDER:
        return "Choose a path that does not exist yet, or an existing folder; no part of the path may be a file."
    return "Check the disk, or choose a folder on another disk."


@contextmanager
def disk_errors(path: Path, *, caller: str) -> Iterator[None]:
    """Turn an `OSError`, or any exception caused by a full disk, into a `ScoregramError` with a remedy."""
    try:
        yield
    except ScoregramError:
        raise
    except Exception as error:
        cause = error if isinstance(error, OSError) else disk_is_full(error)
        if cause is None:
            raise
        fail(caller, f"{path} must be writable", cause.strerror or str(cause), remedy_for(cause.errno))


def require_own_folder(folder: Path, marker: str, *, caller: str) -> None:
    """Raise if `folder` exists, is not empty and lacks the file `marker`: it belongs to something else."""
    with disk_errors(folder, caller=caller):
        found = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    others = [name for name in found if not name.startswith(TEMPORARY)]
    if others and not (folder / marker).is_file():
        got = ", ".join(others[:3]) + " and more" * (len(others) > 3)
        fail(caller, f"{folder} must be empty", got, "Choose a new or an empty folder.")


def require_path(path: Path | str, *, caller: str) -> Path:
    """`path` as a Path; an error if no file can have that name, such as one of more than 255 bytes."""
    if not isinstance(path, str | os.PathLike):
        fail(caller, "a path must be a text or a Path", repr(path), "Pass the path of a file or folder.")
    if not os.fspath(path):
        fail(caller, "a path must not be empty", "''", "Name a file or folder, . for the current one.")
    try:
        os.lstat(path)
    except ValueError:  # a NUL byte, or a character that the file system cannot encode
        fail(caller, "a path must consist of characters that the disk allows", repr(str(path)), "Choose another one.")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            got = f"{len(os.fsencode(path))} bytes, {str(path)[:40]}…"
            fail(caller, "a path must not be too long", got, remedy_for(error.errno))
    return Path(path)


def disk_is_full(error: BaseException | None) -> OSError | None:
    """The out-of-space `OSError` behind `error`, or None.

    Libraries wrap it in exceptions of their own, some only as text.
    """
    seen: set[int] = set()  # a chain of causes can be a cycle
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _FULL | {errno.EFBIG}:
            return error
        if os.strerror(errno.ENOSPC) in str(error):
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        error = error.__cause__ or error.__context__
    return None


def require_space(folder: Path | str, needed: int, *, caller: str = "require_space") -> int:
    """Free bytes on the disk of `folder`, at least `needed`; the folder need not exist yet.

    Call it before the work begins: a disk that fills up during a run costs the steps since the last checkpoint.

    Raises:
        ScoregramError: If fewer bytes are free; the error states both numbers.
    """
    existing = require_path(folder, caller=caller).absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        remedy = "Free some space, keep fewer checkpoints, or choose a folder on another disk."
        fail(caller, f"{folder} needs {needed / 1e9:.3g} GB of free disk", f"{free / 1e9:.3g} GB", remedy)
    return free


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write every byte; one `os.write` may write only some of them."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Write `content` to `path`; on any failure the file stays as it was."""
    if not path.name:  # the current folder, or the root
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
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
    """Flush the content of a file to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, on systems that support it."""
    if os.name == "nt":
        return
    try:
        sync_file(folder)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def sync_tree(folder: Path) -> None:
    """Flush a folder and everything in it to the disk."""
    for inside, _, names in os.walk(folder):
        for name in names:
            sync_file(Path(inside, name))
        sync_folder(Path(inside))


def file_sha256(path: Path) -> str:
    """Hash of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(folder: Path) -> None:
    """Write `SHA256SUMS` into a folder: a line for every file in it, which `sha256sum --check` reads."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{file_sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def damaged_files(folder: Path) -> list[str]:
    """Files that are missing from a folder or differ from its `SHA256SUMS`; none if it has no such file."""
    listing = folder / CHECKSUMS
    if not listing.exists():
        return []
    try:
        recorded = [line.split("  ", 1) for line in listing.read_text(encoding="utf-8").splitlines()]
        return [
            name for digest, name in recorded if not (folder / name).is_file() or file_sha256(folder / name) != digest
        ]
    except (OSError, ValueError):  # the listing itself is damaged
        return [CHECKSUMS]


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, and flush each new name to the disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder.

    A folder is renamed to a temporary name first and emptied afterwards: a kill leaves no half-empty checkpoint.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        vanishing = temporary_name(path)
        shutil.rmtree(vanishing, ignore_errors=True)
        path.replace(vanishing)
        sync_folder(path.parent)
        shutil.rmtree(vanishing)
    sync_folder(path.parent)


class FolderLock:
    """Exclusive lock on a run folder for one writer.

    The operating system releases it when the process dies, so a killed run can be resumed at once. A forked worker
    closes its inherited copy when it starts, so an orphaned worker does not keep the folder locked.
    """

    def __init__(self, folder: Path, *, caller: str) -> None:
        self._descriptor = -1
        self.folder = folder.resolve()
        if fcntl is None:
            return
        self._descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            got, remedy = "another process that is writing to it", "Wait until that process has ended"
            if any(lock.folder == self.folder for lock in _held_locks):
                got, remedy = "this process, which is still writing to it", "Close that writer (detach the attachment)"
            fail(caller, f"{folder} must have one writer", got, f"{remedy}, or choose another folder.")
        except OSError:  # the file system has no locks: write without one
            self.release()
        else:
            _held_locks.add(self)

    def release(self) -> None:
        """Release the folder; further calls do nothing."""
        _held_locks.discard(self)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


_held_locks: set[FolderLock] = set()
"""Locks of this process. A fork copies their descriptors, and `flock` holds until every copy is closed."""


def _release_in_child() -> None:
    for lock in list(_held_locks):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
