"""Sorted arrays with a few entries put in between: the next snapshot's arrays in one pass."""

from __future__ import annotations

import numpy as np

from gti_core.types import BoolArray, IntArray, LongArray


def frozen(array: IntArray) -> IntArray:
    """A read-only view of an array, or the array itself where it is read-only already."""
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def spliced(
    array: IntArray,
    at: LongArray,
    added: LongArray | None = None,
    values: LongArray | None = None,
    insert: BoolArray | None = None,
) -> IntArray:
    """A copy of ``array`` with M changes, without looking at the entries in between.

    Change i inserts ``values[i]`` before the old entry ``at[i]`` (where ``insert[i]``) and adds
    ``added[i]`` to every old entry from there on. Inserted values are taken as they are.

    Args:
        array: shape [P], int32.
        at: shape [M], ascending, 0 <= at <= P.
        added: shape [M]; default: nothing is added.
        values: shape [M]; default: nothing is inserted.
        insert: shape [M], bool; default: every value is inserted.

    Returns:
        int32, shape [P + number of insertions].
    """
    inserted = 0
    if values is not None:
        inserted = len(at) if insert is None else int(insert.sum())
    out = np.empty(len(array) + inserted, dtype=np.int32)
    begin = shift = gap = 0
    for i in range(len(at)):
        end = int(at[i])
        _copy(array, begin, end, shift, gap, out)
        if values is not None and (insert is None or insert[i]):
            out[end + gap] = values[i]
            gap += 1
        if added is not None:
            shift += int(added[i])
        begin = end
    _copy(array, begin, len(array), shift, gap, out)
    return out


def _copy(array: IntArray, begin: int, end: int, shift: int, gap: int, out: IntArray) -> None:
    if shift:
        np.add(array[begin:end], np.int32(shift), out=out[begin + gap : end + gap])
    else:
        out[begin + gap : end + gap] = array[begin:end]
