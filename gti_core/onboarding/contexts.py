"""Contexts: hidden states in which the last code of an item's SID is about to be written.

A new item's row at the last level enters a score in one place only: as the output row that these
states are multiplied with. So they are computed once, with the frozen model, and grounding a row on
them needs no further pass through it (compare IncDSI, arXiv 2307.10323).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gti_core.lm import SidLM
from gti_core.prompts import AppendOnlyPrompt
from gti_core.types import BoolArray, FloatArray, LongArray, Sid

_BATCH_TOKENS = 2048
WINDOW = 24
"""Items of a history that are read at once: enough context, and little padding."""


@dataclass(frozen=True, eq=False)
class Contexts:
    """Events of histories, each at the last level of its target.

    Args:
        hidden: shape [E, D], float32.
        log_norm: log of the sum of exp(logit) over the base's active SID rows, [E], float32.
        targets: catalogue row of each event's target, [E], int64.
        inner: states before the other levels' codes of some events, [I, D], float32.
        inner_log_norm: as ``log_norm``, of those, [I], float32.
    """

    hidden: FloatArray
    log_norm: FloatArray
    targets: LongArray
    inner: FloatArray
    inner_log_norm: FloatArray

    def __len__(self) -> int:
        return len(self.targets)


def padded(sequences: Sequence[Sequence[int]]) -> Tensor:
    """Token ids padded on the right with 0, where a causal model can't see them; [B, T] int64."""
    width = max(len(sequence) for sequence in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(list(sequence))
    return ids


def batches(lengths: Sequence[int], most_tokens: int = _BATCH_TOKENS) -> Iterator[list[int]]:
    """Numbers of sequences, by length, in batches of at most so many tokens with padding."""
    order = sorted(range(len(lengths)), key=lambda number: lengths[number])
    batch: list[int] = []
    for number in order:
        if batch and lengths[number] * (len(batch) + 1) > most_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


@torch.inference_mode()
def last_states(lm: SidLM, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Hidden state after each sequence of token ids, [B, D] float32."""
    found = torch.empty(len(sequences), lm.embedding.shape[1])
    for batch in batches([len(sequence) for sequence in sequences]):
        hidden = lm.hidden(padded([sequences[number] for number in batch]))
        ends = torch.tensor([len(sequences[number]) - 1 for number in batch])
        found[batch] = hidden[torch.arange(len(batch)), ends].float()
    return found


@torch.inference_mode()
def log_norms(lm: SidLM, hidden: Tensor, active: BoolArray) -> Tensor:
    """Log of the sum of exp(logit) over some SID rows, shape of ``hidden`` less its last."""
    rows = lm.output_rows[torch.from_numpy(np.flatnonzero(active))]
    return torch.logsumexp(hidden.float() @ rows.float().T, dim=-1)


def with_rows(hidden: FloatArray, norms: FloatArray, rows: FloatArray) -> FloatArray:
    """Log norms with further rows taken in, [n] float32.

    Args:
        hidden: states, [n, D].
        norms: log norms without the rows, [n].
        rows: output rows, [A, D].
    """
    if not len(rows):
        return norms
    added = np.logaddexp.reduce(hidden @ rows.T, axis=1)
    renewed: FloatArray = np.logaddexp(norms, added).astype(np.float32)
    return renewed


@torch.inference_mode()
def collect_contexts(
    lm: SidLM,
    histories: Sequence[Sequence[int]],
    sids: Sequence[Sid],
    prompt: AppendOnlyPrompt,
    *,
    most: int,
    progress: Callable[[int, int], None] | None = None,
) -> Contexts:
    """Read histories once and keep the states before each item's last code.

    Args:
        lm: the model of the base version.
        histories: catalogue rows, oldest first; read in the order given until ``most`` events.
        sids: semantic IDs by catalogue row.
        prompt: the template.
        most: events wanted.
        progress: called with (events, most).
    """
    levels = lm.vocabulary.levels
    start = len(prompt.instruction_token_ids)
    windows: list[Sequence[int]] = []
    events = 0
    for history in histories:
        window = history[-WINDOW:]
        if len(window) >= 2 and events < most:
            windows.append(window)
            events += len(window) - 1
    states: list[Tensor] = []
    inner: list[Tensor] = []
    targets: list[int] = []
    done = 0
    for batch in batches([start + levels * len(window) for window in windows]):
        ids = [
            [
                *prompt.instruction_token_ids,
                *(t for row in windows[number] for t in lm.vocabulary.token_ids(sids[row])),
            ]
            for number in batch
        ]
        hidden = lm.hidden(padded(ids))
        for place, number in enumerate(batch):
            followers = torch.arange(1, len(windows[number]))
            before = start + levels * followers - 1
            states.append(hidden[place, before + levels - 1].float())
            if levels > 1:
                # One level of each event, in turn: an inner state is there to be left alone.
                inner.append(hidden[place, before + followers % (levels - 1)].float())
            targets.extend(windows[number][1:])
        done += sum(len(windows[number]) - 1 for number in batch)
        if progress is not None:
            progress(done, events)
    width = lm.embedding.shape[1]
    last, others = (
        torch.cat(found) if found else torch.empty(0, width) for found in (states, inner)
    )
    active = lm.vocabulary.active_mask
    return Contexts(
        last.numpy(),
        log_norms(lm, last, active).numpy(),
        np.array(targets, dtype=np.int64),
        others.numpy(),
        log_norms(lm, others, active).numpy(),
    )
