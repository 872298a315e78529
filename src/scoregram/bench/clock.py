"""Time and peak memory of one call, on a CPU or a GPU."""

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

MMAP_THRESHOLD = -3
"""glibc's `M_MMAP_THRESHOLD`: larger blocks are mapped on their own and unmapped when freed."""


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Time of one call: processor time on a CPU, where others may share the machine; wall-clock time on a GPU."""
    if device.type != "cuda":
        start = time.process_time()
        call()
        return time.process_time() - start
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def peak_bytes(call: Callable[[], object], device: torch.device) -> float:
    """Highest memory during one call above that before it; `nan` where it cannot be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with PeakResident() as peak:
        call()
    return peak.above


class PeakResident:
    """Highest resident memory of this process inside a `with` block, sampled every few milliseconds (Linux)."""

    def __enter__(self) -> "PeakResident":
        map_blocks_from(1 << 16)
        self._start = self._highest = resident_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        map_blocks_from(1 << 25)

    def _watch(self) -> None:
        while not self._done.wait(0.003):
            self._highest = max(self._highest, resident_bytes())

    @property
    def above(self) -> float:
        """Peak above the start, in bytes."""
        return self._highest - self._start


def resident_bytes() -> float:
    """Resident memory of this process, `nan` where the system does not tell."""
    statm = Path("/proc/self/statm")
    return float(statm.read_text().split()[1]) * 4096 if statm.exists() else float("nan")


def map_blocks_from(size: int) -> None:
    """Return freed memory to the system, and from now on map blocks of at least `size` bytes on their own.

    A low threshold shows peaks exactly and makes every allocation slow, a high one the reverse.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(MMAP_THRESHOLD, size)
        libc.malloc_trim(0)
    except (OSError, AttributeError):
        return
