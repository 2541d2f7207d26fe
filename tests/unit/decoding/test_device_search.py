"""The search on tensors against the plain beam search, and what it promises of its results."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from device_helpers import batch, small
from hypothesis import given, settings
from hypothesis import strategies as st

from gti_core.decoding import BeamSearch, ConstraintIndex, exhaustive_search
from gti_core.decoding import device as device_module
from gti_core.decoding.device import (
    DeviceIndex,
    advance,
    batch_filters,
    results,
    search,
    start,
)
from gti_core.vocabulary import SidVocabulary


@dataclass(frozen=True)
class Scores:
    """Log-probabilities that depend on the prefix alone: negative multiples of 1/16.

    Sums of them are exact in float32, so rankings can be compared to the last tie; with few
    ``steps`` there are many.
    """

    sizes: tuple[int, ...]
    seed: int
    steps: int

    def table(self, level: int, prefixes: np.ndarray) -> np.ndarray:
        """Prefixes [..., level] -> [..., sizes[level]]."""
        state = np.full(prefixes.shape[:-1], self.seed % 1009 + 1, dtype=np.int64)
        for column in range(level):
            state = (state * 31 + prefixes[..., column] + 7) * 48_271 % 2_147_483_647
        mixed = (state[..., None] + np.arange(self.sizes[level]) * 7919) * 16_807 % 2_147_483_647
        return -(mixed // 5 % self.steps) / 16

    def device(self, level: int, prefixes: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.table(level, prefixes.numpy())).float()

    def oracle(self, prefixes) -> np.ndarray:
        level = len(prefixes[0])
        rows = np.full((len(prefixes), sum(self.sizes)), np.nan)
        offset = sum(self.sizes[:level])
        shaped = np.array(prefixes, dtype=np.int64).reshape(len(prefixes), level)
        rows[:, offset : offset + self.sizes[level]] = self.table(level, shaped)
        return rows


@st.composite
def catalogues(draw):
    """Distinct SIDs [N, L] and the levels' sizes."""
    levels = draw(st.sampled_from([1, 2, 3, 4, 8]))
    codes = draw(st.sampled_from([2, 4, 700]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sids = rng.integers(0, codes, size=(draw(st.integers(1, 60)), levels), dtype=np.int32)
    if codes == 700 and levels > 1:
        sids[:, : levels // 2] %= 3
    sids = np.unique(sids, axis=0)
    return sids[rng.permutation(len(sids))], (codes + draw(st.integers(0, 2)),) * levels


def draw_filter(data, index, left):
    """A filter that leaves ``left`` items or all there are: by exclusion, inclusion or both."""
    rows = data.draw(st.permutations(range(len(index))))
    kind = data.draw(st.sampled_from(["excluded", "included", "both", "selection"]))
    admitted = rows[:left]
    if kind == "excluded":
        return index.filter(rows[left:]), admitted
    if kind == "included":
        return index.filter(included_rows=admitted), admitted
    if kind == "both":
        return index.filter(rows[left:], rows), admitted
    mask = np.zeros(len(index), dtype=np.bool_)
    mask[admitted] = True
    return index.filter(rows[left : left + 2], base=index.selection(mask)), admitted


@given(catalogues(), st.integers(0, 2**31), st.data())
@settings(deadline=None, max_examples=150)
def test_every_level_equals_the_plain_beam_search_to_the_last_tie(catalogue, seed, data):
    sids, sizes = catalogue
    index = ConstraintIndex(sids)
    scores = Scores(sizes, seed, data.draw(st.sampled_from([1, 3, 1000])))
    widths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    filters = [
        draw_filter(data, index, data.draw(st.sampled_from([0, 1, width - 1, width, len(sids)])))[0]
        for width in widths
    ]
    fanout = [most + data.draw(st.integers(0, 2)) for most in index.max_children]
    device, batched = batch(index, filters, fanout=fanout)
    most = data.draw(st.sampled_from([1, 7, 40, device_module.MAX_ELEMENTS]))
    vocabulary = SidVocabulary(sizes, sizes, 0)
    oracles = [
        BeamSearch(index, vocabulary, one, width)
        for one, width in zip(filters, widths, strict=True)
    ]
    beams = start(device, batched)
    beam_width = max(widths) + data.draw(st.integers(0, 2))
    prefixes = torch.zeros(len(widths), 1, 0, dtype=torch.int64)
    for level in range(index.levels):
        beams = advance(
            device,
            level,
            beams.lo,
            beams.hi,
            beams.score,
            scores.device(level, prefixes),
            batched,
            torch.tensor(widths),
            beam_width=beam_width,
            max_elements=most,
        )
        parents = beams.parent[:, :, None].expand(-1, -1, level)
        prefixes = torch.cat([prefixes.gather(1, parents), beams.code[:, :, None]], dim=2)
        for row, oracle in enumerate(oracles):
            if not oracle.done:
                oracle.advance(scores.oracle([beam.prefix for beam in oracle.frontier]))
            count = len(oracle.frontier)
            expected = oracle.frontier
            assert prefixes[row, :count].tolist() == [list(beam.prefix) for beam in expected]
            assert beams.parent[row, :count].tolist() == oracle.parents
            assert beams.lo[row, :count].tolist() == [beam.lo for beam in expected]
            assert beams.hi[row, :count].tolist() == [beam.hi for beam in expected]
            assert beams.score[row, :count].tolist() == [beam.logprob for beam in expected]
            for dead in (beams.lo, beams.hi, beams.parent, beams.code):
                assert not dead[row, count:].any()
            assert torch.isneginf(beams.score[row, count:]).all()
    found = results(device, beams, beam_width + 1).tolist()
    for row, oracle in enumerate(oracles):
        expected = [item.row for item in oracle.results(beam_width)] if oracle.frontier else []
        assert found[row] == expected + [-1] * (beam_width + 1 - len(expected))


@given(catalogues(), st.integers(0, 2**31), st.data())
@settings(deadline=None)
def test_a_beam_as_wide_as_the_catalogue_equals_exhaustive_scoring(catalogue, seed, data):
    sids, sizes = catalogue
    index = ConstraintIndex(sids)
    scores = Scores(sizes, seed, 5)
    chosen, admitted = draw_filter(data, index, data.draw(st.integers(0, len(sids))))
    device, batched = batch(index, [chosen])
    found = search(device, scores.device, batched, torch.tensor([len(sids)]), len(sids))
    every = [tuple(int(code) for code in sid) for sid in sids]
    expected = exhaustive_search(
        scores.oracle,
        every,
        SidVocabulary(sizes, sizes, 0),
        len(sids),
        frozenset(every) - {every[row] for row in admitted},
    )
    missing = len(sids) - len(expected)
    assert found.score[0].tolist() == [value for _, value in expected] + [-np.inf] * missing
    assert [tuple(sid) for sid in found.sids[0].tolist()] == [sid for sid, _ in expected] + [
        (0,) * index.levels
    ] * missing
    assert found.rows[0].tolist() == [every.index(sid) for sid, _ in expected] + [-1] * missing


@given(catalogues(), st.integers(0, 2**31), st.integers(1, 8), st.data())
@settings(deadline=None)
def test_exactly_k_come_back_whenever_k_are_admissible(catalogue, seed, k, data):
    sids, sizes = catalogue
    index = ConstraintIndex(sids)
    kinds = [draw_filter(data, index, left) for left in (0, 1, k - 1, k, k + 1, len(sids))]
    device, batched = batch(index, [one for one, _ in kinds])
    found = search(device, Scores(sizes, seed, 50).device, batched, torch.full((len(kinds),), k), k)
    for rows, (_, admitted) in zip(found.rows.tolist(), kinds, strict=True):
        back = [row for row in rows if row >= 0]
        assert len(back) == len(set(back)) == min(k, len(admitted))
        assert set(back) <= set(admitted)


def test_ten_thousand_requests_get_admissible_items_only_and_all_they_asked_for():
    rng = np.random.default_rng(5)
    sids = np.unique(rng.integers(0, 16, size=(3000, 3), dtype=np.int32), axis=0)
    available = rng.random(len(sids)) < 0.8
    index = ConstraintIndex(rng.permutation(sids), available)
    masks = [rng.random(len(index)) < share for share in (0.5, 0.01, 0.002)]
    bases = [index.base, *(index.selection(mask) for mask in masks)]
    device = DeviceIndex(index, base_slots=3)
    for base in bases:
        device.acquire(base)
    served = [available, *(available & mask for mask in masks)]
    seen_at_all = set()
    for _ in range(20):
        filters, admitted = [], np.empty((500, len(index)), dtype=np.bool_)
        for row in range(500):
            kind = rng.integers(0, 4)
            excluded = rng.integers(0, len(index), rng.integers(0, 80))
            included = rng.integers(0, len(index), rng.integers(0, 30)) if row % 3 == 0 else None
            filters.append(index.filter(excluded, included, bases[kind]))
            admitted[row] = served[kind]
            admitted[row, excluded] = False
            if included is not None:
                admitted[row, np.setdiff1d(np.arange(len(index)), included)] = False
        width = rng.integers(1, 9, 500)
        found = search(
            device,
            lambda level, prefix: torch.randn(*prefix.shape[:2], 16),
            batch_filters(device, filters),
            torch.from_numpy(width),
            8,
        )
        rows = found.rows.numpy()
        back = rows >= 0
        assert (back.sum(axis=1) == np.minimum(width, admitted.sum(axis=1))).all()
        assert admitted[np.nonzero(back)[0], rows[back]].all()
        ordered = np.sort(np.where(back, rows, -1 - np.arange(8)), axis=1)
        assert (ordered[:, 1:] != ordered[:, :-1]).all()
        assert (index.sids[index.positions[rows[back]]] == found.sids.numpy()[back]).all()
        seen_at_all.update(rows[back].tolist())
    # Random scores reach nearly every item in service, so the filters above were put to use.
    assert seen_at_all <= set(np.flatnonzero(available).tolist())
    assert len(seen_at_all) > 0.95 * available.sum()


def step(device, batched, level, beams, logprobs, width=3):
    requests = len(beams.lo)
    return advance(
        device,
        level,
        beams.lo,
        beams.hi,
        beams.score,
        logprobs,
        batched,
        torch.full((requests,), width),
        beam_width=width,
    )


def test_two_levels_worked_out_by_hand():
    index = small()
    device, batched = batch(index, [index.filter(), index.filter([0])])
    root = start(device, batched)
    assert (root.lo.tolist(), root.hi.tolist()) == ([[0], [0]], [[4], [4]])
    first = step(device, batched, 0, root, torch.tensor([[[-2.0, -1.0, 0.0]]] * 2))
    # Code 2 scores best, but its only item is out of service.
    assert first.code.tolist() == [[1, 0, 0]] * 2
    assert first.score.tolist() == [[-1.0, -2.0, -np.inf]] * 2
    assert first.lo.tolist() == [[2, 0, 0]] * 2
    assert first.hi.tolist() == [[3, 2, 0]] * 2
    table = torch.tensor([[[0.0, -4.0, 0.0], [-0.5, 0.0, -3.0], [9.0, 9.0, 9.0]]] * 2)
    second = step(device, batched, 1, first, table)
    # (0, 2) and (1, 1) score the same: the smaller SID goes first, though its beam came second.
    assert second.parent.tolist() == [[1, 1, 0], [1, 0, 0]]
    assert second.code.tolist() == [[0, 2, 1], [2, 1, 0]]
    assert second.score.tolist() == [[-2.5, -5.0, -5.0], [-5.0, -5.0, -np.inf]]
    assert results(device, second, 2).tolist() == [[0, 1], [1, 2]]


def test_log_probabilities_may_be_a_slice_a_broadcast_or_half_precision():
    rng = np.random.default_rng(2)
    index = ConstraintIndex(np.unique(rng.integers(0, 6, size=(80, 2), dtype=np.int32), axis=0))
    device, batched = batch(index, [index.filter(), index.filter(range(20))])
    whole = torch.log_softmax(torch.randn(2, 3, 20), dim=-1)
    first = step(device, batched, 0, start(device, batched), whole[:, :1, 2:8])
    for table in (
        whole[:, :, 5:11],
        whole.transpose(1, 2)[:, 5:11].transpose(1, 2),
        whole[:1, :1, 5:11].expand(2, 3, 6),
        whole[:, :, 1:13:2],
        whole.bfloat16()[:, :, 5:11],
    ):
        found = step(device, batched, 1, first, table)
        same = step(
            device, batched, 1, first, table.float().clone(memory_format=torch.contiguous_format)
        )
        for name in vars(found):
            assert torch.equal(getattr(found, name), getattr(same, name))


@pytest.mark.parametrize("nan", [np.nan, -np.nan, np.inf])
def test_nan_comes_out_in_the_scores_and_stays_there(nan):
    index = small()
    device, batched = batch(index, [index.filter()])
    bits = np.copysign(np.float32(nan), np.float32(nan))
    first = step(
        device, batched, 0, start(device, batched), torch.tensor([[[-1.0, float(bits), -1.0]]])
    )
    assert first.code[0, 0] == 1
    assert first.score[0].isnan().tolist() == [True, False, False]
    second = step(device, batched, 1, first, torch.zeros(1, 3, 3))
    assert second.score[0].isnan().tolist() == [True, False, False]
    clean = step(device, batched, 0, start(device, batched), torch.tensor([[[-1.0, -1.0, nan]]]))
    assert not clean.score.isnan().any()  # a column that no admissible child reads


def test_a_child_of_probability_zero_is_still_found():
    index = small()
    device, batched = batch(index, [index.filter()])
    beams = start(device, batched)
    beams = step(device, batched, 0, beams, torch.tensor([[[-np.inf, -1.0, 0.0]]]))
    assert (beams.hi > beams.lo).tolist() == [[True, True, False]]
    beams = step(device, batched, 1, beams, torch.zeros(1, 3, 3))
    assert results(device, beams, 3).tolist() == [[2, 0, 1]]


def test_codes_up_to_65535_in_one_level():
    rng = np.random.default_rng(3)
    sids = np.stack([rng.integers(0, 2, 65_536), rng.permutation(65_536)], axis=1)
    index = ConstraintIndex(np.unique(sids, axis=0).astype(np.int32))
    scores = Scores((2, 65_536), 4, 1000)
    device, batched = batch(index, [index.filter(), index.filter(range(500))])
    vocabulary = SidVocabulary(scores.sizes, scores.sizes, 0)
    for most in (1 << 21, 10_000):
        found = search(
            device, scores.device, batched, torch.tensor([12, 12]), 12, max_elements=most
        )
        for row, excluded in enumerate(([], range(500))):
            oracle = BeamSearch(index, vocabulary, index.admissible(excluded), 12)
            while not oracle.done:
                oracle.advance(scores.oracle([beam.prefix for beam in oracle.frontier]))
            assert found.rows[row].tolist() == [item.row for item in oracle.results(12)]
