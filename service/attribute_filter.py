"""Attribute filters: which items of a catalogue meet conditions on their attributes.

An attribute's values are looked through once per catalogue and kept as columns; a filter is then a
few array operations, and its mask is kept for the requests that send it again. All of it blocks
and belongs in a thread.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from gti_core.catalog import ItemCatalog
from gti_core.types import BoolArray, LongArray
from service.engine.base import Selection

Scalar: TypeAlias = "str | int | float | bool | None"
_EXACT = 2**53
"""Below this float64 holds every integer, and no integer from here on is rounded to one below."""
_KEPT_CATALOGUES = 2
_KEPT_MASKS = 64
"""Of each catalogue; as many as the engine's worker keeps."""


@dataclass(frozen=True)
class Condition:
    """A condition on one attribute; every part that is given must hold.

    An attribute that is a list has several values, and each part asks for one value that meets it.

    Args:
        attribute: its name.
        any_of: one of these is among the item's values.
        none_of: none of these is.
        at_least: some value is a number not below this.
        at_most: some value is a number not above this; with ``at_least``, the same value.
    """

    attribute: str
    any_of: tuple[Scalar, ...] | None = None
    none_of: tuple[Scalar, ...] | None = None
    at_least: int | float | None = None
    at_most: int | float | None = None


@dataclass(frozen=True, eq=False)
class _Column:
    """One attribute of a whole catalogue.

    Args:
        rows: catalogue rows by value.
        numbers: its numeric values below 2**53, float64.
        number_rows: the catalogue row of each.
        large: the others, as they are, each with its catalogue row.
    """

    rows: dict[tuple[str, object], LongArray]
    numbers: np.ndarray
    number_rows: LongArray
    large: tuple[tuple[int | float, int], ...]


@dataclass(eq=False)
class _Known:
    """What was worked out for one catalogue."""

    catalog: ItemCatalog
    columns: dict[str, _Column] = field(default_factory=dict)
    masks: OrderedDict[str, BoolArray] = field(default_factory=OrderedDict)


class AttributeFilters:
    """Selections by attributes, for the catalogues served lately. Used from any thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def selection(self, catalog: ItemCatalog, conditions: Sequence[Condition]) -> Selection:
        """The items that meet every condition. O(N) when it is asked for the first time."""
        key = selection_key(conditions)
        with self._lock:
            known = self._of(catalog)
            mask = known.masks.get(key)
            if mask is None:
                mask = np.ones(len(catalog), dtype=np.bool_)
                for condition in conditions:
                    if condition.attribute not in known.columns:
                        column = _column(catalog, condition.attribute)
                        known.columns[condition.attribute] = column
                    mask &= _meets(known.columns[condition.attribute], condition, len(catalog))
                mask.flags.writeable = False
                known.masks[key] = mask
                if len(known.masks) > _KEPT_MASKS:
                    known.masks.popitem(last=False)
            known.masks.move_to_end(key)
        return Selection(key, mask)

    def _of(self, catalog: ItemCatalog) -> _Known:
        # The entry holds the catalogue, so that its address can't come to name another one.
        known = self._known.setdefault(id(catalog), _Known(catalog))
        self._known.move_to_end(id(catalog))
        if len(self._known) > _KEPT_CATALOGUES:
            self._known.popitem(last=False)
        return known


def selection_key(conditions: Sequence[Condition]) -> str:
    """A name of the conditions; the order of conditions and of values does not matter."""
    parts = sorted(
        json.dumps(
            [
                one.attribute,
                None if one.any_of is None else sorted(map(str, map(value_of, one.any_of))),
                None if one.none_of is None else sorted(map(str, map(value_of, one.none_of))),
                one.at_least,
                one.at_most,
            ]
        )
        for one in conditions
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def meets_oracle(attributes: Mapping[str, object], condition: Condition) -> bool:
    """Whether one item's attributes meet a condition, by the plain reading of it."""
    values = values_of(attributes, condition.attribute)
    if condition.any_of is not None and not any(
        value_of(wanted) == value_of(value) for wanted in condition.any_of for value in values
    ):
        return False
    if condition.none_of is not None and any(
        value_of(unwanted) == value_of(value) for unwanted in condition.none_of for value in values
    ):
        return False
    if condition.at_least is None and condition.at_most is None:
        return True
    least, most = _bounds(condition)
    return any(
        isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
        for value in values
    )


def _column(catalog: ItemCatalog, attribute: str) -> _Column:
    rows: defaultdict[tuple[str, object], list[int]] = defaultdict(list)
    numbers: list[float] = []
    number_rows: list[int] = []
    large: list[tuple[int | float, int]] = []
    for row, item in enumerate(catalog.items):
        for value in values_of(item.attributes, attribute):
            rows[value_of(value)].append(row)
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            if abs(value) >= _EXACT:
                large.append((value, row))
            else:
                numbers.append(float(value))
                number_rows.append(row)
    return _Column(
        {value: np.array(found, dtype=np.int64) for value, found in rows.items()},
        np.array(numbers, dtype=np.float64),
        np.array(number_rows, dtype=np.int64),
        tuple(large),
    )


def _meets(column: _Column, condition: Condition, count: int) -> BoolArray:
    mask = np.ones(count, dtype=np.bool_)
    if condition.any_of is not None:
        mask &= _having(column, condition.any_of, count)
    if condition.none_of is not None:
        mask &= ~_having(column, condition.none_of, count)
    if condition.at_least is not None or condition.at_most is not None:
        least, most = _bounds(condition)
        inside = np.zeros(count, dtype=np.bool_)
        fits = (column.numbers >= _as_float(least)) & (column.numbers <= _as_float(most))
        inside[column.number_rows[fits]] = True
        inside[[row for value, row in column.large if least <= value <= most]] = True
        mask &= inside
    return mask


def _having(column: _Column, wanted: Sequence[Scalar], count: int) -> BoolArray:
    mask = np.zeros(count, dtype=np.bool_)
    for value in wanted:
        mask[column.rows.get(value_of(value), [])] = True
    return mask


def _bounds(condition: Condition) -> tuple[int | float, int | float]:
    least = -math.inf if condition.at_least is None else condition.at_least
    most = math.inf if condition.at_most is None else condition.at_most
    return least, most


def _as_float(bound: int | float) -> float:
    """A bound for values below 2**53, which float64 holds exactly.

    A larger one is beyond all of them, and may be too large for a float.
    """
    return float(min(max(bound, -2 * _EXACT), 2 * _EXACT))


def values_of(attributes: Mapping[str, object], name: str) -> list[object]:
    """The values of an attribute: those of a list, one, or none."""
    value = attributes.get(name, [])
    return list(value) if isinstance(value, (list, tuple)) else [value]


def value_of(value: object) -> tuple[str, object]:
    """A value as JSON tells values apart: true is not 1, but 1.0 is."""
    if isinstance(value, bool):
        return "bool", value
    if isinstance(value, (int, float)):
        # An integer where it is one, so that 1 and 1.0 are written alike; never a rounded one.
        whole = isinstance(value, float) and value.is_integer()
        return "number", int(value) if whole else value
    return type(value).__name__, value
