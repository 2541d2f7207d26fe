"""Readers of items and interactions from RecBole, CSV, TSV, JSON and Parquet files.

Formats are in `gti_core.data.tables`. Ids are strings whatever the file holds. Every error names
the file, and where known the row and the column.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from gti_core.data.dataset import Interaction, ItemText
from gti_core.data.tables import AUTO, KEY, Record, Table, open_table
from gti_core.data.values import (
    as_attribute,
    as_id,
    as_long_text,
    as_number,
    as_text,
    as_timestamp,
)
from gti_core.errors import DataError
from gti_core.types import ItemId

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_INTEGER = re.compile(r"-?(0|[1-9]\d{0,14})")
_DECIMAL = re.compile(r"-?(0|[1-9]\d{0,14})(\.\d+)?")
_DESCRIPTION = "description"


@dataclass(frozen=True)
class InteractionColumns:
    """Column names of a log.

    Args:
        user: the user's id.
        item: the item's id.
        timestamp: a number, a date or ISO 8601 text; None: the file's order is the order of
            events.
    """

    user: str = "user_id"
    item: str = "item_id"
    timestamp: str | None = "timestamp"


@dataclass(frozen=True)
class ItemColumns:
    """Column names of an item file.

    Args:
        item: the item's id. In a JSON object of objects without this column, the entry's key.
        title: text shown to people.
        description: longer text; None: the column "description" where there is one.
        attributes: further columns to keep, under their own names.
    """

    item: str = "item_id"
    title: str = "title"
    description: str | None = None
    attributes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SequenceColumns:
    """Column names of a RecBole sequence file: one row a user.

    Args:
        user: the user's id.
        history: item ids before the last one, oldest first, blanks between them.
        target: the last item's id.
    """

    user: str = "user_id"
    history: str = "item_id_list"
    target: str = "item_id"


def read_interactions(
    path: str | Path,
    *,
    format: str = AUTO,
    columns: InteractionColumns | None = None,
) -> list[Interaction]:
    """The interactions of a log in the file's order.

    Args:
        path: the file.
        format: a format of `gti_core.data.tables`, or "auto" to go by the suffix.
        columns: column names, `InteractionColumns()` by default.

    Raises:
        DataError: a missing file or column, a bad value, a ragged row, bytes that are not UTF-8,
            no row at all.
    """
    names = columns or InteractionColumns()
    wanted = [names.user, names.item, *([names.timestamp] if names.timestamp is not None else [])]
    table = open_table(path, format, wanted)
    for name in wanted:
        table.require(name)
    interactions = []
    for row, record in table.rows:
        user_id = _value(table, row, record, names.user, as_id)
        item_id = _value(table, row, record, names.item, as_id)
        timestamp = (
            None
            if names.timestamp is None
            else _value(table, row, record, names.timestamp, as_timestamp)
        )
        interactions.append(Interaction(user_id, item_id, timestamp))
    if not interactions:
        raise DataError("the file has no rows", file=table.file)
    return interactions


def read_items(
    path: str | Path,
    *,
    format: str = AUTO,
    columns: ItemColumns | None = None,
    skip_blank: bool = False,
) -> tuple[ItemText, ...]:
    """The items of a file in its order.

    Attributes keep their type: RecBole columns by the header (``token_seq`` becomes a list of
    strings), JSON and Parquet as they are; a CSV or TSV column becomes int or float when all its
    values are written that way. Empty values are left out.

    Args:
        path: the file.
        format: a format of `gti_core.data.tables`, or "auto" to go by the suffix.
        columns: column names, `ItemColumns()` by default.
        skip_blank: what to do with an item that has neither title nor description, so nothing to
            tell it by. False refuses the file, True leaves the item out and logs the count.

    Raises:
        DataError: as `read_interactions`; also an item id twice, or an attribute column that no
            record has.
    """
    names = columns or ItemColumns()
    wanted = [names.item, names.title, *names.attributes]
    wanted += [names.description] if names.description is not None else []
    table = open_table(path, format, {*wanted, _DESCRIPTION})
    for name in wanted:
        table.require(name)
    items: list[ItemText] = []
    first_row: dict[ItemId, int] = {}
    blank = 0
    for row, record in table.rows:
        key = names.item if names.item in record or KEY not in record else KEY
        item_id = _value(table, row, record, key, as_id)
        if item_id in first_row:
            raise DataError(
                f"item id {item_id!r} appears twice, first in row {first_row[item_id]}",
                file=table.file,
                row=row,
                column=names.item,
            )
        first_row[item_id] = row
        title = _value(table, row, record, names.title, as_text)
        description = ""
        if names.description is not None or _DESCRIPTION in record:
            name = names.description or _DESCRIPTION
            description = _value(table, row, record, name, as_long_text)
        if not title and not description:
            if not skip_blank:
                raise DataError(
                    f"item {item_id!r} has no text", file=table.file, row=row, column=names.title
                )
            blank += 1
            continue
        attributes = _attributes(table, row, record, names.attributes)
        items.append(ItemText(item_id, title, description, attributes))
    if blank:
        logger.warning("%s: left out %d items without text", table.file, blank)
    if not items:
        raise DataError("the file has no items with text", file=table.file)
    for name in names.attributes:
        if not any(name in item.attributes for item in items):
            raise DataError("no item has a value there", file=table.file, column=name)
    if table.format in ("csv", "tsv"):
        return _with_numbers(items, names.attributes)
    return tuple(items)


def read_sequences(
    path: str | Path, *, format: str = AUTO, columns: SequenceColumns | None = None
) -> dict[str, tuple[ItemId, ...]]:
    """Histories from a sequence file: per user the listed items, then the target.

    Args:
        path: the file, for instance a RecBole ``.inter`` with ``item_id_list:token_seq``.
        format: a format of `gti_core.data.tables`, or "auto" to go by the suffix.
        columns: column names, `SequenceColumns()` by default.

    Raises:
        DataError: as `read_interactions`; also a user twice, as in files that hold every prefix
            of a history.
    """
    names = columns or SequenceColumns()
    wanted = (names.user, names.history, names.target)
    table = open_table(path, format, wanted)
    for name in wanted:
        table.require(name)
    histories: dict[str, tuple[ItemId, ...]] = {}
    for row, record in table.rows:
        user_id = _value(table, row, record, names.user, as_id)
        if user_id in histories:
            raise DataError(
                f"user {user_id!r} appears twice; one row must hold a user's whole history",
                file=table.file,
                row=row,
                column=names.user,
            )
        before = _value(table, row, record, names.history, _as_ids)
        histories[user_id] = (*before, _value(table, row, record, names.target, as_id))
    if not histories:
        raise DataError("the file has no rows", file=table.file)
    return histories


def read_id_map(path: str | Path) -> dict[str, str]:
    """A file of two tab-separated columns without a header, such as UniSRec's ``item2index``.

    Returns:
        First column -> second column.

    Raises:
        DataError: no such file, not two fields in a row, a key or a value twice.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError("there is no such file", file=str(path))
    mapping: dict[str, str] = {}
    values: set[str] = set()
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8: {error}", file=str(path)) from error
    for row, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        fields = line.split("\t")
        if len(fields) != 2:
            raise DataError(f"{len(fields)} fields instead of 2", file=str(path), row=row)
        try:
            key, value = as_id(fields[0]), as_id(fields[1])
        except ValueError as error:
            raise DataError(str(error), file=str(path), row=row) from None
        if key in mapping or value in values:
            raise DataError(f"{key!r} or {value!r} appears twice", file=str(path), row=row)
        mapping[key] = value
        values.add(value)
    if not mapping:
        raise DataError("the file is empty", file=str(path))
    return mapping


