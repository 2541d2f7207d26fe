"""What the service and vLLM's worker say to each other. Imports neither vLLM nor torch at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gti_core.vocabulary import SidVocabulary

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


def write_snapshot(
    path: Path, version: int, vocabulary: SidVocabulary, sids: Any, available: Any
) -> None:
    """Write a catalogue snapshot for the worker, as safetensors.

    Args:
        path: file to write.
        version: its number.
        vocabulary: rows and active codes of the version.
        sids: numpy int32 [N, L], by catalogue row.
        available: numpy bool [N]; an unavailable item never comes back.
    """
    from safetensors.numpy import save_file

    metadata = {"version": str(version), "vocabulary": json.dumps(vocabulary.to_json())}
    save_file({"sids": sids, "available": available}, path, metadata)


def read_snapshot(path: Path) -> tuple[int, SidVocabulary, Any, Any]:
    """Inverse of `write_snapshot`: version, vocabulary, sids, available."""
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
