"""PreparedData: items and a split as one folder, the input of every later stage."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from gti_core.data.dataset import ItemText, text_record
from gti_core.data.files import json_lines, sync_folder, write_atomic
from gti_core.data.splits import CHRONOLOGICAL, LEAVE_ONE_OUT, EvalCase, Split
from gti_core.errors import DataError, PipelineError
from gti_core.types import ItemId, JsonDict

FORMAT = "gti-prepared/1"
_META = "meta.json"
_FILES = ("items.jsonl", "train.jsonl", "valid.jsonl", "test.jsonl")
_T = TypeVar("_T")


@dataclass(frozen=True)
class PreparedData:
    """Items and a split.

    Args:
        name: for people.
        items: the items in row order.
        split: training histories and cases over these items.

    Raises:
        DataError: duplicate item ids, or an id in the split that no item has.
    """

    name: str
    items: tuple[ItemText, ...]
    split: Split

    def __post_init__(self) -> None:
        if not self.items:
            raise DataError(f"{self.name}: there is no item")
        known = {item.item_id for item in self.items}
        if len(known) != len(self.items):
            twice = Counter(item.item_id for item in self.items).most_common(1)[0][0]
            raise DataError(f"item id {twice!r} appears twice")
        used = {item_id for items in self.split.train.values() for item_id in items}
        for case in (*self.split.valid, *self.split.test):
            used.update(case.history)
            used.add(case.target)
        if not used <= known:
            raise DataError(f"item {min(used - known)!r} of the split is not among the items")

    @cached_property
    def rows(self) -> dict[ItemId, int]:
        """Row of each item id in ``items``."""
        return {item.item_id: row for row, item in enumerate(self.items)}

    @cached_property
    def popularity(self) -> dict[ItemId, int]:
        """Interactions of each item in the training histories; 0 where there is none."""
        counts = Counter(item_id for items in self.split.train.values() for item_id in items)
        return {item.item_id: counts[item.item_id] for item in self.items}

    @property
    def counts(self) -> dict[str, int]:
        """Sizes, as they stand in meta.json."""
        return {
            "items": len(self.items),
            "train_users": len(self.split.train),
            "train_interactions": sum(len(items) for items in self.split.train.values()),
            "valid_cases": len(self.split.valid),
            "test_cases": len(self.split.test),
        }

    def save(self, folder: Path) -> None:
        """Writes the folder; it must be new, empty, or hold prepared data to be replaced.

        meta.json carries the digests of the other files, is removed first and written last: a
        folder with a part of another run in it does not load.

        Raises:
            PipelineError: the folder holds something else.
        """
        folder.mkdir(parents=True, exist_ok=True)
        meta = folder / _META
        if any(folder.iterdir()) and not meta.exists() and not self._leftover(folder):
            raise PipelineError(f"{folder}: is not empty and holds no prepared data")
        if meta.exists():
            _read_meta(meta)
            meta.unlink()
            sync_folder(folder)
        records: tuple[list[JsonDict], ...] = (
            [text_record(item) for item in self.items],
            [{"user_id": u, "items": list(items)} for u, items in self.split.train.items()],
            [_case_record(case) for case in self.split.valid],
            [_case_record(case) for case in self.split.test],
        )
        digests = {}
        for name, lines in zip(_FILES, records, strict=True):
            content = json_lines(lines)
            digests[name] = hashlib.sha256(content).hexdigest()
            write_atomic(folder / name, content)
        document = {
            "format": FORMAT,
            "name": self.name,
            "split": self.split.kind,
            "counts": self.counts,
            "sha256": digests,
        }
        write_atomic(meta, (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode())

    @staticmethod
    def _leftover(folder: Path) -> bool:
        """Whether a folder holds nothing but files of an interrupted `save`."""
        names = (path.name.lstrip(".") for path in folder.iterdir())
        return all(name.startswith((*_FILES, _META)) for name in names)

    @classmethod
    def load(cls, folder: Path) -> PreparedData:
        """Reads the folder and checks it.

        Raises:
            PipelineError: no prepared data there, an unfinished save, another format, or a file
                that differs from its digest.
            DataError: a record that can't be used; names file and row.
        """
        meta = folder / _META
        if not meta.is_file():
            raise PipelineError(
                f"{folder}: no prepared data there ({_META} is missing; an interrupted "
                "preparation leaves it out)"
            )
        document = _read_meta(meta)
        items = _records(folder / _FILES[0], document, _parse_item)
        train: dict[str, tuple[ItemId, ...]] = {}
        for user_id, history in _records(folder / _FILES[1], document, _parse_history):
            if user_id in train:
                raise DataError(f"user {user_id!r} appears twice", file=str(folder / _FILES[1]))
            train[user_id] = history
        valid = _records(folder / _FILES[2], document, _parse_case)
        test = _records(folder / _FILES[3], document, _parse_case)
        split = Split(str(document["split"]), train, tuple(valid), tuple(test))
        return cls(str(document["name"]), tuple(items), split)


def _case_record(case: EvalCase) -> JsonDict:
    return {"user_id": case.user_id, "history": list(case.history), "target": case.target}


def _parse_item(record: JsonDict) -> ItemText:
    attributes = record["attributes"]
    if not isinstance(attributes, dict):
        raise TypeError("attributes are not an object")
    return ItemText(
        _text(record["item_id"]), _text(record["title"]), _text(record["description"]), attributes
    )


def _parse_history(record: JsonDict) -> tuple[str, tuple[ItemId, ...]]:
    return _text(record["user_id"]), _texts(record["items"])


def _parse_case(record: JsonDict) -> EvalCase:
    return EvalCase(_text(record["user_id"]), _texts(record["history"]), _text(record["target"]))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    return tuple(_text(x) for x in value)


def _read_meta(meta: Path) -> JsonDict:
    try:
        document = json.loads(meta.read_bytes())
    except ValueError as error:
        raise PipelineError(f"{meta}: not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PipelineError(f"{meta}: not prepared data of format {FORMAT}")
    if document.get("split") not in (LEAVE_ONE_OUT, CHRONOLOGICAL):
        raise PipelineError(f"{meta}: unknown split {document.get('split')!r}")
    if not isinstance(document.get("sha256"), dict) or "name" not in document:
        raise PipelineError(f"{meta}: name or sha256 is missing")
    return document


def _records(path: Path, document: JsonDict, parse: Callable[[JsonDict], _T]) -> list[_T]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PipelineError(f"{path}: can't be read: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != document["sha256"].get(path.name):
        raise PipelineError(f"{path}: differs from its digest in {_META}; prepare the data again")
    parsed = []
    for row, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            parsed.append(parse(json.loads(line)))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"not a usable record: {error!r}", file=str(path), row=row) from error
        except DataError as error:
            raise DataError(str(error), file=str(path), row=row) from error
    return parsed
