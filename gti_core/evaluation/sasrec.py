"""SASRec, the sequential baseline: a causal transformer over the items of the history.

Kang and McAuley, "Self-attentive sequential recommendation", ICDM 2018. The network is the
``cornac`` library's; it is trained here, with cross-entropy over the whole catalogue in place of
sampled negatives, which makes the stronger baseline (Klenitskiy and Vasilev, "Turning dross into
gold loss: is BERT4Rec really better than SASRec?", RecSys 2023).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from gti_core.errors import DataError, PipelineError
from gti_core.evaluation.baselines import flat_rows, top_rows
from gti_core.evaluation.metrics import ndcg_at_k
from gti_core.types import LongArray

log = logging.getLogger(__name__)

VALIDATION_K = 10
"""Early stopping watches NDCG at this cut-off."""

_CASES_AT_A_TIME = 1024


@dataclass(frozen=True)
class SasRecConfig:
    """Settings of `SasRec`; docs/decisions/0005-sasrec.md says how the defaults were chosen.

    Args:
        epochs: passes over the training targets, at most.
        patience: with validation cases, stop after so many epochs without a better NDCG@10.
        width: of embeddings and layers; a multiple of heads.
        layers: transformer blocks.
        heads: of each attention.
        dropout: share of embeddings, attention weights and activations, in [0, 1).
        max_length: last items of a history that are read.
        learning_rate: of Adam.
        batch_size: targets per step.
    """

    epochs: int = 20
    patience: int = 4
    width: int = 128
    layers: int = 2
    heads: int = 2
    dropout: float = 0.6
    max_length: int = 50
    learning_rate: float = 1e-3
    batch_size: int = 256

    def __post_init__(self) -> None:
        for name in ("epochs", "patience", "width", "layers", "heads", "max_length", "batch_size"):
            if getattr(self, name) < 1:
                raise DataError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.width % self.heads:
            raise DataError(f"width is {self.width}, not a multiple of {self.heads} heads")
        if not 0 <= self.dropout < 1:
            raise DataError(f"dropout is {self.dropout}; it must be at least 0 and below 1")
        if not self.learning_rate > 0:
            raise DataError(f"learning_rate is {self.learning_rate}; it must be above 0")


class SasRecEpoch(NamedTuple):
    """What a finished epoch came to.

    Args:
        epoch: 1-based.
        epochs: at most so many.
        loss: mean cross-entropy of the epoch's targets, nats.
        ndcg: NDCG@10 on the validation cases, seen items left out; None without cases.
    """

    epoch: int
    epochs: int
    loss: float
    ndcg: float | None


class SasRec:
    """Ranks by a transformer's score for the next item; needs no known user.

    Every item of a training history but its first is a target, predicted from the items before
    it. An empty history is answered by popularity. The same seed, data and number of threads give
    the same ranking.

    Args:
        train: training histories, item rows, oldest first.
        items: N, number of items.
        config: settings.
        seed: of initialization, order and dropout; torch's own generator is left as it was.
        validation: histories and their targets; the epoch with the best NDCG@10 on them is kept.
            Without, the last epoch is.
        progress: called after each epoch.

    Raises:
        DataError: a row outside 0..N-1, no target to learn, or histories and validation targets
            that differ in number.
        PipelineError: the library is not installed.
    """

    def __init__(
        self,
        train: Sequence[Sequence[int]],
        items: int,
        *,
        config: SasRecConfig | None = None,
        seed: int = 0,
        validation: tuple[Sequence[Sequence[int]], Sequence[int]] | None = None,
        progress: Callable[[SasRecEpoch], None] | None = None,
    ) -> None:
        self.config = config or SasRecConfig()
        self.items = items
        self.epochs: list[SasRecEpoch] = []
        self.counts: LongArray = np.bincount(flat_rows(train, items), minlength=items)
        targets = _Windows.of_targets(train, self.config.max_length)
        if not len(targets.lengths):
            raise DataError("no training history has two items, so there is nothing to learn")
        if validation is not None:
            flat_rows([*validation[0], validation[1]], items)
            if not len(validation[0]) == len(validation[1]) > 0:
                raise DataError(
                    f"{len(validation[0])} validation histories, {len(validation[1])} targets"
                )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._model = _network(items, self.config)
            self._fit(targets, validation, progress)

    def rank(
        self, histories: Sequence[Sequence[int]], k: int, exclude_seen: bool = True
    ) -> LongArray:
        """See `Ranker.rank`."""
        return top_rows(self._scores, histories, k, exclude_seen, self.counts)

    def _fit(
        self,
        targets: _Windows,
        validation: tuple[Sequence[Sequence[int]], Sequence[int]] | None,
        progress: Callable[[SasRecEpoch], None] | None,
    ) -> None:
        # Adam's second moment as in the authors' code.
        optimizer = torch.optim.Adam(
            self._model.parameters(), lr=self.config.learning_rate, betas=(0.9, 0.98)
        )
        best, best_epoch, kept = -1.0, 0, {}
        for epoch in range(1, self.config.epochs + 1):
            loss = self._train_epoch(targets, optimizer)
            ndcg = None if validation is None else self._ndcg(*validation)
            done = SasRecEpoch(epoch, self.config.epochs, loss, ndcg)
            self.epochs.append(done)
            log.debug("SASRec epoch %d: loss %.4f, NDCG@10 %s", epoch, loss, ndcg)
            if progress is not None:
                progress(done)
            if ndcg is None:
                continue
            if ndcg > best:
                best, best_epoch = ndcg, epoch
                kept = {name: t.clone() for name, t in self._model.state_dict().items()}
            elif epoch - best_epoch >= self.config.patience:
                break
        if kept:
            self._model.load_state_dict(kept)

    def _train_epoch(self, targets: _Windows, optimizer: torch.optim.Optimizer) -> float:
        self._model.train()
        total = 0.0
        for batch in _batches(targets.lengths, self.config.batch_size):
            windows = targets.take(batch)
            logits = _hidden(self._model, windows) @ self._outputs().T
            loss = functional.cross_entropy(logits, windows.flat[windows.ends])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.item() * len(batch)
        return total / len(targets.lengths)

    def _ndcg(self, histories: Sequence[Sequence[int]], targets: Sequence[int]) -> float:
        """Mean NDCG@10, seen items left out; of equal scores the target counts as the last."""
        ranks: list[LongArray] = []
        for start in range(0, len(histories), _CASES_AT_A_TIME):
            part = histories[start : start + _CASES_AT_A_TIME]
            scores = self._scores(part)
            for case, history in enumerate(part):
                scores[case, list(history)] = -np.inf
            own = scores[np.arange(len(part)), list(targets[start : start + len(part)])]
            rank = (scores >= own[:, None]).sum(axis=1)
            ranks.append(np.where(np.isneginf(own), 0, rank).astype(np.int64))
        return float(ndcg_at_k(np.concatenate(ranks), VALIDATION_K).mean())

    @torch.no_grad()
    def _scores(self, histories: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
        """Scores of all items, shape [B, N]; all zero for an empty history."""
        self._model.eval()
        scores = torch.zeros(len(histories), self.items)
        known = torch.tensor([case for case, history in enumerate(histories) if len(history)])
        if len(known):
            windows = _Windows.of_histories(
                [history for history in histories if len(history)], self.config.max_length
            )
            scores[known] = _hidden(self._model, windows) @ self._outputs().T
        return scores.numpy().astype(np.float64)

    def _outputs(self) -> torch.Tensor:
        """Embeddings of the items, tied with the input's, shape [N, D]; padding left out."""
        return self._model.get_parameter("item_emb.weight")[: self.items]


