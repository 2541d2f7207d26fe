"""``gti ground``: SID rows from an initialization, grounded in the frozen backbone.

Only the S new rows are trained. Objective "nll" is the paper's grounding stage: negative
log-likelihood of the answer tokens over pairs (text, SID) in both directions. Objective
"regression" fits the rows to encoded texts (`gti_core.grounding.regression`), "whitened" evens out
their spectrum too; "regression+nll" starts the paper's stage from the regression.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gti_core.backbone import demo_backbone, demo_backbone_source, folder_source
from gti_core.errors import PipelineError
from gti_core.pipeline.stage import Stage, begin_stage, finish_stage, read_stage
from gti_core.pipeline.tokenize import Tokens, load_tokens
from gti_core.tuning.config import LoopConfig
from gti_core.types import JsonDict
from gti_core.vocabulary import SidVocabulary

if TYPE_CHECKING:
    from torch import Tensor

    from gti_core.lm import SidLM
    from gti_core.tuning.loop import Progress

KIND = "ground"
INITIALIZATIONS = ("mean", "random", "text-mean")
OBJECTIVES = ("nll", "regression", "whitened", "regression+nll", "none")
FITTED = frozenset({"regression", "whitened", "regression+nll"})
"""Objectives that start from rows fitted to encoded texts."""
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class GroundOptions:
    """Options of the stage.

    Args:
        initialization: one of `INITIALIZATIONS`.
        objective: one of `OBJECTIVES`; "none" keeps the initialization (the baseline arms), and
            a regression replaces it.
        dtype: of the frozen backbone; the rows are float32 always.
        loop: training settings.
        whitening: of objective "whitened": the power taken off the rows' singular values, 0 to 1.
            0 leaves the regression as it is, 1 makes rows orthogonal and forgets the texts;
            docs/results.md shows what lies between.
    """

    initialization: str = "mean"
    objective: str = "nll"
    dtype: str = "bfloat16"
    loop: LoopConfig = field(
        default_factory=lambda: LoopConfig(epochs=3.0, batch_size=16, rows_lr=1e-3)
    )
    whitening: float = 0.75

    def __post_init__(self) -> None:
        if not 0.0 <= self.whitening <= 1.0:
            raise PipelineError(f"whitening must lie between 0 and 1, got {self.whitening}")
        for value, allowed in (
            (self.initialization, INITIALIZATIONS),
            (self.objective, OBJECTIVES),
            (self.dtype, DTYPES),
        ):
            if value not in allowed:
                raise PipelineError(f"{value!r} is not one of {', '.join(allowed)}")


@dataclass(frozen=True)
class Grounded:
    """What the stage wrote.

    Args:
        stage: the stage.
        tokens: the tokenized data it was made from.
        vocabulary: the SID vocabulary.
        backbone: the backbone's manifest entry.
        rows: "rows_in" [S, D] and, for untied backbones, "rows_out" [S, D]; float32.
    """

    stage: Stage
    tokens: Tokens
    vocabulary: SidVocabulary
    backbone: JsonDict
    rows: dict[str, Tensor]


def load_grounded(folder: Path) -> Grounded:
    """Load a finished stage. Raises PipelineError."""
    from safetensors.torch import load_file

    stage = read_stage(folder, KIND)
    return Grounded(
        stage,
        load_tokens(stage.input_folder),
        SidVocabulary.from_json(stage.figures["vocabulary"]),
        stage.options["backbone"],
        load_file(folder / "rows.safetensors"),
    )


def backbone_source(backbone: Path | None) -> JsonDict:
    """Manifest entry of a backbone folder, or of the demo backbone for None."""
    return demo_backbone_source() if backbone is None else folder_source(backbone)


def rows_of(lm: SidLM) -> dict[str, Any]:
    """The SID rows of a model, as they are stored."""
    rows = {"rows_in": lm.rows_in.detach()}
    if not lm.tied:
        rows["rows_out"] = lm.rows_out.detach()
    return rows


class _Start:
    """Rows before training, by initialization and objective."""

    def __init__(
        self,
        options: GroundOptions,
        tokens: Tokens,
        vocabulary: SidVocabulary,
        model: Any,
        tokenizer: Any,
    ) -> None:
        self._options = options
        self._tokens = tokens
        self._vocabulary = vocabulary
        self._model = model
        self._tokenizer = tokenizer

    @cached_property
    def _texts(self) -> list[list[int]]:
        """Token ids of each item's text, in catalogue order."""
        from gti_core.grounding.corpus import text_of
        from gti_core.lm import encode_text

        return [encode_text(self._tokenizer, text_of(item)) for item in self._tokens.catalog]

    @cached_property
    def _vectors(self) -> Tensor:
        from gti_core.grounding.regression import text_vectors

        return text_vectors(self._model, self._texts)

    def rows(self, matrix: Tensor, seed: int) -> Tensor:
        """Rows at the scale of a matrix of the backbone, shape [S, D], float32."""
        from gti_core.grounding.initialize import mean_rows, random_rows, text_mean_rows
        from gti_core.grounding.regression import regression_rows

        count, catalog = self._vocabulary.rows, self._tokens.catalog
        if self._options.objective in FITTED:
            options = self._options
            whitening = options.whitening if options.objective == "whitened" else 0.0
            return regression_rows(
                self._vectors, catalog.sids, self._vocabulary, matrix, whitening=whitening
            )
        match self._options.initialization:
            case "mean":
                return mean_rows(matrix, count)
            case "random":
                return random_rows(matrix, count, seed=seed)
            case _:
                codes = [
                    [self._vocabulary.row(level, code) for level, code in enumerate(item.sid)]
                    for item in catalog
                ]
                return text_mean_rows(matrix, self._texts, codes, count)


