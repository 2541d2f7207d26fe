from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from gti_core.errors import DataError, PipelineError
from gti_core.evaluation.baselines import Ranker
from gti_core.evaluation.metrics import evaluate_rankings
from gti_core.evaluation.sasrec import SasRec, SasRecConfig, SasRecEpoch

ITEMS = 12
SMALL = SasRecConfig(
    epochs=30, width=16, layers=1, heads=1, dropout=0.1, max_length=6, learning_rate=1e-2
)


def _cycle(start: int, length: int, step: int = 1) -> list[int]:
    return [(start + step * place) % ITEMS for place in range(length)]


def _train(
    histories: list[list[int]], validation: Any = None, seed: int = 0, **settings: Any
) -> tuple[SasRec, list[SasRecEpoch]]:
    seen: list[SasRecEpoch] = []
    config = SasRecConfig(**{**vars(SMALL), "batch_size": 16, **settings})
    ranker = SasRec(
        histories, ITEMS, config=config, seed=seed, validation=validation, progress=seen.append
    )
    return ranker, seen


@pytest.fixture(scope="module")
def cyclic() -> SasRec:
    """Item i is always followed by item i + 1, and 11 by 0."""
    return _train([_cycle(start, length) for start in range(ITEMS) for length in (1, 3, 9)])[0]


def test_the_next_item_of_a_cycle_is_learnt(cyclic: SasRec) -> None:
    ranker: Ranker = cyclic
    histories = [_cycle(start, length) for start in range(ITEMS) for length in (1, 2, 4)]
    targets = np.array([(history[-1] + 1) % ITEMS for history in histories])

    assert evaluate_rankings(ranker.rank(histories, 1), targets, (1,))["recall@1"] == 1.0


def test_order_decides_and_all_that_is_read_counts() -> None:
    # After a rise comes the next item up, after a fall the next one down: the last item alone
    # leaves both open, and max_length allows for one more.
    histories = [_cycle(start, 5, step) for start in range(ITEMS) for step in (1, -1)]

    ranker, _ = _train(histories, max_length=2, epochs=40, learning_rate=5e-3)

    # Seen items stay in: without them the way back would be closed and the answer given away.
    ranked = ranker.rank([[3, 4, 5], [7, 6, 5], [11, 0], [1, 0]], 1, exclude_seen=False)
    assert ranked.tolist() == [[6], [4], [1], [11]]


def test_seen_items_are_left_out(cyclic: SasRec) -> None:
    # The whole cycle but 7: 7 is all that is left, and then nothing is.
    history = [row for row in range(ITEMS) if row != 7]

    assert cyclic.rank([history], 3).tolist() == [[7, -1, -1]]
    assert cyclic.rank([[0, 1]], 1, exclude_seen=False).tolist() == [[2]]
    assert cyclic.rank([[2, 0, 1]], 12).tolist()[0].count(2) == 0
    assert sorted(cyclic.rank([[0, 1]], ITEMS, exclude_seen=False)[0].tolist()) == [*range(ITEMS)]


def test_an_empty_history_is_answered_by_popularity(cyclic: SasRec) -> None:
    by_popularity = np.argsort(-cyclic.counts, kind="stable")

    assert cyclic.rank([[], [4]], 3)[0].tolist() == by_popularity[:3].tolist()
    assert cyclic.rank([[], [4]], 3)[1, 0] == 5
    assert cyclic.rank([], 3).shape == (0, 3)


def test_only_the_last_items_of_a_history_count(cyclic: SasRec) -> None:
    tail = [9, 2, 5, 1, 0, 3]

    assert (
        cyclic.rank([[7, 7, *tail], [8, *tail]], 5, exclude_seen=False).tolist()
        == cyclic.rank([tail] * 2, 5, exclude_seen=False).tolist()
    )


def test_cases_do_not_depend_on_the_cases_beside_them(cyclic: SasRec) -> None:
    histories = [[4], [1, 2, 3], [], [8, 3], [0, 1, 2, 3, 4, 5, 6, 7]]

    together = cyclic.rank(histories, 4)

    for case, history in enumerate(histories):
        assert together[case].tolist() == cyclic.rank([history], 4)[0].tolist()


def test_every_item_but_the_first_is_a_target() -> None:
    # Two targets, and at the start the softmax over N items is nearly even: loss log(N).
    _, epochs = _train([[0, 1, 2], [5], []], epochs=1, learning_rate=1e-6)

    assert [epoch.epoch for epoch in epochs] == [1]
    assert epochs[0].loss == pytest.approx(np.log(ITEMS), abs=0.1)
    assert epochs[0].ndcg is None


def test_the_same_seed_gives_the_same_model() -> None:
    histories = [_cycle(start, 4) for start in range(ITEMS)]
    torch.manual_seed(5)
    before = torch.random.get_rng_state()

    first, first_epochs = _train(histories, epochs=2, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    again, again_epochs = _train(histories, epochs=2, seed=3)
    _, other_epochs = _train(histories, epochs=2, seed=4)

    assert first_epochs == again_epochs
    assert first_epochs != other_epochs
    assert first.rank(histories, 8).tolist() == again.rank(histories, 8).tolist()


def test_the_best_epoch_on_validation_is_kept() -> None:
    # The validation cases go the other way round, so learning the cycle makes them worse.
    histories = [_cycle(start, 6) for start in range(ITEMS)] * 3
    held = ([[5, 4], [9, 8], [2, 1]], [3, 7, 0])

    ranker, epochs = _train(histories, validation=held, epochs=40, patience=3)

    scores = [epoch.ndcg or 0.0 for epoch in epochs]
    best = int(np.argmax(scores))
    assert len(epochs) == best + 1 + 3 < 40
    found = evaluate_rankings(ranker.rank(held[0], 10), np.array(held[1]), (10,))
    assert found["ndcg@10"] == pytest.approx(scores[best])
    assert scores[-1] < scores[best]


def test_a_target_that_was_seen_is_no_hit() -> None:
    _, epochs = _train([[0, 1]], validation=([[3, 4]], [3]), epochs=1)

    assert epochs[0].ndcg == 0.0


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 0},
        {"patience": 0},
        {"layers": 0},
        {"max_length": 0},
        {"batch_size": 0},
        {"width": 10, "heads": 4},
        {"dropout": 1.0},
        {"dropout": -0.1},
        {"dropout": float("nan")},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=next(iter(settings))):
        SasRecConfig(**settings)


@pytest.mark.parametrize(
    ("train", "validation"),
    [
        ([[0], [3]], None),
        ([], None),
        ([[0, ITEMS]], None),
        ([[0, -1]], None),
        ([[0, 1]], ([[0]], [1, 2])),
        ([[0, 1]], ([], [])),
        ([[0, 1]], ([[0]], [ITEMS])),
        ([[0, 1]], ([[ITEMS]], [1])),
    ],
)
def test_data_that_can_not_be_used_is_refused(train: list[list[int]], validation: Any) -> None:
    with pytest.raises(DataError):
        SasRec(train, ITEMS, config=SMALL, validation=validation)


def test_bad_requests_are_refused(cyclic: SasRec) -> None:
    for history, k in (([0], 0), ([ITEMS], 2), ([-1], 2)):
        with pytest.raises(DataError):
            cyclic.rank([history], k)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cornac.models.sasrec.sasrec", None)

    with pytest.raises(PipelineError, match="cornac"):
        SasRec([[0, 1]], ITEMS, config=SMALL)
