"""Files of any supported format as a stream of numbered records.

==========  ==========================  ====================================================
format      suffixes                    rows are counted as
==========  ==========================  ====================================================
recbole     .inter .item .user .text    lines, the header is line 1; tab separated, no quotes
csv, tsv    .csv .tsv                   lines, the header is line 1; quotes as in RFC 4180
jsonl       .jsonl .ndjson              lines; one object a line
json        .json                       entries; a list of objects, or an object of objects
parquet     .parquet .pq                records
==========  ==========================  ====================================================

Text is UTF-8, with or without a byte order mark, with LF or CRLF. Blank lines are passed over.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from gti_core.errors import DataError

AUTO = "auto"
SUFFIXES: Mapping[str, str] = {
    ".inter": "recbole",
    ".item": "recbole",
    ".user": "recbole",
    ".text": "recbole",
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
}
FORMATS = (AUTO, "recbole", "csv", "tsv", "jsonl", "json", "parquet")
KEY = "__key__"
"""Column under which the ``json`` format gives an entry's key in an object of objects."""

_BOM = b"\xef\xbb\xbf"
_RECBOLE_TYPES = ("token", "token_seq", "float", "float_seq")
_BATCH = 65_536

Record = Mapping[str, object]


@dataclass(frozen=True)
class Table:
    """An open file.

    Args:
        file: path as the caller gave it.
        format: one of `FORMATS` but for "auto".
        columns: the columns there are; None where each record has its own.
        rows: 1-based row and record, once; raises DataError as it meets a bad row.
        types: RecBole type by column; empty for other formats.
    """

    file: str
    format: str
    columns: tuple[str, ...] | None
    rows: Iterator[tuple[int, Record]]
    types: Mapping[str, str] = field(default_factory=dict)

    def require(self, column: str) -> None:
        """Raises DataError when the file is known not to have the column."""
        if self.columns is not None and column not in self.columns:
            # Text formats name their columns in the first row; Parquet has no such row.
            self.missing(column, self.columns, None if self.format == "parquet" else 1)

    def missing(self, column: str, there: Sequence[str], row: int | None = None) -> NoReturn:
        """Raises the DataError for a column that is not there."""
        names = ", ".join(name for name in there if name != KEY) or "none"
        raise DataError(
            f"there is no such column; columns are: {names}",
            file=self.file,
            row=row,
            column=column,
        )


