"""What grounding new items needs of the frozen model, computed once per bundle and kept.

Text vectors of the catalogue, contexts of the training histories, and the beams of the probes:
a file in the cache from then on.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gti_core.bundle.delta import CatalogState
from gti_core.bundle.format import Bundle
from gti_core.bundle.histories import Histories
from gti_core.catalog import Item
from gti_core.files import write_safetensors
from gti_core.lm import SidLM
from gti_core.onboarding.contexts import WINDOW, Contexts, collect_contexts
from gti_core.onboarding.probes import ProbeBeams, search_prefixes
from gti_core.quantizer.encoder import TextEncoder, item_text
from gti_core.types import FloatArray

log = logging.getLogger(__name__)

FORMAT = "gti-onboarding/3"
Say = Callable[[str], None]


@dataclass(frozen=True)
class AssetSizes:
    """How much is kept.

    Args:
        events: contexts.
        probes: held-out histories that items are judged by.
        beam_width: prefixes per probe.
    """

    events: int = 4096
    probes: int = 256
    beam_width: int = 20


@dataclass(frozen=True, eq=False)
class Assets:
    """See the module.

    Args:
        vectors: text vectors by catalogue row of the base, of length 1, [N, E], float32.
        contexts: of training histories.
        probes: of held-out histories.
        ability: share of old items that the model names after their own text.
    """

    vectors: FloatArray
    contexts: Contexts
    probes: ProbeBeams
    ability: float


def text_of_item(item: Item) -> str:
    """What the text encoder reads of an item; its id where there is no text."""
    return item_text(item.title, item.description, item.attributes) or item.item_id


def load_assets(
    bundle: Bundle,
    lm: SidLM,
    encoder: TextEncoder,
    histories: Histories,
    cache_dir: Path,
    sizes: AssetSizes,
    measure_ability: Callable[[], float],
    say: Say = log.info,
) -> Assets:
    """Read the bundle's assets from the cache, or compute and keep them."""
    import torch

    key = f"{FORMAT}/{bundle.digest}/{sizes}/{next(lm.backbone.parameters()).dtype}"
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    path = cache_dir / f"onboarding-{name}.safetensors"
    if path.is_file():
        found = _read(path)
        if found is not None:
            return found
        log.warning("%s can't be read; it is made again", path)
    state = CatalogState.of(bundle.catalog, bundle.vocabulary)
    say("reading histories, searching for the probes, encoding the catalogue's texts")
    catalog = bundle.catalog
    sids = [item.sid for item in catalog]

    def read_histories() -> Contexts:
        train = [[catalog.row(name) for name in history] for history in histories.train]
        random.Random(0).shuffle(train)
        return collect_contexts(lm, train, sids, bundle.prompt, most=sizes.events)

    def search() -> ProbeBeams:
        cases = histories.probes[: sizes.probes]
        pasts = [[catalog.row(name) for name in case.history] for case in cases]
        prompts = [[sids[row] for row in past[-WINDOW:]] for past in pasts]
        return search_prefixes(
            lm,
            state.index,
            [bundle.prompt.token_ids(prompt, lm.vocabulary) for prompt in prompts],
            [frozenset(past) for past in pasts],
            [catalog.row(case.target) for case in cases],
            beam_width=sizes.beam_width,
        )

    # Two halves that never wait for each other: on a busy machine threads of one operation do.
    with ThreadPoolExecutor(2) as pool:
        searched = pool.submit(search)
        contexts = read_histories()
        vectors = encoder.encode([text_of_item(item) for item in catalog])
        ability = measure_ability()
        assets = Assets(vectors, contexts, searched.result(), ability)
    tensors = {name: torch.from_numpy(array) for name, array in _arrays(assets).items()}
    write_safetensors(path, tensors)
    return assets


def _arrays(assets: Assets) -> dict[str, np.ndarray]:
    contexts, probes = assets.contexts, assets.probes
    past = [sorted(rows) for rows in probes.seen]
    return {
        "vectors": assets.vectors,
        "contexts.hidden": contexts.hidden,
        "contexts.log_norm": contexts.log_norm,
        "contexts.targets": contexts.targets,
        "contexts.inner": contexts.inner,
        "contexts.inner_log_norm": contexts.inner_log_norm,
        "probes.prefixes": probes.prefixes,
        "probes.scores": probes.scores,
        "probes.hidden": probes.hidden,
        "probes.log_norms": probes.log_norms,
        "probes.targets": probes.targets,
        "probes.seen": np.array([row for rows in past for row in rows], dtype=np.int64),
        "probes.lengths": np.array([len(rows) for rows in past], dtype=np.int64),
        "ability": np.array([assets.ability], dtype=np.float64),
    }


def _read(path: Path) -> Assets | None:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        found = load_file(path)
        ends = np.cumsum(found["probes.lengths"])
        seen = np.split(found["probes.seen"], ends[:-1]) if len(ends) else []
        return Assets(
            found["vectors"],
            Contexts(
                found["contexts.hidden"],
                found["contexts.log_norm"],
                found["contexts.targets"],
                found["contexts.inner"],
                found["contexts.inner_log_norm"],
            ),
            ProbeBeams(
                found["probes.prefixes"],
                found["probes.scores"],
                found["probes.hidden"],
                found["probes.log_norms"],
                found["probes.targets"],
                tuple(frozenset(rows.tolist()) for rows in seen),
            ),
            float(found["ability"][0]),
        )
    except (OSError, KeyError, SafetensorError):
        return None


def vectors_of(
    state: CatalogState, assets: Assets, encoder: TextEncoder, known: dict[str, FloatArray]
) -> FloatArray:
    """Text vectors of a version's whole catalogue, [N, E].

    Args:
        state: the version.
        assets: hold the base's vectors.
        encoder: for items added since.
        known: vectors by text, of items encoded before; filled.
    """
    added: Sequence[str] = [
        text_of_item(item) for item in state.catalog.items[len(assets.vectors) :]
    ]
    missing = sorted({text for text in added if text not in known})
    if missing:
        known.update(zip(missing, encoder.encode(missing), strict=True))
    if not added:
        return assets.vectors
    return np.concatenate([assets.vectors, np.stack([known[text] for text in added])])
