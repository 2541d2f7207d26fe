"""The worker's loop: claim a job, have it grounded, keep the proposal, commit the version.

It runs in a process of its own (see `service.onboarding.worker_process`), since grounding needs
the transformers copy of the model and would slow requests down. It imports no vllm and no fastapi.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gti_core.bundle.delta import CatalogState, Delta
from gti_core.errors import GroundingError, GtiError
from gti_core.onboarding.proposal import Grounder, Proposal
from gti_core.types import ItemId, JsonDict
from service.onboarding.faults import fault
from service.onboarding.rebase import check_codes, rebased, without
from service.onboarding.states import States
from service.store import Store
from service.store.errors import JobLostError, StaleVersionError, StoreError
from service.store.records import Claim

logger = logging.getLogger(__name__)

LEASE_S = 30.0
POLL_S = 0.25
REPORT_S = 0.2
STORE_PAUSE_S = 2.0
TAKEN_OUT = "it was taken out of service while the job was under way"
UNKNOWN_FAULT = "a fault of the service; the worker's log says more"


class Worker:
    """Works on the jobs of a store, one at a time.

    Args:
        store: holds the jobs.
        states: computes versions.
        grounder: the science; `load` was called.
        name: unlike that of any other worker, at most 128 characters.
        lease_s: seconds after which a job of a silent worker is taken back.
        poll_s: seconds between looks at an empty queue.
    """

    def __init__(
        self,
        store: Store,
        states: States,
        grounder: Grounder,
        name: str,
        *,
        lease_s: float = LEASE_S,
        poll_s: float = POLL_S,
    ) -> None:
        self._store = store
        self._states = states
        self._grounder = grounder
        self._name = name
        self._lease_s = lease_s
        self._poll_s = poll_s

    def run(self, stop: threading.Event) -> None:
        """Work until told to stop; a job under way is finished first."""
        while not stop.is_set():
            try:
                worked = self.step()
            except StoreError as error:
                logger.error("%s", error)
                stop.wait(STORE_PAUSE_S)
                continue
            if not worked:
                stop.wait(self._poll_s)

    def step(self) -> bool:
        """Work on one job; false when none waits. Raises StoreError."""
        claim = self._store.jobs.claim(self._name, self._lease_s)
        if claim is None:
            return False
        fault("claimed")
        logger.info("job %s: %d items, attempt %d", claim.job_id, len(claim.items), claim.attempt)
        try:
            with self._heartbeat(claim):
                self._work(claim)
        except JobLostError:
            logger.info("job %s was cancelled, or another worker has it", claim.job_id)
        except (StoreError, KeyboardInterrupt, SystemExit):
            self._give_back()
            raise
        return True

    def _work(self, claim: Claim) -> None:
        try:
            if claim.proposal is None:
                made = self._propose(claim)
                if made is None:
                    return
                base, delta = made
            else:
                base, document, block = claim.proposal
                delta = Delta.parse(document, block)
            self._commit(claim, base, delta)
        except (JobLostError, StoreError):
            raise
        except GtiError as error:
            logger.warning("job %s: %s", claim.job_id, error)
            final = isinstance(error, GroundingError)
            self._store.jobs.fail(claim, f"{error.code}: {error}", final=final)
        except Exception:
            logger.exception("job %s", claim.job_id)
            self._store.jobs.fail(claim, UNKNOWN_FAULT)

    def _propose(self, claim: Claim) -> tuple[int, Delta] | None:
        base = self._store.versions.current()
        state = self._states.at(base)
        report = _Report(self._store, claim)
        proposal = self._grounder.propose(state, claim.items, claim.first_code, report)
        if proposal.delta is None:
            self._store.jobs.reject(claim, _result(proposal))
            return None
        delta = proposal.delta
        check_codes(delta, claim.first_code, claim.code_end)
        state.apply(delta)
        fault("before_proposal")
        end = max(claim.first_code, min(claim.code_end, delta.vocabulary.active[-1]))
        self._store.jobs.propose(
            claim, base, delta.document(), delta.block(), end, _result(proposal)
        )
        fault("after_proposal")
        return base, delta

    def _commit(self, claim: Claim, base: int, delta: Delta) -> None:
        while True:
            current = self._store.versions.current()
            state = self._states.at(current)
            moved = delta if current == base else rebased(delta, state.vocabulary)
            gone = self._taken_out(claim, delta, state)
            if gone:
                moved = rebased(without(delta, gone), state.vocabulary)
                if not self._left_out(claim, current, moved, gone):
                    return
                base, delta = current, moved
            try:
                state.apply(moved)
            except GtiError:
                if current == base:
                    raise
                logger.info("job %s does not fit version %d: again", claim.job_id, current)
                self._store.jobs.restart(claim)
                return
            fault("before_commit")
            try:
                number = self._store.versions.commit(current, "onboard", moved, claim=claim)
            except StaleVersionError:
                continue
            fault("after_commit")
            logger.info("job %s: version %d", claim.job_id, number)
            return

    def _taken_out(self, claim: Claim, delta: Delta, state: CatalogState) -> set[ItemId]:
        """Items to be replaced that went out of service after the job came; that has to last."""
        known = [item.item_id for item in delta.added if item.item_id in state.catalog]
        out = {name for name in known if not state.index.in_service(state.catalog.row(name))}
        if not out:
            return out
        came = self._store.jobs.get(claim.job_id).created_at
        then = self._states.at(self._store.versions.current_at(came))
        return {
            name
            for name in out
            if name in then.catalog and then.index.in_service(then.catalog.row(name))
        }

    def _left_out(self, claim: Claim, current: int, moved: Delta, gone: set[ItemId]) -> bool:
        """Record which items are left out of a job; false if that ends it."""
        result = dict(self._store.jobs.get(claim.job_id).result or {})
        result["verdicts"] = [
            verdict | {"passed": False, "reasons": [*verdict["reasons"], TAKEN_OUT]}
            if verdict["item_id"] in gone
            else verdict
            for verdict in result.get("verdicts", ())
        ]
        if not moved.added:
            self._store.jobs.reject(claim, result)
            return False
        end = max(claim.first_code, min(claim.code_end, moved.vocabulary.active[-1]))
        self._store.jobs.propose(claim, current, moved.document(), moved.block(), end, result)
        return True

    def _give_back(self) -> None:
        try:
            self._store.jobs.release(self._name)
        except StoreError as error:
            logger.warning("its lease will run out: %s", error)

    @contextmanager
    def _heartbeat(self, claim: Claim) -> Iterator[None]:
        """Renew the lease while a step of the science takes long."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(self._lease_s / 3):
                try:
                    self._store.jobs.renew(claim, self._lease_s)
                except JobLostError:
                    return  # the next report says so to the work itself
                except StoreError as error:
                    logger.warning("the lease could not be renewed: %s", error)

        thread = threading.Thread(target=beat, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


class _Report:
    """Writes progress into the store, not more often than people look. Raises JobLostError."""

    def __init__(self, store: Store, claim: Claim) -> None:
        self._store = store
        self._claim = claim
        self._stage = ""
        self._last = 0.0

    def __call__(self, stage: str, done: int, of: int) -> None:
        entered = stage != self._stage
        if entered or done >= of or time.monotonic() - self._last >= REPORT_S:
            self._stage, self._last = stage, time.monotonic()
            self._store.jobs.progress(self._claim, stage, done, of)
        if entered:
            fault(stage)


def _result(proposal: Proposal) -> JsonDict:
    return {
        "verdicts": [
            {
                "item_id": verdict.item_id,
                "passed": verdict.passed,
                "reasons": list(verdict.reasons),
                "figures": verdict.figures,
            }
            for verdict in proposal.verdicts
        ],
        "reasons": list(proposal.reasons),
        "figures": proposal.figures,
    }
