"""Deltas: what a version of the catalogue changes in the one before it.

A version is the base bundle and a chain of deltas. A delta is a JSON document and, where codes were
activated, a safetensors block with their rows; both are named by one digest, so that a version
means the same thing on every replica and after every restart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from gti_core.catalog import Item, ItemCatalog
from gti_core.data.dataset import text_record
from gti_core.decoding.constraint import ConstraintIndex
from gti_core.errors import BundleError, CatalogError, GtiError
from gti_core.types import BoolArray, FloatArray, IntArray, ItemId, JsonDict, LongArray
from gti_core.vocabulary import SidVocabulary

FORMAT = "gti-delta/1"


@dataclass(frozen=True, eq=False)
class Rows:
    """Values of activated SID rows.

    Args:
        numbers: rows inside the SID block, ascending, shape [M], int64.
        rows_in: input rows, shape [M, D], float32.
        rows_out: output rows, the same shape; None for tied models.

    Raises:
        BundleError: shapes that disagree, numbers out of order, or values that are not finite.
    """

    numbers: LongArray
    rows_in: FloatArray
    rows_out: FloatArray | None = None

    def __post_init__(self) -> None:
        blocks = [self.rows_in] + ([] if self.rows_out is None else [self.rows_out])
        if self.numbers.ndim != 1 or any(
            block.ndim != 2 or block.shape != self.rows_in.shape for block in blocks
        ):
            raise BundleError("rows must have shape [M, D], their numbers [M]")
        if len(self.numbers) != len(self.rows_in):
            raise BundleError(f"{len(self.numbers)} numbers for {len(self.rows_in)} rows")
        if len(self.numbers) and (self.numbers[0] < 0 or (np.diff(self.numbers) <= 0).any()):
            raise BundleError("row numbers must ascend from 0")
        if not all(np.isfinite(block).all() for block in blocks):
            raise BundleError("rows hold values that are not finite")

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def output(self) -> FloatArray:
        """The rows that logits are made with, [M, D]: the input rows where tied."""
        return self.rows_in if self.rows_out is None else self.rows_out

    def chosen(self, which: BoolArray) -> Rows:
        """Some of the rows. ``which`` is a mask, [M]."""
        rows_out = None if self.rows_out is None else self.rows_out[which]
        return Rows(self.numbers[which], self.rows_in[which], rows_out)

    def joined(self, other: Rows | None) -> Rows:
        """These rows and others with other numbers."""
        if other is None:
            return self
        if (self.rows_out is None) != (other.rows_out is None):
            raise BundleError("rows of tied and of untied models can't be joined")
        numbers = np.concatenate([self.numbers, other.numbers])
        order = np.argsort(numbers)
        rows_out = None
        if self.rows_out is not None and other.rows_out is not None:
            rows_out = np.concatenate([self.rows_out, other.rows_out])[order]
        rows_in = np.concatenate([self.rows_in, other.rows_in])[order]
        return Rows(numbers[order], rows_in, rows_out)


@dataclass(frozen=True, eq=False)
class Delta:
    """What a version changes.

    Args:
        vocabulary: of the new version.
        added: new rows of the catalogue, in order; one with a known id supersedes that item's row.
        retired: items that go out of service.
        restored: items that come back into service.
        attributes: new attributes, in place of all the item has.
        rows: values of the codes that become active.
    """

    vocabulary: SidVocabulary
    added: tuple[Item, ...] = ()
    retired: tuple[ItemId, ...] = ()
    restored: tuple[ItemId, ...] = ()
    attributes: Mapping[ItemId, Mapping[str, object]] = field(default_factory=dict)
    rows: Rows | None = None

    def document(self) -> str:
        """Everything but the rows, as JSON text."""
        added = [
            {**text_record(item), "sid": list(item.sid), "popularity": item.popularity}
            for item in self.added
        ]
        return json.dumps(
            {
                "format": FORMAT,
                "vocabulary": self.vocabulary.to_json(),
                "added": added,
                "retired": list(self.retired),
                "restored": list(self.restored),
                "attributes": {name: dict(value) for name, value in self.attributes.items()},
            },
            allow_nan=False,
        )

    def block(self) -> bytes | None:
        """The rows as safetensors; None when there are none."""
        from safetensors.numpy import save

        if self.rows is None:
            return None
        tensors = {"numbers": self.rows.numbers, "rows_in": self.rows.rows_in}
        if self.rows.rows_out is not None:
            tensors["rows_out"] = self.rows.rows_out
        block: bytes = save({name: np.ascontiguousarray(array) for name, array in tensors.items()})
        return block

    @classmethod
    def parse(cls, document: str, block: bytes | None) -> Delta:
        """Inverse of `document` and `block`. Raises BundleError for anything else."""
        try:
            data: JsonDict = json.loads(document)
            if data["format"] != FORMAT:
                raise BundleError(f"a delta of format {data['format']!r}, expected {FORMAT!r}")
            return cls(
                SidVocabulary.from_json(data["vocabulary"]),
                tuple(_item(record) for record in data["added"]),
                tuple(str(name) for name in data["retired"]),
                tuple(str(name) for name in data["restored"]),
                {str(name): dict(value) for name, value in data["attributes"].items()},
                None if block is None else _rows(block),
            )
        except BundleError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, GtiError) as error:
            raise BundleError(f"not a delta: {error!r}") from error


def digest(document: str, block: bytes | None) -> str:
    """sha256 over a delta's two parts, hex."""
    whole = hashlib.sha256(hashlib.sha256(document.encode()).digest())
    whole.update(hashlib.sha256(block or b"").digest())
    return whole.hexdigest()


