"""Stopping a long run between two steps, so that nothing done is lost."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, ClassVar

from gti_core.errors import PipelineError


class StoppedError(PipelineError):
    """A run was asked to stop, and did after saving a checkpoint."""

    code: ClassVar[str] = "stopped"


class StopSignal:
    """While entered, the first SIGINT or SIGTERM only sets `requested`; a second one acts as usual.

    Outside the main thread, where Python allows no handlers, it never fires.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
