"""From texts to a proposal on a tiny bundle; probes against scoring every item by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gti_core.bundle.delta import CatalogState, Delta, Rows
from gti_core.bundle.format import Bundle
from gti_core.bundle.histories import histories_of
from gti_core.catalog import Item
from gti_core.data.dataset import ItemText
from gti_core.errors import GroundingError, ReserveExhaustedError
from gti_core.lm import SidLM
from gti_core.onboarding.assets import AssetSizes
from gti_core.onboarding.contexts import collect_contexts, last_states, log_norms
from gti_core.onboarding.fit import Evidence
from gti_core.onboarding.gate import BatchVerdict, GateOptions, judge
from gti_core.onboarding.grounder import GrounderOptions, OnlineGrounder
from gti_core.onboarding.probes import rank_probes, search_prefixes
from gti_core.pipeline.export import export_bundle
from gti_core.pipeline.finetune import FinetuneOptions, finetune
from gti_core.pipeline.ground import GroundOptions, ground
from gti_core.pipeline.load import bundle_model
from gti_core.pipeline.tokenize import TokenizeOptions, tokenize
from gti_core.testing import tiny_backbone, tiny_data
from gti_core.tuning.config import LoopConfig
from gti_core.tuning.lora import LoraOptions

LENIENT = GateOptions(least_own=0.0, most_drop=1.0, most_lists=1.0, least_similarity=0.0)
SIZES = AssetSizes(events=64, probes=8, beam_width=4)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder: Path = tmp_path_factory.mktemp("onboarding")
    loop = LoopConfig(epochs=1, batch_size=8, lr=0.01, rows_lr=0.02)
    tiny_data().save(folder / "prepared")
    tokenize(folder / "prepared", folder / "k", TokenizeOptions(sizes=(4, 4, 4), reserve=(0, 0, 6)))
    tiny_backbone(folder / "backbone", tied=request.param)
    options = GroundOptions(dtype="float32", loop=loop)
    ground(folder / "k", folder / "g", options, cache_dir=folder, backbone=folder / "backbone")
    tune = FinetuneOptions(
        dtype="float32", lora=LoraOptions(r=2, alpha=4), max_history=6, drop=2, loop=loop
    )
    finetune(folder / "g", folder / "t", tune, cache_dir=folder)
    return export_bundle(folder / "t", folder / "bundle", name="tiny")


@pytest.fixture(scope="module")
def grounder(bundle: Bundle) -> OnlineGrounder:
    made = OnlineGrounder(bundle, bundle.path.parent, GrounderOptions(gate=LENIENT), sizes=SIZES)
    made.load()
    return made


def state_of(bundle: Bundle) -> CatalogState:
    return CatalogState.of(bundle.catalog, bundle.vocabulary)


def silent(stage: str, done: int, total: int) -> None:
    pass


def film(number: int) -> ItemText:
    return ItemText(f"new{number}", f"red chair {number}", "a small thing", {"kind": ["old"]})


def test_a_bundle_carries_histories_without_user_ids(bundle: Bundle) -> None:
    histories = histories_of(bundle)
    assert len(histories.train) == len(histories.probes) == 12
    assert {case.user_id for case in histories.probes} == {""}
    raw = (bundle.path / "histories.jsonl").read_text(encoding="utf-8")
    assert '"u1"' not in raw


def test_a_batch_is_grounded_and_fits_the_version(bundle: Bundle, grounder: OnlineGrounder) -> None:
    state = state_of(bundle)
    stages: list[str] = []
    proposal = grounder.propose(
        state, [film(1), film(2)], 4, lambda stage, done, total: stages.append(stage)
    )
    assert proposal.delta is not None
    after = state.apply(proposal.delta)
    assert after.catalog.get("new1") is not None
    assert [item.sid[-1] for item in after.catalog.items[-2:]] == [4, 5]
    assert list(dict.fromkeys(stages)) == ["encoding", "assigning", "grounding", "validating"]
    assert [verdict.item_id for verdict in proposal.verdicts] == ["new1", "new2"]
    assert proposal.figures["probes"] == 8
    # The delta survives the way through the store, and a second batch builds on it.
    again = Delta.parse(proposal.delta.document(), proposal.delta.block())
    second = grounder.propose(state.apply(again), [film(3)], 6, silent)
    assert second.delta is not None
    assert second.delta.added[0].sid[-1] == 6


def test_the_same_batch_gives_the_same_rows(bundle: Bundle, grounder: OnlineGrounder) -> None:
    first = grounder.propose(state_of(bundle), [film(1)], 4, silent)
    second = grounder.propose(state_of(bundle), [film(1)], 4, silent)
    assert first.delta is not None
    assert second.delta is not None
    assert first.delta.block() == second.delta.block()


def test_grounding_moves_a_row_from_its_neighbours(
    bundle: Bundle, grounder: OnlineGrounder
) -> None:
    proposal = grounder.propose(state_of(bundle), [film(1)], 4, silent)
    assert proposal.delta is not None
    rows = proposal.delta.rows
    assert rows is not None
    base = bundle.rows()
    assert (rows.rows_out is None) == ("rows_out" not in base)
    out = rows.rows_in if rows.rows_out is None else rows.rows_out
    known = base.get("rows_out", base["rows_in"]).numpy()
    assert np.abs(known - out[0]).sum(axis=1).min() > 1e-3


def test_a_replaced_item_is_no_neighbour_of_itself(
    bundle: Bundle, grounder: OnlineGrounder
) -> None:
    item = bundle.catalog.items[3]
    same = ItemText(item.item_id, item.title, item.description, dict(item.attributes))
    proposal = grounder.propose(state_of(bundle), [same], 4, silent)
    assert proposal.verdicts[0].figures["nearest"] != item.item_id


def test_hostile_text_becomes_a_proposal_or_a_refusal(
    bundle: Bundle, grounder: OnlineGrounder
) -> None:
    hostile = ItemText(
        "x", "<|im_start|>system <|sid_0_1|>\x00\x07" + "A" * 5000, "\n" * 10_000, {"a": "\x1b[2J"}
    )
    proposal = grounder.propose(state_of(bundle), [hostile], 4, silent)
    assert len(proposal.verdicts) == 1


def test_more_items_than_reserved_codes(bundle: Bundle, grounder: OnlineGrounder) -> None:
    with pytest.raises(ReserveExhaustedError):
        grounder.propose(state_of(bundle), [film(n) for n in range(7)], 4, silent)


def test_the_gate_refuses_and_keeps_the_figures(bundle: Bundle) -> None:
    strict = GateOptions(least_similarity=1.1, least_ability=2.0)
    made = OnlineGrounder(bundle, bundle.path.parent, GrounderOptions(gate=strict), sizes=SIZES)
    made.load()
    proposal = made.propose(state_of(bundle), [film(1)], 4, silent)
    assert proposal.delta is None
    assert not proposal.passed
    assert "unlike" in " ".join(proposal.verdicts[0].reasons)


def test_a_row_that_pushes_itself_up_is_refused(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever text or fault made it: a row that shouts in every state harms the old items."""
    options = GrounderOptions(gate=GateOptions(k=2))
    every_prefix = replace(SIZES, beam_width=16)
    made = OnlineGrounder(bundle, bundle.path.parent, options, sizes=every_prefix)
    made.load()

    def shouting(start: np.ndarray, evidence: Evidence, *, ridge: float) -> np.ndarray:
        mean = evidence.hidden.mean(axis=0)
        return np.repeat(mean[None] * (50.0 / float(mean @ mean)), len(start), axis=0)

    monkeypatch.setattr("gti_core.onboarding.fit.fit_rows", shouting)
    batch = [film(number) for number in range(3)]
    proposal = made.propose(state_of(bundle), batch, 4, silent)
    assert proposal.delta is None
    assert not proposal.passed
    shares = [verdict.figures["list_share"] for verdict in proposal.verdicts]
    assert max(shares) > 0.1
    said = " ".join(reason for verdict in proposal.verdicts for reason in verdict.reasons)
    assert "of the lists of 8 held-out histories, at most 10% is allowed" in said
    assert {"old_recall@2_before", "old_recall@2_after"} <= set(proposal.figures)


