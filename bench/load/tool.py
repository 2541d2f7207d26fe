"""Locust in an environment of its own: its dependencies stay out of the service's.

Made once, from requirements/load.lock, with hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gti_core.types import JsonDict

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "load.lock"
USERS = Path(__file__).with_name("users.py")


@dataclass(frozen=True)
class Sample:
    """One answer.

    Args:
        at: end, seconds since 1970.
        name: path that was asked for.
        status: of HTTP; 0 without an answer.
        ms: milliseconds it took.
        error: why there is none.
    """

    at: float
    name: str
    status: int
    ms: float
    error: str = ""


def locust(folder: Path) -> Path:
    """The program, installed under ``folder`` if it isn't there or the lock has changed."""
    digest = hashlib.sha256(LOCK.read_bytes()).hexdigest()
    venv = folder / "locust"
    done = venv / "lock.sha256"
    if not (done.is_file() and done.read_text() == digest):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        pip += ["--disable-pip-version-check", "--require-hashes", "--no-deps", "-r", str(LOCK)]
        subprocess.run(pip, check=True)
        done.write_text(digest)
    return venv / "bin" / "locust"


def run(
    program: Path,
    folder: Path,
    url: str,
    *,
    users: int,
    seconds: float,
    histories: Sequence[Sequence[str]],
    body: JsonDict,
    rate: float = 0.0,
) -> list[Sample]:
    """Let users ask, and one look at liveness, for some time. Blocks.

    Args:
        program: of `locust`.
        folder: for its files.
        url: of the service.
        users: that ask at the same time.
        seconds: how long.
        histories: what they ask with.
        body: further members of each request.
        rate: requests per second of all users together; 0: each asks as soon as it has its answer.
    """
    out = folder / "answers.jsonl"
    out.unlink(missing_ok=True)
    told = {
        "LOAD_HISTORIES": json.dumps([list(history) for history in histories]),
        "LOAD_RATE": str(rate / users),
        "LOAD_BODY": json.dumps(body),
        "LOAD_OUT": str(out),
    }
    command = [str(program), "-f", str(USERS), "--headless", "--host", url, "--only-summary"]
    command += ["-u", str(users + 1), "-r", str(users + 1), "-t", f"{seconds:.0f}s"]
    command += ["--loglevel", "WARNING", "--exit-code-on-error", "0"]
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    ended = subprocess.run(
        command, env=kept | told, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
    )
    if ended.returncode or not out.is_file():
        raise SystemExit(f"locust failed: {ended.stderr.decode(errors='replace')[-2000:]}")
    with out.open(encoding="utf-8") as lines:
        return [Sample(**json.loads(line)) for line in lines]
