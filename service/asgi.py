"""What the pure ASGI middleware shares."""

from __future__ import annotations

from starlette.types import Message, Send

PROBE_PATHS = frozenset({"/livez", "/readyz", "/startupz", "/metrics"})
"""Asked for all day by machines: always answered, no span, a log line of level debug only."""


class StatusWatch:
    """Takes the place of ``send`` and remembers the answer's status.

    Args:
        send: where messages go on to.
        status: what it is as long as no answer has begun.
    """

    def __init__(self, send: Send, status: int) -> None:
        self._send = send
        self.status = status

    async def __call__(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)
