from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gti_core.data.dataset import Interaction, ItemText
from gti_core.data.readers import (
    InteractionColumns,
    ItemColumns,
    SequenceColumns,
    read_id_map,
    read_interactions,
    read_items,
    read_sequences,
    renamed,
)
from gti_core.errors import DataError

LOG = [Interaction("u", "7", 5.0), Interaction("1", "8", 4.0)]


def _parquet(path: Path, columns: dict[str, object]) -> None:
    pq.write_table(pa.table(columns), path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("log.csv", "user_id,item_id,timestamp\nu,7,5\n1,8,4\n"),
        ("log.csv", "\ufefftimestamp,user_id,extra,item_id\r\n5,u,x,7\r\n\r\n4,1,,8"),
        ("log.csv", 'user_id,item_id,timestamp\n"u","7","5"\n"1",8,4\n'),
        ("log.TSV", "user_id\titem_id\ttimestamp\nu\t7\t5\n1\t8\t4\n"),
        (
            "log.inter",
            "\ufeffuser_id:token\titem_id:token\trating:float\ttimestamp:float\r\n"
            "u\t7\t3\t5\r\n1\t8\t3\t4\r\n",
        ),
        (
            "log.jsonl",
            '{"user_id": "u", "item_id": 7, "timestamp": 5}\n\n'
            '{"user_id": 1, "item_id": "8", "timestamp": "4", "more": null}\n',
        ),
        (
            "log.json",
            '[{"user_id": "u", "item_id": 7.0, "timestamp": 5},\n'
            '{"user_id": 1, "item_id": "8", "timestamp": 4.0}]',
        ),
    ],
)
def test_one_log_in_every_text_format(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode())

    assert read_interactions(path) == LOG


