"""Telemetry: the one handle that the rest of the service holds."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager

from prometheus_client.exposition import choose_encoder

from service.telemetry.facts import Facts, FactsCollector
from service.telemetry.meters import Meters
from service.telemetry.tracing import Tracing


class Telemetry:
    """Metrics and traces of one application.

    Args:
        tracing: writes spans; None: nobody asked for any.
    """

    def __init__(self, tracing: Tracing | None = None) -> None:
        self.meters = Meters()
        self.tracing = tracing or Tracing()
        self._collector = FactsCollector()
        self.meters.registry.register(self._collector)

    async def scrape(self, facts: Facts, accept: str) -> tuple[bytes, str]:
        """All metrics as text, and its content type. Written in a thread.

        Args:
            facts: how things stand now.
            accept: the request's Accept header; OpenMetrics where it asks for that.
        """
        self._collector.facts = facts
        encode, content_type = choose_encoder(accept)
        return await asyncio.to_thread(encode, self.meters.registry), content_type

    def publishing(self, version: int) -> AbstractContextManager[None]:
        """A span around the publishing of a version."""
        return self.tracing.publishing(version)
