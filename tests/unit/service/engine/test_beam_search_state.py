"""Searches as the worker runs them, with made-up log-probabilities in place of a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gti_core.decoding import BeamSearch, ConstraintIndex
from gti_core.vocabulary import SidVocabulary
from service.engine.vllm_beams.snapshot import Search, Snapshot
from service.engine.vllm_beams.wire import BeamRequest

SIZES = (6, 5, 4)
VOCABULARY = SidVocabulary(SIZES, SIZES, 100)
CPU = torch.device("cpu")


def logprobs_after(request: int, path: Sequence[int]) -> torch.Tensor:
    """[S], the same for the same request and path, whoever asks."""
    generator = torch.Generator().manual_seed(hash((request, *map(int, path))) % 2**31)
    return torch.log_softmax(3 * torch.randn(VOCABULARY.rows, generator=generator), dim=0)


def rows_after(search: Search, places: torch.Tensor) -> torch.Tensor:
    found = []
    for place in places.tolist():
        request, beam = divmod(place, search.width)
        found.append(logprobs_after(request, search.path[request, beam].tolist()))
    return torch.stack(found) if found else torch.empty(0, VOCABULARY.rows)


def run(
    snapshot: Snapshot, requests: Sequence[BeamRequest], best_first: bool
) -> tuple[list[list[tuple[int, float]]], int]:
    """Answers, and the rows computed at the last level."""
    search = Search(snapshot, requests)
    places = torch.tensor(
        [q * search.width + w for q, one in enumerate(requests) for w in range(one.beam_width)]
    )
    search.advance_from_prompt(torch.stack([logprobs_after(q, []) for q in range(len(requests))]))
    alive = search.alive(places)
    search.advance(alive, rows_after(search, alive))
    alive = search.alive(places)
    if best_first:
        better = alive % search.width < (search.width + 1) // 2
        first, rest = alive[better], alive[~better]
        found = rows_after(search, first)
        rest = search.hopeful(first, found, rest)
        alive, found = torch.cat([first, rest]), torch.cat([found, rows_after(search, rest)])
    else:
        found = rows_after(search, alive)
    search.advance(alive, found)
    search.close()
    return [[(int(r), s) for r, s in one.tolist() if r >= 0] for one in search.answers()], len(
        alive
    )


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.data())
def test_best_first_finds_the_same_and_both_equal_the_oracle(seed, data):
    rng = np.random.default_rng(seed)
    every = np.stack(np.unravel_index(np.arange(120), SIZES), axis=1).astype(np.int32)
    index = ConstraintIndex(every[rng.choice(120, data.draw(st.integers(1, 120)), replace=False)])
    snapshot = Snapshot(1, VOCABULARY, index, CPU)
    requests = []
    for _ in range(data.draw(st.integers(1, 4))):
        width = data.draw(st.integers(1, 12))
        out = rng.choice(len(index), data.draw(st.integers(0, len(index))), replace=False)
        k = data.draw(st.integers(1, width))
        requests.append(BeamRequest(1, k, width, out.tolist()))
    plain, all_rows = run(snapshot, requests, best_first=False)
    pruned, some_rows = run(snapshot, requests, best_first=True)
    assert pruned == plain
    assert some_rows <= all_rows
    for number, (request, got) in enumerate(zip(requests, plain, strict=True)):
        search = BeamSearch(
            index, VOCABULARY, index.admissible(request.excluded), request.beam_width
        )
        while not search.done:
            rows = [
                logprobs_after(number, VOCABULARY.token_ids(beam.prefix)).numpy()
                for beam in search.frontier
            ]
            search.advance(np.stack(rows))
        want = search.results(request.k)
        assert [row for row, _ in got] == [item.row for item in want]
        assert np.allclose([s for _, s in got], [item.logprob for item in want], atol=1e-4)


def test_pruning_leaves_rows_out_where_one_beam_is_far_ahead():
    every = np.stack(np.unravel_index(np.arange(120), SIZES), axis=1).astype(np.int32)
    snapshot = Snapshot(1, VOCABULARY, ConstraintIndex(every), CPU)
    _, all_rows = run(snapshot, [BeamRequest(1, 1, 12)], best_first=False)
    _, some_rows = run(snapshot, [BeamRequest(1, 1, 12)], best_first=True)
    assert some_rows < all_rows
