"""A small client of the admin routes, over the standard library."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import ClassVar

from gti_core.data.dataset import ItemText, text_record
from gti_core.errors import GtiError
from gti_core.types import JsonDict
from service.access.keys import key_id
from service.settings import KEY_VARIABLE

BATCH = 1_000
TIMEOUT_S = 90
POLL_S = 0.3
_ENDED = ("live", "rejected", "failed", "cancelled")


class ClientError(GtiError):
    """The service could not be asked, or refused."""

    code: ClassVar[str] = "request_failed"


class AdminClient:
    """Asks a running service.

    Args:
        url: its address, such as http://127.0.0.1:8000.
        key: an admin key, for a service that asks for one; spaces around it don't count.

    Raises:
        ClientError: not an http or https address, or something that is no key.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ClientError(f"{url!r} is no http address")
        self._url = url.rstrip("/")
        self._key = (key or "").strip()
        if self._key and key_id(self._key) is None:
            # Told here: what is no key might not be fit for a header, and errors there quote it.
            raise ClientError(f"{KEY_VARIABLE} holds no key; keys look like gti_<id>_<secret>")

    def onboard(
        self,
        items: Sequence[ItemText],
        *,
        replace: bool = False,
        report: Callable[[str, int, int], None] = lambda stage, done, of: None,
    ) -> JsonDict:
        """Onboard items in one job and wait for its end; returns the job.

        Args:
            items: 1 to 1,000 items.
            replace: whether known ids may come with other content.
            report: told (stage, items done, items) as the work goes on.

        Raises:
            ClientError: the service can't be reached, or it refused.
        """
        if len(items) > BATCH:
            raise ClientError(f"{len(items)} items: a job takes {BATCH} at most")
        body = {"items": [text_record(item) for item in items], "replace": replace}
        # Safe to run again after a broken connection: what is known is no new work.
        job = self._send("/v1/admin/items", body)
        while job["state"] not in _ENDED:
            progress = job["progress"]
            if progress is not None:
                report(progress["stage"], progress["done"], progress["of"])
            time.sleep(POLL_S)
            job = self._send(f"/v1/admin/jobs/{job['job_id']}")
        return job

    def _send(self, path: str, body: JsonDict | None = None) -> JsonDict:
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked
            self._url + path,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        if self._key:
            # Left out where the answer is a redirect: another host must not get the key.
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                answered: JsonDict = json.loads(answer.read())
                return answered
        except urllib.error.HTTPError as error:
            raise ClientError(f"{self._url}: {_detail(error)}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ClientError(f"{self._url}: {error}") from error


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        problem = json.loads(error.read())
        return f"{problem['code']}: {problem['detail']}"
    except (OSError, ValueError, KeyError, TypeError):
        return str(error)
