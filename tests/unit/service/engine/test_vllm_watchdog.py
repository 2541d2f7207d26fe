"""The watchdog, with processes that only sleep."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from service.engine.vllm_watchdog import Watchdog

SERVICE = """
import subprocess, sys, time
from service.engine.vllm_watchdog import Watchdog
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
watchdog = Watchdog()
watchdog.add(engine.pid)
print(engine.pid, watchdog._process.pid, flush=True)
time.sleep(600)
"""


def gone(process: psutil.Process, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_killed_service_takes_its_engine_along() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVICE], stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        engine, watchdog = (psutil.Process(int(x)) for x in service.stdout.readline().split())
        watchdog.terminate()  # as a signal to the whole service might
        time.sleep(0.2)
        assert engine.is_running()
        service.kill()
        assert gone(engine)
        assert gone(watchdog)


def test_close_ends_the_watchdog_and_what_is_left() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command) as engine, subprocess.Popen([sys.executable, "-c", ""]) as over:
        over.wait()
        watchdog = Watchdog()
        watchdog.add(over.pid)
        watchdog.add(engine.pid)
        watchdog.close()
        assert engine.wait(timeout=60) == -9
        assert watchdog._process.returncode == 0


def test_a_watchdog_that_was_killed_does_no_harm() -> None:
    watchdog = Watchdog()
    watchdog._process.kill()
    watchdog._process.wait()
    watchdog.add(1)
    watchdog.close()
