"""Times and memory of what runs in this process."""

from __future__ import annotations

import ctypes
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")


def interleaved(rounds: int, *functions: Callable[[], Any]) -> list[list[float]]:
    """Seconds of each function, by round.

    They take turns, so that what slows the machine down for a while slows all of them; a ratio is
    taken in each round, and its median over the rounds.

    Args:
        rounds: How many times each function runs.
        functions: What is timed.
    """
    taken: list[list[float]] = []
    for _ in range(rounds):
        row = []
        for function in functions:
            start = time.perf_counter()
            function()
            row.append(time.perf_counter() - start)
        taken.append(row)
    return taken


def medians(rows: list[list[float]]) -> dict[str, float]:
    """Median seconds of the first and the second function, and the median of their ratios."""
    return {
        "ours": statistics.median(row[0] for row in rows),
        "other": statistics.median(row[1] for row in rows),
        "ratio": statistics.median(row[0] / row[1] for row in rows),
    }


def resident() -> float:
    """Memory that this process holds now, in GB (10⁹ bytes); Linux only."""
    return _kilobytes("VmRSS") * 1024 / 1e9


def peak() -> float:
    """Largest memory that this process has held since `forget_peak`, in GB."""
    if _STATUS.exists() and "VmHWM" in _STATUS.read_text():
        return _kilobytes("VmHWM") * 1024 / 1e9
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size * (1 if sys.platform == "darwin" else 1024) / 1e9


def forget_peak() -> bool:
    """Begins the peak anew, as far as the kernel lets it; returns whether it did.

    Where it does not, `peak` is that of the whole process, and what is above the loaded model is
    overestimated where loading took more than the work.
    """
    # What was freed goes back to the system first: the work would take it again uncounted.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return peak() <= 1.05 * resident()


def _kilobytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise OSError(f"{_STATUS} has no {field}")
