"""Figures of one arm's SID rows, from plain arrays. No model and no file is read here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gti_core.diagnosis.sample import Sample, spread
from gti_core.grounding.diagnostics import (
    Rsa,
    cosine_matrix,
    effective_rank,
    mean_cosine,
    rsa,
    spectrum,
)
from gti_core.types import FloatArray, LongArray

BEFORE = "before SFT"
AFTER = "after SFT"
TIED = "tied"
INPUT = "input"
OUTPUT = "output"

MAX_PAIRED = 2048
"""Most rows whose pairs are compared; of more, evenly spaced codes are taken."""
MAX_POINTS = 1000
"""Most SID rows on a map."""

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Block:
    """Rows of one side of a model at one time, float32.

    Args:
        state: `BEFORE` or `AFTER` supervised fine-tuning (SFT).
        side: `TIED`, or `INPUT` or `OUTPUT` of an untied model.
        sid: active SID rows, level after level, shape [S, D].
        text: rows of `Sample.text_ids`, shape [*, D].
        words: rows of `Sample.word_ids`, shape [*, D].
    """

    state: str
    side: str
    sid: FloatArray
    text: FloatArray
    words: FloatArray


@dataclass(frozen=True)
class RsaFigures:
    """RSA against the codebooks.

    Args:
        levels: of each level's rows among themselves.
        mean: mean over the levels where it is defined: the figure to compare arms by. Codewords
            of different levels are residuals of different size and are not comparable.
        all: of all rows at once, cosines across levels included, as in the paper. All codebooks
            live in one space, so these exist, but how far the levels lie apart decides them.
    """

    levels: tuple[Rsa, ...]
    mean: Rsa
    all: Rsa


@dataclass(frozen=True)
class Snapshot:
    """Figures of one `Block`.

    Args:
        state: as in `Block`.
        side: as in `Block`.
        effective_rank: of the SID rows.
        mean_cosine: of distinct pairs of SID rows.
        rsa: against the codebooks.
        spectrum: singular values as shares of the largest, shape [min(S, D)].
        cosine: of the sample's text tokens and SID tokens, in this order, shape [*, *].
        centred_cosine: the same after `centred`, text and SID tokens each about their own mean.
        word_points: the words on the map, shape [*, 2].
        sid_points: the SID rows on the map, shape [*, 2]; their levels are `Side.point_levels`.
    """

    state: str
    side: str
    effective_rank: float
    mean_cosine: float
    rsa: RsaFigures
    spectrum: Doubles
    cosine: Doubles
    centred_cosine: Doubles
    word_points: Doubles
    sid_points: Doubles


@dataclass(frozen=True)
class Side:
    """One side of one arm, before and, where it was fine-tuned, after.

    Args:
        side: as in `Block`.
        snapshots: in order of time.
        point_levels: level of each SID point of the maps.
        explained: share of the variance on each of the maps' two axes.
    """

    side: str
    snapshots: tuple[Snapshot, ...]
    point_levels: LongArray
    explained: tuple[float, float]

    def at(self, state: str) -> Snapshot | None:
        """The snapshot of a state, or None."""
        return next((snap for snap in self.snapshots if snap.state == state), None)


def side_figures(blocks: Sequence[Block], codebooks: Sequence[FloatArray], sample: Sample) -> Side:
    """Figures of one side.

    The map is one principal component analysis (PCA) of all blocks' rows, so that positions
    before and after can be compared. Rows enter it at length 1, because the other figures too
    look at directions only.

    Args:
        blocks: of one side, in order of time.
        codebooks: vectors of the active codes, per level, shape [K_l, d].
        sample: what is shown.
    """
    sizes = [len(book) for book in codebooks]
    levels = np.repeat(np.arange(len(sizes)), sizes)
    offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    chosen = [int(offsets[level]) + code for level, code in sample.codes]
    points = spread(len(levels), MAX_POINTS)
    maps, explained = shared_map(
        [np.concatenate([block.words, block.sid[points]]) for block in blocks]
    )
    snapshots = tuple(
        Snapshot(
            block.state,
            block.side,
            effective_rank(block.sid),
            mean_cosine(block.sid),
            rsa_figures(block.sid, codebooks),
            spectrum(block.sid).numpy(),
            cosine_matrix(np.concatenate([block.text, block.sid[chosen]])).numpy(),
            cosine_matrix(
                np.concatenate([centred(block.text), centred(block.sid)[chosen]])
            ).numpy(),
            places[: len(block.words)],
            places[len(block.words) :],
        )
        for block, places in zip(blocks, maps, strict=True)
    )
    return Side(blocks[0].side, snapshots, levels[points], explained)


def centred(rows: FloatArray) -> Doubles:
    """Rows less their mean; what is left of a row that lies on the mean is exactly zero.

    A component that all rows share hides how they differ; this takes it away.

    Args:
        rows: shape [*, D].
    """
    block = rows.astype(np.float64)
    if not len(block):
        return block
    rest = block - block.mean(axis=0)
    # Below float32's resolution a rest is rounding, and its direction means nothing.
    kept = np.linalg.norm(rest, axis=1) > 1e-6 * np.linalg.norm(block, axis=1)
    return np.where(kept[:, None], rest, 0.0)


def rsa_figures(rows: FloatArray, codebooks: Sequence[FloatArray]) -> RsaFigures:
    """RSA per level, their mean, and of all rows at once.

    Args:
        rows: active rows, level after level, shape [S, D].
        codebooks: per level, shape [K_l, d]; S is the sum of all K_l.
    """
    ends = np.cumsum([len(book) for book in codebooks])[:-1]
    levels = []
    for block, book in zip(np.split(rows, ends), codebooks, strict=True):
        kept = spread(len(book), MAX_PAIRED)
        levels.append(rsa(block[kept], book[kept]))
    kept = spread(len(rows), MAX_PAIRED)
    together = rsa(rows[kept], np.concatenate(list(codebooks))[kept])
    mean = Rsa(_mean([r.pearson for r in levels]), _mean([r.spearman for r in levels]))
    return RsaFigures(tuple(levels), mean, together)


def _mean(values: Sequence[float | None]) -> float | None:
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None


def shared_map(blocks: Sequence[FloatArray]) -> tuple[list[Doubles], tuple[float, float]]:
    """Blocks of rows in the plane of their common first two principal components.

    Args:
        blocks: each [*, D]; rows are scaled to length 1, rows of zeros stay.

    Returns:
        Each block's points [*, 2], and the share of the variance on each axis. Rows that are all
        the same lie at the origin.
    """
    from sklearn.decomposition import PCA

    stacked = np.concatenate(list(blocks)).astype(np.float64)
    lengths = np.linalg.norm(stacked, axis=1, keepdims=True)
    stacked /= np.where(lengths > 0, lengths, 1.0)
    points = np.zeros((len(stacked), 2))
    explained = (0.0, 0.0)
    if len(stacked) > 2 and np.ptp(stacked, axis=0).max() > 1e-12:
        pca = PCA(n_components=2, svd_solver="full")
        points = pca.fit_transform(stacked)
        first, second = pca.explained_variance_ratio_
        explained = (float(first), float(second))
    ends = np.cumsum([len(block) for block in blocks])[:-1]
    return np.split(points, ends), explained
