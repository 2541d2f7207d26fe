"""A version of the catalogue as the worker holds it, and searches over it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gti_core.decoding.constraint import ConstraintIndex
from gti_core.decoding.device import (
    DeviceIndex,
    Step,
    advance,
    batch_filters,
    results,
    start,
)
from gti_core.decoding.filters import Admissible, Filter
from gti_core.types import BoolArray, IntArray
from gti_core.vocabulary import SidVocabulary
from service.engine.vllm_beams.wire import BeamRequest, read_snapshot

MOST_SELECTIONS = 16
"""Different selections that the requests of one turn may use."""


class Snapshot:
    """One version: catalogue and vocabulary never change.

    Args:
        version: its number.
        vocabulary: rows and active codes.
        index: constraint index.
        device: where decoding happens.
        previous: tensors of another version, used again where both are the same.
    """

    def __init__(
        self,
        version: int,
        vocabulary: SidVocabulary,
        index: ConstraintIndex,
        device: torch.device,
        previous: DeviceIndex | None = None,
    ) -> None:
        self.version = version
        self.vocabulary = vocabulary
        self.index = index
        self.device_index = DeviceIndex(
            index, device, base_slots=MOST_SELECTIONS, previous=previous
        )
        self.selections: dict[str, Admissible] = {}
        """By key; the service says when to make and when to forget one."""
        self.inactive = torch.from_numpy(~vocabulary.active_mask).to(device)
        """Rows that take no part in the softmax, [S] bool."""
        self.device = device

    @classmethod
    def load(cls, path: Path, device: torch.device) -> Snapshot:
        """Read a file of `service.engine.vllm_beams.wire.write_snapshot`."""
        version, vocabulary, sids, available = read_snapshot(path)
        return cls(version, vocabulary, ConstraintIndex(sids, available), device)

    def followed(
        self,
        version: int,
        vocabulary: SidVocabulary,
        added: IntArray,
        available: BoolArray,
        retired: Iterable[int],
        restored: Iterable[int],
    ) -> Snapshot:
        """The snapshot of a version made from this one, without a rebuild.

        Args:
            version: its number.
            vocabulary: its vocabulary.
            added: SIDs of further catalogue rows, [M, L] int32.
            available: whether each of them is in service, [M] bool.
            retired: catalogue rows that go out of service.
            restored: catalogue rows that come back into service.

        Raises:
            CatalogError: a SID that is taken.
            DecodingError: a catalogue row that does not exist.
        """
        index = self.index.inserted_many(added, available)
        index = index.with_availability(retired, False).with_availability(restored, True)
        return Snapshot(version, vocabulary, index, self.device, self.device_index)

    @property
    def counts(self) -> list[int]:
        """Items, and items in service."""
        return [len(self.index), self.index.base.total]

    def filter(self, request: BeamRequest) -> Filter:
        """Which items may come back. Raises KeyError for a selection that is not here."""
        base = None if request.selection is None else self.selections[request.selection]
        return self.index.filter(request.excluded, request.included, base)

    @property
    def levels(self) -> int:
        """L, codes per SID."""
        return self.index.levels


class Search:
    """Searches of one turn, Q requests with up to W beams each; all stand at the same level.

    Args:
        snapshot: the version they run over.
        requests: what is asked.
    """

    def __init__(self, snapshot: Snapshot, requests: Sequence[BeamRequest]) -> None:
        device = snapshot.device
        self._snapshot = snapshot
        self._requests = list(requests)
        self.width = max(request.beam_width for request in requests)
        """W."""
        filters = [snapshot.filter(request) for request in requests]
        self._bases: list[Admissible] = []
        for one in filters:
            if not one.include:  # an include list needs no base of its own
                snapshot.device_index.acquire(one.base)
                self._bases.append(one.base)
        self._filters = batch_filters(snapshot.device_index, filters)
        self._widths = torch.tensor([request.beam_width for request in requests]).to(device)
        self._wanted = torch.tensor([request.k for request in requests]).to(device)
        self._beams: Step = start(snapshot.device_index, self._filters)
        self._level = 0
        self.choosing_s = [0.0] * snapshot.levels
        """Host's seconds for choosing the survivors, per level; added up by the decoder."""
        self.path = torch.zeros(len(requests), 1, 0, dtype=torch.int64, device=device)
        """Token ids of the codes so far, [Q, W, level]; of dead beams, any."""

    @property
    def parents(self) -> Tensor:
        """Beam of the level before that each beam continues, [Q, W] int64."""
        return self._beams.parent

    def alive(self, places: Tensor) -> Tensor:
        """Of some places in [Q * W], those worth computing.

        On a CPU the live ones. Elsewhere all: asking would make the host wait for the device.
        """
        if places.device.type != "cpu":
            return places
        live = (self._beams.hi > self._beams.lo).flatten()
        return places[live[places]]

    def advance_from_prompt(self, logprobs: Tensor) -> None:
        """The first level.

        Args:
            logprobs: [Q, S], log-softmax over the active SID rows after each prompt.
        """
        self._advance(logprobs[:, None])

    def advance(self, places: Tensor, logprobs: Tensor) -> None:
        """One more level.

        Args:
            places: computed beams, places in [Q * W], [R].
            logprobs: their log-softmax over the active SID rows, [R, S].
        """
        self._advance(self._spread(places, logprobs))

    def hopeful(self, places: Tensor, logprobs: Tensor, rest: Tensor) -> Tensor:
        """Before the last level: which further beams can still reach their request's best k.

        A log-probability adds at most 0, so a beam below the k-th best item found so far has
        nothing to add. The best k are the same with and without it.

        Args:
            places: beams computed so far, places in [Q * W], [R].
            logprobs: their log-softmax over the active SID rows, [R, S].
            rest: beams not computed yet, places.

        Returns:
            Those of ``rest`` that are worth computing.
        """
        found = self._step(self._spread(places, logprobs))
        last = self._wanted[:, None] - 1
        bound = found.score.gather(1, last.clamp_max(found.score.shape[1] - 1))
        reach = (self._beams.score >= bound).flatten()
        return rest[reach[rest]]

    def _spread(self, places: Tensor, logprobs: Tensor) -> Tensor:
        """[Q, W, S], -inf where nothing was computed: behind all that was."""
        count, width = self._beams.lo.shape
        every = logprobs.new_full((count * width, logprobs.shape[1]), -torch.inf)
        every[places] = logprobs
        return every.view(count, width, -1)

    def _step(self, logprobs: Tensor) -> Step:
        vocabulary, level = self._snapshot.vocabulary, self._level
        first = vocabulary.offsets[level]
        return advance(
            self._snapshot.device_index,
            level,
            self._beams.lo,
            self._beams.hi,
            self._beams.score,
            logprobs[:, :, first : first + vocabulary.sizes[level]],
            self._filters,
            self._widths,
            beam_width=self.width,
        )

    def _advance(self, logprobs: Tensor) -> None:
        vocabulary, level = self._snapshot.vocabulary, self._level
        first = vocabulary.offsets[level]
        self._beams = self._step(logprobs)
        before = self.path.gather(1, self._beams.parent[:, :, None].expand(-1, -1, level))
        tokens = vocabulary.first_token_id + first + self._beams.code
        self.path = torch.cat([before, tokens[:, :, None]], dim=2)
        self._level += 1

    def close(self) -> None:
        """Let the places of the requests' selections be used again."""
        for base in self._bases:
            self._snapshot.device_index.release(base)
        self._bases = []

    def answers(self) -> list[Tensor]:
        """Per request [k, 2] float64: catalogue row, -1 where nothing is left, and score."""
        rows = results(self._snapshot.device_index, self._beams, self.width)
        found = torch.stack([rows.double(), self._beams.score.double()], dim=2)
        return [found[q, : request.k] for q, request in enumerate(self._requests)]