def renamed(items: Iterable[ItemText], ids: Mapping[ItemId, ItemId]) -> tuple[ItemText, ...]:
    """Items under new ids; an item without a new id is left out."""
    return tuple(replace(item, item_id=ids[item.item_id]) for item in items if item.item_id in ids)


def _value(
    table: Table, row: int, record: Record, column: str, convert: Callable[[object], _T]
) -> _T:
    if column not in record:
        table.missing(column, tuple(record), row)
    try:
        return convert(record[column])
    except ValueError as error:
        raise DataError(str(error), file=table.file, row=row, column=column) from None


def _as_ids(value: object) -> tuple[ItemId, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return tuple(as_id(part) for part in value.split())
    if isinstance(value, list):
        return tuple(as_id(part) for part in value)
    raise ValueError("neither a list nor ids with blanks between them")


def _attributes(
    table: Table, row: int, record: Record, columns: Iterable[str]
) -> dict[str, object]:
    attributes: dict[str, object] = {}
    for name in columns:
        if name not in record:
            continue
        convert = _RECBOLE[table.types[name]] if table.types else as_attribute
        value = _value(table, row, record, name, convert)
        if value is not None and value != []:
            attributes[name] = value
    return attributes


def _number(value: object) -> object:
    text = str(value).strip()
    return as_number(text) if text else None


def _tokens(value: object) -> object:
    return str(value).split()


def _numbers(value: object) -> object:
    return [as_number(part) for part in str(value).split()]


_RECBOLE: Mapping[str, Callable[[object], object]] = {
    "token": as_attribute,
    "token_seq": _tokens,
    "float": _number,
    "float_seq": _numbers,
}


def _with_numbers(items: list[ItemText], columns: Iterable[str]) -> tuple[ItemText, ...]:
    """Items whose numeric attribute columns hold numbers; "007" or one word keeps a column text."""
    kinds: dict[str, type[int] | type[float]] = {}
    for name in columns:
        texts = [str(item.attributes[name]) for item in items if name in item.attributes]
        if all(_INTEGER.fullmatch(text) for text in texts):
            kinds[name] = int
        elif all(_DECIMAL.fullmatch(text) for text in texts):
            kinds[name] = float
    if not kinds:
        return tuple(items)
    return tuple(
        replace(
            item,
            attributes={
                name: kinds[name](str(value)) if name in kinds else value
                for name, value in item.attributes.items()
            },
        )
        for item in items
    )
