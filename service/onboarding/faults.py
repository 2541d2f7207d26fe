"""Named points at which a crash test can kill the process. In service they do nothing."""

from __future__ import annotations

import os
import signal
import threading

VARIABLE = "GTI_FAULT"

POINTS = (
    "claimed",
    "encoding",
    "assigning",
    "grounding",
    "validating",
    "before_proposal",
    "after_proposal",
    "before_commit",
    "after_commit",
    "before_swap",
    "after_swap",
)

_hits: dict[str, int] = {}
_lock = threading.Lock()


def fault(point: str) -> None:
    """Kill this process with SIGKILL if ``GTI_FAULT`` is ``point`` or, at hit N, ``point:N``."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    name, _, count = wanted.partition(":")
    if name != point:
        return
    with _lock:
        _hits[point] = _hits.get(point, 0) + 1
        if _hits[point] == int(count or 1):
            os.kill(os.getpid(), signal.SIGKILL)
