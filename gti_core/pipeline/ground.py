"""``gti ground``: SID rows from mean (or random) initialization, grounded in the frozen backbone.

Only the S new rows are trained (paper, grounding stage): negative log-likelihood of the answer
tokens over pairs (text, SID) in both directions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
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
INITIALIZATIONS = ("mean", "random")
OBJECTIVES = ("nll", "none")
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class GroundOptions:
    """Options of the stage.

    Args:
        initialization: "mean" or "random".
        objective: "nll", or "none" to keep the initialization (the baseline arm).
        dtype: of the frozen backbone; the rows are float32 always.
        loop: training settings.
    """

    initialization: str = "mean"
    objective: str = "nll"
    dtype: str = "bfloat16"
    loop: LoopConfig = field(
        default_factory=lambda: LoopConfig(epochs=3.0, batch_size=16, rows_lr=1e-3)
    )

    def __post_init__(self) -> None:
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
    from gti_core.grounding.corpus import GroundingCorpus
    from gti_core.grounding.diagnostics import effective_rank, mean_cosine
    from gti_core.grounding.initialize import mean_rows, random_rows
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

    def initial(matrix: Any, seed: int) -> Tensor:
        if options.initialization == "mean":
            return mean_rows(matrix, vocabulary.rows)
        return random_rows(matrix, vocabulary.rows, seed=seed)

    seed = options.loop.seed
    rows_out = None if head is None else initial(head, seed + 1)
    lm = SidLM(model, vocabulary, initial(embedding, seed), rows_out)
    active_rows = torch.from_numpy(vocabulary.active_mask.copy())
    before = effective_rank(lm.rows_in.detach()[active_rows])
    done = Trained()
    if options.objective == "nll":
        corpus = GroundingCorpus(tokens.catalog.items, vocabulary, load_tokenizer(folder))
        examples = Examples(corpus.epoch, options.loop)
        done = train(lm, examples, options.loop, output, identity=identity, progress=progress)
    rows = rows_of(lm)
    write_safetensors(output / "rows.safetensors", rows)
    active = rows["rows_in"][active_rows]
    losses = done.losses or []
    figures = {
        "vocabulary": vocabulary.to_json(),
        "steps": done.steps,
        "seconds": round(done.seconds, 1),
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
