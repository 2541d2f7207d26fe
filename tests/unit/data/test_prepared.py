from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from gti_core.data import prepared
from gti_core.data.dataset import ItemText
from gti_core.data.files import json_lines, write_atomic
from gti_core.data.prepared import PreparedData
from gti_core.data.splits import EvalCase, Split, leave_one_out
from gti_core.errors import DataError, GtiError, PipelineError

ITEMS = (
    ItemText("a", "Ä title with \u2028 a line separator", "text", {"year": 1995, "tags": ["x"]}),
    ItemText("b", "B"),
    ItemText("c", "C"),
)


@pytest.fixture
def data() -> PreparedData:
    return PreparedData("toy", ITEMS, leave_one_out({"u": ("a", "b", "a"), "v": ("a", "c")}))


def test_round_trip_and_layout(data: PreparedData, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "prepared"

    data.save(folder)

    assert PreparedData.load(folder) == data
    assert sorted(path.name for path in folder.iterdir()) == [
        "items.jsonl",
        "meta.json",
        "test.jsonl",
        "train.jsonl",
        "valid.jsonl",
    ]
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["format"] == "gti-prepared/1"
    assert meta["split"] == "leave-one-out"
    assert meta["counts"] == {
        "items": 3,
        "train_users": 2,
        "train_interactions": 3,
        "valid_cases": 1,
        "test_cases": 1,
    }
    assert json.loads((folder / "test.jsonl").read_text()) == {
        "user_id": "u",
        "history": ["a", "b"],
        "target": "a",
    }
    assert (folder / "train.jsonl").read_text() == (
        '{"user_id": "u", "items": ["a"]}\n{"user_id": "v", "items": ["a", "c"]}\n'
    )


def test_rows_and_popularity_come_from_items_and_train(data: PreparedData) -> None:
    assert data.rows == {"a": 0, "b": 1, "c": 2}
    assert data.popularity == {"a": 2, "b": 0, "c": 1}


def test_saving_again_replaces(data: PreparedData, tmp_path: Path) -> None:
    data.save(tmp_path)
    other = PreparedData("other", ITEMS[:2], leave_one_out({"u": ("a", "b", "b")}))

    other.save(tmp_path)

    assert PreparedData.load(tmp_path) == other


def test_a_foreign_folder_is_left_alone(data: PreparedData, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("dear")

    with pytest.raises(PipelineError, match="holds no prepared data"):
        data.save(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("at", range(5))
def test_an_interrupted_save_does_not_load_and_can_be_repeated(
    data: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    data.save(tmp_path)
    calls = 0

    def fail_later(path: Path, content: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls > at:
            (path.parent / f".{path.name}.x.tmp").write_bytes(content[:3])
            raise OSError("disk full")
        write_atomic(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(prepared, "write_atomic", fail_later)
        with pytest.raises(OSError, match="disk full"):
            data.save(tmp_path)
    with pytest.raises(PipelineError, match="interrupted"):
        PreparedData.load(tmp_path)

    data.save(tmp_path)

    assert PreparedData.load(tmp_path) == data


def test_write_atomic_keeps_the_old_file_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "file"
    write_atomic(target, b"old")

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(target, b"new")

    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, "\ud800"])
def test_values_without_a_json_form_are_refused(value: object) -> None:
    with pytest.raises(DataError, match="can't be written as JSON"):
        json_lines([{"value": value}])


def test_loading_nothing(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"meta\.json is missing"):
        PreparedData.load(tmp_path)


def test_a_changed_file_is_found(data: PreparedData, tmp_path: Path) -> None:
    data.save(tmp_path)
    with (tmp_path / "train.jsonl").open("a") as stream:
        stream.write('{"user_id": "z", "items": ["a"]}\n')

    with pytest.raises(PipelineError, match=r"train\.jsonl: differs"):
        PreparedData.load(tmp_path)


def test_a_lost_file_is_found(data: PreparedData, tmp_path: Path) -> None:
    data.save(tmp_path)
    (tmp_path / "valid.jsonl").unlink()

    with pytest.raises(PipelineError, match=r"valid\.jsonl: can't be read"):
        PreparedData.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "gti-prepared/2"}, "not prepared data of format"),
        ({"split": "random"}, "unknown split 'random'"),
        ({"sha256": None}, "sha256 is missing"),
    ],
)
def test_foreign_meta(
    data: PreparedData, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    data.save(tmp_path)
    meta = tmp_path / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | change))

    with pytest.raises(PipelineError, match=message):
        PreparedData.load(tmp_path)


def test_truncated_meta(data: PreparedData, tmp_path: Path) -> None:
    data.save(tmp_path)
    meta = tmp_path / "meta.json"
    meta.write_bytes(meta.read_bytes()[:20])

    with pytest.raises(PipelineError, match="not JSON"):
        PreparedData.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("items.jsonl", '{"item_id": 7, "title": "", "description": "", "attributes": {}}'),
        ("items.jsonl", '{"item_id": "7", "title": "", "description": "", "attributes": []}'),
        ("items.jsonl", '{"item_id": "", "title": "", "description": "", "attributes": {}}'),
        ("train.jsonl", '{"user_id": "u"}'),
        ("train.jsonl", '{"user_id": "u", "items": "ab"}'),
        ("train.jsonl", '{"user_id": "u", "items": []}\n{"user_id": "u", "items": []}'),
        ("test.jsonl", '{"user_id": "u", "history": [1], "target": "a"}'),
        ("test.jsonl", '["u"]'),
        ("test.jsonl", "{"),
    ],
)
def test_bad_records_name_file_and_row(
    data: PreparedData, tmp_path: Path, name: str, record: str
) -> None:
    data.save(tmp_path)
    (tmp_path / name).write_text(record + "\n")
    meta = tmp_path / "meta.json"
    document = json.loads(meta.read_text())
    document["sha256"][name] = hashlib.sha256((record + "\n").encode()).hexdigest()
    meta.write_text(json.dumps(document))

    with pytest.raises(DataError) as caught:
        PreparedData.load(tmp_path)

    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("items", "split"),
    [
        ((), Split("leave-one-out", {}, (), ())),
        ((ITEMS[0], ITEMS[0]), Split("leave-one-out", {}, (), ())),
        (ITEMS, Split("leave-one-out", {"u": ("x",)}, (), ())),
        (ITEMS, Split("leave-one-out", {}, (EvalCase("u", ("x",), "a"),), ())),
        (ITEMS, Split("leave-one-out", {}, (), (EvalCase("u", ("a",), "x"),))),
    ],
)
def test_contradictions_are_refused(items: tuple[ItemText, ...], split: Split) -> None:
    with pytest.raises(GtiError):
        PreparedData("toy", items, split)
