"""Gauges: how things stand when somebody looks, read from the service then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.engine.timings import Load
from service.store.records import STATES
from service.store.store import StoreSummary


@dataclass(frozen=True)
class Facts:
    """How things stand.

    Args:
        engine_up: whether requests are answered.
        version: the version served; None until ready.
        items: items of its catalogue.
        in_service: those of them that can be recommended.
        load: requests in the engine.
        beams: beam rows of all requests under way, by which overload is told.
        store: what the store says; None: it can't be read just now.
        build: labels of ``gti_build_info``.
    """

    engine_up: bool
    version: int | None
    items: int
    in_service: int
    load: Load
    beams: int
    store: StoreSummary | None
    build: Mapping[str, str]


class FactsCollector(Collector):
    """Turns the latest `Facts` into gauges. What is not known is left out."""

    def __init__(self) -> None:
        self.facts: Facts | None = None

    def collect(self) -> Iterator[Metric]:
        """For `CollectorRegistry`."""
        facts = self.facts
        if facts is None:
            return
        yield _gauge("gti_engine_up", "1 while requests are answered.", facts.engine_up)
        if facts.version is not None:
            yield _gauge("gti_version", "Number of the version served.", facts.version)
        yield _gauge("gti_items", "Items of the catalogue, all of them.", facts.items)
        yield _gauge("gti_items_in_service", "Items that can be recommended.", facts.in_service)
        yield _gauge(
            "gti_engine_running_requests", "Requests that the engine took.", facts.load.running
        )
        yield _gauge(
            "gti_engine_waiting_requests", "Requests that wait for it.", facts.load.waiting
        )
        yield _gauge(
            "gti_beams_under_way", "Beams of requests under way, running and waiting.", facts.beams
        )
        info = GaugeMetricFamily("gti_build_info", "What runs; always 1.", labels=list(facts.build))
        info.add_metric(list(facts.build.values()), 1)
        yield info
        store = facts.store
        yield _gauge("gti_store_up", "1 while the store can be read.", store is not None)
        if store is not None:
            yield _gauge("gti_reserve_left", "Items that can still be added.", store.codes_left)
            jobs = GaugeMetricFamily("gti_jobs", "Jobs in the store.", labels=["state"])
            for state in STATES:
                jobs.add_metric([state], store.jobs.get(state, 0))
            yield jobs
            workers = GaugeMetricFamily(
                "gti_grounding_workers", "Workers heard of lately.", labels=["state"]
            )
            workers.add_metric(["ready"], store.workers.ready)
            workers.add_metric(["starting"], store.workers.starting)
            yield workers


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(name, meaning, value=float(value))
