"""The SID rows of a loaded model, written in place while it serves."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gti_core.bundle.delta import Rows
from gti_core.types import FloatArray
from gti_core.vocabulary import SidVocabulary


class LiveRows:
    """The SID blocks of a model's two matrices. Values change, tensors and addresses do not.

    Args:
        embedding: input matrix, shape [V', D]; the SID block ends at or before V'.
        head: output matrix, the same; in a tied model the same tensor.
        vocabulary: says where the SID block lies.

    Raises:
        ValueError: a matrix ends before the SID block does.
    """

    def __init__(self, embedding: Tensor, head: Tensor, vocabulary: SidVocabulary) -> None:
        begin, end = vocabulary.first_token_id, vocabulary.first_token_id + vocabulary.rows
        if min(len(embedding), len(head)) < end:
            raise ValueError(f"the model has {len(embedding)} rows, the SID rows end at {end}")
        self._block_in = embedding.detach()[begin:end]
        tied = head.data_ptr() == embedding.data_ptr()
        self._block_out = None if tied else head.detach()[begin:end]
        self._reached = np.zeros(vocabulary.rows, dtype=np.bool_)

    def reach(self, vocabulary: SidVocabulary) -> None:
        """Say that a version may be asked for: its active rows keep their values from now on."""
        self._reached |= vocabulary.active_mask

    @torch.inference_mode()
    def write(self, rows: Rows) -> None:
        """Write rows that no version has reached; those may be given again that do not change.

        Raises:
            ValueError: rows of another width or outside the block, output rows for a tied model or
                none for an untied one, values beyond the matrix's type, or another value for a row
                that a version has reached. Nothing is written then.
        """
        size, width = self._block_in.shape
        if rows.rows_in.shape[1] != width:
            raise ValueError(f"rows of width {rows.rows_in.shape[1]}, the model's are {width}")
        if len(rows) and rows.numbers[-1] >= size:
            raise ValueError(f"there is no row {rows.numbers[-1]} among {size} SID rows")
        if (self._block_out is None) != (rows.rows_out is None):
            kind = "tied and takes no" if self._block_out is None else "untied and needs"
            raise ValueError(f"the model is {kind} output rows")
        numbers = torch.from_numpy(rows.numbers).to(self._block_in.device)
        kept = torch.from_numpy(self._reached[rows.numbers]).to(self._block_in.device)
        written = [(self._block_in, _cast(rows.rows_in, self._block_in))]
        if self._block_out is not None and rows.rows_out is not None:
            written.append((self._block_out, _cast(rows.rows_out, self._block_out)))
        for block, values in written:
            if not torch.equal(block[numbers[kept]], values[kept]):
                raise ValueError("a row that a version has reached would change")
        for block, values in written:
            block.index_copy_(0, numbers, values)


def _cast(values: FloatArray, like: Tensor) -> Tensor:
    """Rows in a matrix's type and place. Raises ValueError where a value does not fit the type."""
    cast = torch.from_numpy(values).to(like)
    if not bool(torch.isfinite(cast).all()):
        raise ValueError(f"rows hold values beyond {like.dtype}")
    return cast