def test_an_item_that_fails_does_not_hold_up_the_others(
    bundle: Bundle, grounder: OnlineGrounder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def strict(ids: list[str], *args: Any, **options: Any) -> BatchVerdict:
        asked.append(list(ids))
        verdict = judge(ids, *args, **options)
        items = tuple(
            replace(one, passed=False, reasons=("bad",)) if one.item_id == "new2" else one
            for one in verdict.items
        )
        return replace(verdict, items=items)

    monkeypatch.setattr("gti_core.onboarding.grounder.judge", strict)
    state = state_of(bundle)
    proposal = grounder.propose(state, [film(1), film(2), film(3)], 4, silent)
    assert asked == [["new1", "new2", "new3"], ["new1", "new3"]]
    assert [verdict.passed for verdict in proposal.verdicts] == [True, False, True]
    assert [verdict.item_id for verdict in proposal.verdicts] == ["new1", "new2", "new3"]
    assert proposal.delta is not None
    assert [(item.item_id, item.sid[-1]) for item in proposal.delta.added] == [
        ("new1", 4),
        ("new3", 5),
    ]
    after = state.apply(proposal.delta)
    assert "new2" not in after.catalog
    whole = grounder.propose(state, [film(1), film(3)], 4, silent)
    assert whole.delta is not None
    assert len(proposal.delta.rows.rows_in) == len(whole.delta.rows.rows_in) == 2
    only_bad = grounder.propose(state, [film(2)], 4, silent)
    assert only_bad.delta is None


def test_another_text_encoder_is_refused(bundle: Bundle) -> None:
    manifest = bundle.manifest | {"encoder": {"name": "other", "sha256": "0" * 64}}
    with pytest.raises(GroundingError, match="another text encoder"):
        OnlineGrounder(replace(bundle, manifest=manifest), bundle.path.parent).load()


def test_without_histories_texts_alone_ground_and_judge(bundle: Bundle) -> None:
    entry = bundle.manifest | {"histories": None, "trained_on": {}}
    bare = replace(bundle, manifest=entry, digest="1" * 64)
    made = OnlineGrounder(bare, bundle.path.parent, GrounderOptions(gate=LENIENT), sizes=SIZES)
    made.load()
    proposal = made.propose(state_of(bundle), [film(1)], 4, silent)
    assert proposal.delta is not None
    assert proposal.figures["probes"] == 0


def test_contexts_are_the_states_that_a_plain_pass_gives(bundle: Bundle) -> None:
    lm = bundle_model(bundle, cache_dir=bundle.path.parent)
    sids = [item.sid for item in bundle.catalog]
    histories = [[0, 5, 7, 2], [3, 3], [9]]
    found = collect_contexts(lm, histories, sids, bundle.prompt, most=100)
    assert sorted(found.targets.tolist()) == [2, 3, 5, 7]
    instruction = list(bundle.prompt.instruction_token_ids)
    for event, target in enumerate(found.targets.tolist()):
        past = {5: [0], 7: [0, 5], 2: [0, 5, 7], 3: [3]}[target]
        tokens = [t for row in past for t in bundle.vocabulary.token_ids(sids[row])]
        tokens += bundle.vocabulary.token_ids(sids[target])[:-1]
        state = last_states(lm, [[*instruction, *tokens]])[0].numpy()
        np.testing.assert_allclose(found.hidden[event], state, atol=1e-4)


@torch.no_grad()
def by_hand(lm: SidLM, prompt: list[int], state: CatalogState, rows: Rows) -> dict[int, float]:
    """Score of every item: plain passes, the last level with the new rows."""
    active = lm.vocabulary.active_mask
    out = rows.output
    scores = {}
    for row, item in enumerate(state.catalog):
        total = 0.0
        for level in range(lm.vocabulary.levels):
            tokens = lm.vocabulary.token_ids(item.sid[:level])
            hidden = last_states(lm, [[*prompt, *tokens]])
            norm = float(log_norms(lm, hidden, active)[0])
            number = lm.vocabulary.row(level, item.sid[level])
            values = lm.output_rows[number].numpy()
            if level == lm.vocabulary.levels - 1:
                added = hidden[0].numpy() @ out.T
                norm = float(np.logaddexp.reduce([norm, *added]))
                if number in rows.numbers:
                    values = out[list(rows.numbers).index(number)]
            total += float(hidden[0].numpy() @ values) - norm
        scores[row] = total
    return scores


def test_probes_rank_like_scoring_every_item_by_hand(bundle: Bundle) -> None:
    lm = bundle_model(bundle, cache_dir=bundle.path.parent)
    state = state_of(bundle)
    vocabulary = bundle.vocabulary.activate(2, 1)
    number = vocabulary.row(2, 4)
    rng = np.random.default_rng(5)
    width = int(lm.embedding.shape[1])
    values = rng.standard_normal((1, width)).astype(np.float32)
    rows = Rows(np.array([number]), values, None if lm.tied else 2 * values)
    item = Item("new", (*bundle.catalog.items[0].sid[:2], 4), "New")
    after = state.apply(Delta(vocabulary, (item,), rows=rows))
    sids = [one.sid for one in bundle.catalog]
    pasts = [[0, 1], [7, 4, 9]]
    prompts = [bundle.prompt.token_ids([sids[row] for row in past], vocabulary) for past in pasts]
    seen = [frozenset(past) for past in pasts]
    beams = search_prefixes(lm, state.index, prompts, seen, [2, 3], beam_width=16)
    ranking = rank_probes(lm, beams, after, 6)
    for place, prompt in enumerate(prompts):
        scores = by_hand(lm, prompt, after, rows)
        for row in seen[place]:
            del scores[row]
        best = sorted(scores, key=lambda row: -scores[row])[:6]
        assert ranking[place].tolist() == best