def test_log_from_parquet_with_nullable_integers_as_floats(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    _parquet(path, {"user_id": ["u", "1"], "item_id": [7.0, 8.0], "timestamp": [5, 4]})

    assert read_interactions(path) == LOG


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC"])
def test_parquet_times(tmp_path: Path, unit: str, zone: str | None) -> None:
    path = tmp_path / "log.parquet"
    times = pa.array([dt.datetime(1970, 1, 1, 0, 0, 5)], pa.timestamp("us"))
    times = times.cast(pa.timestamp(unit))
    if zone:
        times = times.cast(pa.timestamp(unit, zone))
    _parquet(path, {"user_id": [1], "item_id": [2], "timestamp": times})

    assert read_interactions(path) == [Interaction("1", "2", 5.0)]


def test_own_column_names_and_no_times(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("who,what\nu,7\n")

    log = read_interactions(path, format="csv", columns=InteractionColumns("who", "what", None))

    assert log == [Interaction("u", "7", None)]


BAD_LOGS: list[tuple[str, bytes, int | None, str | None, str]] = [
    ("log.csv", b"", None, None, "the file is empty"),
    ("log.csv", b"\n\n", 1, None, "no header"),
    ("log.csv", b"\xef\xbb\xbf", 1, None, "no header"),
    ("log.csv", b"user_id,item_id,timestamp\n", None, None, "no rows"),
    ("log.csv", b"user_id,item_id,time\nu,7,1\n", 1, "timestamp", "user_id, item_id, time"),
    ("log.csv", b"user_id,item_id,item_id\nu,7,1\n", 1, "item_id", "twice"),
    ("log.csv", b"user_id,,timestamp\nu,7,1\n", 1, None, "without a name"),
    ("log.csv", b"user_id,item_id,timestamp\nu,7,1\nu,8\n", 3, None, "2 fields, the header has 3"),
    ("log.csv", b"user_id,item_id,timestamp\nu,7,1,9\n", 2, None, "4 fields, the header has 3"),
    ("log.csv", b"user_id,item_id,timestamp\nu,7,1\nu,,2\n", 3, "item_id", "the id is empty"),
    ("log.csv", b"user_id,item_id,timestamp\nu,7,soon\n", 2, "timestamp", "'soon'"),
    ("log.csv", b'user_id,item_id,timestamp\nu,"7\n,8",1\nu,7,x\n', 2, "item_id", "control"),
    ("log.csv", b'user_id,item_id,timestamp\nu,7,1\nu,"8,1\nu,9,1\n', 3, None, "not CSV"),
    ("log.tsv", b'user_id\titem_id\ttimestamp\n"u" x\t7\t1\n', 2, None, "not TSV"),
    ("log.csv", b"user_id,item_id,timestamp\nu,7,1\nu,\xe9,1\n", 3, None, "0xe9 at position 2"),
    ("log.csv", "user_id,item_id\nu,7\n".encode("utf-16"), 1, None, "not UTF-8"),
    ("log.inter", b"user_id\titem_id:token\n", 1, None, "name:type"),
    ("log.inter", b"user_id:token\titem_id:int\n", 1, None, "'item_id:int'"),
    (
        "log.inter",
        b"user_id:token\titem_id:token\ttimestamp:float\nu\t7\t1\n\t\t\n",
        3,
        "user_id",
        "empty",
    ),
    ("log.jsonl", b'{"user_id": 1, "item_id": 2}\n', 1, "timestamp", "user_id, item_id"),
    ("log.jsonl", b'{"user_id": 1, "item_id": 2, "timestamp": 3}\n{"user', 2, None, "not JSON"),
    ("log.jsonl", b'{"user_id": 1, "item_id": 2, "timestamp": NaN}', 1, None, "NaN is not JSON"),
    ("log.jsonl", b'{"user_id": 1, "item_id": true, "timestamp": 3}', 1, "item_id", "True"),
    ("log.jsonl", b'{"user_id": "\\ud800", "item_id": 2}', 1, "user_id", "Unicode"),
    ("log.jsonl", b"[1, 2]\n", 1, None, "not a JSON object"),
    ("log.jsonl", b"[" * 100_000, 1, None, "not JSON"),
    ("log.json", b"7", None, None, "neither a list nor an object"),
    ("log.json", b"[{}, 7]", 1, "user_id", "columns are: none"),
    ("log.parquet", b"PAR1 but no more", None, None, "not a Parquet file"),
    ("log.xlsx", b"PK", None, None, "'.xlsx' names no format"),
]


@pytest.mark.parametrize(("name", "content", "row", "column", "message"), BAD_LOGS)
def test_bad_logs_name_file_row_and_column(
    tmp_path: Path, name: str, content: bytes, row: int | None, column: str | None, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(DataError) as caught:
        read_interactions(path)

    assert message in str(caught.value)
    assert (caught.value.file, caught.value.row, caught.value.column) == (str(path), row, column)


def test_missing_file_and_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_interactions(tmp_path / "log.csv")
    with pytest.raises(DataError, match="unknown format 'xml'"):
        read_interactions(tmp_path / "log.csv", format="xml")


@pytest.mark.parametrize("bad", [None, 7.5, float("nan")])
def test_bad_parquet_ids_name_the_record(tmp_path: Path, bad: float | None) -> None:
    path = tmp_path / "log.parquet"
    _parquet(path, {"user_id": [1, 1], "item_id": [7.0, bad], "timestamp": [1, 2]})

    with pytest.raises(DataError) as caught:
        read_interactions(path)

    assert (caught.value.row, caught.value.column) == (2, "item_id")


def test_truncated_parquet(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    _parquet(path, {"user_id": [1], "item_id": [2], "timestamp": [3]})
    path.write_bytes(path.read_bytes()[:-10])

    with pytest.raises(DataError, match="not a Parquet file"):
        read_interactions(path)


def test_items_from_csv_take_numbers_where_a_column_is_numeric(tmp_path: Path) -> None:
    path = tmp_path / "items.csv"
    path.write_text(
        "item_id,title,description,year,price,code,mixed\n"
        '1,"A, B","line one\nline two",1995,2.5,007,3\n'
        '2," 19"" rack ",,,3,008,x\n'
    )

    items = read_items(path, columns=ItemColumns(attributes=("year", "price", "code", "mixed")))

    assert items == (
        ItemText(
            "1",
            "A, B",
            "line one line two",
            {"year": 1995, "price": 2.5, "code": "007", "mixed": "3"},
        ),
        ItemText("2", '19" rack', "", {"price": 3.0, "code": "008", "mixed": "x"}),
    )
    assert type(items[0].attributes["year"]) is int


def test_items_from_recbole_take_types_from_the_header(tmp_path: Path) -> None:
    path = tmp_path / "toy.item"
    path.write_text(
        "item_id:token\ttitle:token_seq\tyear:token\tclass:token_seq\tscore:float\tv:float_seq\n"
        '1\tToy "Story"\t1995\tChildren\'s Sci-Fi\t4.5\t1 2.5\n'
        "2\tHeat\t\t\t\t\n"
    )

    items = read_items(path, columns=ItemColumns(attributes=("year", "class", "score", "v")))

    assert items == (
        ItemText(
            "1",
            'Toy "Story"',
            "",
            {"year": "1995", "class": ["Children's", "Sci-Fi"], "score": 4.5, "v": [1.0, 2.5]},
        ),
        ItemText("2", "Heat", "", {}),
    )


def test_items_from_recbole_bad_number(tmp_path: Path) -> None:
    path = tmp_path / "toy.item"
    path.write_text("item_id:token\ttitle:token_seq\tscore:float\n1\tA\tgood\n")

    with pytest.raises(DataError, match=r"row 2, column 'score': 'good' is not a number"):
        read_items(path, columns=ItemColumns(attributes=("score",)))


def test_items_from_jsonl_keep_their_types(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    records = [
        {"item_id": 1, "title": "A", "genres": ["x", "y"], "year": 1995, "unused": 1},
        {"item_id": "2", "title": None, "description": ["One.", "Two."]},
    ]
    path.write_text("\n".join(json.dumps(record) for record in records))

    items = read_items(path, columns=ItemColumns(attributes=("genres", "year")))

    assert items == (
        ItemText("1", "A", "", {"genres": ["x", "y"], "year": 1995}),
        ItemText("2", "", "One. Two.", {}),
    )


def test_items_from_an_object_of_objects_are_known_by_key(tmp_path: Path) -> None:
    path = tmp_path / "items.json"
    path.write_text('{"0": {"title": "A", "text": "[\'One.\', \'Two.\']"}, "1": {"title": "B"}}')

    with pytest.raises(DataError) as caught:
        read_items(path, columns=ItemColumns(description="text"))
    assert (caught.value.row, caught.value.column) == (2, "text")

    assert read_items(path) == (ItemText("0", "A"), ItemText("1", "B"))


def test_items_from_parquet(tmp_path: Path) -> None:
    path = tmp_path / "items.pq"
    _parquet(
        path,
        {
            "item_id": pa.array([1, 2], pa.int32()),
            "title": pa.array(["A", "B"]).dictionary_encode(),
            "tags": [["x"], []],
            "day": [dt.date(2020, 1, 2), None],
            "blob": [b"\xff", b""],
        },
    )

    items = read_items(path, columns=ItemColumns(attributes=("tags", "day")))

    assert items == (
        ItemText("1", "A", "", {"tags": ["x"], "day": "2020-01-02"}),
        ItemText("2", "B", "", {}),
    )
    with pytest.raises(DataError, match=r"row 1, column 'blob': .* can't be an attribute"):
        read_items(path, columns=ItemColumns(attributes=("blob",)))


def test_items_without_text_are_refused_or_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "items.csv"
    path.write_text("item_id,title\n1,A\n2, \n3,C\n")

    with pytest.raises(DataError, match=r"row 3, column 'title': item '2' has no text"):
        read_items(path)

    assert [item.item_id for item in read_items(path, skip_blank=True)] == ["1", "3"]
    assert "left out 1 items without text" in caplog.text


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("item_id,title\n1,A\n 1 ,B\n", ItemColumns(), "row 3, column 'item_id': item id '1'"),
        ("id,title\n1,A\n", ItemColumns(), "column 'item_id': there is no such column"),
        ("item_id,name\n1,A\n", ItemColumns(), "columns are: item_id, name"),
        ("item_id,title\n1,A\n", ItemColumns(description="text"), "column 'text'"),
        ("item_id,title\n1,A\n", ItemColumns(attributes=("year",)), "column 'year'"),
        ("item_id,title,year\n1,A,\n", ItemColumns(attributes=("year",)), "no item has a value"),
        ("item_id,title\n", ItemColumns(), "no items with text"),
    ],
)
def test_bad_item_files(tmp_path: Path, text: str, columns: ItemColumns, message: str) -> None:
    path = tmp_path / "items.csv"
    path.write_text(text)

    with pytest.raises(DataError) as caught:
        read_items(path, columns=columns)

    assert message in str(caught.value)


def test_sequences_end_with_the_target(tmp_path: Path) -> None:
    path = tmp_path / "toy.test.inter"
    path.write_text("user_id:token\titem_id_list:token_seq\titem_id:token\n0\t1 2 1\t3\n9\t\t4\n")

    assert read_sequences(path) == {"0": ("1", "2", "1", "3"), "9": ("4",)}


def test_sequences_from_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "toy.jsonl"
    path.write_text('{"u": 0, "before": [1, "2"], "next": 3}\n{"u": 1, "before": null, "next": 4}')

    histories = read_sequences(path, columns=SequenceColumns("u", "before", "next"))

    assert histories == {"0": ("1", "2", "3"), "1": ("4",)}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0\t1\t2\n0\t1 2\t3\n", "row 3, column 'user_id': user '0' appears twice"),
        ("0\t1\t\n", "row 2, column 'item_id': the id is empty"),
        ("", "no rows"),
    ],
)
def test_bad_sequences(tmp_path: Path, rows: str, message: str) -> None:
    path = tmp_path / "toy.inter"
    path.write_text("user_id:token\titem_id_list:token_seq\titem_id:token\n" + rows)

    with pytest.raises(DataError) as caught:
        read_sequences(path)

    assert message in str(caught.value)


def test_sequence_file_is_not_a_log(tmp_path: Path) -> None:
    path = tmp_path / "toy.inter"
    path.write_text("user_id:token\titem_id_list:token_seq\titem_id:token\n0\t1\t2\n")

    with pytest.raises(DataError, match="columns are: user_id, item_id_list, item_id"):
        read_interactions(path)


def test_id_map_renames_items(tmp_path: Path) -> None:
    path = tmp_path / "toy.item2index"
    path.write_bytes(b"\xef\xbb\xbfB00A\t0\r\nB00B\t1\r\n")

    ids = read_id_map(path)

    assert ids == {"B00A": "0", "B00B": "1"}
    items = (ItemText("B00B", "b", "d", {"x": 1}), ItemText("B00Z", "z"))
    assert renamed(items, ids) == (ItemText("1", "b", "d", {"x": 1}),)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.write_text("\n"), "the file is empty"),
        (lambda path: path.write_text("a\t1\nb\n"), "row 2: 1 fields instead of 2"),
        (lambda path: path.write_text("a\t1\na\t2\n"), "row 2: .* appears twice"),
        (lambda path: path.write_text("a\t1\nb\t1\n"), "row 2: .* appears twice"),
        (lambda path: path.write_text("a\t1\nb\t\n"), "row 2: the id is empty"),
        (lambda path: path.write_bytes(b"\xff\t1"), "not UTF-8"),
    ],
)
def test_bad_id_maps(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "map"
    make(path)

    with pytest.raises(DataError, match=message):
        read_id_map(path)
