"""The store: transactions, numbers, idempotency, leases and codes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_grounder import delta_for

from gti_core.bundle.delta import CatalogState, Delta
from gti_core.catalog import Item, ItemCatalog
from gti_core.data.dataset import ItemText
from gti_core.vocabulary import SidVocabulary
from service.onboarding.admin import catalogued
from service.onboarding.states import States
from service.store import Store
from service.store.errors import (
    IdempotencyConflictError,
    ItemConflictError,
    JobLostError,
    JobNotCancellableError,
    JobNotFoundError,
    ReserveExhaustedError,
    StaleVersionError,
    StoreError,
    VersionNotFoundError,
)
from service.store.records import Claim, JobRecord
from service.store.submission import Submission

VOCABULARY = SidVocabulary((3, 2, 14), (3, 2, 4), 100)


def base_state() -> CatalogState:
    items = [Item(f"i{n}", (n % 3, n % 2, n % 4), f"Title {n}", popularity=n) for n in range(12)]
    return CatalogState.of(ItemCatalog(items), VOCABULARY)


def opened(folder: Path, digest: str = "d" * 64) -> Store:
    return Store(str(folder / "gti.db"), "tiny", digest, VOCABULARY)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = opened(tmp_path)
    yield store
    store.close()


@pytest.fixture
def states(store: Store) -> States:
    return States(store, base_state())


def texts(*ids: str, title: str = "New") -> tuple[ItemText, ...]:
    return tuple(ItemText(name, f"{title} {name}") for name in ids)


def submit(
    store: Store, states: States, *ids: str, title: str = "New", **options: object
) -> tuple[JobRecord, bool]:
    submission = Submission(texts(*ids, title=title), **options)  # type: ignore[arg-type]
    current = store.versions.current()
    return store.jobs.submit(submission, current, catalogued(states.at(current), submission))


def claimed(store: Store, worker: str = "w", lease_s: float = 60) -> Claim:
    claim = store.jobs.claim(worker, lease_s)
    assert claim is not None
    return claim


def published(store: Store, states: States, *ids: str, title: str = "New") -> int:
    """From submission to a served version; its number."""
    job, _ = submit(store, states, *ids, title=title, replace=True)
    claim = claimed(store)
    assert claim.job_id == job.job_id
    current = store.versions.current()
    delta = delta_for(states.at(current), claim.items, claim.first_code)
    number = store.versions.commit(current, "onboard", delta, claim=claim)
    store.versions.mark_served(number)
    return number


def test_a_new_store_serves_the_base(store: Store) -> None:
    assert store.versions.current() == 1
    [record] = store.versions.page(10)
    assert (record.kind, record.parent, record.current, record.served) == ("base", None, True, True)
    assert store.codes_left() == 10


def test_what_was_committed_is_there_after_reopening(tmp_path: Path) -> None:
    store = opened(tmp_path)
    states = States(store, base_state())
    number = published(store, states, "a", "b")
    before = states.at(number)
    store.close()
    again = opened(tmp_path)
    assert again.versions.current() == number == 2
    after = States(again, base_state()).at(2)
    assert after.catalog.items == before.catalog.items
    assert after.vocabulary == before.vocabulary
    again.close()


def test_another_bundle_is_told_apart(store: Store, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"belongs to bundle 'tiny' \(dddd.*--store"):
        opened(tmp_path, "e" * 64)


@pytest.mark.parametrize("content", [b"no database at all, just text" * 50, b"\x00" * 8192])
def test_a_file_that_is_no_database_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "gti.db").write_bytes(content)
    with pytest.raises(StoreError, match=r"gti\.db"):
        opened(tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    store = opened(tmp_path)
    published(store, States(store, base_state()), "a")
    store.close()
    file = tmp_path / "gti.db"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(StoreError, match=r"gti\.db"):
        opened(tmp_path)


def test_a_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "gti.db") as connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()
    with pytest.raises(StoreError, match="another program"):
        opened(tmp_path)


@pytest.mark.parametrize("url", ["nonsense://x/y", "sqlite:///nowhere/at/all/gti.db"])
def test_a_url_that_leads_nowhere_is_a_store_error(url: str) -> None:
    with pytest.raises(StoreError):
        Store(url, "tiny", "d" * 64, VOCABULARY)


def test_passwords_stand_in_no_message() -> None:
    with pytest.raises(StoreError) as caught:
        Store("nonsense://me:secret@host/db", "tiny", "d" * 64, VOCABULARY)
    assert "secret" not in str(caught.value)


def test_a_damaged_delta_is_refused(store: Store, states: States, tmp_path: Path) -> None:
    number = published(store, states, "a")
    with sqlite3.connect(tmp_path / "gti.db") as connection:
        connection.execute("UPDATE versions SET document = replace(document, 'New', 'Old')")
    connection.close()
    with pytest.raises(StoreError, match="version 2 is damaged"):
        store.versions.delta(number)


def test_a_commit_on_an_old_version_is_stale(store: Store, states: States) -> None:
    published(store, states, "a")
    with pytest.raises(StaleVersionError):
        store.versions.commit(1, "retire", Delta(VOCABULARY, retired=("i0",)))
    assert [record.number for record in store.versions.page(10)] == [2, 1]


def test_numbers_are_never_reused(store: Store, states: States) -> None:
    two = published(store, states, "a")
    store.versions.activate(1)
    three = store.versions.commit(1, "retire", Delta(VOCABULARY, retired=("i0",)))
    store.versions.refuse(three, "no", served=1)
    assert store.versions.current() == 1
    four = store.versions.commit(1, "retire", Delta(VOCABULARY, retired=("i1",)))
    assert (two, three, four) == (2, 3, 4)
    assert store.versions.chain(4) == (1, 4)
    with pytest.raises(VersionNotFoundError):
        store.versions.activate(three)
    with pytest.raises(VersionNotFoundError):
        store.versions.activate(9)


def test_a_branch_gets_codes_of_its_own(store: Store, states: States) -> None:
    published(store, states, "a", "b")
    store.versions.activate(1)
    submit(store, states, "c")
    claim = claimed(store)
    assert (claim.first_code, claim.code_end) == (6, 7)


def test_two_jobs_at_work_have_different_codes(store: Store, states: States) -> None:
    submit(store, states, "a", "b")
    submit(store, states, "c")
    one, two = claimed(store, "w1"), claimed(store, "w2")
    assert (one.first_code, one.code_end, two.first_code, two.code_end) == (4, 6, 6, 7)


def test_a_rejected_job_frees_its_codes(store: Store, states: States) -> None:
    submit(store, states, "a", "b")
    claim = claimed(store)
    assert store.codes_left() == 8
    store.jobs.reject(claim, {"figures": {}})
    assert store.codes_left() == 10
    submit(store, states, "c")
    assert claimed(store).first_code == 4


def test_more_items_than_codes_are_refused_before_any_work(store: Store, states: States) -> None:
    submit(store, states, *(f"a{n}" for n in range(6)))
    with pytest.raises(ReserveExhaustedError, match="5 items need as many reserved codes, 4 are"):
        submit(store, states, *(f"b{n}" for n in range(5)))
    submit(store, states, *(f"b{n}" for n in range(4)))
    assert store.codes_left() == 0


def test_the_same_key_gives_the_same_job(store: Store, states: States) -> None:
    job, new = submit(store, states, "a", key="k")
    again, newer = submit(store, states, "a", key="k")
    assert (new, newer) == (True, False)
    assert again == job
    with pytest.raises(IdempotencyConflictError):
        submit(store, states, "b", key="k")
    with pytest.raises(IdempotencyConflictError):
        submit(store, states, "a", key="k", replace=True)


def test_the_same_items_again_are_no_new_work(store: Store, states: States) -> None:
    job, _ = submit(store, states, "a", "b")
    waiting, new = submit(store, states, "b", "a")
    assert (waiting.job_id, new) == (job.job_id, False)
    partly, new = submit(store, states, "a", "c")
    assert (partly.known, new) == (("a",), True)
    assert [item.item_id for item in partly.items] == ["c"]
    with pytest.raises(ItemConflictError, match="not from one job"):
        submit(store, states, "a", "c")


def test_items_of_the_catalogue_are_live_at_once(store: Store, states: States) -> None:
    number = published(store, states, "a")
    job, new = submit(store, states, "a")
    assert (job.state, job.version, job.known, new) == ("live", number, ("a",), True)
    base, _ = submit(store, states, "a", key="x", replace=True)
    assert base.state == "live"
    submission = Submission((ItemText("i3", " Title\n3 "),))
    known = catalogued(states.at(number), submission)
    assert store.jobs.submit(submission, number, known)[0].state == "live"


def test_an_item_that_a_rollback_took_away_is_new_again(store: Store, states: States) -> None:
    published(store, states, "a")
    store.versions.activate(1)
    job, _ = submit(store, states, "a")
    assert job.state == "queued"


def test_other_content_needs_replace(store: Store, states: States) -> None:
    with pytest.raises(ItemConflictError, match="'i1' stands in the catalogue"):
        submit(store, states, "i1")
    job, _ = submit(store, states, "i1", replace=True)
    assert job.state == "queued"
    with pytest.raises(ItemConflictError, match="unfinished job"):
        submit(store, states, "i1", title="Newer", replace=True)


def test_a_submission_against_an_old_version_is_stale(store: Store, states: States) -> None:
    published(store, states, "a")
    with pytest.raises(StaleVersionError):
        store.jobs.submit(Submission(texts("b")), 1, {})


def test_jobs_come_oldest_first_and_once(store: Store, states: States) -> None:
    jobs = [submit(store, states, name)[0].job_id for name in "abc"]
    assert [claimed(store, f"w{n}").job_id for n in range(3)] == jobs
    assert store.jobs.claim("w", 60) is None


def test_an_expired_lease_gives_the_job_to_another(store: Store, states: States) -> None:
    job, _ = submit(store, states, "a")
    first = claimed(store, "w1", lease_s=-1)
    second = claimed(store, "w2")
    assert (second.job_id, second.attempt) == (job.job_id, 2)
    for late in (
        lambda: store.jobs.progress(first, "grounding", 0, 1),
        lambda: store.jobs.renew(first, 60),
        lambda: store.jobs.reject(first, {}),
        lambda: store.versions.commit(1, "onboard", Delta(VOCABULARY), claim=first),
    ):
        with pytest.raises(JobLostError):
            late()
    assert store.versions.current() == 1


def test_a_job_that_kills_three_workers_has_failed(store: Store, states: States) -> None:
    job, _ = submit(store, states, "a")
    for _ in range(3):
        claimed(store, lease_s=-1)
    store.jobs.expire()
    ended = store.jobs.get(job.job_id)
    assert (ended.state, ended.attempts) == ("failed", 3)
    assert ended.error is not None
    assert "3 times" in ended.error
    assert store.codes_left() == 10


def test_a_worker_that_ends_in_good_order_costs_no_attempt(store: Store, states: States) -> None:
    submit(store, states, "a")
    for _ in range(5):
        assert claimed(store).attempt == 1
        store.jobs.release("w")


def test_a_proposal_outlives_its_worker(store: Store, states: States) -> None:
    submit(store, states, "a", "b")
    claim = claimed(store, lease_s=-1)
    delta = delta_for(states.at(1), claim.items, claim.first_code)
    store.jobs.propose(claim, 1, delta.document(), delta.block(), 6, {"figures": {}})
    again = claimed(store, "w2")
    assert again.proposal == (1, delta.document(), delta.block())
    assert (again.first_code, again.code_end) == (4, 6)


def test_cancelling(store: Store, states: States) -> None:
    job, _ = submit(store, states, "a")
    claim = claimed(store)
    assert store.jobs.cancel(job.job_id).state == "cancelled"
    assert store.jobs.cancel(job.job_id).state == "cancelled"
    with pytest.raises(JobLostError):
        store.jobs.progress(claim, "grounding", 0, 1)
    with pytest.raises(JobNotFoundError):
        store.jobs.cancel("nothing")
    published(store, states, "b")
    [live] = store.jobs.page(5, state="live")
    with pytest.raises(JobNotCancellableError, match="is live"):
        store.jobs.cancel(live.job_id)


def test_a_refused_version_fails_its_job_and_its_parent_is_current(
    store: Store, states: States
) -> None:
    job, _ = submit(store, states, "a")
    claim = claimed(store)
    delta = delta_for(states.at(1), claim.items, claim.first_code)
    number = store.versions.commit(1, "onboard", delta, claim=claim)
    assert store.jobs.get(job.job_id).state == "publishing"
    store.versions.refuse(number, "rows don't fit", served=1)
    ended = store.jobs.get(job.job_id)
    assert (ended.state, ended.error) == ("failed", "rows don't fit")
    assert store.versions.current() == 1
    assert store.versions.get(number).refused == "rows don't fit"
    assert store.codes_left() == 9  # its code is never given out again


def test_a_job_rolled_back_before_it_was_served_has_failed(store: Store, states: States) -> None:
    job, _ = submit(store, states, "a")
    claim = claimed(store)
    delta = delta_for(states.at(1), claim.items, claim.first_code)
    number = store.versions.commit(1, "onboard", delta, claim=claim)
    store.versions.mark_served(1)
    assert store.jobs.get(job.job_id).state == "publishing"
    store.versions.activate(1)
    store.versions.mark_served(1)
    ended = store.jobs.get(job.job_id)
    assert (ended.state, number in store.versions.chain(1)) == ("failed", False)


def test_pages(store: Store, states: States) -> None:
    ids = [submit(store, states, name)[0].job_id for name in "abcde"]
    first = store.jobs.page(2)
    assert [job.job_id for job in first] == ids[:2:-1]
    rest = store.jobs.page(10, before=first[-1].seq)
    assert [job.job_id for job in rest] == ids[2::-1]
    assert store.jobs.page(10, state="live") == []
    assert [record.number for record in store.versions.page(5, before=1)] == []
