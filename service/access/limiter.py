"""Rate limit: so many requests a second per caller, with bursts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

BURST_S = 2.0
"""A caller that was quiet may send this many seconds' worth at once."""
_PRUNE_ABOVE = 1024


@dataclass(frozen=True)
class Allowance:
    """What a caller may do after one request.

    Args:
        allowed: whether this request may go on.
        remaining: how many more may follow at once.
        retry_after_s: seconds until the next one may come; 0 if at once.
        full_after_s: seconds of quiet until a whole burst is allowed again.
    """

    allowed: bool
    remaining: int
    retry_after_s: float
    full_after_s: float


class RateLimiter:
    """Generic cell rate algorithm: one number per caller, no timers, no lock.

    The number is the moment by which all the caller's requests so far would have come, had they
    come at the steady rate. A request is allowed while that moment is at most a burst ahead.

    Args:
        per_second: steady requests per second, above 0.
        clock: seconds that never go back.
    """

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = 1 / per_second
        self.burst = max(1, math.floor(per_second * BURST_S))
        self.window_s = math.ceil(self.burst * self._interval_s)
        self._clock = clock
        self._due: dict[str, float] = {}
        self._prune_above = _PRUNE_ABOVE

    def hit(self, caller: str) -> Allowance:
        """Count one request of a caller. A refused one costs nothing."""
        now = self._clock()
        due = max(self._due.get(caller, now), now)
        ahead = due + self._interval_s - now
        room = self.burst * self._interval_s
        # The sum of many intervals is off by rounding: a hundredth of one is no request.
        allowed = ahead <= room + self._interval_s / 100
        if allowed:
            due += self._interval_s
            self._due[caller] = due
            if len(self._due) > self._prune_above:
                self._prune(now)
        left = room - (due - now)
        remaining = max(0, math.floor(left / self._interval_s + 0.01))
        retry_after_s = 0.0 if remaining else max(0.0, self._interval_s - left)
        return Allowance(allowed, remaining, retry_after_s, due - now)

    def _prune(self, now: float) -> None:
        # Who has been quiet long enough is as one never seen.
        self._due = {caller: due for caller, due in self._due.items() if due > now}
        self._prune_above = max(_PRUNE_ABOVE, 2 * len(self._due))
