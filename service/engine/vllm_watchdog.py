"""Ends the engine process when the service is gone, however it went.

vLLM's engine process does not watch its parent: after a ``kill -9`` of the service it would stay
for ever, with its memory. So a small process of our own waits for the end of a pipe that the
service holds open, and then kills what it was told to. Run as a script it is that process; it
imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path


class Watchdog:
    """Handle to the watching process, kept by the service. Making one blocks until it watches."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own file, no input of others
            [sys.executable, "-I", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        # It says when it ignores signals; one that came earlier would end it.
        with self._process.stdout as ready:
            ready.readline()

    def add(self, pid: int) -> None:
        """Kill this process too, once the service is gone."""
        assert self._process.stdin is not None
        # A watchdog that was killed must not take the service down.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"%d\n" % pid)
            self._process.stdin.flush()

    def close(self) -> None:
        """Kill now whatever is left of the processes, and wait for the watchdog's end."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def watch() -> None:
    """Read pids from standard input, one a line, until it ends; then kill them all."""
    # Signals meant for the service may reach this process too; only the pipe's end counts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)  # noqa: T201 - to the pipe's other end
    handles = []
    for line in sys.stdin:
        with contextlib.suppress(ProcessLookupError):
            # A handle, because the number may belong to another process by then.
            handles.append(os.pidfd_open(int(line)))
    for handle in handles:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)


if __name__ == "__main__":
    watch()
