"""OnlineGrounder: from item texts to a proposal, on the frozen model, in seconds."""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gti_core.bundle.delta import CatalogState
from gti_core.bundle.format import Bundle
from gti_core.bundle.histories import histories_of
from gti_core.catalog import Item
from gti_core.errors import GroundingError
from gti_core.onboarding.assign import (
    Neighbours,
    assign_new,
    nearest_items,
    neighbour_weights,
)
from gti_core.onboarding.batch import Asked, Batch, owners_of
from gti_core.onboarding.gate import BatchVerdict, GateOptions, judge
from gti_core.onboarding.own import (
    EvidenceOptions,
    OwnPrompts,
    history_prompts,
    made_up_histories,
    text_prompts,
)
from gti_core.onboarding.proposal import ItemVerdict, Proposal, Report
from gti_core.types import FloatArray, Sid

if TYPE_CHECKING:
    from gti_core.data.dataset import ItemText
    from gti_core.lm import SidLM
    from gti_core.onboarding.assets import Assets, AssetSizes
    from gti_core.onboarding.probes import ProbeBeams
    from gti_core.quantizer.encoder import TextEncoder

log = logging.getLogger(__name__)

NEIGHBOURS = 20
ABILITY_ITEMS = 32
"""Old items whose own text is tried, to learn whether this model can be asked by text at all."""
OWN_HISTORIES, OWN_NEIGHBOURS, OWN_LENGTH = 8, 8, 3
"""Made-up histories that a new item is asked by where texts can't be: how many, of how many of its
neighbours, how long."""
OWN_BEAM_WIDTH = 20


@dataclass(frozen=True)
class GrounderOptions:
    """Options of online grounding.

    Args:
        gate: limits.
        evidence: what a row is fitted to.
        ridge: pull of a row towards its start, see `gti_core.onboarding.fit`.
        seed: of everything that is drawn.
    """

    gate: GateOptions = field(default_factory=GateOptions)
    evidence: EvidenceOptions = field(default_factory=EvidenceOptions)
    ridge: float = 0.01
    seed: int = 0


