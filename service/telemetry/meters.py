"""Meters: everything that is counted or timed while requests run, under one registry.

Names, units and meanings stand in docs/operations.md; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Sequence

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector

from service.engine.timings import Timings
from service.problem_table import TABLE

STAGES = ("queue", "prefill", "beams", "render", "total")
MODEL, FALLBACK = "model", "fallback"
FALLBACK_REASONS = ("empty_history", "no_known_item")
UNKNOWN_ROUTE = "unknown"
"""Label of requests whose path names no route: as many paths as there are, one label."""
CLIENT_CLOSED = 499
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SHORT_SECONDS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1)
_LONG_SECONDS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)


class Meters:
    """Counters and histograms of one application. Labels have few values, whatever clients send.

    Used from any thread. Only the event loop's thread writes, which takes microseconds.
    """

    def __init__(self) -> None:
        # When each series began is a series of its own by default: twice as many, and unused.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = self._counter(
            "gti_http_requests_total", "HTTP requests answered.", "method", "route", "status"
        )
        self._request_seconds = self._histogram(
            "gti_http_request_seconds",
            "From a request's head to the end of its answer.",
            _SECONDS,
            "method",
            "route",
        )
        self._problems = self._counter(
            "gti_problems_total", "Problems answered, those inside batches too.", "code"
        )
        self._answers = self._counter(
            "gti_recommendations_total", "Recommendations, each of a batch.", "source"
        )
        self._fallbacks = self._counter(
            "gti_fallbacks_total", "Answers of popular items instead of the model's.", "reason"
        )
        self._stages = self._histogram(
            "gti_stage_seconds",
            "Time of a recommendation by stage; total also has what is in no stage.",
            _SECONDS,
            "stage",
            "source",
        )
        self._constraint = self._histogram(
            "gti_constraint_seconds",
            "Choosing the admissible survivors of a level; requests decoded together share it.",
            _SHORT_SECONDS,
            "level",
        )
        self._illegal = self._counter(
            "gti_illegal_items_total", "Items of the engine that were not admissible; dropped."
        )
        self._prompt_tokens = self._counter("gti_prompt_tokens_total", "Tokens of prompts.")
        self._cached_tokens = self._counter(
            "gti_cached_prompt_tokens_total", "Those of them that the prefix cache held."
        )
        self._served = self._histogram(
            "gti_post_to_served_seconds", "From an item's POST until it is served.", _LONG_SECONDS
        )
        self._begin_at_zero()

    def request(
        self, method: str, route: str | None, status: int, seconds: float, problem: str | None
    ) -> None:
        """Count one HTTP request.

        Args:
            method: as sent; any that HTTP does not define count as ``other``.
            route: template of its route; None if it has none.
            status: status of the answer.
            seconds: from its head to the end of the answer.
            problem: code of the problem that it was answered with, if any.
        """
        method = method if method in METHODS else "other"
        route = route or UNKNOWN_ROUTE
        self._requests.labels(method, route, str(status)).inc()
        self._request_seconds.labels(method, route).observe(seconds)
        if problem is not None:
            self.problem(problem)

    def problem(self, code: str) -> None:
        """Count a problem. ``code`` is one of the table's."""
        self._problems.labels(code).inc()

    def answered(
        self, timings: Timings | None, render_s: float, total_s: float, reason: str | None
    ) -> None:
        """Count a recommendation.

        Args:
            timings: the engine's; None when it was not asked.
            render_s: from the engine's answer to the service's, seconds.
            total_s: all of it, seconds.
            reason: why it is a fallback; None: it is the model's.
        """
        source = MODEL if reason is None else FALLBACK
        self._answers.labels(source).inc()
        if reason is not None:
            self._fallbacks.labels(reason).inc()
        stages: list[float | None] = [None, None, None, render_s, total_s]
        if timings is not None:
            stages[:3] = timings.queue_s, timings.prefill_s, timings.beams_s
            self._constraint_times(timings.constraint_s)
            self._prompt_tokens.inc(timings.prompt_tokens or 0)
            self._cached_tokens.inc(timings.cached_tokens or 0)
        for stage, seconds in zip(STAGES, stages, strict=True):
            if seconds is not None:
                self._stages.labels(stage, source).observe(seconds)

    def illegal(self, count: int) -> None:
        """Count items that an engine should not have returned."""
        self._illegal.inc(count)

    def served(self, items: int, seconds: float) -> None:
        """Count items of one job that are served from now on, ``seconds`` after they came."""
        for _ in range(items):
            self._served.observe(seconds)

    def _constraint_times(self, seconds: Sequence[float]) -> None:
        for level, value in enumerate(seconds):
            self._constraint.labels(str(level)).observe(value)

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(name, meaning, labels, registry=self.registry)

    def _histogram(
        self, name: str, meaning: str, buckets: Sequence[float], *labels: str
    ) -> Histogram:
        return Histogram(name, meaning, labels, registry=self.registry, buckets=buckets)

    def _begin_at_zero(self) -> None:
        """Make the series whose labels are known: an alert on a rate misses a series' first step
        if it begins with it."""
        for kind in TABLE:
            self._problems.labels(kind.code)
        for source in (MODEL, FALLBACK):
            self._answers.labels(source)
            for stage in STAGES if source == MODEL else STAGES[-2:]:
                self._stages.labels(stage, source)
        for reason in FALLBACK_REASONS:
            self._fallbacks.labels(reason)
