"""Where an engine's time for one request goes. Clocks are of the host: see `Timings`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(eq=False)
class Timings:
    """What an engine tells of one request; what it can't tell stays None.

    All times are seconds of `time.monotonic`, which the processes of a machine share. On a CPU
    that is where the time went. On a GPU the host starts kernels and does not wait for them, and
    nothing here makes it wait: the figures are the host's share there, and what the device takes
    longer is in none of them.

    Args:
        queue_s: until the engine began with the prompt.
        prefill_s: the prompt through the model, until its last chunk was done.
        beams_s: from there to the items, requests decoded in the same step included.
        constraint_s: choosing the survivors, per level; requests decoded together share it.
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them that the prefix cache held.
    """

    queue_s: float | None = None
    prefill_s: float | None = None
    beams_s: float | None = None
    constraint_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    asked: float = field(default_factory=time.monotonic)
    """When the engine was asked."""

    def restart(self) -> None:
        """Forget everything; an engine calls it first, since a request may be decoded again."""
        vars(self).update(vars(Timings()))


@dataclass(frozen=True)
class Load:
    """Requests under way in an engine.

    Args:
        running: let in, whether or not the engine computes for them just now.
        waiting: not let in yet.
    """

    running: int
    waiting: int


class LevelTimer:
    """Fills in `Timings` where the service itself drives a beam search, level after level.

    Args:
        timings: to be filled in.
        queued: whether what was before now is the queue; else the queue is not known.
    """

    def __init__(self, timings: Timings, *, queued: bool = True) -> None:
        self._timings = timings
        self._began = time.monotonic()
        self._scored = self._began
        self._prefilled: float | None = None
        if queued:
            timings.queue_s = self._began - timings.asked

    def scored(self) -> None:
        """The model's scores of a level are there."""
        self._scored = time.monotonic()
        if self._prefilled is None:
            self._prefilled = self._scored
            self._timings.prefill_s = self._scored - self._began

    def chosen(self) -> None:
        """The survivors of a level are chosen."""
        now = time.monotonic()
        self._timings.constraint_s.append(now - self._scored)
        if self._prefilled is not None:
            self._timings.beams_s = now - self._prefilled
