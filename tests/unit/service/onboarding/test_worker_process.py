"""The worker as a process, and who keeps it running."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gti_core.bundle import load_bundle
from gti_core.data.dataset import ItemText
from service.onboarding.supervisor import Supervisor
from service.onboarding.worker_process import open_store
from service.store import Store
from service.store.records import JobRecord
from service.store.submission import Submission

ROOT = Path(__file__).parents[4]
SCRIPT = ROOT / "tests" / "fake_worker.py"

Command = Callable[..., list[str]]


@pytest.fixture
def store(tmp_path: Path, tiny_bundle: Path) -> Iterator[Store]:
    store = open_store(str(tmp_path / "gti.db"), load_bundle(tiny_bundle))
    yield store
    store.close()


@pytest.fixture
def command(store: Store, tiny_bundle: Path) -> list[str]:
    return [sys.executable, str(SCRIPT), str(tiny_bundle), str(store.name)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def submit(store: Store, name: str, title: str = "New") -> str:
    submission = Submission((ItemText(name, title),))
    return store.jobs.submit(submission, store.versions.current(), {})[0].job_id


def until(store: Store, job_id: str, *states: str) -> JobRecord:
    deadline = time.monotonic() + 60
    while (job := store.jobs.get(job_id)).state not in states:
        assert time.monotonic() < deadline, job
        time.sleep(0.05)
    return job


def test_it_works_and_ends_in_good_order(store: Store, command: list[str]) -> None:
    job_id = submit(store, "n")
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE) as process:
        assert until(store, job_id, "publishing").version == 2
        slow = submit(store, "m", "slow")
        until(store, slow, "grounding")
        assert os.getpriority(os.PRIO_PROCESS, process.pid) > os.getpriority(os.PRIO_PROCESS, 0)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    job = store.jobs.get(slow)
    assert (job.state, job.attempts) == ("queued", 0)


def test_it_ends_with_its_parent(store: Store, command: list[str]) -> None:
    """It is told of a parent that is not its own: as if that had died at once."""
    done = subprocess.run(
        [*command, "--parent", "1"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert "the service is gone" in done.stderr


def test_a_worker_that_is_killed_is_started_again(store: Store, command: list[str]) -> None:
    job_id = submit(store, "n", "slow")

    async def state(*states: str) -> None:
        await asyncio.to_thread(until, store, job_id, *states)

    async def work() -> None:
        supervisor = Supervisor(store, command, environment(), first_pause_s=0.05)
        supervisor.start()
        try:
            await state("grounding")
            first = supervisor.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            await state("queued")
            await state("grounding")
            assert supervisor.pid not in (None, first)
        finally:
            await supervisor.stop()
        assert supervisor.pid is None

    asyncio.run(work())
    job = store.jobs.get(job_id)
    assert (job.state, job.attempts) == ("queued", 1)


def test_it_imports_neither_vllm_nor_a_web_framework() -> None:
    code = (
        "import sys, service.onboarding.worker_process, service.cli\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(loaded & {'vllm', 'fastapi', 'starlette', 'uvicorn', 'torch'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.stdout.strip() == "[]", done.stderr
