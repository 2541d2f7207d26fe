"""Faults that users of such systems reported in public, over the fake engine."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from admin_parts import code, ids, item, onboard

from gti_core.decoding import BeamSearch, ConstraintIndex
from gti_core.vocabulary import SidVocabulary


@pytest.fixture
def tiny_vocabulary() -> SidVocabulary:
    """Room for forty items at the last level."""
    return SidVocabulary(sizes=(5, 4, 40), active=(4, 3, 4), first_token_id=16)


@pytest.mark.parametrize("width", [10, 11, 20, 21, 50, 256, 257, 100_000])
def test_a_wide_beam_works_or_is_refused(client: Any, width: int) -> None:
    """2: a width above some hidden cap."""
    answer = client.recommend(history=["a1"], k=5, beam_width=width)
    if width <= client.get("/v1/info").json()["limits"]["max_beam_width"]:
        assert len(ids(answer)) == 5
        assert answer.json()["beam_width"] == width
    else:
        assert code(answer) == (422, "validation_failed")


def test_the_cost_of_a_wide_beam_grows_no_faster_than_its_width() -> None:
    """3: host code that is worse than linear in the width, 8 to 256."""
    rng = np.random.default_rng(0)
    vocabulary = SidVocabulary((64, 64, 64), (64, 64, 64), 16)
    sids = np.unique(rng.integers(0, 64, (50_000, 3)), axis=0)
    index = ConstraintIndex(sids.astype(np.int32))
    logprobs = rng.standard_normal((256, vocabulary.rows)).astype(np.float32) - 5

    def seconds(width: int) -> float:
        began = time.perf_counter()
        search = BeamSearch(index, vocabulary, index.admissible(), width)
        while not search.done:
            search.advance(logprobs[: len(search.frontier)])
        return time.perf_counter() - began

    fastest = {width: min(seconds(width) for _ in range(5)) for width in (8, 256)}
    assert fastest[256] < 1.5 * (256 / 8) * fastest[8]


def test_exactly_k_come_back_or_the_shortfall_is_stated(client: Any) -> None:
    """4: fewer than k results, with lists or without."""
    for k in range(1, 14):
        for excluded in ([], ["a2"], ["a2", "c1", "50", "d1"]):
            body = client.recommend(history=["a1"], k=k, exclude_items=excluded).json()
            expected = min(k, 11 - len(excluded))
            assert (len(body["items"]), body["shortfall"]) == (expected, k - expected)


def test_five_near_identical_items_are_all_reachable_in_a_stable_order(
    admin: Any, working: None
) -> None:
    """5: several items under one semantic ID."""
    made = [f"n{n}" for n in range(5)]
    assert onboard(admin, *(item(name, "The same film") for name in made)).json()["state"] == "live"
    sids = {tuple(admin.get(f"/v1/items/{name}").json()["semantic_id"]) for name in made}
    assert len(sids) == 5
    first = ids(admin.recommend(history=["a1"], k=20))
    assert set(made) <= set(first)
    assert all(ids(admin.recommend(history=["a1"], k=20)) == first for _ in range(3))


def test_odd_ids_in_history_and_lists_are_reported_and_harmless(admin: Any) -> None:
    """6: unknown, retired, negative, huge, repeated ids, and the text of special tokens."""
    admin.request("DELETE", "/v1/admin/items/50")
    odd = ["-1", "9" * 256, "<|sid_0_0|>", "<|im_start|>", "</s>", "ghost"]
    history = ["a1", "a1", "50", *odd, *odd]
    answer = admin.recommend(history=history, k=12, exclude_items=odd)
    assert answer.json()["unknown_items"] == odd
    assert answer.json()["unknown_count"] == 2 * len(odd)
    plain = admin.recommend(history=["a1", "a1", "50"], k=12)
    assert ids(answer) == ids(plain)
    assert ids(admin.recommend(history=["a1"], include_items=["50", "b1", "b1"])) == ["b1"]


@pytest.mark.parametrize("title", ["", " ", "\u200b", "\x00\x07", "\u0301", "x" * 100_000])
def test_titles_that_say_nothing_or_too_much_leave_nothing_behind(admin: Any, title: str) -> None:
    """14: a title that is blank, of control characters, or of 100 kB."""
    assert code(onboard(admin, item("n", title), item("m"))) == (422, "validation_failed")
    assert admin.get("/v1/admin/jobs").json()["jobs"] == []
    assert admin.get("/v1/items/m").status_code == 404


@pytest.mark.parametrize(
    "title", ["x", "\U0001f9f5\U0001f9f5", "<|sid_0_0|><|sid_1_0|>", "<|im_start|>system"]
)
def test_titles_of_our_own_tokens_are_data(admin: Any, working: None, title: str) -> None:
    """14: a title of one letter, of emoji, of our own tokens or of chat markers."""
    before = ids(admin.recommend(history=["a1"], k=11))
    assert onboard(admin, item("n", title)).json()["state"] == "live"
    assert admin.get("/v1/items/n").json()["title"] == title
    after = ids(admin.recommend(history=["a1"], k=12))
    assert set(after) == {*before, "n"}


def test_what_was_taken_away_does_not_come_back(make_admin: Any) -> None:
    """15: an item retired comes back in a batch, in the fallback or on another replica."""
    here, there = make_admin(), make_admin()
    version = here.request("DELETE", "/v1/admin/items/50").json()["version"]
    requests = [
        {"history": history, "k": 12, "min_version": version}
        for history in (["a1"], [], ["ghost"], ["50"])
    ]
    requests.append({"history": ["a1"], "include_items": ["50"], "min_version": version})
    for replica in (here, there):
        batch = replica.post("/v1/recommendations:batch", json={"requests": requests}).json()
        for result in batch["results"]:
            assert result["status"] == 200
            assert "50" not in [found["item_id"] for found in result["answer"]["items"]]
