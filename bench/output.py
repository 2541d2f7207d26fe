"""The end of every benchmark: its result as JSON, printed and kept."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gti_core.machine import machine


def publish(
    benchmark: str, arguments: Sequence[str] | None, path: Path | None, load: float, **result: Any
) -> None:
    """Print a result with its command and machine, and write it to a file.

    Args:
        benchmark: name of the module in `bench`.
        arguments: as given to its `main`; None for those of the process.
        path: file to write, or None.
        load: load average of the last minute before it began.
        result: what was found.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    document = {
        "benchmark": benchmark,
        "command": " ".join(["python", "-m", f"bench.{benchmark}", *words]),
        "machine": {**machine(), "load_1min_before": round(load, 2)},
        **result,
    }
    text = json.dumps(document, indent=2)
    sys.stdout.write(text + "\n")
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")


def load_average() -> float:
    """Load average of the last minute."""
    return os.getloadavg()[0]