@dataclass(frozen=True, eq=False)
class CatalogState:
    """What a version consists of, the base's weights aside.

    Args:
        catalog: the items.
        vocabulary: the SID vocabulary.
        index: constraint index over ``catalog.sids``, with what is in service.
        rows: values of the codes activated since the base; None when there are none.
    """

    catalog: ItemCatalog
    vocabulary: SidVocabulary
    index: ConstraintIndex
    rows: Rows | None = None

    @classmethod
    def of(cls, catalog: ItemCatalog, vocabulary: SidVocabulary) -> CatalogState:
        """The state of a base bundle: everything is in service."""
        return cls(catalog, vocabulary, ConstraintIndex(catalog.sids))

    def apply(self, delta: Delta) -> CatalogState:
        """The next version's state; this one stays as it is. O(N), nothing is sorted.

        Raises:
            BundleError: the delta does not fit: unknown items, SIDs that are taken or not active.
        """
        try:
            self._check(delta)
            catalog, index = self.catalog, self.index
            if delta.attributes:
                changed = {}
                for name, attributes in delta.attributes.items():
                    row = catalog.row(name)
                    changed[row] = replace(catalog.items[row], attributes=attributes)
                catalog = catalog.changed(changed)
            for names, available in ((delta.retired, False), (delta.restored, True)):
                index = index.with_availability([catalog.row(name) for name in names], available)
            if delta.added:
                known = [item.item_id for item in delta.added if item.item_id in catalog]
                gone = [catalog.row(name) for name in known]
                catalog = catalog.extended(delta.added)
                sids: IntArray = np.array([item.sid for item in delta.added], dtype=np.int32)
                index = index.with_availability(gone, False).inserted_many(sids)
        except (KeyError, CatalogError) as error:
            raise BundleError(f"the delta does not fit: {error}") from error
        rows = self.rows if delta.rows is None else delta.rows.joined(self.rows)
        return CatalogState(catalog, delta.vocabulary, index, rows)

    def _check(self, delta: Delta) -> None:
        before, after = self.vocabulary, delta.vocabulary
        if (after.sizes, after.first_token_id) != (before.sizes, before.first_token_id):
            raise BundleError("the delta's vocabulary has other rows")
        if any(new < old for new, old in zip(after.active, before.active, strict=True)):
            raise BundleError("the delta's vocabulary takes active codes back")
        for item in delta.added:
            if not after.is_active(item.sid):
                raise BundleError(f"item {item.item_id!r}: SID {item.sid} uses a code not active")
        activated = np.flatnonzero(after.active_mask & ~before.active_mask)
        given = np.empty(0, np.int64) if delta.rows is None else delta.rows.numbers
        if not np.array_equal(activated, given):
            raise BundleError(f"{len(activated)} codes are activated, {len(given)} rows are given")


def _item(record: JsonDict) -> Item:
    return Item(
        str(record["item_id"]),
        tuple(int(code) for code in record["sid"]),
        str(record["title"]),
        str(record["description"]),
        dict(record["attributes"]),
        int(record["popularity"]),
    )


def _rows(block: bytes) -> Rows:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(block)
    except SafetensorError as error:
        raise BundleError(f"rows that can't be read: {error}") from error
    rows_out = tensors.get("rows_out")
    return Rows(
        tensors["numbers"].astype(np.int64),
        tensors["rows_in"].astype(np.float32),
        None if rows_out is None else rows_out.astype(np.float32),
    )
