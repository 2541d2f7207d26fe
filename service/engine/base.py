"""What the rest of the service knows of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Protocol

import numpy as np

from gti_core.bundle.delta import Rows
from gti_core.catalog import Item, ItemCatalog
from gti_core.decoding import ConstraintIndex, ScoredRow
from gti_core.decoding.filters import Filter
from gti_core.types import BoolArray, IntArray, JsonDict
from gti_core.vocabulary import SidVocabulary
from service.engine.timings import Load, Timings


class EngineError(Exception):
    """The engine could not answer."""


class EngineDeadError(EngineError):
    """The engine is gone and will answer nothing more."""


class PromptTooLongError(EngineError):
    """The prompt is longer than the model allows."""


@dataclass(frozen=True)
class ServingModel:
    """Everything an engine needs to serve one version.

    Args:
        model_dir: Hugging Face folder of the merged model (backbone, adapter and SID rows).
        vocabulary: the SID vocabulary; its active rows take part in the softmax.
        catalog: the items.
        index: constraint index over ``catalog.sids``; knows what is in service.
        max_tokens: longest prompt plus one SID, tokens.
        version: number of the version; equal numbers mean equal content.
    """

    model_dir: Path
    vocabulary: SidVocabulary
    catalog: ItemCatalog
    index: ConstraintIndex
    max_tokens: int
    version: int = 1

    @cached_property
    def popular(self) -> tuple[Item, ...]:
        """Items in service, most popular first; equals keep row order. O(N log N) at first."""
        in_service = compress(self.catalog.items, self.index.available.tolist())
        return tuple(sorted(in_service, key=lambda item: -item.popularity))

    @cached_property
    def active_token_ids(self) -> list[int]:
        """Token ids of the active SID rows, ascending."""
        first = self.vocabulary.first_token_id
        return [first + int(row) for row in np.flatnonzero(self.vocabulary.active_mask)]


@dataclass(frozen=True, eq=False)
class Selection:
    """A set of items that many requests share, such as those with an attribute.

    Args:
        key: names it; within a version equal keys mean equal masks.
        mask: bool [N] by catalogue row, True for items that may come back.
    """

    key: str
    mask: BoolArray


@dataclass(frozen=True)
class DecodeRequest:
    """One constrained beam search.

    Args:
        model: the version that serves it, of `Engine.model`; rows are those of its catalogue.
        request_id: unique id, also used in logs.
        prompt_token_ids: the whole prompt.
        k: items wanted, 1 <= k <= beam_width.
        beam_width: W.
        excluded_rows: catalogue rows that must not come back.
        included_rows: the only catalogue rows that may come back; None for all.
        selection: items that may come back, as far as the two above let them; None for all.
        timings: filled in by the engine, as far as it can tell.
    """

    model: ServingModel
    request_id: str
    prompt_token_ids: Sequence[int]
    k: int
    beam_width: int
    excluded_rows: frozenset[int] = frozenset()
    included_rows: frozenset[int] | None = None
    selection: Selection | None = None
    timings: Timings = field(default_factory=Timings, repr=False, compare=False)

    def filter(self) -> Filter:
        """Which items of the version may come back. Raises DecodingError for a row it lacks."""
        index = self.model.index
        base = None if self.selection is None else index.selection(self.selection.mask)
        return index.filter(self.excluded_rows, self.included_rows, base)


@dataclass(frozen=True, eq=False)
class CatalogChange:
    """How a version's catalogue differs from its parent's.

    Args:
        parent: number of the version it was made from.
        added: SIDs of the catalogue rows appended, shape [M, L], int32.
        added_available: whether each of them is in service, shape [M], bool.
        retired: catalogue rows that go out of service.
        restored: catalogue rows that come back into service, after ``retired`` is done.
    """

    parent: int
    added: IntArray
    added_available: BoolArray
    retired: tuple[int, ...] = ()
    restored: tuple[int, ...] = ()


def check_same_weights(loaded: ServingModel, model: ServingModel) -> None:
    """Raise EngineError for a version that an engine which loaded ``loaded`` can't serve."""
    for name, old, new in (
        ("SID rows", loaded.vocabulary.sizes, model.vocabulary.sizes),
        ("first SID token", loaded.vocabulary.first_token_id, model.vocabulary.first_token_id),
        ("longest prompt", loaded.max_tokens, model.max_tokens),
    ):
        if old != new:
            raise EngineError(f"version {model.version}: {name} {new}, the engine has {old}")


class Engine(Protocol):
    """A loaded model that answers decode requests. Built with a `ServingModel`."""

    @property
    def name(self) -> str:
        """Short name: vllm, reference or fake."""
        ...

    @property
    def model(self) -> ServingModel:
        """The current version: what new requests get."""
        ...

    async def start(self) -> None:
        """Load the model. Raises EngineError with a clear message when that fails."""
        ...

    async def stop(self) -> None:
        """Free everything, rows published included. Idempotent. It is not started again."""
        ...

    async def publish(
        self,
        model: ServingModel,
        *,
        rows: Rows | None = None,
        change: CatalogChange | None = None,
    ) -> None:
        """Make ``model`` the current version: its rows first, then its snapshot, then all at once.

        Requests under way keep their version. Calls are serialized. A version that is installed
        already, as after a rollback, costs nothing; one that was discarded is installed whole.

        A row that any version has reached keeps its values: it may be given again, unchanged. So
        what is written is in no cached prefix, and no cache is flushed.

        When the awaiting task is cancelled, `model` tells which version is current.

        Args:
            model: the version, over the weights that the engine has loaded.
            rows: values of rows that the version reaches and none before it has; None for none.
            change: how it differs from its parent; saves a rebuild where the parent is installed.

        Raises:
            EngineDeadError: the engine is gone.
            EngineError: the version or its rows don't fit, or something went wrong inside. The
                old version is still the current one.
        """
        ...

    async def decode(self, request: DecodeRequest) -> list[ScoredRow]:
        """Best items first, scores as defined in `gti_core.decoding.beam`.

        Cancelling the awaiting task frees the engine's work.

        Raises:
            PromptTooLongError: the prompt does not fit.
            EngineDeadError: the engine is gone.
            EngineError: anything else that went wrong, a version that is not served any more too.
        """
        ...

    async def check(self) -> None:
        """Raise EngineDeadError when the engine can't serve."""
        ...

    def load(self) -> Load:
        """Requests under way. Costs nothing."""
        ...

    def info(self) -> JsonDict:
        """JSON facts for /v1/info: backend, version of the library, dtype, device, limits."""
        ...
