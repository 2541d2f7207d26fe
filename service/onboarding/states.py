"""States: what a version of the store consists of, computed from the base and its deltas."""

from __future__ import annotations

import threading
from collections import OrderedDict

from gti_core.bundle.delta import CatalogState
from service.store import Store

KEPT = 4


class States:
    """States by version number. The latest few are kept; used from any thread.

    Args:
        store: holds the deltas.
        base: the state of version 1.
    """

    def __init__(self, store: Store, base: CatalogState) -> None:
        self._store = store
        self._base = base
        self._kept: OrderedDict[int, CatalogState] = OrderedDict()
        self._lock = threading.Lock()

    def at(self, number: int) -> CatalogState:
        """The state of a version. Blocks: O(N) for every delta above the nearest one kept.

        Raises:
            VersionNotFoundError: no such version.
            StoreError: the store can't be read, or a delta is damaged.
            BundleError: a delta that does not fit.
        """
        with self._lock:
            chain = self._store.versions.chain(number)
            known = [n for n in chain if n in self._kept]
            state = self._kept[known[-1]] if known else self._base
            done = known[-1] if known else 1
            for step in chain[chain.index(done) + 1 :]:
                state = state.apply(self._store.versions.delta(step))
            self._kept[number] = state
            self._kept.move_to_end(number)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return state
