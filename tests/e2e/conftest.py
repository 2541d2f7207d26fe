"""Engines run as on a machine without a C++ compiler, which set-up does not ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No compiler, and no compiled code of earlier runs."""
    patch = pytest.MonkeyPatch()
    patch.setenv("CXX", "/nonexistent/c++")
    patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
    yield
    patch.undo()
