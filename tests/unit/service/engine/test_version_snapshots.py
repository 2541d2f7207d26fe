"""Snapshots made from a parent's, against the same version built whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gti_core.catalog import Item, ItemCatalog
from gti_core.decoding import ConstraintIndex
from gti_core.errors import GtiError
from gti_core.vocabulary import SidVocabulary
from service.engine.base import ServingModel
from service.engine.vllm_beams.snapshot import MOST_SELECTIONS, Snapshot
from service.engine.vllm_beams.wire import float32_bytes, rows_of, write_snapshot

SIZES = (6, 5, 4)
VOCABULARY = SidVocabulary(SIZES, (5, 4, 3), 100)
CPU = torch.device("cpu")
EVERY = np.stack(np.unravel_index(np.arange(60), (5, 4, 3)), axis=1).astype(np.int32)


def assert_same(got: Snapshot, want: Snapshot) -> None:
    assert got.counts == want.counts
    a, b = got.device_index, want.device_index
    for one, other in zip(
        (a.rows, *a.codes, *a.starts, a.table[0], got.inactive),
        (b.rows, *b.codes, *b.starts, b.table[0], want.inactive),
        strict=True,
    ):
        assert torch.equal(one, other)
    assert a.table.shape == b.table.shape == (MOST_SELECTIONS + 1, len(got.index) + 1)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.data())
def test_a_chain_of_changes_equals_a_rebuild(seed, data):
    rng = np.random.default_rng(seed)
    sids = EVERY[rng.permutation(60)]
    count = data.draw(st.integers(3, 40))
    available = rng.random(count) < 0.8
    snapshot = Snapshot(1, VOCABULARY, ConstraintIndex(sids[:count], available), CPU)
    for version in range(2, data.draw(st.integers(2, 5))):
        more = data.draw(st.integers(0, 5))
        bits = rng.random(more) < 0.5
        retired = rng.choice(count + more, data.draw(st.integers(0, 3)), replace=False).tolist()
        restored = rng.choice(count + more, data.draw(st.integers(0, 3)), replace=False).tolist()
        vocabulary = VOCABULARY.activate(version % 3)
        parent = snapshot
        before = [
            tensor.clone() for tensor in (parent.device_index.rows, parent.device_index.table)
        ]
        snapshot = parent.followed(
            version, vocabulary, sids[count : count + more], bits, retired, restored
        )
        assert torch.equal(parent.device_index.rows, before[0])
        assert torch.equal(parent.device_index.table, before[1])
        count += more
        available = np.concatenate([available, bits])
        available[retired] = False
        available[restored] = True
        index = ConstraintIndex(sids[:count], available)
        assert_same(snapshot, Snapshot(version, vocabulary, index, CPU))


def test_a_change_that_does_not_fit_is_refused() -> None:
    snapshot = Snapshot(1, VOCABULARY, ConstraintIndex(EVERY[:4]), CPU)
    nothing, bits = EVERY[:0], np.ones(0, np.bool_)
    with pytest.raises(GtiError, match="share a SID"):
        snapshot.followed(2, VOCABULARY, EVERY[3:4], np.ones(1, np.bool_), (), ())
    with pytest.raises(GtiError, match="row 4"):
        snapshot.followed(2, VOCABULARY, nothing, bits, [4], ())


def test_a_version_travels_as_a_file(tmp_path: Path) -> None:
    catalog = ItemCatalog([Item(f"{n}", tuple(map(int, sid))) for n, sid in enumerate(EVERY[::3])])
    vocabulary = VOCABULARY.activate(0)
    index = ConstraintIndex(catalog.sids).with_availability([3, 7], False)
    model = ServingModel(tmp_path, vocabulary, catalog, index, 20, version=5)
    write_snapshot(tmp_path / "s.safetensors", model)
    loaded = Snapshot.load(tmp_path / "s.safetensors", CPU)
    assert loaded.version == 5
    assert loaded.vocabulary == vocabulary
    assert_same(loaded, Snapshot(5, vocabulary, index, CPU))


@given(st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_rows_travel_as_bytes(count, width, tied):
    blocks = np.random.default_rng(count).standard_normal((2, count, width)).astype(np.float32)
    rows_out = None if tied else float32_bytes(blocks[1])
    got = rows_of(list(range(count)), float32_bytes(blocks[0]), rows_out)
    assert got.numbers.tolist() == list(range(count))
    assert np.array_equal(got.rows_in, blocks[0])
    assert (got.rows_out is None) if tied else np.array_equal(got.rows_out, blocks[1])


def test_bytes_that_are_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="reshape"):
        rows_of([0, 1], bytes(4 * 3), None)