class _Windows(NamedTuple):
    """What the network reads: for each case a few items in a row out of one flat tensor.

    Args:
        flat: item rows of all histories one after the other, shape [T], int64.
        ends: place behind the case's last item, shape [B], int64.
        lengths: items the case reads, at least 1, shape [B], int64.
    """

    flat: torch.Tensor
    ends: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of_histories(cls, histories: Sequence[Sequence[int]], max_length: int) -> _Windows:
        """The last items of each history, none of which is empty."""
        flat = torch.tensor([row for history in histories for row in history], dtype=torch.int64)
        sizes = torch.tensor([len(history) for history in histories], dtype=torch.int64)
        return cls(flat, sizes.cumsum(0), sizes.clamp(max=max_length))

    @classmethod
    def of_targets(cls, histories: Sequence[Sequence[int]], max_length: int) -> _Windows:
        """The items before each target; the target itself is at ``flat[ends]``."""
        flat = torch.tensor([row for history in histories for row in history], dtype=torch.int64)
        before = torch.tensor(
            [place for history in histories for place in range(len(history))], dtype=torch.int64
        )
        ends = before.nonzero()[:, 0]
        return cls(flat, ends, before[ends].clamp(max=max_length))

    def take(self, cases: torch.Tensor) -> _Windows:
        """Some of the cases."""
        return self._replace(ends=self.ends[cases], lengths=self.lengths[cases])


def _batches(lengths: torch.Tensor, size: int) -> list[torch.Tensor]:
    """All cases in random batches of like lengths, the batches in random order."""
    order = torch.randperm(len(lengths))
    parts = torch.split(order[lengths[order].argsort(stable=True)], size)
    return [parts[place] for place in torch.randperm(len(parts)).tolist()]


def _hidden(model: nn.Module, windows: _Windows) -> torch.Tensor:
    """The network's last state for each case, shape [B, D].

    Cases of the same length go in together, so nothing is padded: an item's position counts from
    the start of what is read, and short histories, the most of them, cost little.
    """
    no_item = torch.empty(0, dtype=torch.int64)
    cases, states = [], []
    for length in torch.unique(windows.lengths).tolist():
        same = (windows.lengths == length).nonzero()[:, 0]
        places = windows.ends[same, None] + torch.arange(-length, 0)
        states.append(model(None, windows.flat[places], no_item, return_hidden=True)[0])
        cases.append(same)
    return torch.cat(states)[torch.cat(cases).argsort()]


def _network(items: int, config: SasRecConfig) -> nn.Module:
    try:
        # Takes seconds: every other model of the library is imported with it.
        from cornac.models.sasrec.sasrec import SASRecModel  # type: ignore[import-untyped]
    except ImportError as error:
        raise PipelineError(
            f"SASRec needs the cornac library of requirements/dev.lock, which is not here: {error}"
        ) from error
    network: nn.Module = SASRecModel(
        items,
        embedding_dim=config.width,
        maxlen=config.max_length,
        n_layers=config.layers,
        n_heads=config.heads,
        use_biases=False,
        dropout=config.dropout,
    )
    return network
