"""The levels after the prompt, for all finished prompts of a step together.

Per level one forward pass over the beam rows: one new token per row, the prompt's KV blocks shared,
logits over the SID rows only, and `gti_core.decoding.device` picks the survivors. On a GPU all
shapes follow from the requests, never from what the model says, so that nothing waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from service.engine.vllm_beams.clock import stamped
from service.engine.vllm_beams.rows import BeamRows
from service.engine.vllm_beams.scratch import Scratch, ScratchError
from service.engine.vllm_beams.snapshot import MOST_SELECTIONS, Search, Snapshot
from service.engine.vllm_beams.wire import CONSTRAINT, BeamRequest

SPLIT_ROWS = 96
"""Fewest rows for which a second, smaller pass is cheaper than one over all (two cores)."""


@dataclass(frozen=True)
class Prompt:
    """A prompt whose prefill has ended.

    Args:
        request: what is asked.
        hidden: last hidden state, [D].
        blocks: its row of the block table, [blocks].
        length: its number of tokens.
    """

    request: BeamRequest
    hidden: Tensor
    blocks: Tensor
    length: int


class BeamDecoder:
    """Runs beam searches inside the worker.

    Args:
        model: the beam model (`service.engine.vllm_beams.model`).
        config: vLLM's configuration.
        layers: attention layers by name, KV caches bound.
        scratch: the beams' KV blocks.
    """

    def __init__(
        self, model: Any, config: VllmConfig, layers: dict[str, Any], scratch: Scratch
    ) -> None:
        self._model = model
        self._config = config
        self._scratch = scratch
        self._device = next(iter(layers.values())).kv_cache.device
        self._builder = _builder(layers, config, self._device)
        self._layer_names = list(layers)

    def decode(self, prompts: Sequence[Prompt], snapshot: Snapshot) -> list[Tensor]:
        """One search per prompt; those that do not fit the scratch pool together take turns.

        Args:
            prompts: finished prompts of one version.
            snapshot: that version.

        Returns:
            Per prompt [k, 2] float64: catalogue row (-1 where nothing is left) and score, nats;
            behind them the host's seconds for choosing the survivors, per level.
        """
        geometry, codes = self._scratch.geometry, snapshot.levels - 1
        turns: list[list[Prompt]] = []
        used = 0
        selections: set[str | None] = set()
        for prompt in prompts:
            tail = prompt.length % geometry.block_size
            need = prompt.request.beam_width * geometry.blocks_per_row(tail, codes)
            selections.add(prompt.request.selection)
            crowded = len(selections - {None}) > MOST_SELECTIONS
            if not turns or used + need > geometry.count or crowded:
                turns.append([])
                used = 0
                selections = {prompt.request.selection}
            turns[-1].append(prompt)
            used += need
        return [answer for turn in turns for answer in self._turn(turn, snapshot)]

    def _turn(self, prompts: Sequence[Prompt], snapshot: Snapshot) -> list[Tensor]:
        search = Search(snapshot, [prompt.request for prompt in prompts])
        try:
            answers = self._levels(prompts, search, snapshot)
            return [stamped(answer, CONSTRAINT, search.choosing_s) for answer in answers]
        finally:
            search.close()

    @contextmanager
    def _choosing(self, search: Search, level: int) -> Iterator[None]:
        began = time.monotonic()
        with self._model.clock.constraint:
            yield
        search.choosing_s[level] += time.monotonic() - began

    def _levels(
        self, prompts: Sequence[Prompt], search: Search, snapshot: Snapshot
    ) -> list[Tensor]:
        hidden = torch.stack([prompt.hidden for prompt in prompts])
        logprobs = self._model.sid_logprobs(hidden, snapshot)
        with self._choosing(search, 0):
            search.advance_from_prompt(logprobs)
        if snapshot.levels > 1:
            rows = BeamRows(
                [prompt.blocks for prompt in prompts],
                [prompt.length for prompt in prompts],
                [prompt.request.beam_width for prompt in prompts],
                snapshot.levels - 1,
                self._scratch,
                self._device,
            )
            if rows.blocks_needed <= self._scratch.geometry.count:
                self._keeping_codes(rows, search, snapshot)
            else:
                self._in_parts(rows, search, snapshot)
        return search.answers()

    def _keeping_codes(self, rows: BeamRows, search: Search, snapshot: Snapshot) -> None:
        """One new token per row and level; a row keeps the keys and values of its codes."""
        rows.place_all()
        for level in range(1, snapshot.levels):
            alive = search.alive(rows.places)
            if not len(alive):
                return
            if level > 1:
                rows.follow(alive, search.parents, level - 1)
            if level == snapshot.levels - 1 and self._worth_splitting(alive):
                alive, found = self._best_first(rows, alive, search, snapshot)
            else:
                found = self._newest(rows, alive, search, snapshot)
            with self._choosing(search, level):
                search.advance(alive, found)

    def _worth_splitting(self, alive: Tensor) -> bool:
        """On a CPU, where a pass costs what its rows cost; not for few rows, nor on a GPU, where
        the host would have to wait for the scores."""
        return alive.device.type == "cpu" and len(alive) >= SPLIT_ROWS

    def _best_first(
        self, rows: BeamRows, alive: Tensor, search: Search, snapshot: Snapshot
    ) -> tuple[Tensor, Tensor]:
        """The last level in two passes: the better half of each beam, then what can still win."""
        better = alive % search.width < (search.width + 1) // 2
        first, rest = alive[better], alive[~better]
        found = self._newest(rows, first, search, snapshot)
        with self._choosing(search, snapshot.levels - 1):
            rest = search.hopeful(first, found, rest)
        if not len(rest):
            return first, found
        more = self._newest(rows, rest, search, snapshot)
        return torch.cat([first, rest]), torch.cat([found, more])

    def _newest(self, rows: BeamRows, alive: Tensor, search: Search, snapshot: Snapshot) -> Tensor:
        """Log-probabilities [R, S] after the newest code of some rows."""
        newest = search.path[:, :, -1:].flatten(0, 1)[alive]
        cached = search.path.shape[2] - 1
        hidden = self._forward(rows, alive, rows.home[alive], newest, cached)
        logprobs: Tensor = self._model.sid_logprobs(hidden, snapshot)
        return logprobs

    def _in_parts(self, rows: BeamRows, search: Search, snapshot: Snapshot) -> None:
        """For a beam wider than the pool: part after part, each computes its whole path anew."""
        for level in range(1, snapshot.levels):
            alive = search.alive(rows.places)
            if not len(alive):
                return
            logprobs = []
            for part in torch.split(alive, rows.most_at_once):
                home = rows.place_part(len(part))
                path = search.path.flatten(0, 1)[part]
                hidden = self._forward(rows, part, home, path, 0)
                logprobs.append(self._model.sid_logprobs(hidden, snapshot))
            with self._choosing(search, level):
                search.advance(alive, torch.cat(logprobs))

    def _forward(
        self, rows: BeamRows, alive: Tensor, home: Tensor, tokens: Tensor, cached: int
    ) -> Tensor:
        """Last hidden states [R, D] of R rows.

        Args:
            rows: all rows.
            alive: the rows to compute, places, [R].
            home: first scratch block of each, [R].
            tokens: new token ids, [R, m].
            cached: codes before them whose keys and values are in the cache.
        """
        count, new = tokens.shape
        batch = rows.batch(alive, home, cached, new)
        starts = torch.arange(count + 1, dtype=torch.int32) * new
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self._device),
            query_start_loc_cpu=starts,
            seq_lens=batch.lengths,
            num_reqs=count,
            num_actual_tokens=count * new,
            max_query_len=new,
            max_seq_len=batch.longest,
            block_table_tensor=batch.table,
            slot_mapping=batch.slots,
            positions=batch.positions,
        )
        metadata = dict.fromkeys(self._layer_names, self._builder.build(0, common))
        slots = dict.fromkeys(self._layer_names, batch.slots)
        with set_forward_context(
            metadata, self._config, num_tokens=count * new, slot_mapping=slots
        ):
            hidden = self._model.beam_hidden(tokens.flatten(), batch.positions)
        last: Tensor = hidden.view(count, new, -1)[:, -1]
        return last


def _builder(layers: dict[str, Any], config: VllmConfig, device: torch.device) -> Any:
    """Builder of the layers' attention metadata. Raises ScratchError for several backends."""
    backends = {layer.get_attn_backend() for layer in layers.values()}
    if len(backends) != 1:
        raise ScratchError(f"attention layers with {len(backends)} backends")
    spec = next(iter(layers.values())).get_kv_cache_spec(config)
    return backends.pop().get_builder_cls()(spec, list(layers), config, device)