class OnlineGrounder:
    """See `gti_core.onboarding.proposal.Grounder`.

    Args:
        bundle: the base version.
        cache_dir: where backbones and assets are kept.
        options: options.
        encoder_dir: the text encoder that the bundle was tokenized with; None for the demo's.
        sizes: how much is kept of the model's states; None for the usual.
    """

    def __init__(
        self,
        bundle: Bundle,
        cache_dir: Path,
        options: GrounderOptions | None = None,
        encoder_dir: Path | None = None,
        *,
        sizes: AssetSizes | None = None,
    ) -> None:
        self._bundle = bundle
        self._cache_dir = cache_dir
        self._options = options or GrounderOptions()
        self._encoder_dir = encoder_dir
        self._sizes = sizes
        self._known: dict[str, FloatArray] = {}
        self._lm: SidLM
        self._encoder: TextEncoder
        self._assets: Assets
        self._tokenizer: Any
        self._by_text = False

    def load(self) -> None:
        """Load model, encoder and assets. See `Grounder.load`."""
        from gti_core.backbone import backbone_digest, resolve_backbone
        from gti_core.lm import load_tokenizer
        from gti_core.onboarding.assets import AssetSizes, load_assets
        from gti_core.pipeline.load import bundle_model
        from gti_core.quantizer.encoder import TextEncoder, find_demo_encoder

        bundle = self._bundle
        encoder = self._encoder_dir or find_demo_encoder()
        made_with = bundle.manifest.get("encoder", {})
        if backbone_digest(encoder) != made_with.get("sha256"):
            raise GroundingError(
                f"bundle {bundle.name!r} was made with another text encoder than {encoder}: "
                f"{made_with.get('name', 'it does not say which')}"
            )
        self._encoder = TextEncoder(encoder)
        self._lm = bundle_model(bundle, cache_dir=self._cache_dir, dtype="bfloat16")
        self._lm.requires_grad_(False)
        backbone = resolve_backbone(bundle.manifest["backbone"], self._cache_dir)
        self._tokenizer = load_tokenizer(backbone)
        self._assets = load_assets(
            bundle,
            self._lm,
            self._encoder,
            histories_of(bundle),
            self._cache_dir,
            self._sizes or AssetSizes(),
            self._ability,
        )
        ability = self._assets.ability
        self._by_text = ability >= self._options.gate.least_ability
        log.info(
            "own texts lead to %.0f %% of old items, so new ones are asked by %s",
            100 * ability,
            "text" if self._by_text else "histories",
        )

    def propose(
        self, state: CatalogState, items: Sequence[ItemText], first_code: int, report: Report
    ) -> Proposal:
        """See `Grounder.propose`."""
        from gti_core.onboarding.assets import text_of_item, vectors_of
        from gti_core.onboarding.choice import candidate_prefixes, choose_prefixes

        count = len(items)
        report("encoding", 0, count)
        self._write(state)
        plain = [
            Item(item.item_id, (), item.title, item.description, dict(item.attributes))
            for item in items
        ]
        if not all(text_of_item(item) for item in plain):
            raise GroundingError("an item has no text")
        new = self._encoder.encode([text_of_item(item) for item in plain])
        known = vectors_of(state, self._assets, self._encoder, self._known)
        report("assigning", 0, count)
        near = self._nearest(state, {item.item_id for item in items}, new, known)
        popularity = np.array([item.popularity for item in state.catalog], dtype=np.float32)
        weights = neighbour_weights(near, popularity)
        sids = state.catalog.sids
        candidates = [
            candidate_prefixes(sids, near.rows[number], weights[number]) for number in range(count)
        ]
        # Too many items: say so before the work.
        assign_new([(0,) * (sids.shape[1] - 1)] * count, state.vocabulary, first_code)
        prompts = self._prompts(state, plain, near, weights)
        prefixes, after_texts = choose_prefixes(
            self._lm, state.index, prompts, candidates, by_text=self._by_text
        )
        report("grounding", 0, count)
        rows = self._ground(state, prompts, prefixes, near, report)
        report("validating", 0, count)
        batch = Batch(state, plain, prefixes, rows, first_code)
        if after_texts is None:
            asked = self._ask_histories(batch, near, weights)
        else:
            asked = Asked(after_texts, owners_of([len(own.texts) for own in prompts]))
        verdicts: dict[int, ItemVerdict] = {}
        chosen = list(range(count))
        while True:
            delta, verdict = batch.delta(chosen), self._judge(batch, chosen, asked, near)
            verdicts.update(zip(chosen, verdict.items, strict=True))
            passed = [number for number in chosen if verdicts[number].passed]
            # Without those that failed, the others have to show again what they do.
            if not passed or len(passed) == len(chosen):
                break
            chosen = passed
        report("validating", count, count)
        for number, one in verdicts.items():
            nearest = state.catalog.items[int(near.rows[number, 0])]
            one.figures["nearest"] = nearest.item_id
        return Proposal(
            delta if verdict.passed else None,
            tuple(verdicts[number] for number in range(count)),
            verdict.reasons,
            verdict.figures,
        )

    def vectors(self, items: Sequence[Item]) -> FloatArray:
        """Text vectors of items, of length 1, [M, E]."""
        from gti_core.onboarding.assets import text_of_item

        return self._encoder.encode([text_of_item(item) for item in items])

    def copied_rows(self, state: CatalogState, items: Sequence[ItemText]) -> FloatArray:
        """Output rows of the last codes of the items' nearest neighbours, [M, D]: what grounding
        starts from."""
        plain = [Item(i.item_id, (), i.title, i.description, dict(i.attributes)) for i in items]
        near = self._nearest(
            state, {item.item_id for item in items}, self.vectors(plain), self._assets.vectors
        )
        return self._copied(state, near, self._lm.output_rows)

    def _write(self, state: CatalogState) -> None:
        """Give the model the rows activated since the base; it reads them in histories."""
        import torch

        if state.rows is None:
            return
        numbers = torch.from_numpy(state.rows.numbers)
        with torch.no_grad():
            self._lm.rows_in[numbers] = torch.from_numpy(state.rows.rows_in)
            if state.rows.rows_out is not None:
                self._lm.rows_out[numbers] = torch.from_numpy(state.rows.rows_out)

    def _nearest(
        self, state: CatalogState, own: set[str], new: FloatArray, known: FloatArray
    ) -> Neighbours:
        """Neighbours in service, an item's own earlier row left out."""
        candidates = [
            row
            for row in np.flatnonzero(state.index.available).tolist()
            if state.catalog.items[row].item_id not in own
        ]
        return nearest_items(new, known, np.array(candidates, dtype=np.int64), NEIGHBOURS)

    def _prompts(
        self,
        state: CatalogState,
        items: Sequence[Item],
        near: Neighbours,
        weights: FloatArray,
    ) -> list[OwnPrompts]:
        """What each item is to be found by: its texts, and histories of items like it."""
        options = self._options.evidence
        rng = random.Random(f"fit/{self._options.seed}")
        found = []
        for number, item in enumerate(items):
            histories = [
                history
                for length in options.lengths
                for history in made_up_histories(
                    near.rows[number, : options.neighbours],
                    weights[number, : options.neighbours],
                    options.histories,
                    length,
                    rng,
                )
            ]
            prompts = history_prompts(histories, state.catalog.sids, self._bundle.prompt, self._lm)
            found.append(OwnPrompts(self._texts(item), prompts, list(map(frozenset, histories))))
        return found

    def _ground(
        self,
        state: CatalogState,
        prompts: Sequence[OwnPrompts],
        prefixes: Sequence[Sid],
        near: Neighbours,
        report: Report,
    ) -> tuple[FloatArray, FloatArray | None]:
        """Input and output rows of the items' new codes, [M, D]; the latter None when tied."""
        from gti_core.onboarding.evidence import EvidenceMaker
        from gti_core.onboarding.fit import fit_rows

        maker = EvidenceMaker(
            self._lm,
            self._assets.contexts,
            state.catalog.sids,
            self._nothing if state.rows is None else state.rows.output,
            self._options.evidence,
            self._options.seed,
        )
        start_in = self._copied(state, near, self._lm.rows_in)
        start_out = start_in if self._lm.tied else self._copied(state, near, self._lm.rows_out)
        found = start_out.copy()
        groups: dict[Sid, list[int]] = defaultdict(list)
        for number, prefix in enumerate(prefixes):
            groups[prefix].append(number)
        done = 0
        for prefix, members in groups.items():
            evidence = maker.for_group(
                prefix,
                [prompts[number] for number in members],
                Neighbours(near.rows[members], near.similarity[members]),
            )
            found[members] = fit_rows(start_out[members], evidence, ridge=self._options.ridge)
            done += len(members)
            report("grounding", done, len(prompts))
        return (found, None) if self._lm.tied else (start_in, found)

    @property
    def _nothing(self) -> FloatArray:
        return np.empty((0, int(self._lm.embedding.shape[1])), dtype=np.float32)

    def _copied(self, state: CatalogState, near: Neighbours, rows: Any) -> FloatArray:
        """Start of each new row: the row of the nearest item's last code, [M, D] float32."""
        vocabulary = state.vocabulary
        last = vocabulary.levels - 1
        codes = state.catalog.sids[near.rows[:, 0], last]
        copied: FloatArray = rows.detach()[vocabulary.offsets[last] + codes].float().numpy()
        return copied.copy()

    def _texts(self, item: Item) -> list[list[int]]:
        return text_prompts(item, self._tokenizer, self._bundle.search, self._lm.vocabulary)

    def _ability(self) -> float:
        """Share of old items that stand in the first ``own_k`` after their own text."""
        from gti_core.onboarding.probes import rank_probes

        state = CatalogState.of(self._bundle.catalog, self._bundle.vocabulary)
        items = list(state.catalog.items)
        chosen = random.Random(0).sample(items, min(ABILITY_ITEMS, len(items)))
        prompts = [self._texts(item)[0] for item in chosen]
        rows = [state.catalog.row(item.item_id) for item in chosen]
        beams = self._searched(state, prompts, [frozenset()] * len(prompts))
        lists = rank_probes(self._lm, beams, state, self._options.gate.own_k)
        return float((lists == np.array(rows)[:, None]).any(axis=1).mean())

    def _ask_histories(self, batch: Batch, near: Neighbours, weights: FloatArray) -> Asked:
        """Search made-up histories that no row was fitted to."""
        rng = random.Random(f"own/{self._options.seed}")
        after = batch.state.apply(batch.delta(list(range(len(batch.items)))))
        histories = [
            made_up_histories(
                near.rows[number, :OWN_NEIGHBOURS],
                weights[number, :OWN_NEIGHBOURS],
                OWN_HISTORIES,
                OWN_LENGTH,
                rng,
            )
            for number in range(len(batch.items))
        ]
        every = [history for own in histories for history in own]
        prompts = history_prompts(every, after.catalog.sids, self._bundle.prompt, self._lm)
        beams = self._searched(after, prompts, list(map(frozenset, every)))
        return Asked(beams, owners_of(list(map(len, histories))))

    def _judge(
        self, batch: Batch, chosen: Sequence[int], asked: Asked, near: Neighbours
    ) -> BatchVerdict:
        """What the gate says of some items of a batch, without the others."""
        from gti_core.onboarding.probes import rank_probes

        gate, probes = self._options.gate, self._assets.probes
        before, after = batch.state, batch.state.apply(batch.delta(chosen))
        lists = rank_probes(self._lm, asked.beams, after, gate.own_k)
        ids = [batch.items[number].item_id for number in chosen]
        return judge(
            ids,
            [after.catalog.row(item_id) for item_id in ids],
            [lists[asked.owners == number] for number in chosen],
            near.similarity[list(chosen), 0].tolist(),
            rank_probes(self._lm, probes, before, gate.k),
            rank_probes(self._lm, probes, after, gate.k),
            probes.targets,
            gate,
            by_text=self._by_text,
        )

    def _searched(
        self,
        state: CatalogState,
        prompts: Sequence[Sequence[int]],
        seen: Sequence[frozenset[int]],
    ) -> ProbeBeams:
        from gti_core.onboarding.probes import search_prefixes

        nothing = [-1] * len(prompts)
        return search_prefixes(
            self._lm, state.index, prompts, seen, nothing, beam_width=OWN_BEAM_WIDTH
        )
