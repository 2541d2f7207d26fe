"""The table of faults names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


def test_every_fault_has_a_row_and_every_test_named_exists() -> None:
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [int(n) for n in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)] == [*range(1, 19)]
    named = re.findall(r"`(tests/[^`]+?\.py)::(\w+)`", table)
    assert len(named) > 20
    # Read, not imported: some of them need an engine to be imported.
    for file, function in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert function in found, f"{file}::{function}"
