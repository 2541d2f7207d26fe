"""Any order of submissions, claims, publishes, rollbacks and crashes keeps the store's promises."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fake_grounder import delta_for
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gti_core.bundle.delta import CatalogState, Delta
from gti_core.catalog import Item, ItemCatalog
from gti_core.data.dataset import ItemText
from gti_core.errors import GtiError
from gti_core.vocabulary import SidVocabulary
from service.onboarding.admin import catalogued
from service.onboarding.rebase import rebased
from service.onboarding.states import States
from service.store import Store
from service.store.errors import JobLostError, RefusedError
from service.store.records import ENDED, UNFINISHED, Claim
from service.store.submission import Submission

VOCABULARY = SidVocabulary((3, 2, 40), (3, 2, 4), 100)
NAMES = [f"n{number}" for number in range(8)]


def base_state() -> CatalogState:
    items = [Item(f"i{n}", (n % 3, n % 2, n % 4), f"Title {n}") for n in range(12)]
    return CatalogState.of(ItemCatalog(items), VOCABULARY)


class StoreMachine(RuleBasedStateMachine):
    """A service and several workers on one store."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.url = str(Path(self.folder.name) / "gti.db")
        self.base = base_state()
        self.open()
        self.claims: list[Claim] = []
        self.proposed: dict[str, tuple[int, Delta]] = {}
        self.accepted: set[str] = set()
        self.owners: dict[int, str] = {}
        self.numbers = [1]
        self.workers = self.items = 0

    def open(self) -> None:
        self.store = Store(self.url, "tiny", "d" * 64, VOCABULARY)
        self.states = States(self.store, self.base)

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @rule(
        names=st.lists(st.sampled_from([*NAMES, "i1"]), min_size=1, max_size=3, unique=True),
        title=st.sampled_from(["One", "Two"]),
        replace=st.booleans(),
        key=st.sampled_from([None, None, "k"]),
    )
    def submit(self, names: list[str], title: str, replace: bool, key: str | None) -> None:
        submission = Submission(tuple(ItemText(name, title) for name in names), replace, key)
        current = self.store.versions.current()
        known = catalogued(self.states.at(current), submission)
        left = self.store.codes_left()
        try:
            job, _ = self.store.jobs.submit(submission, current, known)
        except RefusedError:
            return
        assert len(job.items) <= left or job.job_id in self.accepted
        self.accepted.add(job.job_id)

    @rule()
    def claim(self) -> None:
        self.workers += 1
        claim = self.store.jobs.claim(f"w{self.workers}", 1000)
        if claim is None:
            assert self.store.jobs.page(1, state="queued") == []
            return
        self.claims.append(claim)
        if claim.proposal is not None:
            base, document, block = claim.proposal
            self.proposed[claim.worker] = (base, Delta.parse(document, block))

    @rule(count=st.integers(1, 2), served=st.booleans())
    def onboard(self, count: int, served: bool) -> None:
        """A job from submission to a version, with nothing in between but jobs before it."""
        self.items += 1
        names = [f"m{self.items}-{number}" for number in range(count)]
        self.submit(names, "One", False, None)
        self.claim()
        if not self.claims:
            return
        claim = self.claims[-1]
        self.offer(claim)
        self.bring_out(claim.worker)
        if served:
            self.follow(False)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def propose(self, data: st.DataObject) -> None:
        self.offer(data.draw(st.sampled_from(self.claims)))

    def offer(self, claim: Claim) -> None:
        base = self.store.versions.current()
        delta = delta_for_branch(self.states.at(base), claim)
        try:
            self.store.jobs.propose(
                claim, base, delta.document(), delta.block(), claim.code_end, {}
            )
        except JobLostError:
            self.claims.remove(claim)
            return
        self.proposed[claim.worker] = (base, delta)

    @precondition(lambda self: self.proposed)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.bring_out(data.draw(st.sampled_from(sorted(self.proposed))))

    def bring_out(self, worker: str) -> None:
        if worker not in self.proposed:
            return
        _, delta = self.proposed.pop(worker)
        claim = next((claim for claim in self.claims if claim.worker == worker), None)
        if claim is None:
            return
        self.claims.remove(claim)
        current = self.store.versions.current()
        moved = rebased(delta, self.states.at(current).vocabulary)
        self.states.at(current).apply(moved)  # codes of its own: it always fits
        try:
            number = self.store.versions.commit(current, "onboard", moved, claim=claim)
        except JobLostError:
            return
        self.new_version(number)
        assert moved.rows is not None
        for row in moved.rows.numbers:
            assert self.owners.setdefault(int(row), claim.job_id) == claim.job_id
            assert list(self.owners.values()).count(claim.job_id) <= len(claim.items)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), how=st.sampled_from(["reject", "fail", "release", "abandon", "cancel"]))
    def end(self, data: st.DataObject, how: str) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        self.claims.remove(claim)
        self.proposed.pop(claim.worker, None)
        jobs = self.store.jobs
        try:
            if how == "reject":
                jobs.reject(claim, {})
            elif how == "fail":
                jobs.fail(claim, "no")
            elif how == "cancel":
                jobs.cancel(claim.job_id)
            else:
                getattr(jobs, how)(claim.worker)
        except (JobLostError, RefusedError):
            pass

    @rule(row=st.integers(0, 11), available=st.booleans())
    def change(self, row: int, available: bool) -> None:
        current = self.store.versions.current()
        vocabulary = self.states.at(current).vocabulary
        names = (f"i{row}",)
        delta = Delta(vocabulary, restored=names) if available else Delta(vocabulary, retired=names)
        self.new_version(self.store.versions.commit(current, "retire", delta))

    @rule(data=st.data())
    def activate(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.numbers))
        if self.store.versions.get(number).refused is None:
            self.store.versions.activate(number)
            assert self.store.versions.current() == number

    @rule(refuse=st.booleans())
    def follow(self, refuse: bool) -> None:
        """The engine takes what is current, or refuses it."""
        current = self.store.versions.current()
        record = self.store.versions.get(current)
        if refuse and not record.served:
            self.store.versions.refuse(current, "no", served=1)
            assert self.store.versions.current() == record.parent or (
                self.store.versions.get(record.parent or 1).refused is not None
            )
        else:
            self.store.versions.mark_served(current)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.open()

    def new_version(self, number: int) -> None:
        assert number == max(self.numbers) + 1
        self.numbers.append(number)

    @invariant()
    def current_is_the_replay_of_its_chain(self) -> None:
        current = self.store.versions.current()
        chain = self.store.versions.chain(current)
        fresh = self.base
        for number in chain[1:]:
            fresh = fresh.apply(self.store.versions.delta(number))
        state = self.states.at(current)
        assert state.catalog.items == fresh.catalog.items
        assert state.vocabulary == fresh.vocabulary
        assert state.index.available.tolist() == fresh.index.available.tolist()
        last = [item.sid[-1] for item in state.catalog.items[12:]]
        assert len(set(last)) == len(last)

    @invariant()
    def codes_at_work_are_free_and_apart(self) -> None:
        used = {row - VOCABULARY.offsets[-1] for row in self.owners}
        held: set[int] = set()
        for claim in self.claims:
            job = self.store.jobs.get(claim.job_id)
            if job.state not in UNFINISHED or job.attempts != claim.attempt:
                continue
            codes = set(range(claim.first_code, claim.code_end))
            assert not codes & (used | held)
            held |= codes

    @invariant()
    def no_job_is_lost(self) -> None:
        jobs = {job.job_id: job for job in self.store.jobs.page(1000)}
        assert set(jobs) == self.accepted
        for job in jobs.values():
            assert job.state in (*UNFINISHED, *ENDED)
            if job.state == "live" and job.items:
                assert job.version in self.numbers


def delta_for_branch(state: CatalogState, claim: Claim) -> Delta:
    """As the science makes it, also where the branch has higher codes already."""
    try:
        return delta_for(state, claim.items, claim.first_code)
    except GtiError:
        base = base_state()
        return rebased(delta_for(base, claim.items, claim.first_code), state.vocabulary)


StoreMachine.TestCase.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)
TestStore = StoreMachine.TestCase
