"""FakeEngine: proper, fixed scores and the Engine contract."""

from __future__ import annotations

import asyncio
import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest

from gti_core.catalog import Item, ItemCatalog
from gti_core.decoding import ConstraintIndex, exhaustive_search
from gti_core.vocabulary import SidVocabulary
from service.engine.base import (
    DecodeRequest,
    EngineDeadError,
    EngineError,
    PromptTooLongError,
    ServingModel,
)
from service.engine.fake import FakeEngine, fake_logprobs

PROMPT = [3, 1, 4, 16, 21, 25]


def run(engine: FakeEngine, request: DecodeRequest) -> list[tuple[tuple[int, ...], float]]:
    async def work() -> list[tuple[tuple[int, ...], float]]:
        await engine.start()
        found = await engine.decode(request)
        await engine.stop()
        return [(row.sid, row.logprob) for row in found]

    return asyncio.run(work())


def test_logprobs_are_a_distribution_over_active_rows(tiny_vocabulary: SidVocabulary) -> None:
    logprobs = fake_logprobs(PROMPT, [(0,), (1,), (3,)], tiny_vocabulary)
    assert logprobs.shape == (3, 15)
    assert logprobs.dtype == np.float32
    assert np.isneginf(logprobs[:, ~tiny_vocabulary.active_mask]).all()
    assert np.exp(logprobs).sum(axis=1) == pytest.approx([1, 1, 1], abs=1e-5)


def test_logprobs_depend_on_prompt_and_prefix(tiny_vocabulary: SidVocabulary) -> None:
    base = fake_logprobs(PROMPT, [(0, 1)], tiny_vocabulary)
    assert np.array_equal(base, fake_logprobs(list(PROMPT), [(0, 1)], tiny_vocabulary))
    assert not np.array_equal(base, fake_logprobs(PROMPT[:-1], [(0, 1)], tiny_vocabulary))
    assert not np.array_equal(base, fake_logprobs(PROMPT, [(1, 0)], tiny_vocabulary))
    both = fake_logprobs(PROMPT, [(1, 0), (0, 1)], tiny_vocabulary)
    assert np.array_equal(base[0], both[1])


def test_logprobs_are_the_same_everywhere(tiny_vocabulary: SidVocabulary) -> None:
    """Against the same hash in plain Python: recorded answers must not drift."""
    seed = int.from_bytes(
        hashlib.blake2b(
            b"".join(token.to_bytes(8, "little") for token in [1, 2, 3])
            + b"".join(code.to_bytes(4, "little") for code in [3, 2]),
            digest_size=8,
        ).digest(),
        "little",
    )
    logits = [
        (splitmix64(seed + row) >> 40) / 2**21 - 4
        for row in range(15)
        if tiny_vocabulary.active_mask[row]
    ]
    total = math.log(sum(math.exp(x) for x in logits))
    found = fake_logprobs([1, 2, 3], [(3, 2)], tiny_vocabulary)[0, tiny_vocabulary.active_mask]
    assert found == pytest.approx([x - total for x in logits], abs=1e-5)


def splitmix64(x: int) -> int:
    mask = 2**64 - 1
    x = x * 0x9E3779B97F4A7C15 & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


@pytest.mark.parametrize("excluded", [frozenset(), frozenset({0, 4, 11})])
def test_decode_equals_exhaustive_search(
    tiny_model: ServingModel, excluded: frozenset[int]
) -> None:
    request = DecodeRequest(tiny_model, "r", PROMPT, 12, 12, excluded)
    items = tiny_model.catalog.items
    expected = exhaustive_search(
        lambda prefixes: fake_logprobs(PROMPT, prefixes, tiny_model.vocabulary),
        [item.sid for item in items],
        tiny_model.vocabulary,
        12,
        frozenset(items[row].sid for row in excluded),
    )
    found = run(FakeEngine(tiny_model), request)
    assert [sid for sid, _ in found] == [sid for sid, _ in expected]
    assert [s for _, s in found] == pytest.approx([s for _, s in expected], abs=1e-5)
    assert len(found) == 12 - len(excluded)


