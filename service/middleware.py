"""Pure ASGI middleware: request id, access line, last-resort 500, HEAD, body limit.

None of them hides a client's disconnect: ``receive`` reaches the application unchanged once the
body has been read.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.access.keys import redact
from service.asgi import PROBE_PATHS
from service.errors import BodyTooLargeError
from service.logs import request_id_var
from service.problems import problem_response

logger = logging.getLogger("gti.access")
error_logger = logging.getLogger("gti.errors")

REQUEST_ID_HEADER = "X-Request-ID"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class RequestContextMiddleware:
    """Gives each request an id, writes its access line and answers what nobody caught.

    The id is the client's X-Request-ID when that has 1 to 128 letters, digits, dots, dashes or
    underscores and holds no key, else a new one. It stands in ``scope["state"]["request_id"]``, in
    the log context and in the answer's header.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        usable = _REQUEST_ID.fullmatch(given) and redact(given) == given
        request_id = given if usable else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        token = request_id_var.set(request_id)
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as error:
            error_logger.exception("unhandled error")
            if not status:
                await problem_response(error, request_id)(scope, receive, send_with_id)
        finally:
            took_ms = round((time.perf_counter() - started) * 1000, 2)
            path = redact(quote(scope["path"], errors="replace"))
            logger.log(
                logging.DEBUG
                if path in PROBE_PATHS or scope["state"].get("quiet")
                else logging.INFO,
                "%s %s %d %.2f ms",
                scope["method"],
                path,
                status,
                took_ms,
                extra={
                    "method": scope["method"],
                    "path": path,
                    "status": status,
                    "took_ms": took_ms,
                    "version": scope["state"].get("version"),
                    "code": scope["state"].get("problem"),
                },
            )
            request_id_var.reset(token)


class HeadMiddleware:
    """Answers HEAD as GET (RFC 9110, 9.3.2); the server leaves the body out.

    FastAPI's routes know the methods they were declared with and no HEAD.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            # A copy: the server goes by its own, which still says HEAD.
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send)


class BodyLimitMiddleware:
    """Refuses bodies above a limit, declared or not, before the application reads them.

    The body is read whole and handed on in one piece: every route needs all of it anyway.

    Args:
        app: the application.
        max_bytes: largest body, bytes.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry point."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self.max_bytes:
            await self._refuse(scope, receive, send)
            return
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if len(body) > self.max_bytes:
                await self._refuse(scope, receive, send)
                return
            more = message.get("more_body", False)
        whole: Message | None = {"type": "http.request", "body": bytes(body), "more_body": False}

        async def receive_whole() -> Message:
            nonlocal whole
            if whole is None:
                return await receive()
            message, whole = whole, None
            return message

        await self.app(scope, receive_whole, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = BodyTooLargeError(f"the body is larger than {self.max_bytes} bytes")
        await problem_response(error, scope["state"]["request_id"])(scope, receive, send)
