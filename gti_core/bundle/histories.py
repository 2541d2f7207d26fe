"""Histories that a bundle carries: contexts to ground new items in, and probes to judge them by."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gti_core.data.splits import LEAVE_ONE_OUT, EvalCase, Split
from gti_core.errors import BundleError
from gti_core.types import ItemId, JsonDict

if TYPE_CHECKING:
    from gti_core.bundle.format import Bundle

HISTORIES = "histories.jsonl"
MOST_USERS = 1024
"""Users whose histories go into a bundle unless told otherwise."""


@dataclass(frozen=True)
class Histories:
    """Histories of a sample of users; who they are is not part of it.

    Args:
        train: item ids, oldest first, as the model was trained on.
        probes: cases that training has not seen.
    """

    train: tuple[tuple[ItemId, ...], ...] = ()
    probes: tuple[EvalCase, ...] = ()


def sample_histories(split: Split, most: int = MOST_USERS, seed: int = 0) -> list[JsonDict]:
    """Records of a random sample of the users with a validation case.

    Args:
        split: what the model was trained on; test cases are never used.
        most: users at most; 0 for none.
        seed: of the draw.

    Returns:
        [{"train": ids, "history": ids, "target": id}], without user ids.
    """
    cases = list(split.valid)
    random.Random(seed).shuffle(cases)
    return [
        {
            "train": list(split.train.get(case.user_id, ())),
            "history": list(case.history),
            "target": case.target,
        }
        for case in cases[:most]
    ]


def histories_of(bundle: Bundle) -> Histories:
    """The histories that a bundle carries or names; empty when there are none.

    Raises:
        BundleError: the file can't be read, or names items that the bundle lacks.
    """
    manifest = bundle.manifest
    entry = manifest.get("histories")
    if entry is None:
        trained_on = manifest.get("trained_on", {})
        joined = manifest["texts"].get("kind") == "movielens-100k"
        if not joined or trained_on.get("split") != LEAVE_ONE_OUT:
            return Histories()
        entry = {"kind": "movielens-100k"}
    match entry.get("kind"):
        case "file":
            records = _read(bundle.path / HISTORIES)
        case "movielens-100k":
            records = _movielens()
        case other:
            raise BundleError(f"unknown kind of histories {other!r}")
    found = _histories(records)
    known = {item.item_id for item in bundle.catalog}
    for history in (*found.train, *((*case.history, case.target) for case in found.probes)):
        unknown = set(history) - known
        if unknown:
            raise BundleError(f"{HISTORIES} names item {min(unknown)!r}, which is not there")
    return found


def _movielens() -> Sequence[JsonDict]:
    from gti_core.data.demo import movielens_100k
    from gti_core.data.splits import leave_one_out

    return sample_histories(leave_one_out(movielens_100k().histories))


def _read(path: Path) -> Sequence[JsonDict]:
    try:
        lines = path.read_bytes().split(b"\n")
        return [json.loads(line) for line in lines if line]
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} can't be read: {error}") from error


def _histories(records: Sequence[JsonDict]) -> Histories:
    try:
        train = tuple(tuple(map(str, record["train"])) for record in records)
        probes = tuple(
            EvalCase("", tuple(map(str, record["history"])), str(record["target"]))
            for record in records
        )
    except (KeyError, TypeError) as error:
        raise BundleError(f"{HISTORIES} is malformed: {error!r}") from error
    return Histories(train, probes)
