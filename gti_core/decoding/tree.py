"""Beam search in which the beams share their prompt's keys and values.

The beams of a prompt are one row of the batch: at level l the row gets one new token per beam, and
a mask lets each see the prompt, its own ancestors and itself. Nothing is copied per beam, so a wide
beam costs its own tokens only; `gti_core.decoding.cached` copies the cache per beam instead, which
any attention can follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gti_core.decoding.beam import BeamSearch
from gti_core.lm import SidLM

OnStates = Callable[[int, Tensor], None]
"""Called with a search's number and the states [W, D] that its next codes are scored in."""


def attention_window(model: Any) -> int | None:
    """Columns that the narrowest attention layer sees; None when every layer sees all.

    A window is counted in columns of the cache, which are not positions here.
    """
    config = model.config
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return int(config.window_size)
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if window is None or (types is not None and "sliding_attention" not in types):
        return None
    return int(window)


def columns_needed(prompts: Sequence[Sequence[int]], searches: Sequence[BeamSearch]) -> int:
    """Columns of the cache at the end of `run_tree`, at most."""
    longest = max((len(prompt) for prompt in prompts), default=0)
    return longest + max((search.columns for search in searches), default=0)


def fits_tree(model: Any, prompts: Sequence[Sequence[int]], searches: Sequence[BeamSearch]) -> bool:
    """Whether every layer sees all that `run_tree` puts into the cache."""
    window = attention_window(model)
    return window is None or columns_needed(prompts, searches) <= window


@torch.inference_mode()
def run_tree(
    lm: SidLM,
    prompts: Sequence[Sequence[int]],
    searches: Sequence[BeamSearch],
    on_states: OnStates | None = None,
) -> None:
    """Drive one beam search per prompt to its end.

    Args:
        lm: the model, in eval mode; no attention window below `columns_needed`.
        prompts: B prompts of token ids below V + S, none empty; lengths may differ.
        searches: B fresh searches, none done, which go from level to level together; advanced in
            place. A search may begin again at the first level, and may end early.
        on_states: called for every search before each of its levels.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = int(lengths.max())
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
    # Padding on the left; a padded column sees itself, so that no row of the softmax is empty.
    real = torch.arange(width) >= (width - lengths)[:, None]
    sees = real[:, None, :] & torch.ones(width, width, dtype=torch.bool).tril()
    sees |= torch.eye(width, dtype=torch.bool)
    positions = (torch.arange(width) - (width - lengths)[:, None]).clamp_min(0)
    hidden, cache = _forward(lm, ids, sees, positions, None)
    states = hidden[:, -1:]
    logprobs = _logprobs(lm, states)
    # Per search and beam, the columns of its codes so far.
    columns: list[Tensor] = [torch.empty(1, 0, dtype=torch.int64) for _ in searches]
    start = width
    while True:
        for row, search in enumerate(searches):
            if search.done:
                continue
            if on_states is not None:
                on_states(row, states[row, : len(search.frontier)])
            search.advance(logprobs[row, : len(search.frontier)])
            # A prefix of one code descends from the prompt alone.
            columns[row] = (
                columns[row][search.parents]
                if search.level > 1
                else torch.empty(len(search.frontier), 0, dtype=torch.int64)
            )
        live = [search for search in searches if not search.done]
        if not live:
            return
        level = live[0].level
        count = max(len(search.frontier) for search in live)
        ids = torch.zeros(len(searches), count, dtype=torch.int64)
        sees = torch.zeros(len(searches), count, start + count, dtype=torch.bool)
        sees[:, :, :width] = real[:, None, :]
        # An unused place sees itself, so that no row of the softmax is empty.
        own = torch.arange(count)
        sees[:, own, start + own] = True
        for row, search in enumerate(searches):
            if search.done:
                continue
            beams = len(search.frontier)
            ids[row, :beams] = torch.tensor(
                [lm.vocabulary.token_id(level - 1, beam.prefix[-1]) for beam in search.frontier]
            )
            sees[row, :beams].scatter_(1, columns[row], True)
            columns[row] = torch.cat([columns[row], start + own[:beams, None]], dim=1)
        positions = (lengths + level - 1)[:, None].expand(-1, count)
        states, cache = _forward(lm, ids, sees, positions, cache)
        logprobs = _logprobs(lm, states)
        start += count


def _logprobs(lm: SidLM, hidden: Tensor) -> Any:
    """Log-probabilities over the SID rows, numpy float32 [B, W, S]."""
    return torch.log_softmax(lm.sid_logits(hidden), dim=-1).numpy()


def _forward(
    lm: SidLM, ids: Tensor, sees: Tensor, positions: Tensor, cache: Any
) -> tuple[Tensor, Any]:
    """Last hidden states [B, W, D] of new tokens, and the cache with them added.

    Args:
        sees: [B, W, columns], True where a token attends to a column.
    """
    embeddings = lm.embed(ids)
    mask = torch.zeros(sees.shape, dtype=embeddings.dtype)
    mask.masked_fill_(~sees, torch.finfo(mask.dtype).min)
    out = lm.backbone.base_model(
        inputs_embeds=embeddings,
        attention_mask=mask[:, None],
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
    )
    return out.last_hidden_state, out.past_key_values
