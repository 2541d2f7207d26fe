"""Reading and writing JSON and safetensors so that a crash leaves the old file or the new one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gti_core.data.files import sync_folder, write_atomic
from gti_core.errors import PipelineError


def write_json(path: Path, value: object, *, indent: int | None = 2) -> None:
    """Write JSON durably and atomically, keys in the given order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    write_atomic(path, (text + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises PipelineError naming the file when it is absent or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PipelineError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise PipelineError(f"{path} is not readable JSON: {error}") from error


def write_safetensors(
    path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> None:
    """Write torch tensors as safetensors, durably and atomically."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, temporary, dict(metadata or {}))
    with temporary.open("rb") as stream:
        os.fsync(stream.fileno())
    # safetensors writes files that only their owner can read.
    temporary.chmod(0o644)
    temporary.replace(path)
    sync_folder(path.parent)
