"""Times on their way from vLLM's worker to the service."""

from __future__ import annotations

import pytest
import torch

from service.engine.timings import Timings
from service.engine.vllm_beams.clock import stamped
from service.engine.vllm_beams.wire import BEGAN, CONSTRAINT, read_times


def test_times_travel_behind_the_items() -> None:
    items = torch.tensor([[3.0, -0.5], [0.0, -1.5], [-1.0, -torch.inf]], dtype=torch.float64)
    answer = stamped(stamped(items, CONSTRAINT, [0.001, 0.002, 0.003]), BEGAN, [101.5, 0.25, 0.75])
    assert answer.dtype is torch.float64
    assert torch.equal(answer[:3], items)
    timings = Timings(asked=100.0)
    read_times(answer.tolist(), timings)
    assert (timings.queue_s, timings.prefill_s, timings.beams_s) == (1.5, 0.25, 0.75)
    assert timings.constraint_s == [0.001, 0.002, 0.003]


@pytest.mark.parametrize("rows", [[], [[4.0, -1.0]], [[-2.0, -2.0]]])
def test_an_answer_without_times_tells_nothing(rows: list[list[float]]) -> None:
    timings = Timings()
    read_times(rows, timings)
    assert (timings.queue_s, timings.prefill_s, timings.beams_s) == (None, None, None)
    assert timings.constraint_s == []


def test_a_queue_is_never_negative() -> None:
    timings = Timings(asked=100.0)
    read_times(stamped(torch.zeros(0, 2, dtype=torch.float64), BEGAN, [99.0]).tolist(), timings)
    assert timings.queue_s == 0
