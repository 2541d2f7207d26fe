"""The admin routes over the fake engine: a store, a worker's loop, and words for requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fake_grounder import FakeGrounder

from gti_core.bundle.delta import CatalogState
from service.context import ServingContext
from service.onboarding.running import Onboarding
from service.onboarding.states import States
from service.onboarding.worker import Worker
from service.store import Store


class Parts:
    """A store with what works on it; clients share it, as replicas do."""

    def __init__(self, folder: Path, context: ServingContext) -> None:
        self.url = str(folder / "gti.db")
        self.context = context
        self.base = CatalogState(context.catalog, context.vocabulary, context.index)
        self.store = self.open()
        self.grounder = FakeGrounder()

    def open(self) -> Store:
        return Store(self.url, self.context.name, self.context.digest, self.context.vocabulary)

    def onboarding(self) -> Onboarding:
        return Onboarding(self.open(), self.base, poll_s=0.02)

    def worker(self) -> Worker:
        states = States(self.store, self.base)
        return Worker(self.store, states, self.grounder, "w", poll_s=0.01)


def item(item_id: str, title: str = "A title", **fields: Any) -> dict[str, Any]:
    return {"item_id": item_id, "title": title, **fields}


def onboard(client: Any, *items: dict[str, Any], wait: float = 10, **options: Any) -> Any:
    headers = options.pop("headers", {})
    return client.post(
        f"/v1/admin/items?wait={wait}", json={"items": list(items), **options}, headers=headers
    )


def ids(response: Any) -> list[str]:
    return [found["item_id"] for found in response.json()["items"]]


def code(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["code"]
