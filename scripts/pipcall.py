"""Running pip for set-up: a log, a line of progress now and then, and torch's second index.

Standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockfile import TORCH_CPU_INDEX, LockEntry, SetupError, may_ask_second_index

PROGRESS_SECONDS = 15.0
STARTED = time.monotonic()


def say(message: str) -> None:
    """One line for the person watching, with the seconds since the start."""
    print(f"[set-up {time.monotonic() - STARTED:5.1f} s] {message}", flush=True)


@dataclass(frozen=True)
class PipResult:
    """Exit status of one pip call and everything it printed."""

    returncode: int
    output: str


PipRunner = Callable[[Sequence[str]], PipResult]
"""Runs ``pip ARGUMENTS`` in the environment."""


def run_logged(command: Sequence[str], log: Path, lock_fd: int, packages: int) -> PipResult:
    """Run a command into the log, with a line of progress now and then.

    The child inherits the lock: should this process be killed alone, the next set-up waits until
    the orphan is done instead of working beside it.
    """
    output: list[str] = []
    fetched, installing, said = 0, False, time.monotonic()
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PYTHONPATH")}
    with (
        log.open("a") as file,
        subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=[lock_fd],
            start_new_session=True,
            env=environment,
        ) as child,
    ):
        assert child.stdout is not None
        file.write(f"$ {' '.join(command)}\n")
        try:
            for line in child.stdout:
                file.write(line)
                file.flush()
                output.append(line)
                fetched += line.startswith("Collecting ")
                if line.startswith("Installing collected packages") and packages > 1:
                    installing = True
                    say(f"installing {packages} packages")
                elif packages > 1 and not installing and time.monotonic() - said > PROGRESS_SECONDS:
                    said = time.monotonic()
                    say(f"fetched {fetched} of {packages} packages")
        except BaseException:
            # pip and venv have children of their own, which must not go on alone.
            os.killpg(child.pid, signal.SIGTERM)
            raise
    return PipResult(child.returncode, "".join(output))


def install_arguments(requirements: Path) -> list[str]:
    """pip arguments that install exactly what a file pins, wheels only."""
    return [
        *("install", "--no-deps", "--require-hashes", "--only-binary", ":all:"),
        *("--progress-bar", "off", "-r", str(requirements)),
    ]


def install_local_build(pip: PipRunner, entry: LockEntry, requirements: Path) -> bool:
    """Install a build with a local version (``+cpu``), asking the second index if need be.

    Args:
        pip: runs pip.
        entry: the package, the only one in ``requirements``.
        requirements: file with that one entry.

    Returns:
        Whether the second index was asked.

    Raises:
        SetupError: it could not be installed.
    """
    arguments = install_arguments(requirements)
    first = pip(arguments)
    if first.returncode == 0:
        return False
    what = f"{entry.name}=={entry.version}"
    if not may_ask_second_index(first.output, entry.name):
        raise SetupError(f"pip could not install {what}")
    say(f"{what} is on none of the configured indexes; asking {TORCH_CPU_INDEX}")
    second = pip([*arguments, "--extra-index-url", TORCH_CPU_INDEX, "--retries", "2"])
    if second.returncode != 0:
        raise SetupError(f"pip could not install {what} from {TORCH_CPU_INDEX} either")
    return True
