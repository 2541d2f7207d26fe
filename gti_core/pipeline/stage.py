"""Stage folders: what one pipeline command writes and the next one reads.

``stage.json`` is written last; its presence says that the stage is finished. It names the kind,
the options, the folder it was made from, figures, and the digest of every file. A stage called
again with the same options on the same input is already done; with others it is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gti_core.backbone import sha256_file
from gti_core.errors import PipelineError
from gti_core.files import read_json, write_json
from gti_core.types import JsonDict

FORMAT = "gti-stage/1"
DOCUMENT = "stage.json"


@dataclass(frozen=True)
class Stage:
    """A finished stage.

    Args:
        folder: where it lies.
        document: parsed ``stage.json``.
    """

    folder: Path
    document: JsonDict

    @property
    def identity(self) -> str:
        """Digest of kind, options and input."""
        return str(self.document["identity"])

    @property
    def options(self) -> JsonDict:
        """Options it was made with."""
        options: JsonDict = self.document["options"]
        return options

    @property
    def figures(self) -> JsonDict:
        """Figures it reported."""
        figures: JsonDict = self.document["figures"]
        return figures

    @property
    def input_folder(self) -> Path:
        """Folder of the stage it was made from."""
        return Path(os.path.normpath(self.folder / str(self.document["input"]["folder"])))


def identity_of(kind: str, options: Mapping[str, object], input_identity: str) -> str:
    """Digest of everything a stage's result depends on, hex."""
    payload = json.dumps([FORMAT, kind, options, input_identity], sort_keys=True)
    return hashlib.sha256(payload.encode()).hexdigest()


def read_stage(folder: Path, kinds: str | Sequence[str]) -> Stage:
    """A finished stage of one of these kinds, files checked against their digests.

    Raises:
        PipelineError: no such stage, another kind, or a file that is missing or changed.
    """
    expected = [kinds] if isinstance(kinds, str) else list(kinds)
    if not (folder / DOCUMENT).is_file():
        raise PipelineError(
            f"{folder} holds no finished stage; `gti {expected[0]}` must write it first"
        )
    document = read_json(folder / DOCUMENT)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PipelineError(f"{folder / DOCUMENT} is not a {FORMAT} document")
    if document.get("kind") not in expected:
        raise PipelineError(
            f"{folder} was written by `gti {document.get('kind')}`, "
            f"not by `gti {' / '.join(expected)}`"
        )
    for name, digest in document["files"].items():
        path = folder / name
        if not path.is_file():
            raise PipelineError(f"{path} is missing")
        if sha256_file(path) != digest:
            raise PipelineError(f"{path} was changed after the stage finished")
    return Stage(folder, document)


def begin_stage(
    folder: Path, kind: str, options: Mapping[str, object], input_identity: str
) -> tuple[str, Stage | None]:
    """Prepare a stage's folder.

    Returns:
        The identity of the run, and the finished stage where the same run ended before.

    Raises:
        PipelineError: the folder holds another run's result.
    """
    identity = identity_of(kind, options, input_identity)
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / DOCUMENT).exists():
        stage = read_stage(folder, kind)
        if stage.identity != identity:
            raise PipelineError(
                f"{folder} holds the result of another run (other options or input); "
                "choose another folder or remove it"
            )
        return identity, stage
    return identity, None


def finish_stage(
    folder: Path,
    kind: str,
    *,
    identity: str,
    options: Mapping[str, object],
    input_folder: Path,
    input_identity: str,
    files: Sequence[str],
    figures: Mapping[str, object],
) -> Stage:
    """Write ``stage.json`` and return the finished stage."""
    document = {
        "format": FORMAT,
        "kind": kind,
        "identity": identity,
        "options": dict(options),
        "input": {
            "folder": os.path.relpath(input_folder.resolve(), folder.resolve()),
            "identity": input_identity,
        },
        "figures": dict(figures),
        "files": {name: sha256_file(folder / name) for name in files},
    }
    write_json(folder / DOCUMENT, document)
    return Stage(folder, document)
