"""Beam rows: which prompt they continue, and where their keys and values lie.

Row ``q * W + w`` is beam w of prompt q, W the widest beam of the turn. Only rows below their own
prompt's width have scratch blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from service.engine.vllm_beams.scratch import Scratch


@dataclass(frozen=True)
class Batch:
    """Tensors of one forward pass over R rows of m new tokens each.

    Args:
        positions: [R * m] int64.
        slots: KV slot of each new token, [R * m] int64.
        lengths: tokens of each row with the new ones, [R] int32.
        table: KV blocks of each row, [R, B] int32.
        longest: largest of ``lengths``, or a bound on it.
    """

    positions: Tensor
    slots: Tensor
    lengths: Tensor
    table: Tensor
    longest: int


class BeamRows:
    """The rows of one turn.

    Args:
        tables: block table of each prompt, [B_q] each.
        lengths: tokens of each prompt.
        widths: beam width of each prompt.
        codes: codes that a row writes at most, L - 1.
        scratch: the beams' KV blocks.
        device: where the tensors live.
    """

    def __init__(
        self,
        tables: Sequence[Tensor],
        lengths: Sequence[int],
        widths: Sequence[int],
        codes: int,
        scratch: Scratch,
        device: torch.device,
    ) -> None:
        size = scratch.geometry.block_size
        self._scratch = scratch
        self._device = device
        self._width = max(widths)
        self._tails = [length % size for length in lengths]
        self._strides = [scratch.geometry.blocks_per_row(tail, codes) for tail in self._tails]
        self._widths = list(widths)
        full = [length // size for length in lengths]
        self._tail_blocks = [table[n : n + 1] for table, n in zip(tables, full, strict=True)]
        self._longest = max(lengths)
        columns = max(full) + max(self._strides)
        table = torch.zeros(len(full), columns, dtype=torch.int32)
        self._table = table.to(device)
        for row, (blocks, count) in enumerate(zip(tables, full, strict=True)):
            self._table[row, :count] = blocks[:count]
        self._full = torch.tensor(full).to(device)
        self._tail = torch.tensor(self._tails).to(device)
        self._length = torch.tensor(list(lengths)).to(device)
        places, homes = [], [0] * (len(full) * self._width)
        block = scratch.geometry.first
        self._firsts = []
        for q, (width, stride) in enumerate(zip(self._widths, self._strides, strict=True)):
            self._firsts.append(block)
            for w in range(width):
                places.append(q * self._width + w)
                homes[places[-1]] = block + w * stride
            block += width * stride
        self.blocks_needed = block - scratch.geometry.first
        self.places = torch.tensor(places).to(device)
        """Rows that exist, places in [Q * W]."""
        self.home = torch.tensor(homes).to(device)
        """First scratch block of each place, [Q * W]; meaningful when all rows fit the pool."""

    @property
    def most_at_once(self) -> int:
        """Rows that fit the pool, whatever their prompt."""
        return max(1, self._scratch.geometry.count // max(self._strides))

    def place_all(self) -> None:
        """Copy each prompt's partial block into its rows' first scratch blocks."""
        for q, tail in enumerate(self._tails):
            if tail:
                self._scratch.copy_tail(
                    self._tail_blocks[q], self._firsts[q], self._strides[q], self._widths[q]
                )

    def place_part(self, count: int) -> Tensor:
        """Give the pool to ``count`` rows of the only prompt; returns their first blocks."""
        first, stride = self._scratch.geometry.first, self._strides[0]
        if self._tails[0]:
            self._scratch.copy_tail(self._tail_blocks[0], first, stride, count)
        return first + stride * torch.arange(count, device=self._device)

    def follow(self, rows: Tensor, parents: Tensor, codes: int) -> None:
        """Take over the keys and values of the parents' first ``codes`` codes.

        Args:
            rows: [R], places.
            parents: beam of the level before that each row continues, [Q, W].
            codes: how many codes the parents have in the cache.
        """
        owner = rows // self._width
        parent = owner * self._width + parents.flatten()[rows]
        offsets = self._tail[owner][:, None] + torch.arange(codes, device=self._device)
        size = self._scratch.geometry.block_size
        inside, step = (offsets % size).flatten(), offsets // size
        self._scratch.move_tokens(
            (self.home[parent][:, None] + step).flatten(),
            inside,
            (self.home[rows][:, None] + step).flatten(),
            inside,
        )

    def batch(self, rows: Tensor, home: Tensor, first: int, count: int) -> Batch:
        """What a forward pass over some rows needs.

        Args:
            rows: [R], places.
            home: first scratch block of each, [R].
            first: codes that the rows have in the cache already.
            count: new codes per row, m.
        """
        size = self._scratch.geometry.block_size
        owner = rows // self._width
        new = first + torch.arange(count, device=self._device)
        offsets = self._tail[owner][:, None] + new
        slots = (home[:, None] + offsets // size) * size + offsets % size
        table = self._table[owner]
        own = torch.arange(max(self._strides), device=self._device)
        columns = self._full[owner][:, None] + own
        # A row with fewer blocks than the widest stride names blocks that it never reads.
        columns = columns.clamp_max(table.shape[1] - 1)
        table.scatter_(1, columns, (home[:, None] + own).int())
        return Batch(
            positions=(self._length[owner][:, None] + new).flatten(),
            slots=slots.flatten(),
            lengths=(self._length[owner] + first + count).int(),
            table=table,
            longest=self._longest + first + count,
        )