def open_table(
    path: str | Path, format: str = AUTO, wanted: Collection[str] | None = None
) -> Table:
    """Opens a file for reading, by its suffix or as the format named.

    Args:
        path: the file.
        format: one of `FORMATS`.
        wanted: columns that will be looked at; Parquet reads no others. None: all.

    Raises:
        DataError: no such file, an unknown format or suffix, an empty file, a bad header.
    """
    path = Path(path)
    if format not in FORMATS:
        raise DataError(f"unknown format {format!r}; formats are: {', '.join(FORMATS)}")
    if format == AUTO:
        try:
            format = SUFFIXES[path.suffix.lower()]
        except KeyError:
            raise DataError(
                f"the suffix {path.suffix!r} names no format; suffixes are: {', '.join(SUFFIXES)}; "
                "or name the format",
                file=str(path),
            ) from None
    if not path.is_file():
        raise DataError("there is no such file", file=str(path))
    if path.stat().st_size == 0:
        raise DataError("the file is empty", file=str(path))
    match format:
        case "parquet":
            return _open_parquet(path, wanted)
        case "jsonl":
            return Table(str(path), format, None, _json_lines(path))
        case "json":
            return Table(str(path), format, None, _json_entries(path))
        case "recbole":
            return _open_recbole(path)
        case _:
            return _open_delimited(path, format)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines without their ends; only LF and CRLF end a line."""
    with path.open("rb") as stream:
        for row, line in enumerate(stream, start=1):
            if row == 1:
                line = line.removeprefix(_BOM)
            try:
                yield row, line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
            except UnicodeDecodeError as error:
                byte = line[error.start]
                raise DataError(
                    f"byte 0x{byte:02x} at position {error.start} of the line is not UTF-8",
                    file=str(path),
                    row=row,
                ) from None


def _header(path: Path, names: Sequence[str]) -> tuple[str, ...]:
    stripped = tuple(name.strip() for name in names)
    if not any(stripped):
        raise DataError("the file has no header", file=str(path), row=1)
    for name in stripped:
        if not name:
            raise DataError("the header has a column without a name", file=str(path), row=1)
        if stripped.count(name) > 1:
            raise DataError("the header has this column twice", file=str(path), row=1, column=name)
    return stripped


def _record(path: Path, row: int, columns: Sequence[str], fields: Sequence[str]) -> Record:
    if len(fields) != len(columns):
        raise DataError(
            f"the row has {len(fields)} fields, the header has {len(columns)}",
            file=str(path),
            row=row,
        )
    return dict(zip(columns, fields, strict=True))


def _open_recbole(path: Path) -> Table:
    lines = _lines(path)
    _, first = next(lines)
    names: list[str] = []
    types: dict[str, str] = {}
    for head in _header(path, first.split("\t")):
        name, _, kind = head.rpartition(":")
        if not name or kind not in _RECBOLE_TYPES:
            raise DataError(
                f"the header has {head!r}; a RecBole column is name:type with a type of "
                f"{', '.join(_RECBOLE_TYPES)}",
                file=str(path),
                row=1,
            )
        names.append(name)
        types[name] = kind
    columns = _header(path, names)
    rows = ((row, _record(path, row, columns, line.split("\t"))) for row, line in lines if line)
    return Table(str(path), "recbole", columns, rows, types)


def _open_delimited(path: Path, format: str) -> Table:
    rows = _delimited_rows(path, format)
    _, names = next(rows, (1, []))
    columns = _header(path, names)
    return Table(
        str(path),
        format,
        columns,
        ((row, _record(path, row, columns, fields)) for row, fields in rows),
    )


def _delimited_rows(path: Path, format: str) -> Iterator[tuple[int, list[str]]]:
    # strict: a quote that opens a field and never closes it must not swallow the rest in silence.
    reader = csv.reader(
        (line + "\n" for _, line in _lines(path)),
        delimiter="\t" if format == "tsv" else ",",
        strict=True,
    )
    while True:
        row = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"not {format.upper()}: {error}", file=str(path), row=row) from error
        if fields:
            yield row, fields


def _load_json(path: Path, row: int | None, text: str) -> object:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}", file=str(path), row=row) from error


def _object(path: Path, row: int, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise DataError("not a JSON object", file=str(path), row=row)
    return value


def _json_lines(path: Path) -> Iterator[tuple[int, Record]]:
    for row, line in _lines(path):
        if line.strip():
            yield row, _object(path, row, _load_json(path, row, line))


def _json_entries(path: Path) -> Iterator[tuple[int, Record]]:
    document = _load_json(path, None, "\n".join(line for _, line in _lines(path)))
    if isinstance(document, list):
        for row, value in enumerate(document, start=1):
            yield row, _object(path, row, value)
    elif isinstance(document, dict):
        for row, (key, value) in enumerate(document.items(), start=1):
            yield row, {KEY: key, **_object(path, row, value)}
    else:
        raise DataError("neither a list nor an object", file=str(path))


def _open_parquet(path: Path, wanted: Collection[str] | None) -> Table:
    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"not a Parquet file: {error}", file=str(path)) from error
    columns = _header(path, schema.names)
    read = [name for name in columns if wanted is None or name in wanted]
    return Table(str(path), "parquet", columns, _parquet_rows(path, read))


def _parquet_rows(path: Path, columns: list[str]) -> Iterator[tuple[int, Record]]:
    row = 0
    try:
        with pq.ParquetFile(path) as source:
            for batch in source.iter_batches(batch_size=_BATCH, columns=columns):
                for record in _in_microseconds(batch).to_pylist():
                    row += 1
                    yield row, record
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"can't be read: {error}", file=str(path), row=row + 1) from error


def _in_microseconds(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Nanosecond times cut to microseconds, which Python's datetime can hold."""
    for index, item in enumerate(batch.schema):
        if pa.types.is_timestamp(item.type) and item.type.unit == "ns":
            kind = pa.timestamp("us", item.type.tz)
            values = batch.column(index).cast(kind, safe=False)
            batch = batch.set_column(index, pa.field(item.name, kind), values)
    return batch
