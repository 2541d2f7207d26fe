"""Make the virtual environment from the locks, and only when they changed.

    python3 scripts/setup.py [--variant cpu|gpu] [--venv DIR] [--sets dev,demo]
                             [--project editable|wheel|none]

Standard library only; uses the pip that comes with CPython 3.11. A stamp inside the environment
holds a digest of what was installed and is written last, so a second call returns at once and an
interrupted one starts over. Two calls at the same time wait for each other.

torch's CPU build (``torch==...+cpu``) is installed first and alone: as this machine's pip is
configured, and only where that version can't be found, again with PyTorch's public CPU index.
No other package is ever looked for there. See docs/decisions/0001-locks-and-setup.md.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lockfile import (
    FORMAT,
    SetupError,
    digest,
    merge_locks,
)
from pipcall import PipRunner, install_arguments, install_local_build, run_logged, say

ROOT = Path(__file__).resolve().parent.parent
STAMP = "gti-setup.json"
LOG = "gti-setup.log"
VARIANTS = ("cpu", "gpu")
SETS = ("dev", "demo")
PROJECTS = ("editable", "wheel", "none")


@dataclass(frozen=True)
class Plan:
    """What the environment should hold.

    Args:
        venv: its folder.
        variant: cpu or gpu.
        sets: further locks to install, of ``SETS``.
        project: how the project itself is installed: editable, wheel or none.
        root: the checkout.
    """

    venv: Path
    variant: str
    sets: tuple[str, ...]
    project: str
    root: Path = ROOT

    @property
    def lock_files(self) -> list[Path]:
        """The locks to install, the variant's first."""
        return [self.root / "requirements" / f"{n}.lock" for n in (self.variant, *self.sets)]

    def locks_digest(self) -> str:
        """Digest of everything that decides which packages are installed."""
        return digest({file.name: file.read_bytes() for file in self.lock_files})

    def project_digest(self) -> str:
        """Digest of what decides the project's own metadata and how it is installed."""
        files = [self.root / "pyproject.toml", *(self.root / "requirements").glob("*.in")]
        parts = {file.name: file.read_bytes() for file in files}
        return digest(parts | {"how": f"{self.project} {self.root}".encode()})

    def stamp(self, python: str) -> dict[str, Any]:
        """The stamp of an environment that is as planned."""
        return {
            "format": FORMAT,
            "complete": True,
            "python": python,
            "venv": str(self.venv),
            "locks": self.locks_digest(),
            "project": "" if self.project == "none" else self.project_digest(),
        }


