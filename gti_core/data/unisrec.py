"""Folders in the layout of UniSRec and its successors: Amazon reviews with whole histories.

``NAME.text`` (RecBole atomic: item id, one text "title. category path. brand. "),
``NAME.item2index`` (item id, number in the histories) and ``NAME.test.inter`` (user, history
before the test item, test item). Hou et al., "Towards Universal Sequence Representation Learning
for Recommender Systems", KDD 2022.

The numbers count items by first appearance inside early users' histories, which would tell a model
what follows what; items are therefore known by their own ids here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from gti_core.data.dataset import Dataset, ItemText
from gti_core.data.readers import ItemColumns, read_id_map, read_items, read_sequences
from gti_core.errors import DataError

_JOINT = ". "
_SHARED = 0.8
"""A department is the longest beginning that this share of the category paths has in common."""


def read_unisrec(folder: str | Path, name: str | None = None) -> Dataset:
    """The data set of a folder.

    The text becomes title, description (the category path without the department all have in
    common) and attribute ``brand``.

    Args:
        folder: holds the three files.
        name: NAME; None where the folder holds one data set only.

    Raises:
        DataError: a missing or unreadable file, several data sets and no name, or a history
            with a number that the map lacks.
    """
    folder = Path(folder)
    name = name or _only_name(folder)
    numbers = read_id_map(folder / f"{name}.item2index")
    ids = {number: item_id for item_id, number in numbers.items()}
    sequences = folder / f"{name}.test.inter"
    histories = {}
    for user_id, history in read_sequences(sequences).items():
        try:
            histories[user_id] = tuple(ids[number] for number in history)
        except KeyError as error:
            raise DataError(
                f"user {user_id!r}: item number {error} is not in {name}.item2index",
                file=str(sequences),
            ) from None
    items = read_items(folder / f"{name}.text", columns=ItemColumns("item_id", "text", None, ()))
    return Dataset(name, split_texts(items), histories)


def split_texts(items: Sequence[ItemText]) -> tuple[ItemText, ...]:
    """Items whose title is "title. category path. brand. ", with the three told apart.

    A title or a brand may itself hold ". "; the department that most category paths begin with
    tells where the path starts. A text that does not follow the pattern stays a title.
    """
    bodies = [item.title.strip().removesuffix(".") for item in items]
    department = _department(
        parts[1].strip() for body in bodies if len(parts := body.rsplit(_JOINT, 2)) == 3
    )
    return tuple(_split(item, body, department) for item, body in zip(items, bodies, strict=True))


def _split(item: ItemText, body: str, department: str) -> ItemText:
    mark = f"{_JOINT}{department}" if department else ""
    if mark and mark in body:
        title, _, rest = body.rpartition(mark)
        path, _, brand = rest.partition(_JOINT)
    elif f"{_JOINT}. " in body:
        title, _, brand = body.rpartition(f"{_JOINT}. ")
        path = ""
    else:
        return ItemText(item.item_id, body, item.description, item.attributes)
    attributes = {**item.attributes, "brand": brand.strip()} if brand.strip() else item.attributes
    return ItemText(item.item_id, title.strip() or body, path.strip(), attributes)


def _department(paths: Iterable[str]) -> str:
    """Longest run of first words that nearly all category paths share, "" for none."""
    words = [path.split() for path in paths if path]
    found: list[str] = []
    enough = _SHARED * len(words)
    while words:
        following = Counter(path[len(found)] for path in words if len(path) > len(found))
        word, count = following.most_common(1)[0] if following else ("", 0)
        if count < enough:
            break
        found.append(word)
        words = [path for path in words if path[: len(found)] == found]
    return " ".join(found)


def _only_name(folder: Path) -> str:
    names = sorted(path.stem for path in folder.glob("*.item2index"))
    if len(names) != 1:
        raise DataError(
            f"holds {len(names)} files named *.item2index; name the data set", file=str(folder)
        )
    return names[0]
