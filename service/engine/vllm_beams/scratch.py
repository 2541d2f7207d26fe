"""KV blocks for beams: behind the scheduler's own, never shared with a request.

A beam row sees its prompt's full blocks where they lie. The prompt's last, partial block is copied
into the row's first scratch block, and the row's codes are written behind it. Between two levels
the survivors take over the codes of their parents.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class ScratchError(RuntimeError):
    """The KV cache is laid out in a way that this code was not written for."""


@dataclass(frozen=True)
class Geometry:
    """Where the scratch blocks lie.

    Args:
        first: number of the first scratch block.
        count: how many there are.
        block_size: tokens per block.
    """

    first: int
    count: int
    block_size: int

    def blocks_per_row(self, tail: int, codes: int) -> int:
        """Blocks that hold a prompt's last ``tail`` tokens and ``codes`` codes, at least 1."""
        return max(1, -(-(tail + codes) // self.block_size))


class Scratch:
    """The scratch blocks of every attention layer.

    Args:
        layers: vLLM attention layers, KV caches bound.
        first: number of the first scratch block.
        count: how many there are.
        block_size: tokens per block.

    Raises:
        ScratchError: layers whose caches differ in shape, or no room where the blocks should be.
    """

    def __init__(self, layers: Sequence[Any], first: int, count: int, block_size: int) -> None:
        caches = [layer.kv_cache for layer in layers]
        shapes = {(tuple(cache.shape), cache.stride(), cache.dtype) for cache in caches}
        if len(shapes) != 1:
            raise ScratchError(f"attention layers with {len(shapes)} kinds of KV cache")
        blocks = caches[0].shape[0]
        if first + count != blocks:
            raise ScratchError(f"the KV cache has {blocks} blocks, {first} + {count} expected")
        self.geometry = Geometry(first, count, block_size)
        self._stack = _stacked(caches)
        self._elements = _elements_of_tokens(layers[0], block_size)

    def copy_tail(self, source: Tensor, first: int, stride: int, rows: int) -> None:
        """Copy a prompt's last block into the first block of each of ``rows`` rows.

        Args:
            source: the prompt's block, [1] integer; stays on its device.
            first: the first row's first block.
            stride: blocks per row.
            rows: number of rows.
        """
        end = first + stride * rows
        self._stack[:, first:end:stride] = self._stack[:, source.long()]

    def move_tokens(
        self, from_blocks: Tensor, from_offsets: Tensor, to_blocks: Tensor, to_offsets: Tensor
    ) -> None:
        """Copy single tokens' keys and values, all layers; sources are read before any write.

        Args:
            from_blocks: [M] int64. from_offsets: [M], place inside the block. to_*: the same.
        """
        head, token, channel = self._elements
        values = self._stack[
            :, from_blocks[:, None], head, token[from_offsets], channel[from_offsets]
        ]
        self._stack[:, to_blocks[:, None], head, token[to_offsets], channel[to_offsets]] = values


def _stacked(caches: Sequence[Tensor]) -> Tensor:
    """All layers' caches as one view, [layers, blocks, heads, tokens, channels].

    Raises:
        ScratchError: they do not lie in one allocation at equal distances.
    """
    base = caches[0]
    offsets = [cache.storage_offset() for cache in caches]
    step = offsets[1] - offsets[0] if len(offsets) > 1 else 0
    regular = all(offset == offsets[0] + i * step for i, offset in enumerate(offsets))
    storage = base.untyped_storage().data_ptr()
    if not regular or any(cache.untyped_storage().data_ptr() != storage for cache in caches):
        raise ScratchError("the layers' KV caches do not lie in one allocation")
    return base.as_strided((len(caches), *base.shape), (step, *base.stride()), offsets[0])


def _elements_of_tokens(layer: Any, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which elements of a block [heads, tokens, channels] hold the keys and values of a token.

    Backends arrange the inside of a block as suits their kernels, so a copy of two blocks of the
    real cache is written by the backend itself and looked at.

    Returns:
        Index tensors: heads [E], and tokens and channels [block_size, E].
    """
    cache = layer.kv_cache[:2].clone(memory_format=torch.preserve_format)
    if cache.stride() != layer.kv_cache.stride():
        probe = torch.empty_strided(
            cache.shape, layer.kv_cache.stride(), dtype=cache.dtype, device=cache.device
        )
        cache = probe
    heads, width = cache.shape[1], cache.shape[3] // 2
    found = []
    for offset in range(block_size):
        cache.zero_()
        ones = torch.ones(1, heads, width, dtype=layer.kv_cache.dtype, device=cache.device)
        slot = torch.tensor([block_size + offset], dtype=torch.int64, device=cache.device)
        layer.impl.do_kv_cache_update(layer, ones, ones, cache, slot)
        if bool((cache[0] != 0).any()):
            raise ScratchError("a token was written outside its block")
        found.append(torch.nonzero(cache[1] != 0))
    counts = {len(elements) for elements in found}
    if counts != {heads * width * 2}:
        raise ScratchError(f"a token takes {sorted(counts)} elements, {heads * width * 2} expected")
    table = torch.stack(found)
    # nonzero sorts by head first, and each head holds as many elements of every token.
    head = table[0, :, 0]
    if not bool((table[:, :, 0] == head).all()):
        raise ScratchError("tokens are spread unevenly over the heads")
    return head, table[:, :, 1], table[:, :, 2]


def enlarged(kv_cache_config: Any, more: int) -> Any:
    """A copy of vLLM's KV cache configuration with ``more`` blocks.

    Raises:
        ScratchError: several groups of layers, or an arrangement of blocks that is not known.
    """
    if len(kv_cache_config.kv_cache_groups) != 1:
        raise ScratchError(
            f"{len(kv_cache_config.kv_cache_groups)} groups of attention layers; models with "
            "mixed attention are not supported"
        )
    bigger = copy.deepcopy(kv_cache_config)
    blocks = kv_cache_config.num_blocks
    bigger.num_blocks = blocks + more
    for tensor in bigger.kv_cache_tensors:
        if tensor.size % blocks or tensor.offset:
            raise ScratchError(f"a KV cache of {tensor.size} bytes in {blocks} blocks")
        tensor.size = tensor.size // blocks * (blocks + more)
        if tensor.layer_stride == tensor.block_stride * blocks:
            # Each layer has a region of its own.
            tensor.layer_stride = tensor.block_stride * (blocks + more)
        elif len(tensor.layers) > 1 and tensor.layer_stride >= tensor.block_stride:
            raise ScratchError("the KV cache's layers are arranged in an unknown way")
    return bigger
