"""From stage folders to figures: arms before and after supervised fine-tuning (SFT)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gti_core.backbone import resolve_backbone
from gti_core.diagnosis.figures import (
    AFTER,
    BEFORE,
    INPUT,
    OUTPUT,
    TIED,
    Block,
    Doubles,
    Side,
    side_figures,
)
from gti_core.diagnosis.sample import Sample, choose
from gti_core.errors import DataError, PipelineError
from gti_core.lm import is_tied, load_backbone, load_tokenizer
from gti_core.pipeline import finetune, ground
from gti_core.pipeline.finetune import load_finetuned
from gti_core.pipeline.ground import Grounded, load_grounded
from gti_core.pipeline.stage import read_stage
from gti_core.text import clean_text
from gti_core.types import JsonDict

FORMAT = "gti-diagnose/1"
MAX_NAME_CHARS = 60


@dataclass(frozen=True)
class Arm:
    """A run to look at.

    Args:
        name: what the plots call it.
        folder: folder of ``gti ground`` (before SFT only) or of ``gti finetune`` (before, from
            its input, and after).

    Raises:
        PipelineError: a name that is empty, longer than 60 characters or not printable.
    """

    name: str
    folder: Path

    def __post_init__(self) -> None:
        if not self.name or clean_text(self.name, MAX_NAME_CHARS) != self.name:
            raise PipelineError(
                f"{self.name!r} is no name for an arm: 1 to {MAX_NAME_CHARS} printable characters"
            )

    @classmethod
    def parse(cls, text: str) -> Arm:
        """An arm from NAME=FOLDER. Raises PipelineError."""
        name, separator, folder = text.partition("=")
        if not separator or not folder:
            raise PipelineError(f"an arm is given as NAME=FOLDER, not {text!r}")
        return cls(name.strip(), Path(folder))


@dataclass(frozen=True)
class ArmFigures:
    """Figures of one arm.

    Args:
        name: the arm's.
        stage: kind of its stage, "ground" or "finetune".
        identity: digest of that stage.
        backbone: name of the backbone.
        levels: active codes per level.
        sample: tokens and words that are shown.
        sides: one when tied; input and output when untied.
    """

    name: str
    stage: str
    identity: str
    backbone: str
    levels: tuple[int, ...]
    sample: Sample
    sides: tuple[Side, ...]


@dataclass(frozen=True)
class Diagnosis:
    """Figures of all arms, in the order given.

    Args:
        seed: seed of the samples.
        arms: the arms.
    """

    seed: int
    arms: tuple[ArmFigures, ...]

    @property
    def one_sample(self) -> bool:
        """True when all arms show the same tokens, so that their matrices match cell by cell."""
        return len({(arm.backbone, arm.levels, arm.sample) for arm in self.arms}) == 1

    def to_json(self) -> JsonDict:
        """Everything, as JSON values; undefined correlations are null."""
        return {
            "format": FORMAT,
            "seed": self.seed,
            "arms": [_arm_json(arm) for arm in self.arms],
        }


def collect(
    arms: Sequence[Arm],
    *,
    cache_dir: Path,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Diagnosis:
    """Read the arms' folders and compute their figures.

    Args:
        arms: at least one, with different names.
        cache_dir: where the demo backbone is converted to.
        seed: seed of the samples of tokens.
        progress: called with (phase, done, total).

    Raises:
        PipelineError: no arm, equal names, or a folder that can't be used.
        BundleError: a backbone that is missing or was changed.
        DataError: rows that are not finite; the message names the arm.
    """
    names = [arm.name for arm in arms]
    if not names:
        raise PipelineError("name at least one arm")
    if len(set(names)) != len(names):
        raise PipelineError(f"two arms have the same name: {', '.join(names)}")
    backbones: dict[str, _Backbone] = {}
    done = []
    for number, arm in enumerate(arms):
        if progress is not None:
            progress("figures", number, len(arms))
        try:
            done.append(_collect_arm(arm, backbones, cache_dir, seed))
        except DataError as error:
            raise DataError(f"arm {arm.name!r}: {error}") from error
    if progress is not None:
        progress("figures", len(arms), len(arms))
    return Diagnosis(seed, tuple(done))


def _collect_arm(
    arm: Arm, backbones: dict[str, _Backbone], cache_dir: Path, seed: int
) -> ArmFigures:
    stage = read_stage(arm.folder, (ground.KIND, finetune.KIND))
    kind = str(stage.document["kind"])
    tuned = load_finetuned(arm.folder) if kind == finetune.KIND else None
    grounded = load_grounded(arm.folder) if tuned is None else tuned.grounded
    key = str(grounded.backbone["sha256"])
    if key not in backbones:
        backbones[key] = _Backbone.load(resolve_backbone(grounded.backbone, cache_dir))
    backbone = backbones[key]
    vocabulary = grounded.vocabulary
    titles = [item.title for item in grounded.tokens.catalog]
    sample = choose(backbone.tokenizer, titles, vocabulary, seed)
    blocks = _blocks(BEFORE, grounded, grounded.rows, backbone.matrices, sample)
    if tuned is not None:
        full = tuned.mode == "full"
        matrices = backbone.tuned(tuned.adapter) if full else backbone.matrices
        blocks += _blocks(AFTER, grounded, tuned.rows, matrices, sample)
    books = grounded.tokens.quantizer.codebooks
    codebooks = [book[:active] for book, active in zip(books, vocabulary.active, strict=True)]
    sides = (TIED,) if backbone.tied else (INPUT, OUTPUT)
    return ArmFigures(
        arm.name,
        kind,
        stage.identity,
        str(grounded.backbone["name"]),
        vocabulary.active,
        sample,
        tuple(
            side_figures([block for block in blocks if block.side == side], codebooks, sample)
            for side in sides
        ),
    )


def _blocks(
    state: str,
    grounded: Grounded,
    rows: dict[str, Tensor],
    matrices: dict[str, Tensor],
    sample: Sample,
) -> list[Block]:
    active = torch.from_numpy(grounded.vocabulary.active_mask.copy())
    blocks = []
    for side, matrix in matrices.items():
        sid = rows["rows_out" if side == OUTPUT else "rows_in"][active]
        text, words = (
            matrix[torch.tensor(ids, dtype=torch.long)].float().numpy()
            for ids in (sample.text_ids, sample.word_ids)
        )
        blocks.append(Block(state, side, sid.float().numpy(), text, words))
    return blocks


@dataclass(frozen=True)
class _Backbone:
    """What is needed of a backbone: its text rows by side, their parameters' names, its tokens."""

    tokenizer: Any
    tied: bool
    matrices: dict[str, Tensor]
    names: dict[str, str]

    @classmethod
    def load(cls, folder: Path) -> _Backbone:
        model = load_backbone(folder, torch.float32)
        tied = is_tied(model)
        weights = {TIED if tied else INPUT: model.get_input_embeddings().weight}
        if not tied:
            weights[OUTPUT] = model.get_output_embeddings().weight
        names = {
            side: name
            for side, weight in weights.items()
            for name, parameter in model.named_parameters()
            if parameter is weight
        }
        # Copies, so that the rest of the model can go.
        matrices = {side: weight.detach().clone() for side, weight in weights.items()}
        return cls(load_tokenizer(folder), tied, matrices, names)

    def tuned(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The matrices after full fine-tuning, whose state holds every parameter."""
        matrices = {}
        for side, name in self.names.items():
            matrix = state.get(name)
            if matrix is None or matrix.shape != self.matrices[side].shape:
                raise PipelineError(f"the tuned weights do not fit the backbone: {name}")
            matrices[side] = matrix
        return matrices


def _numbers(array: Doubles, digits: int) -> list[Any]:
    numbers: list[Any] = array.round(digits).tolist()
    return numbers


def _arm_json(arm: ArmFigures) -> JsonDict:
    return {
        "name": arm.name,
        "stage": arm.stage,
        "identity": arm.identity,
        "backbone": arm.backbone,
        "levels": list(arm.levels),
        "sample": {**asdict(arm.sample), "codes": [list(code) for code in arm.sample.codes]},
        "sides": [
            {
                "side": side.side,
                "map": {
                    "method": "pca",
                    "explained": [round(share, 6) for share in side.explained],
                    "point_levels": side.point_levels.tolist(),
                },
                "states": [
                    {
                        "state": snap.state,
                        "effective_rank": round(snap.effective_rank, 4),
                        "mean_cosine": round(snap.mean_cosine, 6),
                        "rsa": asdict(snap.rsa),
                        "spectrum": _numbers(snap.spectrum, 8),
                        "cosine": _numbers(snap.cosine, 4),
                        "centred_cosine": _numbers(snap.centred_cosine, 4),
                        "word_points": _numbers(snap.word_points, 5),
                        "sid_points": _numbers(snap.sid_points, 5),
                    }
                    for snap in side.snapshots
                ],
            }
            for side in arm.sides
        ],
    }
