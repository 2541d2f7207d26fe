"""A constraint snapshot and a batch's filters as tensors. `gti_core.decoding.device` searches them.

Shapes: Q requests of a batch, E longest list of a request's filter, N items, L levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gti_core.decoding.constraint import ConstraintIndex
from gti_core.decoding.filters import Admissible, Filter
from gti_core.errors import DecodingError
from gti_core.types import IntArray


class DeviceIndex:
    """The tensors of one snapshot on one device.

    On the CPU they share the snapshot's memory. The table of bases has a row for the items in
    service and ``base_slots`` more, which are filled as requests with a `selection` come in; its
    address and shape never change. Not thread-safe: one engine owns it.

    Args:
        index: the snapshot.
        device: where the tensors live.
        base_slots: selections that can be in use at once.
        fanout: per level, the children looked at per prefix, at least ``index.max_children``.
            Larger values keep the shapes of `advance` the same for later snapshots.
        previous: tensors of an earlier snapshot on the same device; those of arrays that both
            snapshots share are used again.

    Raises:
        DecodingError: ``fanout`` is too small.
    """

    def __init__(
        self,
        index: ConstraintIndex,
        device: torch.device | str = "cpu",
        *,
        base_slots: int = 0,
        fanout: Sequence[int] | None = None,
        previous: DeviceIndex | None = None,
    ) -> None:
        self.snapshot = index.snapshot
        self.device = torch.device(device)
        self.items = len(index)
        self.levels = index.levels
        self.code_bounds = index.code_bounds
        self.fanout = tuple(index.max_children if fanout is None else fanout)
        if len(self.fanout) != self.levels or any(
            wide < most for wide, most in zip(self.fanout, index.max_children, strict=True)
        ):
            raise DecodingError(f"fanout {self.fanout} is below {index.max_children}")
        known = {} if previous is None or previous.device != self.device else previous._tensors
        self._tensors: dict[int, tuple[IntArray, Tensor]] = {}
        """By id of the snapshot's array: the array, which keeps the id valid, and its tensor."""

        def tensor(array: IntArray) -> Tensor:
            held = known.get(id(array)) or (array, _to_device(array, self.device))
            self._tensors[id(array)] = held
            return held[1]

        self.rows = tensor(index.rows)
        """Catalogue row of each sorted position, [N] int32."""
        self.codes = tuple(tensor(array) for array in index.codes)
        """Per level, the prefixes' last codes and a 0, int32."""
        self.starts = tuple(tensor(array) for array in index.starts)
        """Per level l < L - 1, the prefixes' starts and N, int32."""
        base = tensor(index.base.cumulative)
        if base_slots:
            # Not zeros: a slot is filled before it is read, and the table is large.
            self.table = torch.empty(
                base_slots + 1, self.items + 1, dtype=torch.int32, device=self.device
            )
            self.table[0].copy_(base)
            del self._tensors[id(index.base.cumulative)]
        else:
            self.table = base[None]
        self._in_service = index.base
        self._slots: dict[int, tuple[Admissible, int]] = {}
        """By id of a selection: the selection and its row of the table; least recent first."""
        self._users: dict[int, int] = {}

    def acquire(self, base: Admissible) -> int:
        """Put a base into the table if need be, and keep it there until `release`.

        The first request of a selection costs one copy of 4 (N + 1) bytes; the items in service
        need no call, and cost nothing.

        Returns:
            Its row of the table.

        Raises:
            DecodingError: the base is of another snapshot, or every slot is in use.
        """
        if base is self._in_service:
            return 0
        if base.snapshot is not self.snapshot:
            raise DecodingError("the filter was made for another snapshot")
        _, slot = self._slots.pop(id(base), (None, 0))
        if not slot:
            slot = self._free_slot()
            self.table[slot].copy_(_to_device(base.cumulative, self.device))
        self._slots[id(base)] = (base, slot)
        self._users[slot] = self._users.get(slot, 0) + 1
        return slot

    def release(self, base: Admissible) -> None:
        """Undo one `acquire`. The base stays in the table until its slot is needed.

        Raises:
            DecodingError: the base is not in use.
        """
        if base is self._in_service:
            return
        slot = self.slot(base)
        if not self._users[slot]:
            raise DecodingError("the base is not in use")
        self._users[slot] -= 1

    def slot(self, base: Admissible) -> int:
        """Row of the table that holds a base. Raises DecodingError where none does."""
        if base is self._in_service:
            return 0
        if id(base) not in self._slots:
            raise DecodingError("the filter's base is not in this index's table")
        return self._slots[id(base)][1]

    def _free_slot(self) -> int:
        if len(self._slots) < len(self.table) - 1:
            return len(self._slots) + 1
        for key, (_, slot) in self._slots.items():
            if not self._users[slot]:
                del self._slots[key]
                return slot
        raise DecodingError(f"all {len(self.table) - 1} slots for attribute filters are in use")


@dataclass(frozen=True, eq=False)
class BatchFilter:
    """The filters of Q requests; made by `batch_filters`.

    Args:
        snapshot: marks the snapshot they were made for.
        offset: shape [Q, 1, 1], where each request's base begins in the flattened table of bases;
            int32, or int64 for a table of 2^31 entries and more.
        listed: shape [Q, E], int32, each request's listed positions, ascending, then N.
        keep: shape [Q, 1, 1], int32, 0 where the listed items alone may come back, else 1.
        sign: shape [Q, 1], int32, what a listed item adds to the count: 1 there, else -1.
        total: shape [Q], int32, admissible items.
    """

    snapshot: object
    offset: Tensor
    listed: Tensor
    keep: Tensor
    sign: Tensor
    total: Tensor


def batch_filters(
    index: DeviceIndex, filters: Sequence[Filter], *, listed_width: int = 0
) -> BatchFilter:
    """Put requests' filters together; O(Q E) bytes are copied to the device, never O(N).

    Args:
        index: the snapshot; it must hold the filters' bases (see `DeviceIndex.acquire`).
        filters: Q filters of that snapshot.
        listed_width: E is at least this, so that shapes can be kept the same.

    Raises:
        DecodingError: no filter, one of another snapshot, or one whose base was not acquired.
    """
    if not filters:
        raise DecodingError("a batch needs at least one request")
    if any(one.snapshot is not index.snapshot for one in filters):
        raise DecodingError("the filter was made for another snapshot")
    width = max(listed_width, max(len(one.listed) for one in filters))
    listed = np.full((len(filters), width), index.items, dtype=np.int32)
    for row, one in enumerate(filters):
        listed[row, : len(one.listed)] = one.listed
    offset_type = np.int32 if index.table.numel() < 2**31 else np.int64
    # An include list needs no base: any row of the table will do, its counts are multiplied by 0.
    slots = [0 if one.include else index.slot(one.base) for one in filters]
    include = np.array([one.include for one in filters], dtype=np.int32)

    def put(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(index.device)

    return BatchFilter(
        index.snapshot,
        put((np.array(slots, dtype=offset_type) * (index.items + 1))[:, None, None]),
        put(listed),
        put((1 - include)[:, None, None]),
        put((2 * include - 1)[:, None]),
        put(np.array([one.total for one in filters], dtype=np.int32)),
    )


def _to_device(array: IntArray, device: torch.device) -> Tensor:
    """A tensor of a read-only array; on the CPU it shares the memory, and nobody writes to it."""
    owner = array.base
    if isinstance(owner, np.ndarray) and owner.shape == array.shape and owner.flags.writeable:
        array = owner
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)
