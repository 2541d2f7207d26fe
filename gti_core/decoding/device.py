"""Constrained beam search on tensors: many requests at once, no value read back by the host.

`advance` does one level for a batch of requests that stand at the same level. Its shapes depend on
the shapes of its arguments and on the index alone, so it can be captured as a CUDA graph.

Shapes: Q requests, W beams of a request, K codes of a level, C most children of a prefix,
E longest list of a filter, N items, L levels.

Order: children are ranked by their score in float32, equal scores by SID, as `BeamSearch` ranks
them. A child's score and its place in SID order make one int64 that is unique, so that the
order does not depend on how the device's top-k treats equal values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gti_core.decoding.device_index import BatchFilter, DeviceIndex, batch_filters
from gti_core.errors import DecodingError

__all__ = [
    "BatchFilter",
    "DeviceIndex",
    "Found",
    "Step",
    "advance",
    "batch_filters",
    "results",
    "search",
    "start",
]

MAX_ELEMENTS = 1 << 21
"""Children looked at in one piece, all requests together; about 60 bytes each while it lasts."""

_DEAD = -(1 << 31)
_NO_SIGN = (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class Step:
    """The beams of a batch after one level, best first. ``lo < hi`` tells a live beam.

    Args:
        parent: shape [Q, W], int64, the beam before that each beam extends; 0 where dead.
        code: shape [Q, W], int64, the code it adds; 0 where dead.
        lo: shape [Q, W], int32, start of its range in the sorted order; 0 where dead.
        hi: shape [Q, W], int32, end of it; 0 where dead.
        score: shape [Q, W], float32, cumulative log-probability, nats; -inf where dead.
    """

    parent: Tensor
    code: Tensor
    lo: Tensor
    hi: Tensor
    score: Tensor


@dataclass(frozen=True, eq=False)
class Found:
    """What a search found, best first.

    Args:
        rows: shape [Q, W], int64, catalogue rows; -1 where there is none.
        sids: shape [Q, W, L], int64, semantic IDs; 0 where there is none.
        score: shape [Q, W], float32, cumulative log-probabilities, nats; -inf where there is none.
    """

    rows: Tensor
    sids: Tensor
    score: Tensor


def start(index: DeviceIndex, filters: BatchFilter) -> Step:
    """The root of every request, shape [Q, 1]; dead where nothing is admissible."""
    _check_snapshot(index, filters)
    alive = filters.total[:, None] > 0
    zeros = torch.zeros_like(alive, dtype=torch.int64)
    return Step(
        zeros,
        zeros,
        zeros.int(),
        torch.where(alive, index.items, 0).int(),
        torch.where(alive, 0.0, -torch.inf).float(),
    )


def advance(
    index: DeviceIndex,
    level: int,
    lo: Tensor,
    hi: Tensor,
    score: Tensor,
    logprobs: Tensor,
    filters: BatchFilter,
    width: Tensor,
    *,
    beam_width: int | None = None,
    max_elements: int = MAX_ELEMENTS,
) -> Step:
    """Extend every beam by one code and keep each request's best.

    A child is admissible when an admissible item lies below it; no other comes back, so no beam
    dies for want of children. A child whose log-probability is -inf is still a child, behind all
    others. NaN (and +inf) can't be reported from here: such a child comes first and its score is
    NaN, at every level that follows too, so that the scores of the end tell.

    Args:
        index: the snapshot.
        level: 0 <= level < L, the level of the codes to add.
        lo: shape [Q, W], int32, starts of the beams' ranges. Ranges of a request are disjoint.
        hi: shape [Q, W], int32, ends; ``lo == hi`` where a beam is dead.
        score: shape [Q, W], float32, cumulative log-probabilities.
        logprobs: shape [Q, W, K], floating, non-negative strides: log-softmax over the active
            SID rows, cut to the level's codes. A slice of a larger tensor is not copied.
        filters: the requests' filters.
        width: shape [Q], integer, beams to keep per request; those beyond are dead.
        beam_width: beams of the result, at least ``width``. Default: W.
        max_elements: bound on the children looked at in one piece.

    Returns:
        The beams after the level, shape [Q, beam_width].

    Raises:
        DecodingError: shapes that contradict each other, or filters of another snapshot.
    """
    _check_snapshot(index, filters)
    requests, beams = lo.shape
    keep = beams if beam_width is None else beam_width
    _check_shapes(index, level, lo, logprobs, filters, width, keep)
    level_search = _Level.prepare(index, level, lo, hi, score, logprobs, filters)
    fanout = index.fanout[level]
    columns = max(1, min(fanout, max_elements // requests))
    rows = max(1, min(beams, max_elements // (requests * columns)))
    # Keys are unique and order everything, so the best of all are among the best of the pieces.
    best = [
        _top(
            level_search.keys(begin, min(begin + rows, beams), left, min(left + columns, fanout)),
            keep,
        )
        for begin in range(0, beams, rows)
        for left in range(0, fanout, columns)
    ]
    keys = best[0] if len(best) == 1 else _top(torch.cat(best, dim=1), keep)
    if keys.shape[1] < keep:
        keys = torch.nn.functional.pad(keys, (0, keep - keys.shape[1]), value=_DEAD << 32)
    return level_search.step(keys, width)


def results(index: DeviceIndex, beams: Step, k: int) -> Tensor:
    """Catalogue rows of the best ``k`` whole SIDs, shape [Q, k], int64; -1 where there is none."""
    lo, hi = beams.lo[:, :k], beams.hi[:, :k]
    rows = index.rows.index_select(0, lo.reshape(-1)).view(lo.shape)
    found = torch.where(hi > lo, rows, -1).long()
    return torch.nn.functional.pad(found, (0, k - found.shape[1]), value=-1)


def search(
    index: DeviceIndex,
    score: Callable[[int, Tensor], Tensor],
    filters: BatchFilter,
    width: Tensor,
    beam_width: int,
    *,
    max_elements: int = MAX_ELEMENTS,
) -> Found:
    """Run a whole search with a scoring function.

    Args:
        index: the snapshot.
        score: from a level l and prefixes [Q, W, l], int64, to log-probabilities [Q, W, K] of the
            next code. A dead beam's prefix is filled with codes that may mean nothing.
        filters: the requests' filters.
        width: shape [Q], integer, beams to keep per request, at most ``beam_width``.
        beam_width: W.
        max_elements: see `advance`.
    """
    beams = start(index, filters)
    prefix = torch.zeros(*beams.lo.shape, 0, dtype=torch.int64, device=index.device)
    for level in range(index.levels):
        beams = advance(
            index,
            level,
            beams.lo,
            beams.hi,
            beams.score,
            score(level, prefix),
            filters,
            width,
            beam_width=beam_width,
            max_elements=max_elements,
        )
        parents = beams.parent[:, :, None].expand(-1, -1, level)
        prefix = torch.cat([prefix.gather(1, parents), beams.code[:, :, None]], dim=2)
    alive = beams.hi > beams.lo
    return Found(results(index, beams, beam_width), prefix * alive[:, :, None], beams.score)


@dataclass(frozen=True, eq=False)
class _Level:
    """One call of `advance`: beams in the order of their ranges, and where their children are.

    Args:
        order: [Q, W], int64, the caller's number of each beam.
        first: [Q, W], int32, number of each beam's first child among the level's prefixes.
        last: [Q, W], int32, one behind its last child.
        score: [Q, W], float32.
        flat: the log-probabilities' memory, one-dimensional.
        row: [Q, W], where each beam's log-probabilities begin in it.
        stride: step from a code to the next in it.
        listed: per listed item of each request, [Q, E]: its beam, its child, and what it adds to
            the child's count (0 where it lies in no beam); None where no request lists any.
    """

    index: DeviceIndex
    level: int
    filters: BatchFilter
    order: Tensor
    first: Tensor
    last: Tensor
    score: Tensor
    flat: Tensor
    row: Tensor
    stride: int
    listed: tuple[Tensor, Tensor, Tensor] | None

    @classmethod
    def prepare(
        cls,
        index: DeviceIndex,
        level: int,
        lo: Tensor,
        hi: Tensor,
        score: Tensor,
        logprobs: Tensor,
        filters: BatchFilter,
    ) -> _Level:
        inner = level < index.levels - 1
        # Dead beams go last: their empty range at 0 must not hide a live one that starts there.
        begins, order = torch.where(hi > lo, lo, index.items).sort(dim=1)
        lo, hi, score = lo.gather(1, order), hi.gather(1, order), score.gather(1, order)
        ends = torch.stack([lo, hi])
        if inner:
            ends = torch.searchsorted(index.starts[level], ends, out_int32=True)
        first, last = ends.unbind(0)
        listed = None
        if filters.listed.shape[1]:
            # The other way round would be a search in the list for each of the W x C children.
            at = filters.listed
            beam = (torch.searchsorted(begins, at, right=True) - 1).clamp_min(0)
            inside = (at >= lo.gather(1, beam)) & (at < hi.gather(1, beam))
            node = (
                torch.searchsorted(index.starts[level], at, right=True, out_int32=True) - 1
                if inner
                else at
            )
            listed = beam, node - first.gather(1, beam), filters.sign * inside
        sizes = zip(logprobs.shape, logprobs.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in sizes)
        flat = logprobs.as_strided((extent,), (1,), logprobs.storage_offset())
        request, beam_stride, stride = logprobs.stride()
        row = torch.arange(len(lo), device=lo.device)[:, None] * request + order * beam_stride
        if extent < 1 << 31:
            row = row.int()
        return cls(index, level, filters, order, first, last, score, flat, row, stride, listed)

    @property
    def ranks(self) -> int:
        """Places of children in the order of SIDs, W C."""
        return self.first.shape[1] * self.index.fanout[self.level]

    def keys(self, begin: int, end: int, left: int, right: int) -> Tensor:
        """Keys of the children ``left <= c < right`` of the beams ``begin <= w < end``.

        Returns:
            [Q, beams x children], int64: in the upper half the score's bits, so changed that they
            are ordered as the scores are, `_DEAD` where nothing is admissible; in the lower half
            the place in SID order counted from the end.
        """
        index, level, filters = self.index, self.level, self.filters
        device = self.first.device
        shape = (len(self.first), end - begin, right - left)
        numbers = torch.arange(left, right + 1, dtype=torch.int32, device=device)
        # Behind a beam's last child every edge is its end, so what lies between them is empty.
        node = torch.minimum(
            self.first[:, begin:end, None] + numbers, self.last[:, begin:end, None]
        )
        edge = node
        if level < index.levels - 1:
            edge = index.starts[level].index_select(0, node.view(-1)).view(node.shape)
        if len(index.table) > 1:
            edge = edge + filters.offset
        before = index.table.view(-1).index_select(0, edge.view(-1)).view(node.shape)
        count = before[:, :, 1:] - before[:, :, :-1]
        if self.listed is not None:
            beam, child, change = self.listed
            count *= filters.keep
            if shape[1:] != (self.first.shape[1], index.fanout[level]):
                change = change * (
                    (beam >= begin) & (beam < end) & (child >= left) & (child < right)
                )
            place = (beam - begin) * shape[2] + (child - left)
            place = place.clamp(0, shape[1] * shape[2] - 1)
            count.view(shape[0], -1).scatter_add_(1, place, change)
        code = index.codes[level].index_select(0, node[:, :, :-1].reshape(-1)).view(shape)
        at = self.row[:, begin:end, None] + (code if self.stride == 1 else code * self.stride)
        total = self.flat.index_select(0, at.view(-1)).view(shape).float()
        total = total + self.score[:, begin:end, None]
        bits = total.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        bits = _ordered(bits.view(torch.int32)).masked_fill_(count <= 0, _DEAD)
        beams = torch.arange(begin, end, device=device)[:, None] * index.fanout[level]
        place = (self.ranks - 1) - beams - numbers[:-1]
        return (bits.long() << 32).add_(place).view(shape[0], -1)

    def step(self, keys: Tensor, width: Tensor) -> Step:
        """The beams that ``keys`` [Q, W'] stand for, those beyond ``width`` dead."""
        index, level = self.index, self.level
        bits = (keys >> 32).int()
        place = (self.ranks - 1) - (keys & 0xFFFFFFFF)
        beam = place // index.fanout[level]
        child = place - beam * index.fanout[level]
        kept = torch.arange(keys.shape[1], device=keys.device) < width[:, None]
        alive = kept & (bits > _DEAD)
        node = torch.minimum(self.first.gather(1, beam) + child, self.last.gather(1, beam) - 1)
        node = torch.where(alive, node, 0)
        edges = torch.stack([node, node + 1])
        if level < index.levels - 1:
            edges = index.starts[level].index_select(0, edges.view(-1)).view(edges.shape)
        lo, hi = (edges * alive).int().unbind(0)
        code = index.codes[level].index_select(0, node.view(-1)).view(node.shape)
        score = _ordered(bits).view(torch.float32)
        score = torch.where(score == torch.inf, torch.nan, score)
        return Step(
            self.order.gather(1, beam) * alive,
            code.long() * alive,
            lo,
            hi,
            torch.where(alive, score, -torch.inf),
        )


def _ordered(bits: Tensor) -> Tensor:
    """From the bits of float32 to int32 of the same order, and back; no NaN."""
    return bits ^ ((bits >> 31) & _NO_SIGN)


def _top(keys: Tensor, count: int) -> Tensor:
    return keys.topk(min(count, keys.shape[1]), dim=1).values


def _check_snapshot(index: DeviceIndex, filters: BatchFilter) -> None:
    if filters.snapshot is not index.snapshot:
        raise DecodingError("the filters were made for another snapshot")


def _check_shapes(
    index: DeviceIndex,
    level: int,
    lo: Tensor,
    logprobs: Tensor,
    filters: BatchFilter,
    width: Tensor,
    keep: int,
) -> None:
    if not 0 <= level < index.levels:
        raise DecodingError(f"there is no level {level} among {index.levels}")
    if logprobs.ndim != 3 or logprobs.shape[:2] != lo.shape:
        raise DecodingError(
            f"expected log-probabilities of shape {(*lo.shape, 'K')}, got {tuple(logprobs.shape)}"
        )
    if logprobs.shape[2] < index.code_bounds[level]:
        raise DecodingError(
            f"level {level} has codes up to {index.code_bounds[level] - 1}, the log-probabilities "
            f"have {logprobs.shape[2]} columns"
        )
    if len(filters.total) != len(lo) or width.shape != lo.shape[:1]:
        raise DecodingError(
            f"{len(filters.total)} filters and widths of shape {tuple(width.shape)} for "
            f"{len(lo)} requests"
        )
    if keep < 1:
        raise DecodingError(f"beam_width must be at least 1, got {keep}")
    if lo.shape[1] * index.fanout[level] >= 1 << 32:
        raise DecodingError("more than 2^32 children per request")
