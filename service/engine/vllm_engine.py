"""The vLLM engine: one recommendation is one request, its beams run inside the worker.

The prompt goes through vLLM's own scheduler (continuous batching, chunked prefill, prefix cache,
abort); when its prefill ends, `service.engine.vllm_beams` runs the remaining levels and the items
come back as the request's result. docs/decisions/0006-in-engine-beams.md says how and why.
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gti_core.decoding import ScoredRow
from gti_core.types import JsonDict
from service.engine.base import (
    DecodeRequest,
    EngineDeadError,
    EngineError,
    Selection,
    ServingModel,
)
from service.engine.beam_gate import BeamGate
from service.engine.vllm_base import VllmProcess, cancelled_from_outside
from service.engine.vllm_beams.wire import (
    ARCHITECTURES,
    FAILED,
    SCRATCH_BLOCKS,
    BeamRequest,
    write_snapshot,
)
from service.engine.vllm_start import TESTED_VERSIONS, VllmOptions, is_cpu_build

__all__ = ["TESTED_VERSIONS", "VllmEngine", "VllmOptions"]

CPU_WORKER = "service.engine.vllm_beams.worker_cpu.GtiCPUWorker"
GPU_WORKER = "service.engine.vllm_beams.worker_gpu.GtiGPUWorker"

_USUAL_WIDTH = 20
"""Beam width that the number of prompts in one step of vLLM is sized for."""

HELD_SELECTIONS = 64
"""Selections that the worker keeps, 4 bytes per item each; the least recently used go first."""


@dataclass(eq=False)
class _Held:
    """A selection in the worker: made once ``ready``, kept while it has users."""

    ready: asyncio.Future[Any]
    users: int = 0


class VllmEngine(VllmProcess):
    """Decodes inside vLLM's worker. See `service.engine.base.Engine`."""

    def __init__(self, model: ServingModel, options: VllmOptions | None = None) -> None:
        super().__init__(model, options)
        # One pool's worth is decoded in a step; as much again waits in vLLM for the next.
        self._gate = BeamGate(2 * self._options.scratch_blocks)
        self._held: dict[str, _Held] = {}
        self._prompt_tokens = 0
        self._cached_tokens = 0

    @property
    def name(self) -> str:
        """``vllm``."""
        return "vllm"

    async def decode(self, request: DecodeRequest) -> list[ScoredRow]:
        """Best items first. See `service.engine.base.Engine.decode`."""
        llm = self._running()
        self._check_prompt(request)
        self._check_search(request)
        task = asyncio.create_task(self._admitted(llm, request))
        self._pending.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            if not cancelled_from_outside():
                raise EngineDeadError("the engine was stopped") from None
            raise
        finally:
            self._pending.discard(task)

    def _check_search(self, request: DecodeRequest) -> None:
        """Refuse here what the worker could only answer with a failure."""
        if not 1 <= request.k <= request.beam_width:
            raise EngineError(f"beam_width {request.beam_width} must be at least k {request.k}")
        items = len(self._model.catalog)
        rows = request.excluded_rows | (request.included_rows or frozenset())
        foreign = [row for row in rows if not 0 <= row < items]
        if foreign:
            raise EngineError(f"there is no catalogue row {foreign[0]} among {items}")
        selection = request.selection
        if selection is not None and selection.mask.shape != (items,):
            raise EngineError(f"a selection of shape {selection.mask.shape} for {items} items")

    def in_flight(self) -> int:
        """Requests under way, those that wait for room included."""
        return super().in_flight() + self._gate.waiting

    async def stop(self) -> None:
        """See `VllmProcess.stop`. Selections go with the worker that held them."""
        await super().stop()
        held, self._held = self._held, {}
        for one in held.values():
            one.ready.cancel()

    def info(self) -> JsonDict:
        """Facts about the engine, and prompt tokens so far, all and from the prefix cache."""
        return {
            **super().info(),
            "prompt_tokens": self._prompt_tokens,
            "cached_prompt_tokens": self._cached_tokens,
        }

    async def state(self) -> dict[str, Any]:
        """The worker's versions and counts of searches and failures."""
        return dict(await self._call(self._running(), "gti_state"))

    async def _call(self, llm: Any, method: str, *args: Any) -> Any:
        """What a method of the worker returns. Raises EngineError when it fails there."""
        try:
            (found,) = await llm.collective_rpc(method, args=args)
        except Exception as error:
            if llm.errored:
                raise EngineDeadError("the engine process is gone") from error
            raise EngineError(f"{method} failed in the worker: {error}") from error
        return found

    def _arguments(self) -> Mapping[str, Any]:
        architecture = _architecture(self._model.model_dir)
        return {
            "runner": "pooling",
            "hf_overrides": {"architectures": [ARCHITECTURES[architecture]]},
            "worker_cls": CPU_WORKER if is_cpu_build() else GPU_WORKER,
            "additional_config": {SCRATCH_BLOCKS: self._options.scratch_blocks},
            # All prompts that end in one step are decoded before the next one starts.
            "max_num_seqs": min(
                self._options.max_num_seqs, max(1, self._options.scratch_blocks // _USUAL_WIDTH)
            ),
        }

    async def _first_request(self, llm: Any) -> None:
        await self._install(llm)
        prompt = [self._active_token_ids[0]]
        await self._ask(llm, DecodeRequest("warm-up", prompt, 1, 1))

    async def _install(self, llm: Any) -> None:
        """Give the worker the catalogue of the version being served."""
        model = self._model
        with tempfile.TemporaryDirectory(prefix="gti-") as folder:
            path = Path(folder) / "snapshot.safetensors"
            await asyncio.to_thread(
                write_snapshot,
                path,
                model.version,
                model.vocabulary,
                model.catalog.sids,
                model.index.available,
            )
            await self._call(llm, "gti_install", str(path))

    async def _admitted(self, llm: Any, request: DecodeRequest) -> list[ScoredRow]:
        """Ask once there is room for the beams and the worker has the request's selection."""
        async with self._gate.enter(request.beam_width):
            return await self._selected(llm, request)

    async def _selected(self, llm: Any, request: DecodeRequest) -> list[ScoredRow]:
        if request.selection is None:
            return await self._ask(llm, request)
        held = await self._hold(llm, request.selection)
        try:
            return await self._ask(llm, request)
        finally:
            held.users -= 1

    async def _hold(self, llm: Any, selection: Selection) -> _Held:
        """The selection, made in the worker, with one user more."""
        held = self._held.pop(selection.key, None)
        if held is None:
            held = _Held(asyncio.ensure_future(self._make(llm, selection)))
            self._keep(held.ready)
        self._held[selection.key] = held  # most recent last
        held.users += 1
        try:
            await asyncio.shield(held.ready)
        except BaseException:
            held.users -= 1
            failed = held.ready.done() and (held.ready.cancelled() or held.ready.exception())
            if failed and self._held.get(selection.key) is held:
                del self._held[selection.key]
            raise
        return held

    async def _make(self, llm: Any, selection: Selection) -> None:
        version = self._model.version
        idle = [key for key, held in self._held.items() if not held.users]
        forgotten = idle[: max(0, len(self._held) - HELD_SELECTIONS)]
        for key in forgotten:
            del self._held[key]
        if forgotten:
            # Sent before anyone else runs: a selection asked for again is made after this.
            await self._call(llm, "gti_unselect", version, forgotten)
        if len(self._held) > HELD_SELECTIONS:
            raise EngineError(f"{HELD_SELECTIONS} different selections are in use at once")
        packed = np.packbits(selection.mask.astype(np.bool_)).tobytes()
        await self._call(llm, "gti_select", version, selection.key, packed)

    async def _ask(self, llm: Any, request: DecodeRequest) -> list[ScoredRow]:
        from vllm.inputs import tokens_input
        from vllm.pooling_params import PoolingParams

        wanted = BeamRequest(
            self._model.version,
            request.k,
            request.beam_width,
            sorted(request.excluded_rows),
            None if request.included_rows is None else sorted(request.included_rows),
            None if request.selection is None else request.selection.key,
        )
        params = PoolingParams(
            task="plugin", skip_reading_prefix_cache=False, extra_kwargs=wanted.to_params()
        )
        request_id = f"{request.request_id}-{next(self._serial)}"
        last = await self._last(
            llm.encode(tokens_input(list(request.prompt_token_ids)), params, request_id), request_id
        )
        self._prompt_tokens += len(request.prompt_token_ids)
        self._cached_tokens += last.num_cached_tokens
        return self._rows(request, last.outputs.data)

    def _rows(self, request: DecodeRequest, answer: Any) -> list[ScoredRow]:
        found = []
        for row, score in answer.tolist():
            if row == FAILED or math.isnan(score):
                raise EngineError(
                    f"the search of request {request.request_id} failed inside the worker"
                )
            if row >= 0:
                item = self._model.catalog.items[int(row)]
                found.append(ScoredRow(int(row), item.sid, score))
        return found


def _architecture(model_dir: Path) -> str:
    """The model's architecture. Raises EngineError for one that can't decode beams."""
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{model_dir / 'config.json'} can't be read: {error}") from error
    for name in config.get("architectures") or ():
        if name in ARCHITECTURES:
            return str(name)
    raise EngineError(
        f"no beams inside the engine for {config.get('architectures')}; known: "
        f"{', '.join(ARCHITECTURES)}. Use the engine vllm-per-beam"
    )
