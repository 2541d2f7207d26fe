"""Memory of the service's processes over time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil

from gti_core.types import JsonDict

MIB = 2**20
EVERY_S = 1.0

Trace = list[tuple[float, dict[str, float]]]
"""(seconds since the start, {process: MiB it has for itself})."""


@contextmanager
def watched(pid: int) -> Iterator[Trace]:
    """Look at a process and its children once a second while the block runs."""
    trace: Trace = []
    stop = threading.Event()
    began = time.monotonic()

    def look() -> None:
        while not stop.wait(EVERY_S):
            with contextlib.suppress(psutil.Error):
                trace.append((time.monotonic() - began, _sizes(psutil.Process(pid))))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield trace
    finally:
        stop.set()
        thread.join()


def _sizes(process: psutil.Process) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            name = _role(one, process)
            # What would be free if it ended; libraries that others have loaded too don't count.
            found[name] = found.get(name, 0.0) + one.memory_full_info().uss / MIB
    return found


def _role(one: psutil.Process, service: psutil.Process) -> str:
    if one == service:
        return "service"
    words = " ".join([one.name(), *one.cmdline()])
    for sign, role in (("EngineCore", "engine"), ("worker", "worker"), ("watchdog", "watchdog")):
        if sign in words:
            return role
    return "other"


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Least-squares slope of (seconds, MiB), in MiB per minute; 0 of fewer than two."""
    if len(points) < 2:
        return 0.0
    middle = sum(at for at, _ in points) / len(points)
    mean = sum(size for _, size in points) / len(points)
    spread = sum((at - middle) ** 2 for at, _ in points)
    return 60.0 * sum((at - middle) * (size - mean) for at, size in points) / spread


def summary(trace: Trace, skip_s: float) -> JsonDict:
    """First, last, largest size and slope after ``skip_s``, of each process and all together."""
    kept = [(at, sizes) for at, sizes in trace if at >= skip_s]
    names = sorted({name for _, sizes in kept for name in sizes})
    found: JsonDict = {}
    for name in [*names, "all"]:
        points = [
            (at, sum(sizes.values()) if name == "all" else sizes[name])
            for at, sizes in kept
            if name == "all" or name in sizes
        ]
        if points:
            found[name] = {
                "first_mib": round(points[0][1], 1),
                "last_mib": round(points[-1][1], 1),
                "most_mib": round(max(size for _, size in points), 1),
                "mib_per_min": round(slope(points), 3),
            }
    return found
