"""One writer at a time: a lock on the run folder that ends with its process, however that ends."""

import os
from pathlib import Path

from scoregram.checks import fail

try:
    import fcntl
except ImportError:  # no such locks on Windows
    fcntl = None

_held: set["FolderLock"] = set()


class FolderLock:
    """Exclusive right to write into a folder.

    The system drops it when the process dies, so a killed run can be resumed at once. Forked workers give up their
    share of it when they start: an orphaned one does not keep the folder locked.
    """

    def __init__(self, folder: Path, *, caller: str) -> None:
        self._descriptor = -1
        if fcntl is None:
            return
        self._descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            fail(
                caller,
                f"{folder} must have one writer",
                "another one at work",
                "Wait until it has ended, or choose another folder.",
            )
        except OSError:  # a file system without locks: better an unlocked run than none
            self.release()
        else:
            _held.add(self)

    def release(self) -> None:
        """Give the folder up; more than once does no harm."""
        _held.discard(self)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _release_in_child() -> None:
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
