"""The service keeps to its OpenAPI document, in a few examples; `make contract` has more."""

from __future__ import annotations

from pathlib import Path

import pytest
from contract_service import serving

from tests.contract.__main__ import run


def test_service_keeps_to_its_document(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path) as (host, port):
        code = run(f"http://{host}:{port}", 100, ["--no-color", "--seed=1"])
    assert code == 0, capfd.readouterr().out
