"""Onboarding: the store's side of a running service, from start to end."""

from __future__ import annotations

from gti_core.bundle.delta import CatalogState
from service.engine.base import Engine
from service.onboarding.admin import Admin
from service.onboarding.follower import POLL_S, Follower
from service.onboarding.states import States
from service.onboarding.supervisor import Supervisor
from service.store import Store
from service.store.store import StoreSummary
from service.telemetry.telemetry import Telemetry


class Onboarding:
    """Follower, admin and worker process over one store.

    Args:
        store: belongs to the bundle that is served; closed at the end.
        base: the state of version 1.
        supervisor: runs the worker; None: workers run elsewhere, or nowhere.
        poll_s: seconds between looks at the store.
    """

    def __init__(
        self,
        store: Store,
        base: CatalogState,
        *,
        supervisor: Supervisor | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        self._store = store
        self._states = States(store, base)
        self._supervisor = supervisor
        self._poll_s = poll_s
        self._follower: Follower | None = None
        self.admin: Admin | None = None
        """There once the engine serves what the store says."""

    def summary(self) -> StoreSummary:
        """How the store stands. Blocks; raises StoreError."""
        return self._store.summary()

    async def start(self, engine: Engine, telemetry: Telemetry | None = None) -> None:
        """Catch up with the store, then follow it, and tell ``telemetry`` of it.

        Raises:
            StoreError, BundleError, EngineError: as `Follower.start`.
        """
        self._follower = Follower(
            self._store, self._states, engine, poll_s=self._poll_s, telemetry=telemetry
        )
        await self._follower.start()
        self.admin = Admin(self._store, self._states, self._follower)

    def start_worker(self) -> None:
        """Begin to run the worker process, if there is to be one."""
        if self._supervisor is not None:
            self._supervisor.start()

    async def stop(self) -> None:
        """End the worker and stop following. Idempotent."""
        if self._supervisor is not None:
            await self._supervisor.stop()
        if self._follower is not None:
            await self._follower.stop()
        self._store.close()
