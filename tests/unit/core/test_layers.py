"""The direction of imports: gti_core stands alone; vllm is imported in one place."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import gti_core

ROOT = Path(__file__).parents[3]

BLOCKED = """
import importlib, pkgutil, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("fastapi", "vllm", "service", "starlette", "uvicorn"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
import gti_core
for module in pkgutil.walk_packages(gti_core.__path__, "gti_core."):
    importlib.import_module(module.name)
print("ok")
"""


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


def test_gti_core_imports_without_fastapi_vllm_and_service():
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.stdout.strip() == "ok", done.stderr[-2000:]


def test_only_the_vllm_engine_imports_vllm():
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("gti_core", "service")
        for path in (ROOT / folder).rglob("*.py")
        if "vllm" in imports_of(path)
    }
    assert found
    assert all(name.startswith("service/engine/vllm") for name in found), found


@pytest.mark.parametrize("folder", ["gti_core", "service"])
def test_nothing_unpickles_or_fetches(folder):
    for path in (ROOT / folder).rglob("*.py"):
        assert not imports_of(path) & {"pickle", "dill", "cloudpickle", "requests", "urllib3"}, path
        assert "torch.load(" not in path.read_text(encoding="utf-8"), path


def test_every_package_has_a_docstring():
    for module in pkgutil.walk_packages(gti_core.__path__, "gti_core."):
        path = ROOT / Path(*module.name.split("."))
        path = path / "__init__.py" if module.ispkg else path.with_suffix(".py")
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path
