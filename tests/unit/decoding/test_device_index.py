"""The snapshot's tensors: nothing read back, slots for selections, shared memory, errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device_helpers import batch, small
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from gti_core.decoding.device import (
    BatchFilter,
    DeviceIndex,
    advance,
    batch_filters,
    search,
    start,
)
from gti_core.errors import DecodingError


def test_no_value_is_read_back_by_the_host():
    # On fake tensors, which have no values, whatever reads one raises.
    index = small()
    device, batched = batch(index, [index.filter([0]), index.filter(included_rows=[1, 2])])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        real = vars(device)
        fake = DeviceIndex.__new__(DeviceIndex)
        fake.__dict__.update(real)
        for name in ("rows", "table"):
            setattr(fake, name, mode.from_tensor(real[name]))
        fake.codes = tuple(mode.from_tensor(one) for one in device.codes)
        fake.starts = tuple(mode.from_tensor(one) for one in device.starts)
        filters = BatchFilter(
            batched.snapshot,
            *(
                mode.from_tensor(value)
                for name, value in vars(batched).items()
                if name != "snapshot"
            ),
        )
        found = search(
            fake,
            lambda level, prefix: torch.zeros(*prefix.shape[:2], 3),
            filters,
            torch.tensor([2, 3]),
            3,
            max_elements=4,
        )
        assert found.rows.shape == (2, 3)
        with pytest.raises(DataDependentOutputException):
            found.rows[0, 0].item()


def test_selections_take_slots_and_give_them_back():
    index = small()
    one, two, three = (index.selection(np.arange(4) == row) for row in range(3))
    device = DeviceIndex(index, base_slots=2)
    assert device.acquire(index.base) == 0
    device.release(index.base)
    assert (device.acquire(one), device.acquire(two), device.acquire(one)) == (1, 2, 1)
    with pytest.raises(DecodingError, match="all 2 slots"):
        device.acquire(three)
    device.release(one)
    with pytest.raises(DecodingError, match="all 2 slots"):
        device.acquire(three)  # the first of the two users is still there
    device.release(one)
    with pytest.raises(DecodingError, match="not in use"):
        device.release(one)
    assert device.acquire(one) == 1  # nothing was lost while the slot was idle
    device.release(one)
    assert device.acquire(three) == 1
    with pytest.raises(DecodingError, match="not in this index's table"):
        batch_filters(device, [index.filter(base=one)])
    batched = batch_filters(device, [index.filter(base=two), index.filter(base=three)])
    found = search(
        device,
        lambda level, prefix: torch.zeros(*prefix.shape[:2], 3),
        batched,
        torch.tensor([4, 4]),
        4,
    )
    assert found.rows.tolist() == [[1, -1, -1, -1], [2, -1, -1, -1]]


def test_the_next_snapshot_uses_again_the_tensors_that_did_not_change():
    index = small()
    old = DeviceIndex(index)
    assert old.codes[1].data_ptr() == index.codes[1].ctypes.data  # no copy on the CPU
    new = DeviceIndex(index.restored(3), previous=old)
    assert new.rows is old.rows
    assert new.starts[0] is old.starts[0]
    assert new.table.tolist() == [[0, 1, 2, 3, 4]]
    assert old.table.tolist() == [[0, 1, 2, 3, 3]]
    grown = DeviceIndex(index.inserted((0, 1)), previous=new)
    assert grown.codes[0] is old.codes[0]
    assert grown.codes[1].tolist() == [0, 1, 2, 1, 0, 0]


def test_what_contradicts_itself_is_refused():
    index = small()
    device, batched = batch(index, [index.filter()])
    root = start(device, batched)
    width = torch.tensor([2])
    table = torch.zeros(1, 1, 3)

    def call(level=0, logprobs=table, filters=batched, width=width, beam_width=2):
        return advance(
            device, level, root.lo, root.hi, root.score, logprobs, filters, width,
            beam_width=beam_width,
        )  # fmt: skip

    call()
    other = index.restored(3)
    others = batch(other, [other.filter()])[1]
    for wrong, message in (
        ({"level": 2}, "no level 2"),
        ({"logprobs": torch.zeros(1, 2, 3)}, "of shape"),
        ({"logprobs": torch.zeros(1, 1, 2)}, "codes up to 2"),
        ({"width": torch.tensor([1, 1])}, "1 filters and widths"),
        ({"beam_width": 0}, "at least 1"),
        ({"filters": others}, "another snapshot"),
    ):
        with pytest.raises(DecodingError, match=message):
            call(**wrong)
    with pytest.raises(DecodingError, match="another snapshot"):
        batch_filters(device, [other.filter()])
    with pytest.raises(DecodingError, match="another snapshot"):
        device.acquire(other.selection(np.ones(4, dtype=np.bool_)))
    with pytest.raises(DecodingError, match="at least one"):
        batch_filters(device, [])
    with pytest.raises(DecodingError, match="fanout"):
        DeviceIndex(index, fanout=(1, 9))
