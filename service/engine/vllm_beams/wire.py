"""What the service and vLLM's worker say to each other. Imports neither vLLM nor torch at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gti_core.bundle.delta import Rows
from gti_core.types import FloatArray
from gti_core.vocabulary import SidVocabulary
from service.engine.base import ServingModel
from service.engine.timings import Timings

ARCHITECTURES = {
    "LlamaForCausalLM": "GtiLlamaForCausalLM",
    "Qwen3ForCausalLM": "GtiQwen3ForCausalLM",
    "GPT2LMHeadModel": "GtiGPT2LMHeadModel",
}
"""Architecture in a model's config.json -> the class that decodes beams."""

SCRATCH_BLOCKS = "gti_scratch_blocks"
"""Key of vLLM's ``additional_config``: KV blocks for beams."""

FAILED = -2.0
"""Row number in an answer that stands for a failure inside the worker."""

TIMES = -10.0
"""Row numbers of an answer from here downwards hold times in seconds, not items: ``TIMES - i`` the
i-th of `BEGAN`, `PREFILL`, `BEAMS` and, from `CONSTRAINT` on, one per level."""
BEGAN, PREFILL, BEAMS, CONSTRAINT = range(4)


@dataclass(frozen=True)
class BeamRequest:
    """One search, as it travels in a pooling request's parameters.

    Args:
        version: version of catalogue and vocabulary that must answer.
        k: items wanted.
        beam_width: W.
        excluded: catalogue rows that must not come back.
        included: the only catalogue rows that may; None for all.
        selection: key of a selection that the worker has; None for all items in service.
    """

    version: int
    k: int
    beam_width: int
    excluded: Sequence[int] = ()
    included: Sequence[int] | None = None
    selection: str | None = None

    def to_params(self) -> dict[str, Any]:
        """Plain values for ``PoolingParams.extra_kwargs``."""
        return {
            "version": self.version,
            "k": self.k,
            "beam_width": self.beam_width,
            "excluded": list(self.excluded),
            "included": None if self.included is None else list(self.included),
            "selection": self.selection,
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> BeamRequest:
        """Inverse of `to_params`."""
        return cls(
            int(params["version"]),
            int(params["k"]),
            int(params["beam_width"]),
            [int(row) for row in params["excluded"]],
            None if params["included"] is None else [int(row) for row in params["included"]],
            params["selection"],
        )


def write_snapshot(path: Path, model: ServingModel) -> None:
    """Write a version's catalogue for the worker, as safetensors. O(N), blocks."""
    from safetensors.numpy import save_file

    metadata = {
        "version": str(model.version),
        "vocabulary": json.dumps(model.vocabulary.to_json()),
    }
    arrays = {"sids": model.catalog.sids, "available": model.index.available}
    save_file(arrays, path, metadata)


def read_snapshot(path: Path) -> tuple[int, SidVocabulary, Any, Any]:
    """What `write_snapshot` wrote: version, vocabulary, SIDs [N, L] and availability [N]."""
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        metadata: dict[str, str] = file.metadata()
        vocabulary = SidVocabulary.from_json(json.loads(metadata["vocabulary"]))
        return (
            int(metadata["version"]),
            vocabulary,
            file.get_tensor("sids"),
            file.get_tensor("available"),
        )


def float32_bytes(rows: FloatArray) -> bytes:
    """Rows [M, D] as they travel."""
    return np.ascontiguousarray(rows, dtype=np.float32).tobytes()


def rows_of(numbers: Sequence[int], rows_in: bytes, rows_out: bytes | None) -> Rows:
    """Rows that came as `float32_bytes`. Raises BundleError as `Rows` does, or for no rows."""

    def block(data: bytes) -> FloatArray:
        return np.frombuffer(data, np.float32).reshape(len(numbers), -1).copy()

    outputs = None if rows_out is None else block(rows_out)
    return Rows(np.array(numbers, dtype=np.int64), block(rows_in), outputs)


def read_times(rows: Sequence[Sequence[float]], timings: Timings) -> None:
    """Take the worker's times out of an answer, as far as it holds any.

    Args:
        rows: the answer, (row number, value) each.
        timings: filled in.
    """
    times = {int(TIMES - row): value for row, value in rows if row <= TIMES}
    if BEGAN in times:
        timings.queue_s = max(0.0, times[BEGAN] - timings.asked)
    timings.prefill_s, timings.beams_s = times.get(PREFILL), times.get(BEAMS)
    levels = sorted(place for place in times if place >= CONSTRAINT)
    timings.constraint_s = [times[place] for place in levels]
