"""Time and peak memory of one call, on a CPU or a GPU."""

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

MMAP_THRESHOLD = -3
"""glibc's `M_MMAP_THRESHOLD`."""


@dataclass(frozen=True)
class Reading:
    """One timed call."""

    seconds: float
    """Processor time on a CPU, where others may share the machine; wall-clock time on a GPU."""
    peak_bytes: float
    """Highest memory above that before the call; `nan` where it cannot be read."""


def timed(call: Callable[[], object], device: torch.device) -> Reading:
    """Run `call` once between two synchronisations."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        start = time.perf_counter()
        call()
        torch.cuda.synchronize(device)
        return Reading(time.perf_counter() - start, torch.cuda.max_memory_allocated(device) - before)
    with PeakResident() as peak:
        start = time.process_time()
        call()
        seconds = time.process_time() - start
    return Reading(seconds, peak.above)


class PeakResident:
    """Highest resident memory of this process inside a `with` block, sampled every few milliseconds (Linux)."""

    def __enter__(self) -> "PeakResident":
        give_back_memory()
        self._start = self._highest = resident_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

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


def give_back_memory() -> None:
    """Return freed memory to the system, and keep large blocks out of the allocator's pools, so that peaks show."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(MMAP_THRESHOLD, 1 << 16)
        libc.malloc_trim(0)
    except (OSError, AttributeError):
        return