def ground(
    tokens_folder: Path,
    output: Path,
    options: GroundOptions,
    *,
    cache_dir: Path,
    backbone: Path | None = None,
    progress: Progress | None = None,
) -> Stage:
    """Run the stage; an interrupted run goes on from its checkpoint.

    Args:
        tokens_folder: folder of ``gti tokenize``.
        output: folder to write: rows.safetensors, stage.json, and a checkpoint while running.
        options: options.
        cache_dir: where the demo backbone is converted to.
        backbone: Hugging Face folder; None for the demo backbone.
        progress: called with (step, steps, running loss).
    """
    import torch

    from gti_core.files import write_safetensors
    from gti_core.fusion import prepare_training
    from gti_core.grounding.corpus import GroundingCorpus
    from gti_core.grounding.diagnostics import effective_rank, mean_cosine
    from gti_core.lm import SidLM, is_tied, load_backbone, load_tokenizer
    from gti_core.tuning.loop import CHECKPOINT, Examples, Trained, train

    tokens = load_tokens(tokens_folder)
    recorded = {**asdict(options), "backbone": backbone_source(backbone)}
    identity, finished = begin_stage(output, KIND, recorded, tokens.stage.identity)
    if finished is not None:
        return finished
    folder = demo_backbone(cache_dir) if backbone is None else backbone
    model = load_backbone(folder, getattr(torch, options.dtype))
    model.requires_grad_(False)
    embedding = model.get_input_embeddings().weight
    vocabulary = tokens.vocabulary(int(embedding.shape[0]))
    head = None if is_tied(model) else model.get_output_embeddings().weight

    began = time.monotonic()
    seed = options.loop.seed
    tokenizer = load_tokenizer(folder)
    start = _Start(options, tokens, vocabulary, model, tokenizer)
    rows_out = None if head is None else start.rows(head, seed + 1)
    lm = SidLM(model, vocabulary, start.rows(embedding, seed), rows_out)
    start_seconds = time.monotonic() - began
    active_rows = torch.from_numpy(vocabulary.active_mask.copy())
    before = effective_rank(lm.rows_in.detach()[active_rows])
    done = Trained()
    if options.objective.endswith("nll"):
        corpus = GroundingCorpus(tokens.catalog.items, vocabulary, tokenizer)
        examples = Examples(corpus.epoch, options.loop)
        prepare_training(model)
        done = train(lm, examples, options.loop, output, identity=identity, progress=progress)
    rows = rows_of(lm)
    write_safetensors(output / "rows.safetensors", rows)
    active = rows["rows_in"][active_rows]
    losses = done.losses or []
    figures = {
        "vocabulary": vocabulary.to_json(),
        "steps": done.steps,
        "seconds": round(done.seconds + start_seconds, 1),
        "tokens": done.tokens,
        "loss_first": losses[0] if losses else None,
        "loss_last": round(sum(losses[-20:]) / len(losses[-20:]), 4) if losses else None,
        "effective_rank_before": round(before, 2),
        "effective_rank": round(effective_rank(active), 2),
        "mean_cosine": round(mean_cosine(active), 4),
    }
    stage = finish_stage(
        output,
        KIND,
        identity=identity,
        options=recorded,
        input_folder=tokens_folder,
        input_identity=tokens.stage.identity,
        files=["rows.safetensors"],
        figures=figures,
    )
    (output / CHECKPOINT).unlink(missing_ok=True)
    return stage
