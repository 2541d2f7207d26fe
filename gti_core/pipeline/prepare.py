"""``gti prepare``: a log and item texts become one folder with a split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gti_core.data.dataset import Dataset
from gti_core.data.demo import movielens_100k
from gti_core.data.prepared import PreparedData
from gti_core.data.readers import (
    InteractionColumns,
    ItemColumns,
    read_id_map,
    read_interactions,
    read_items,
    read_sequences,
    renamed,
)
from gti_core.data.splits import CHRONOLOGICAL, LEAVE_ONE_OUT, chronological, leave_one_out
from gti_core.data.unisrec import read_unisrec
from gti_core.errors import PipelineError

DATASETS = ("movielens-100k",)
SPLIT_KINDS = (LEAVE_ONE_OUT, CHRONOLOGICAL)


@dataclass(frozen=True)
class Sources:
    """Where the data comes from: a known data set, a folder in UniSRec's layout, or files.

    Args:
        dataset: one of `DATASETS`.
        unisrec: folder in UniSRec's layout (`gti_core.data.unisrec`).
        items: item file.
        interactions: log with one interaction a row, or
        sequences: file with one user's whole history a row.
        item_ids: two-column file that renames the item file's ids to the log's.
        item_columns: column names of the item file.
        interaction_columns: column names of the log.
        drop_unknown: leave interactions with items without text out instead of refusing.
        skip_blank: leave items without any text out instead of refusing.
    """

    dataset: str | None = None
    unisrec: Path | None = None
    items: Path | None = None
    interactions: Path | None = None
    sequences: Path | None = None
    item_ids: Path | None = None
    item_columns: ItemColumns | None = None
    interaction_columns: InteractionColumns | None = None
    drop_unknown: bool = False
    skip_blank: bool = False


def prepare(
    sources: Sources, output: Path, *, split: str = LEAVE_ONE_OUT, name: str | None = None
) -> PreparedData:
    """Run the stage.

    Args:
        sources: what to read.
        output: folder to write; prepared data in it is replaced.
        split: "leave-one-out", or "chronological" (needs a log with timestamps).
        name: name for people; the data set's or the log file's by default.

    Raises:
        PipelineError: sources that contradict each other.
        DataError: files that can't be used.
    """
    if split not in SPLIT_KINDS:
        raise PipelineError(f"split must be one of {', '.join(SPLIT_KINDS)}, not {split!r}")
    files = (sources.items, sources.interactions, sources.sequences)
    if sources.dataset is not None:
        if any(files) or sources.unisrec is not None:
            raise PipelineError("name a data set or files, not both")
        if sources.dataset not in DATASETS:
            raise PipelineError(
                f"unknown data set {sources.dataset!r}; known: {', '.join(DATASETS)}"
            )
        if split != LEAVE_ONE_OUT:
            raise PipelineError(f"{sources.dataset} is prepared leave-one-out only")
        dataset = movielens_100k()
        prepared = PreparedData(
            name or dataset.name, dataset.items, leave_one_out(dataset.histories)
        )
    elif sources.unisrec is not None:
        if any(files):
            raise PipelineError("name a folder in UniSRec's layout or files, not both")
        if split != LEAVE_ONE_OUT:
            raise PipelineError("histories have no timestamps; only leave-one-out can split them")
        dataset = read_unisrec(sources.unisrec)
        prepared = PreparedData(
            name or dataset.name, dataset.items, leave_one_out(dataset.histories)
        )
    else:
        prepared = _from_files(sources, split, name)
    prepared.save(output)
    return prepared


def _from_files(sources: Sources, split: str, name: str | None) -> PreparedData:
    if sources.items is None or (sources.interactions is None) == (sources.sequences is None):
        raise PipelineError("give an item file, and either interactions or sequences")
    items = read_items(sources.items, columns=sources.item_columns, skip_blank=sources.skip_blank)
    if sources.item_ids is not None:
        items = renamed(items, read_id_map(sources.item_ids))
    if sources.sequences is not None:
        if split != LEAVE_ONE_OUT:
            raise PipelineError("sequences have no timestamps; only leave-one-out can split them")
        histories = read_sequences(sources.sequences)
        title = name or sources.sequences.stem
        dataset = Dataset(title, items, histories)
        return PreparedData(title, dataset.items, leave_one_out(dataset.histories))
    assert sources.interactions is not None
    title = name or sources.interactions.stem
    interactions = read_interactions(sources.interactions, columns=sources.interaction_columns)
    dataset = Dataset.from_interactions(
        title, items, interactions, drop_unknown=sources.drop_unknown
    )
    if split == CHRONOLOGICAL:
        known = {item.item_id for item in items}
        kept = [event for event in interactions if event.item_id in known]
        return PreparedData(title, dataset.items, chronological(kept))
    return PreparedData(title, dataset.items, leave_one_out(dataset.histories))