def test_reserved_codes_change_no_score(tiny_model: ServingModel) -> None:
    """Activating a code may change scores; rows that stay reserved must not."""
    vocabulary = tiny_model.vocabulary
    wider = SidVocabulary((5, 4, 60), vocabulary.active, vocabulary.first_token_id)
    wide = replace(tiny_model, vocabulary=wider)
    found = run(FakeEngine(wide), DecodeRequest(wide, "r", PROMPT, k=12, beam_width=12))
    request = DecodeRequest(tiny_model, "r", PROMPT, k=12, beam_width=12)
    expected = run(FakeEngine(tiny_model), request)
    assert [sid for sid, _ in found] == [sid for sid, _ in expected]
    assert [s for _, s in found] == pytest.approx([s for _, s in expected], abs=1e-5)


def test_prompt_too_long(tiny_model: ServingModel) -> None:
    fits = tiny_model.max_tokens - 3
    run(FakeEngine(tiny_model), DecodeRequest(tiny_model, "r", [1] * fits, 1, 1))
    with pytest.raises(PromptTooLongError, match=str(fits + 1)):
        run(FakeEngine(tiny_model), DecodeRequest(tiny_model, "r", [1] * (fits + 1), 1, 1))


def test_life(tiny_model: ServingModel) -> None:
    async def work() -> None:
        engine = FakeEngine(tiny_model)
        with pytest.raises(EngineDeadError):
            await engine.check()
        await engine.start()
        await engine.check()
        engine.kill()
        with pytest.raises(EngineDeadError):
            await engine.decode(DecodeRequest(tiny_model, "r", PROMPT, 1, 1))
        await engine.stop()
        await engine.stop()
        with pytest.raises(EngineError, match="no weights"):
            await FakeEngine(tiny_model, start_error="no weights").start()

    asyncio.run(work())


def next_version(model: ServingModel) -> ServingModel:
    """One item more, at a code that was reserved, and one out of service."""
    catalog = ItemCatalog([*model.catalog.items, Item("new", (0, 3, 0))])
    index = ConstraintIndex(catalog.sids).with_availability([0], False)
    vocabulary = model.vocabulary.activate(1)
    return replace(model, catalog=catalog, index=index, vocabulary=vocabulary, version=2)


def test_requests_under_way_keep_their_version(tiny_model: ServingModel) -> None:
    second = next_version(tiny_model)
    old_request = DecodeRequest(tiny_model, "old", PROMPT, k=12, beam_width=12)
    alone = run(FakeEngine(tiny_model), old_request)

    async def work() -> None:
        engine = FakeEngine(tiny_model)
        await engine.start()
        old = asyncio.create_task(engine.decode(old_request))
        await asyncio.sleep(0)
        assert engine.running == 1
        await engine.publish(second)
        assert engine.model is second
        assert engine.running == 1
        new = await engine.decode(DecodeRequest(second, "new", PROMPT, k=13, beam_width=13))
        assert {row.row for row in new} == set(range(1, 13))
        assert [(row.sid, row.logprob) for row in await old] == alone
        for current in (second, tiny_model):
            await engine.publish(current)
            again = await engine.decode(old_request)
            assert [(row.sid, row.logprob) for row in again] == alone

    asyncio.run(work())


def test_a_publish_that_fails_leaves_the_old_version(tiny_model: ServingModel) -> None:
    second = next_version(tiny_model)

    async def work() -> None:
        engine = FakeEngine(tiny_model, publish_error="no room")
        with pytest.raises(EngineDeadError):
            await engine.publish(second)
        await engine.start()
        with pytest.raises(EngineError, match="no room"):
            await engine.publish(second)
        engine.publish_error = None
        with pytest.raises(EngineError, match="longest prompt"):
            await engine.publish(replace(second, max_tokens=99))
        assert engine.model is tiny_model

    asyncio.run(work())
