"""Beam search for many prompts at once with a transformers model and its KV cache.

The prompts are read once; per level only the beams' last codes are computed. This is the
pipeline's evaluator and the service's reference engine; `gti_core.decoding.beam` holds the search.
Where the attention allows it, the beams share their prompt's cache (`gti_core.decoding.tree`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gti_core.decoding.beam import BeamSearch
from gti_core.decoding.tree import fits_tree, run_tree
from gti_core.errors import DecodingError
from gti_core.lm import SidLM


def run_searches(
    lm: SidLM, prompts: Sequence[Sequence[int]], searches: Sequence[BeamSearch]
) -> None:
    """Drive one beam search per prompt to its end.

    Args:
        lm: the model, in eval mode.
        prompts: B prompts of token ids below V + S, none empty; lengths may differ.
        searches: B fresh searches; advanced in place.

    Raises:
        DecodingError: an empty prompt, or unequal numbers of prompts and searches.
    """
    if len(prompts) != len(searches):
        raise DecodingError(f"{len(prompts)} prompts for {len(searches)} searches")
    if any(len(prompt) == 0 for prompt in prompts):
        raise DecodingError("a prompt must have at least one token")
    live = [i for i, search in enumerate(searches) if not search.done]
    if not live:
        return
    if fits_tree(lm.backbone, prompts, searches):
        run_tree(lm, [prompts[i] for i in live], [searches[i] for i in live])
    else:
        _run_copies(lm, prompts, searches, live)


@torch.inference_mode()
def _run_copies(
    lm: SidLM,
    prompts: Sequence[Sequence[int]],
    searches: Sequence[BeamSearch],
    live: Sequence[int],
) -> None:
    """As `run_searches`, with a copy of the prompt's cache per beam."""
    width = max(len(prompts[i]) for i in live)
    # Padding on the left, hidden by the mask, so that every row continues at the same column.
    ids = torch.zeros(len(live), width, dtype=torch.int64)
    mask = torch.zeros(len(live), width, dtype=torch.int64)
    for row, i in enumerate(live):
        ids[row, width - len(prompts[i]) :] = torch.tensor(list(prompts[i]))
        mask[row, width - len(prompts[i]) :] = 1
    hidden, cache = _forward(lm, ids, mask, None)
    owners = list(range(len(live)))
    while True:
        logprobs = torch.log_softmax(lm.sid_logits(hidden), dim=-1).numpy()
        parents: list[int] = []
        next_owners: list[int] = []
        codes: list[int] = []
        start = 0
        for row, i in enumerate(live):
            search = searches[i]
            count = owners.count(row)
            if not search.done:
                level = search.level
                search.advance(logprobs[start : start + count])
                if not search.done:
                    parents.extend(start + parent for parent in search.parents)
                    next_owners.extend([row] * len(search.frontier))
                    codes.extend(
                        lm.vocabulary.token_id(level, beam.prefix[-1]) for beam in search.frontier
                    )
            start += count
        if not codes:
            return
        order = torch.tensor(parents)
        cache.batch_select_indices(order)
        mask = torch.cat([mask[order], torch.ones(len(parents), 1, dtype=torch.int64)], dim=1)
        owners = next_owners
        hidden, cache = _forward(lm, torch.tensor(codes)[:, None], mask, cache)


def _forward(lm: SidLM, ids: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Last hidden state of each row [rows, D], and the cache with ``ids`` added."""
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    out = lm.backbone.base_model(
        inputs_embeds=lm.embed(ids),
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
    )
    return out.last_hidden_state[:, -1], out.past_key_values
