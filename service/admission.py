"""Admission: work that could not be done in time is refused at once, before queues grow.

An engine's time goes into beam rows and prompt tokens, so these are counted, not requests: one
request of width 256 weighs as much as a dozen of width 20. How fast rows are done is measured, so
that a request that would wait too long is told to come back instead of timing out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HALF_LIFE_S = 10.0
"""Busy seconds after which a measurement counts half."""
MOST_RETRY_AFTER_S = 30
_LEAST_BUSY_S = 0.5
"""Busy seconds below which nothing is known of the speed."""


class OverloadError(Exception):
    """There is more work under way than can be done in time.

    Args:
        message: what is full.
        retry_after_s: whole seconds after which there should be room.
    """

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Admission:
    """Counts the work under way in one engine. Lives on one event loop; nothing in it waits.

    Args:
        beam_rows: most beam rows of all requests under way, running and waiting.
        prompt_tokens: most prompt tokens of them.
        always_rows: beam rows that are let in whatever the measured speed says. Work that is given
            up makes the engine look slow; this way it is measured again.
        wait_s: most seconds that the work under way may take.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        beam_rows: int,
        prompt_tokens: int,
        always_rows: int = 0,
        wait_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.beam_rows = 0
        """Beam rows under way."""
        self.prompt_tokens = 0
        """Prompt tokens under way."""
        self.requests = 0
        """Requests under way."""
        self._most_rows = beam_rows
        self._most_tokens = prompt_tokens
        self._always_rows = always_rows
        self._wait_s = wait_s
        self._clock = clock
        self._since = 0.0
        self._done = 0.0
        self._busy_s = 0.0

    @property
    def rows_per_s(self) -> float | None:
        """Beam rows done per busy second, the latest counting most; None as long as unknown."""
        known = self._busy_s >= _LEAST_BUSY_S and self._done > 0
        return self._done / self._busy_s if known else None

    @contextmanager
    def enter(self, rows: int, tokens: int, deadline: float | None = None) -> Iterator[None]:
        """Count a request in while the block lasts.

        A request that is alone is always let in.

        Args:
            rows: its beam width.
            tokens: its prompt's length.
            deadline: by the clock, when its answer is worth nothing any more; None: never.

        Raises:
            OverloadError: no room, or not enough time.
        """
        if self.requests:
            self._check(rows, tokens, deadline)
        else:
            self._since = self._clock()
        self.requests += 1
        self.beam_rows += rows
        self.prompt_tokens += tokens
        finished = 0
        try:
            yield
            finished = rows
        finally:
            self._measure(finished)
            self.requests -= 1
            self.beam_rows -= rows
            self.prompt_tokens -= tokens

    def full_for(self, rows: int) -> int | None:
        """Whole seconds after which a request of so many beams should try again; None: now.

        Costs next to nothing: to be asked before a request is even read.
        """
        if not self.requests:
            return None
        try:
            self._check(rows, 0, None)
        except OverloadError as error:
            return error.retry_after_s
        return None

    def _check(self, rows: int, tokens: int, deadline: float | None) -> None:
        speed = self.rows_per_s
        over = self.beam_rows + rows - self._most_rows
        if over > 0:
            raise OverloadError(
                f"{self.beam_rows} beams are under way, at most {self._most_rows} may be",
                _whole_seconds(over, speed),
            )
        if self.prompt_tokens + tokens > self._most_tokens:
            raise OverloadError(
                f"prompts of {self.prompt_tokens} tokens are under way, at most "
                f"{self._most_tokens} may be",
                _whole_seconds(rows, speed),
            )
        ahead = self.beam_rows + rows
        if speed is None or ahead <= self._always_rows:
            return
        left_s = math.inf if deadline is None else deadline - self._clock()
        late_s = ahead / speed - min(left_s, self._wait_s)
        if late_s > 0:
            raise OverloadError(
                f"the work under way takes {late_s:.1f} s longer than this request may wait",
                _whole_seconds(late_s * speed, speed),
            )

    def _measure(self, rows: int) -> None:
        now = self._clock()
        elapsed, self._since = now - self._since, now
        kept = 0.5 ** (elapsed / HALF_LIFE_S)
        self._done = self._done * kept + rows
        self._busy_s = self._busy_s * kept + elapsed


def _whole_seconds(rows: float, speed: float | None) -> int:
    """Seconds that so many rows take, at least 1."""
    seconds = 1 if speed is None else math.ceil(round(rows / speed, 3))
    return max(1, min(seconds, MOST_RETRY_AFTER_S))
