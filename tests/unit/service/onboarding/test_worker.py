"""The worker's loop, in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from fake_grounder import FakeGrounder, delta_for

from gti_core.bundle.delta import CatalogState, Delta
from gti_core.data.dataset import ItemText
from gti_core.onboarding.proposal import Proposal, Report
from service.context import ServingContext
from service.onboarding.admin import catalogued
from service.onboarding.states import States
from service.onboarding.worker import TAKEN_OUT, Worker
from service.store import Store
from service.store.errors import StoreError
from service.store.records import JobRecord
from service.store.submission import Submission


class Scripted(FakeGrounder):
    """Does something in the middle of a proposal."""

    def __init__(self, between: Callable[[], None]) -> None:
        super().__init__()
        self.between = between

    def propose(
        self, state: CatalogState, items: Sequence[ItemText], first_code: int, report: Report
    ) -> Proposal:
        proposal = super().propose(state, items, first_code, report)
        self.between()
        report("validating", 1, 1)
        return proposal


class Shop:
    """A store and workers on it."""

    def __init__(self, folder: Path, context: ServingContext) -> None:
        self.store = Store(str(folder / "gti.db"), context.name, context.digest, context.vocabulary)
        self.vocabulary = context.vocabulary
        self.states = States(
            self.store, CatalogState(context.catalog, context.vocabulary, context.index)
        )

    def worker(self, grounder: FakeGrounder | None = None, **options: float) -> Worker:
        return Worker(self.store, self.states, grounder or FakeGrounder(), "w", **options)

    def submit(self, *ids: str, title: str = "New") -> str:
        submission = Submission(tuple(ItemText(name, title) for name in ids))
        return self.store.jobs.submit(submission, self.store.versions.current(), {})[0].job_id

    def job(self, job_id: str) -> JobRecord:
        return self.store.jobs.get(job_id)

    def retire(self, name: str) -> None:
        current = self.store.versions.current()
        vocabulary = self.states.at(current).vocabulary
        self.store.versions.commit(current, "retire", Delta(vocabulary, retired=(name,)))


@pytest.fixture
def shop(tmp_path: Path, tiny_context: ServingContext) -> Iterator[Shop]:
    shop = Shop(tmp_path, tiny_context)
    yield shop
    shop.store.close()


def test_a_job_becomes_a_version(shop: Shop) -> None:
    job_id = shop.submit("n", "m")
    grounder = FakeGrounder()
    assert shop.worker(grounder).step() is True
    assert grounder.calls == [(("n", "m"), 4)]
    job = shop.job(job_id)
    assert (job.state, job.version) == ("publishing", 2)
    assert job.result is not None
    assert [verdict["passed"] for verdict in job.result["verdicts"]] == [True, True]
    assert shop.states.at(2).catalog.get("m") is not None
    assert shop.worker().step() is False


def test_a_proposal_moves_to_the_version_that_is_current(shop: Shop) -> None:
    job_id = shop.submit("n")
    shop.worker(Scripted(lambda: shop.retire("a1"))).step()
    assert shop.job(job_id).version == 3
    assert shop.store.versions.chain(3) == (1, 2, 3)
    state = shop.states.at(3)
    assert state.catalog.get("n") is not None
    assert not state.index.available[state.catalog.row("a1")]


def replacing(shop: Shop, *ids: str) -> str:
    submission = Submission(tuple(ItemText(name, "Anew") for name in ids), replace=True)
    current = shop.store.versions.current()
    known = catalogued(shop.states.at(current), submission)
    return shop.store.jobs.submit(submission, current, known)[0].job_id


@pytest.mark.parametrize("when", ["queued", "working"])
def test_what_is_retired_while_its_replacement_is_made_stays_retired(shop: Shop, when: str) -> None:
    job_id = replacing(shop, "a1", "b1")
    if when == "queued":
        shop.retire("a1")
        shop.worker().step()
    else:
        shop.worker(Scripted(lambda: shop.retire("a1"))).step()
    job = shop.job(job_id)
    assert (job.state, job.version) == ("publishing", 3)
    assert job.result is not None
    assert [verdict["passed"] for verdict in job.result["verdicts"]] == [False, True]
    assert job.result["verdicts"][0]["reasons"] == [TAKEN_OUT]
    state = shop.states.at(3)
    row = state.catalog.row("a1")
    assert not state.index.in_service(row)
    assert state.catalog.items[row].title == "Alpha"
    assert state.index.in_service(state.catalog.row("b1"))
    assert state.catalog.get("b1").title == "Anew"  # type: ignore[union-attr]
    assert state.rows is not None
    assert len(state.rows.numbers) == 1


def test_a_job_of_which_nothing_is_left_is_rejected(shop: Shop) -> None:
    job_id = replacing(shop, "a1")
    shop.worker(Scripted(lambda: shop.retire("a1"))).step()
    job = shop.job(job_id)
    assert (job.state, job.version) == ("rejected", None)
    assert shop.store.versions.current() == 2
    assert shop.store.codes_left() == 2


def test_an_item_retired_before_comes_back_with_replace(shop: Shop) -> None:
    shop.retire("a1")
    job_id = replacing(shop, "a1")
    shop.worker().step()
    assert shop.job(job_id).version == 3
    state = shop.states.at(3)
    assert state.index.in_service(state.catalog.row("a1"))


def test_codes_below_another_jobs_are_taken_out_of_the_skipped(shop: Shop) -> None:
    """Two workers at a time; the one with the higher code is published first."""
    first, second = shop.submit("n"), shop.submit("m")
    shop.worker(Scripted(lambda: assert_true(shop.worker().step()))).step()
    assert (shop.job(second).version, shop.job(first).version) == (2, 3)
    assert shop.states.at(2).vocabulary.skipped == {(2, 4)}
    state = shop.states.at(3)
    assert (state.vocabulary.active, state.vocabulary.skipped) == ((4, 3, 6), frozenset())
    assert state.rows is not None
    assert state.rows.numbers.tolist() == [13, 14]


def assert_true(value: bool) -> None:
    assert value


def test_a_proposal_on_a_branch_that_was_left_moves_too(shop: Shop) -> None:
    shop.submit("n")
    shop.worker().step()
    job_id = shop.submit("m")
    shop.worker(Scripted(lambda: shop.store.versions.activate(1))).step()
    assert shop.store.versions.chain(3) == (1, 3)
    state = shop.states.at(3)
    assert shop.job(job_id).version == 3
    assert state.catalog.get("n") is None
    assert state.vocabulary.skipped == {(2, 4)}


class SharedSid(FakeGrounder):
    """Gives every item the same SID, with codes that are active already."""

    def propose(
        self, state: CatalogState, items: Sequence[ItemText], first_code: int, report: Report
    ) -> Proposal:
        proposal = super().propose(state, items, first_code, report)
        sid = (0, 1, 3) if state.catalog.at_sid((0, 1, 3)) is None else (0, 1, 2)
        added = tuple(
            type(item)(item.item_id, sid, item.title) for item in delta_for(
                state, items, first_code
            ).added
        )  # fmt: skip
        return Proposal(Delta(state.vocabulary, added), proposal.verdicts)


def test_a_proposal_that_no_longer_fits_is_made_again(shop: Shop) -> None:
    first, second = shop.submit("n"), shop.submit("m")

    class Slow(SharedSid):
        def propose(self, *arguments: object) -> Proposal:  # type: ignore[override]
            proposal = super().propose(*arguments)  # type: ignore[arg-type]
            shop.worker(SharedSid()).step()
            return proposal

    shop.worker(Slow()).step()
    assert (shop.job(second).state, shop.job(first).state) == ("publishing", "queued")
    shop.worker(SharedSid()).step()
    again = shop.job(first)
    assert (again.state, again.attempts) == ("publishing", 1)
    assert shop.states.at(3).catalog.items[-1].sid == (0, 1, 2)


def test_a_cancelled_job_is_given_up(shop: Shop) -> None:
    job_id = shop.submit("n")
    shop.worker(Scripted(lambda: assert_true(bool(shop.store.jobs.cancel(job_id))))).step()
    assert shop.job(job_id).state == "cancelled"
    assert shop.store.versions.current() == 1


def test_codes_that_were_not_kept_are_a_failure(shop: Shop) -> None:
    class Greedy(FakeGrounder):
        def propose(self, *arguments: object) -> Proposal:  # type: ignore[override]
            state, items, first_code, report = arguments
            return super().propose(state, items, first_code + 1, report)  # type: ignore[arg-type, operator]

    job_id = shop.submit("n")
    for _ in range(3):
        shop.worker(Greedy()).step()
    job = shop.job(job_id)
    assert job.state == "failed"
    assert job.error is not None
    assert "was not kept for this job" in job.error


def test_a_proposal_left_by_a_dead_worker_is_not_made_again(shop: Shop) -> None:
    job_id = shop.submit("n")
    claim = shop.store.jobs.claim("dead", -1)
    assert claim is not None
    delta = delta_for(shop.states.at(1), claim.items, claim.first_code)
    shop.store.jobs.propose(claim, 1, delta.document(), delta.block(), 5, {})
    grounder = FakeGrounder()
    assert shop.worker(grounder).step()
    assert grounder.calls == []
    assert shop.job(job_id).state == "publishing"


def test_a_long_step_keeps_its_lease(shop: Shop) -> None:
    job_id = shop.submit("n")
    renewed = threading.Event()
    renew = shop.store.jobs.renew

    def spy(*arguments: object) -> None:
        renew(*arguments)  # type: ignore[arg-type]
        renewed.set()

    shop.store.jobs.renew = spy  # type: ignore[method-assign, assignment]
    shop.worker(Scripted(lambda: assert_true(renewed.wait(5))), lease_s=0.3).step()
    assert shop.job(job_id).state == "publishing"


def test_ending_in_the_middle_gives_the_job_back(shop: Shop) -> None:
    job_id = shop.submit("n")

    def end() -> None:
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        shop.worker(Scripted(end)).step()
    job = shop.job(job_id)
    assert (job.state, job.attempts) == ("queued", 0)


def test_the_loop_outlives_a_store_that_is_away(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.onboarding.worker.STORE_PAUSE_S", 0.01)
    stop, calls = threading.Event(), []

    class Away(Worker):
        def step(self) -> bool:
            calls.append(1)
            if len(calls) == 1:
                raise StoreError("away")
            stop.set()
            return False

    Away(shop.store, shop.states, FakeGrounder(), "w").run(stop)
    assert len(calls) == 2
