"""Where beam rows read and write keys and values, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.vllm_beams.rows import BeamRows
from service.engine.vllm_beams.scratch import Geometry, Scratch, ScratchError, enlarged
from service.engine.vllm_beams.wire import BeamRequest

LAYERS, HEADS, SIZE, WIDTH = 3, 2, 4, 3
CPU = torch.device("cpu")


class PlainBackend:
    """Keys, then values, token after token."""

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        for token, slot in enumerate(slots.tolist()):
            block, place = divmod(slot, SIZE)
            cache[block, :, place, :WIDTH] = key[token]
            cache[block, :, place, WIDTH:] = value[token]


class TransposedBackend:
    """Keys of a block lie channel after channel, as some CPU kernels want them."""

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        halves = cache.view(cache.shape[0], HEADS, 2, SIZE * WIDTH)
        for token, slot in enumerate(slots.tolist()):
            block, place = divmod(slot, SIZE)
            halves[block, :, 0].view(HEADS, WIDTH, SIZE)[:, :, place] = key[token]
            halves[block, :, 1].view(HEADS, SIZE, WIDTH)[:, place] = value[token]


@dataclass
class Layer:
    kv_cache: torch.Tensor
    impl: Any


BACKENDS = [PlainBackend(), TransposedBackend()]


def make(backend: Any, scheduled: int = 6, count: int = 8) -> tuple[Scratch, list[Layer]]:
    stack = torch.zeros(LAYERS, scheduled + count, HEADS, SIZE, 2 * WIDTH)
    layers = [Layer(stack[number], backend) for number in range(LAYERS)]
    return Scratch(layers, scheduled, count, SIZE), layers


def write(layers: list[Layer], slot: int, value: float) -> None:
    for number, layer in enumerate(layers):
        key = torch.full((1, HEADS, WIDTH), value + number / 10)
        layer.impl.do_kv_cache_update(
            layer, key, -key, layer.kv_cache, torch.tensor([slot], dtype=torch.int64)
        )


def read(layer: Layer, slot: int) -> list[float]:
    """The elements that hold a slot's keys and values, found by writing over a copy."""
    before = layer.kv_cache
    probe = torch.zeros_like(before)
    ones = torch.ones(1, HEADS, WIDTH)
    layer.impl.do_kv_cache_update(layer, ones, ones, probe, torch.tensor([slot]))
    return sorted(set(before[probe != 0].tolist()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_single_tokens_move_between_rows_whatever_the_layout(backend):
    scratch, layers = make(backend)
    write(layers, 6 * SIZE + 1, 5.0)
    write(layers, 7 * SIZE + 3, 9.0)
    scratch.move_tokens(
        torch.tensor([6, 7]), torch.tensor([1, 3]), torch.tensor([7, 6]), torch.tensor([3, 1])
    )
    for number, layer in enumerate(layers):
        assert read(layer, 6 * SIZE + 1) == pytest.approx([-9 - number / 10, 9 + number / 10])
        assert read(layer, 7 * SIZE + 3) == pytest.approx([-5 - number / 10, 5 + number / 10])
        assert read(layer, 6 * SIZE + 2) == [0.0]


def test_the_tail_goes_to_every_row_of_its_prompt_and_to_no_other():
    scratch, layers = make(PlainBackend())
    write(layers, 2 * SIZE + 1, 4.0)
    scratch.copy_tail(torch.tensor([2], dtype=torch.int32), first=6, stride=2, rows=3)
    holds = [bool(read(layers[0], block * SIZE + 1) != [0.0]) for block in range(14)]
    assert [block for block, held in enumerate(holds) if held] == [2, 6, 8, 10]


def test_layers_that_are_not_one_allocation_are_refused():
    layers = [Layer(torch.zeros(14, HEADS, SIZE, 2 * WIDTH), PlainBackend()) for _ in range(2)]
    with pytest.raises(ScratchError, match="one allocation"):
        Scratch(layers, 6, 8, SIZE)


def test_a_cache_without_the_extra_blocks_is_refused():
    stack = torch.zeros(LAYERS, 6, HEADS, SIZE, 2 * WIDTH)
    layers = [Layer(stack[number], PlainBackend()) for number in range(LAYERS)]
    with pytest.raises(ScratchError, match="6 blocks, 6 \\+ 8 expected"):
        Scratch(layers, 6, 8, SIZE)


@pytest.mark.parametrize(
    ("tail", "codes", "blocks"), [(0, 2, 1), (2, 2, 1), (3, 2, 2), (3, 7, 3), (0, 0, 1)]
)
def test_blocks_per_row(tail, codes, blocks):
    assert Geometry(0, 8, SIZE).blocks_per_row(tail, codes) == blocks


def test_tables_slots_and_positions_by_hand():
    scratch, _ = make(PlainBackend())
    # Prompt 0: 6 tokens in blocks 0, 1 (two in the last). Prompt 1: 4 tokens fill block 3.
    rows = BeamRows(
        [torch.tensor([0, 1, 9]), torch.tensor([3, 9, 9])], [6, 4], [2, 3], 3, scratch, CPU
    )
    # Row 0, 1 take two blocks each (2 + 3 tokens), rows of prompt 1 one each.
    assert rows.blocks_needed == 7
    assert rows.places.tolist() == [0, 1, 3, 4, 5]
    assert rows.home[rows.places].tolist() == [6, 8, 10, 11, 12]
    places = torch.tensor([1, 4])
    batch = rows.batch(places, rows.home[places], first=1, count=2)
    assert batch.positions.tolist() == [7, 8, 5, 6]
    # Row 1: places 3 and 4 behind its two-token tail: block 8 place 3, block 9 place 0.
    assert batch.slots.tolist() == [8 * SIZE + 3, 9 * SIZE, 11 * SIZE + 1, 11 * SIZE + 2]
    assert batch.lengths.tolist() == [9, 7]
    assert batch.table[0, :3].tolist() == [0, 8, 9]
    assert batch.table[1, :2].tolist() == [3, 11]


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_no_row_writes_where_another_reads(data):
    scratch, _ = make(PlainBackend(), scheduled=20, count=60)
    prompts = data.draw(st.integers(1, 3))
    lengths = [data.draw(st.integers(1, 12)) for _ in range(prompts)]
    widths = [data.draw(st.integers(1, 5)) for _ in range(prompts)]
    tables = [torch.arange(4) + 4 * q for q in range(prompts)]
    rows = BeamRows(tables, lengths, widths, 3, scratch, CPU)
    batch = rows.batch(rows.places, rows.home[rows.places], first=0, count=3)
    slots = batch.slots.tolist()
    assert len(set(slots)) == len(slots)
    assert all(20 <= slot // SIZE < 80 for slot in slots)
    for row, place in enumerate(rows.places.tolist()):
        q = place // max(widths)
        needed = -(-int(batch.lengths[row]) // SIZE)
        table = batch.table[row, :needed].tolist()
        assert table[: lengths[q] // SIZE] == tables[q][: lengths[q] // SIZE].tolist()
        # Every new token lies where the row will look for its position.
        for new in range(3):
            position = int(batch.positions.view(-1, 3)[row, new])
            slot = batch.slots.view(-1, 3)[row, new]
            assert table[position // SIZE] * SIZE + position % SIZE == int(slot)


@dataclass
class CacheTensor:
    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0


@dataclass
class Config:
    num_blocks: int
    kv_cache_tensors: list[CacheTensor]
    kv_cache_groups: list[str] = field(default_factory=lambda: ["one"])


def test_an_enlarged_cache_keeps_the_layers_apart():
    layerwise = Config(10, [CacheTensor(4000, ["a", "b"], 2000, 200)])
    bigger = enlarged(layerwise, 5)
    assert bigger.num_blocks == 15
    assert bigger.kv_cache_tensors[0] == CacheTensor(6000, ["a", "b"], 3000, 200)
    assert layerwise.kv_cache_tensors[0].size == 4000
    with pytest.raises(ScratchError, match="2 groups"):
        enlarged(Config(10, [], ["one", "two"]), 5)
    with pytest.raises(ScratchError, match="unknown way"):
        enlarged(Config(10, [CacheTensor(4000, ["a", "b"], 300, 200)]), 5)


def test_requests_survive_the_wire():
    request = BeamRequest(3, 10, 20, [5, 7])
    assert BeamRequest.from_params(request.to_params()) == request
