"""Peers of `bench.decode`: transformers ``generate`` and vLLM's own ``beam_search``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.decode_common import RESULTS, Cell, Prompts, row
from gti_core.types import JsonDict
from service.engine.base import ServingModel


def allowed_tokens(model: ServingModel, prompt_length: int) -> Callable[[int, Any], list[int]]:
    """A ``prefix_allowed_tokens_fn`` over a dict from prefix to children."""
    children: dict[tuple[int, ...], list[int]] = {}
    for item in model.catalog:
        tokens = model.vocabulary.token_ids(item.sid)
        for depth, token in enumerate(tokens):
            below = children.setdefault(tuple(tokens[:depth]), [])
            if token not in below:
                below.append(token)

    def allowed(_: int, input_ids: Any) -> list[int]:
        return children[tuple(input_ids[prompt_length:].tolist())]

    return allowed


def measure_generate(
    model: ServingModel, prompts: Prompts, cells: list[Cell], dtype: str
) -> list[JsonDict]:
    """transformers ``generate`` under the constraint; concurrent requests are one batch."""
    lm: Any = AutoModelForCausalLM.from_pretrained(model.model_dir, dtype=getattr(torch, dtype))
    lm.eval()
    lm.generation_config.eos_token_id = None
    lm.generation_config.pad_token_id = 0
    levels = model.index.levels
    allowed: Callable[[int, Any], list[int]] | None = None
    results = []
    for cell in cells:
        latencies: list[float] = []
        for batch in range(-(-cell.requests // cell.concurrency) + 1):
            together = prompts(cell.concurrency)
            if allowed is None:
                allowed = allowed_tokens(model, len(together[0]))
            started = time.perf_counter()
            with torch.inference_mode():
                found = lm.generate(
                    torch.tensor(together),
                    attention_mask=torch.ones(len(together), len(together[0]), dtype=torch.long),
                    max_new_tokens=levels,
                    do_sample=False,
                    num_beams=cell.width,
                    num_return_sequences=min(RESULTS, cell.width),
                    prefix_allowed_tokens_fn=allowed,
                )
            if batch or cell.requests == cell.concurrency:  # else the first one warms up
                latencies.extend([time.perf_counter() - started] * cell.concurrency)
            assert found.shape[0] == min(RESULTS, cell.width) * cell.concurrency
            if cell.requests == cell.concurrency:
                break
        wall = sum(latencies) / cell.concurrency
        results.append(row("transformers", cell, latencies, wall))
    return results


def measure_vllm_beam_search(
    model: ServingModel, prompts: Prompts, cells: list[Cell], dtype: str, kv_cache_gib: float
) -> list[JsonDict]:
    """vLLM's ``LLM.beam_search``, concurrent requests in one call.

    It knows no constraint over more tokens than 1,024 and writes what it likes: its speed is an
    upper bound on what it could do under one.
    """
    from vllm import LLM
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import BeamSearchParams

    llm = LLM(
        model=str(model.model_dir),
        dtype=dtype,
        max_model_len=model.max_tokens,
        max_num_seqs=256,
        max_logprobs=2 * max(cell.width for cell in cells),
        enable_prefix_caching=True,
        enforce_eager=True,
        generation_config="vllm",
        kv_cache_memory_bytes=int(kv_cache_gib * 2**30),
        block_size=32,
        disable_log_stats=True,
    )
    results = []
    try:
        for cell in cells:
            latencies: list[float] = []
            for batch in range(-(-cell.requests // cell.concurrency)):
                together = [TokensPrompt(prompt_token_ids=p) for p in prompts(cell.concurrency)]
                params = BeamSearchParams(
                    beam_width=cell.width, max_tokens=model.index.levels, ignore_eos=True
                )
                started = time.perf_counter()
                found = llm.beam_search(together, params)
                latencies.extend([time.perf_counter() - started] * cell.concurrency)
                assert all(len(one.sequences) == cell.width for one in found), batch
            results.append(
                row("vllm_beam_search", cell, latencies, sum(latencies) / cell.concurrency)
            )
    finally:
        llm.llm_engine.engine_core.shutdown()
    return results
