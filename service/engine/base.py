"""What the rest of the service knows of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gti_core.catalog import ItemCatalog
from gti_core.decoding import ConstraintIndex, ScoredRow
from gti_core.decoding.filters import Filter
from gti_core.types import BoolArray, JsonDict
from gti_core.vocabulary import SidVocabulary


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
        index: constraint index over ``catalog.sids``.
        max_tokens: longest prompt plus one SID, tokens.
        version: number of the version.
    """

    model_dir: Path
    vocabulary: SidVocabulary
    catalog: ItemCatalog
    index: ConstraintIndex
    max_tokens: int
    version: int = 1


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
        request_id: unique id, also used in logs.
        prompt_token_ids: the whole prompt.
        k: items wanted, 1 <= k <= beam_width.
        beam_width: W.
        excluded_rows: catalogue rows that must not come back.
        included_rows: the only catalogue rows that may come back; None for all.
        selection: items that may come back, as far as the two above let them; None for all.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    k: int
    beam_width: int
    excluded_rows: frozenset[int] = frozenset()
    included_rows: frozenset[int] | None = None
    selection: Selection | None = None

    def filter(self, index: ConstraintIndex) -> Filter:
        """Which items of a snapshot may come back. Raises DecodingError for a row it lacks."""
        base = None if self.selection is None else index.selection(self.selection.mask)
        return index.filter(self.excluded_rows, self.included_rows, base)


class Engine(Protocol):
    """A loaded model that answers decode requests. Built with a `ServingModel`."""

    @property
    def name(self) -> str:
        """Short name: vllm, reference or fake."""
        ...

    @property
    def model(self) -> ServingModel:
        """The version being served."""
        ...

    async def start(self) -> None:
        """Load the model. Raises EngineError with a clear message when that fails."""
        ...

    async def stop(self) -> None:
        """Free everything. Idempotent."""
        ...

    async def decode(self, request: DecodeRequest) -> list[ScoredRow]:
        """Best items first, scores as defined in `gti_core.decoding.beam`.

        Cancelling the awaiting task frees the engine's work.

        Raises:
            PromptTooLongError: the prompt does not fit.
            EngineDeadError: the engine is gone.
            EngineError: anything else that went wrong inside.
        """
        ...

    async def check(self) -> None:
        """Raise EngineDeadError when the engine can't serve."""
        ...

    def info(self) -> JsonDict:
        """JSON facts for /v1/info: backend, version of the library, dtype, device, limits."""
        ...