def read_stamp(venv: Path) -> dict[str, Any]:
    """The environment's stamp; empty when there is none or it can't be read."""
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(venv: Path, stamp: dict[str, Any]) -> None:
    """Replace the stamp in one step: write, flush to disk, rename."""
    partial = venv / (STAMP + ".part")
    with partial.open("w") as file:
        json.dump(stamp, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(venv / STAMP)


def venv_python_version(venv: Path) -> str:
    """Version named in ``pyvenv.cfg``, empty where the environment can't run."""
    try:
        config = (venv / "pyvenv.cfg").read_text()
    except OSError:
        return ""
    version = re.search(r"^version\s*=\s*(\S+)", config, re.MULTILINE)
    # The interpreter is a link to the one that made the environment, which may be gone.
    return version[1] if version and os.access(venv / "bin" / "python", os.X_OK) else ""


def missing_steps(plan: Plan) -> tuple[str, ...]:
    """What is left to do: nothing, ``("project",)``, or ``("locks", "project")``."""
    version = venv_python_version(plan.venv)
    have, want = read_stamp(plan.venv), plan.stamp(version)
    # An environment can't be moved or copied: its scripts name the folder they were made in.
    decisive = ("format", "complete", "python", "venv", "locks")
    if not version or any(have.get(key) != want[key] for key in decisive):
        return ("locks", "project")
    return () if have.get("project") == want["project"] or not want["project"] else ("project",)


def clear(venv: Path) -> None:
    """Empty the environment's folder, or make it.

    Raises:
        SetupError: the folder holds something this script didn't make.
    """
    venv.mkdir(parents=True, exist_ok=True)
    names = {child.name for child in venv.iterdir()}
    if STAMP not in names and not names <= {STAMP + ".part"}:
        raise SetupError(f"{venv} was not made by this script: move it away or delete it first")
    # The stamp comes first and stays, so that a folder left half empty is still known as ours.
    write_stamp(venv, {"format": FORMAT, "complete": False})
    for child in venv.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        elif child.name != STAMP:
            child.unlink()


def find_python(venv: Path) -> str:
    """A CPython 3.11 outside ``venv`` to make the environment with.

    Raises:
        SetupError: there is none.
    """
    # Inside a virtual environment, possibly the one about to be cleared, take what made that one.
    base = "getattr(sys, '_base_executable', '') or sys.executable"
    question = f"import sys; print(*sys.version_info[:2]); print({base})"
    for name in (sys.executable, "python3.11", "python3"):
        path = shutil.which(name)
        if path is None:
            continue
        # A shim may be on the path without a version behind it, so ask.
        asked = subprocess.run([path, "-c", question], capture_output=True, text=True, check=False)
        if asked.returncode == 0 and asked.stdout.startswith("3 11\n"):
            found = Path(asked.stdout.split("\n")[1])
            # Half cleared, an environment no longer knows what made it, but its link does.
            found = found.resolve() if found.is_relative_to(venv) else found
            if not found.is_relative_to(venv):
                return str(found)
    raise SetupError(
        f"CPython 3.11 is needed, this is {platform.python_version()} and no python3.11 was found"
    )


def check_machine(variant: str) -> None:
    """Refuse machines the locks were not made for; warn where a system library is missing."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SetupError(
            f"the locks are for Linux on x86_64, this is {sys.platform} on {platform.machine()}"
        )
    if variant == "cpu":
        try:
            ctypes.CDLL("libnuma.so.1")
        except OSError:
            say("warning: vLLM's CPU build needs libnuma.so.1 (on Debian: apt install libnuma1)")


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Hold the lock on ``folder``; gives the descriptor that holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is at work here; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def install_packages(plan: Plan, pip: Callable[[int], PipRunner]) -> None:
    """Install all locks of the plan; ``pip(n)`` runs a pip that is about n packages."""
    entries = merge_locks({file.name: file.read_text() for file in plan.lock_files})
    local = [entry for entry in entries.values() if "+" in entry.version]
    rest = [entry for entry in entries.values() if "+" not in entry.version]
    requirements = plan.venv / "gti-requirements.txt"
    for entry in local:
        say(f"fetching {entry.name}=={entry.version}")
        requirements.write_text(entry.text + "\n")
        install_local_build(pip(1), entry, requirements)
    say(f"fetching {len(rest)} packages")
    requirements.write_text("".join(entry.text + "\n" for entry in rest))
    if pip(len(rest))(install_arguments(requirements)).returncode != 0:
        raise SetupError("pip could not install the locked packages")
    requirements.unlink()


def install_project(plan: Plan, pip: PipRunner) -> None:
    """Install the project itself; everything it is built with comes from the lock."""
    say(f"installing the project ({plan.project})")
    how = ["-e", str(plan.root)] if plan.project == "editable" else [str(plan.root)]
    arguments = ["install", "--no-deps", "--no-build-isolation", "--no-index", *how]
    if pip(arguments).returncode != 0:
        raise SetupError("pip could not install the project")


def set_up(plan: Plan) -> None:
    """Bring the environment to the plan.

    Raises:
        SetupError: it can't be; the stamp then says that the environment is unfinished.
    """
    if not missing_steps(plan):
        return
    plan.venv.parent.mkdir(parents=True, exist_ok=True)
    with locked(plan.venv.parent) as lock_fd:
        steps = missing_steps(plan)
        if not steps:
            return
        log = plan.venv / LOG
        python = str(plan.venv / "bin" / "python")

        def pip(packages: int) -> PipRunner:
            base = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
            return lambda args: run_logged([*base, *args], log, lock_fd, packages)

        try:
            if "locks" in steps:
                check_machine(plan.variant)
                interpreter = find_python(plan.venv)
                clear(plan.venv)
                say(f"making {plan.venv} (variant {plan.variant})")
                made = run_logged([interpreter, "-m", "venv", str(plan.venv)], log, lock_fd, 0)
                if made.returncode != 0:
                    raise SetupError("python -m venv failed (on Debian: apt install python3-venv)")
                install_packages(plan, pip)
            version = venv_python_version(plan.venv)
            write_stamp(plan.venv, plan.stamp(version) | {"project": ""})
            if plan.project != "none":
                install_project(plan, pip(1))
                write_stamp(plan.venv, plan.stamp(version))
        except SetupError as error:
            if not log.exists():
                raise
            with log.open(errors="replace") as file:
                tail = "".join(deque(file, maxlen=15))
            raise SetupError(f"{error}\nLast lines of {log}:\n{tail}") from None
        say(f"done: {plan.venv}")


def parse_arguments(arguments: Sequence[str]) -> Plan:
    """The plan that a command line asks for; exits with a message when it makes no sense."""
    parser = argparse.ArgumentParser(description="Make the virtual environment from the locks.")
    parser.add_argument("--variant", choices=VARIANTS, default=os.environ.get("VARIANT") or "cpu")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", metavar="DIR")
    parser.add_argument("--sets", default=",".join(SETS), help="of dev, demo; may be empty")
    parser.add_argument("--project", choices=PROJECTS, default="editable")
    args = parser.parse_args(arguments)
    if args.variant not in VARIANTS:  # argparse does not check a default
        parser.error(f"VARIANT is {args.variant!r}, not one of: {', '.join(VARIANTS)}")
    sets = tuple(dict.fromkeys(part for part in args.sets.split(",") if part))
    if not set(sets) <= set(SETS):
        parser.error(f"--sets is {args.sets!r}, not a comma-separated choice of {', '.join(SETS)}")
    return Plan(args.venv.absolute(), args.variant, sets, args.project)


def stop(_signal: int, _frame: object) -> NoReturn:
    """Turn a polite kill into an exception, so that pip is ended too."""
    raise SystemExit(143)


def main() -> int:
    """Entry point; the exit status."""
    plan = parse_arguments(sys.argv[1:])
    signal.signal(signal.SIGTERM, stop)
    try:
        set_up(plan)
    except (SetupError, OSError) as error:
        print(f"set-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up interrupted; the next call goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
