"""Locust's users: they ask for recommendations, and one looks at liveness.

Locust runs this file in an environment of its own, so nothing of the project is imported. All it
is told stands in variables; every answer becomes a line of LOAD_OUT.
"""

import json
import os
import random
import time

from locust import constant, constant_throughput, events, task
from locust.contrib.fasthttp import FastHttpUser
from locust.env import Environment

HISTORIES = json.loads(os.environ["LOAD_HISTORIES"])
RATE = float(os.environ["LOAD_RATE"])  # requests per second of each user; 0: without a pause
BODY = json.loads(os.environ["LOAD_BODY"])
OUT = open(os.environ["LOAD_OUT"], "w", buffering=1 << 16)  # noqa: SIM115, PTH123


class Shopper(FastHttpUser):
    """Asks for recommendations."""

    wait_time = constant_throughput(RATE) if RATE else constant(0)
    network_timeout = 60.0
    connection_timeout = 60.0

    def on_start(self) -> None:
        # Not all in the same instant.
        if RATE:
            time.sleep(random.random() / RATE)

    @task
    def ask(self) -> None:
        """One request."""
        body = BODY | {"history": random.choice(HISTORIES)}
        with self.client.post("/v1/recommendations", json=body, catch_response=True) as answer:
            answer.success()


class Probe(FastHttpUser):
    """Looks at liveness five times a second."""

    fixed_count = 1
    wait_time = constant_throughput(5)
    network_timeout = 60.0

    @task
    def look(self) -> None:
        """One look."""
        with self.client.get("/livez", catch_response=True) as answer:
            answer.success()


@events.request.add_listener
def _write(
    name: str, response_time: float, response: object, exception: object, **_: object
) -> None:
    status = getattr(response, "status_code", 0) or 0
    line = {"at": time.time(), "name": name, "status": status, "ms": round(response_time, 2)}
    if status == 0 or exception is not None:
        line["error"] = repr(exception or getattr(response, "error", None))[:200]
    OUT.write(json.dumps(line) + "\n")


@events.quit.add_listener
def _close(**_: object) -> None:
    OUT.close()


@events.init.add_listener
def _quiet(environment: Environment, **_: object) -> None:
    environment.stop_timeout = 15.0  # users finish the request they are in
