"""``gti finetune``: supervised fine-tuning from the grounded rows, with the append-only prompt."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gti_core.backbone import resolve_backbone
from gti_core.errors import PipelineError
from gti_core.files import write_safetensors
from gti_core.pipeline.ground import DTYPES, Grounded, load_grounded, rows_of
from gti_core.pipeline.stage import Stage, begin_stage, finish_stage, read_stage
from gti_core.prompts import AppendOnlyPrompt, SearchPrompt
from gti_core.tuning.config import LoopConfig
from gti_core.tuning.lora import LoraOptions, adapter_state, attach, merge_into

if TYPE_CHECKING:
    from torch import Tensor

    from gti_core.lm import SidLM
    from gti_core.tuning.loop import Progress

KIND = "finetune"
MODES = ("lora", "full")
TASKS = ("next", "align", "search")
INSTRUCTION = "The items a user chose, oldest first, and what comes next:\n"


@dataclass(frozen=True)
class FinetuneOptions:
    """Options of the stage.

    Args:
        mode: "lora" (adapters and SID rows) or "full" (everything).
        dtype: of the products; what is trained is float32 always, and under LoRA the frozen
            backbone is kept in this dtype too.
        lora: adapter options.
        tasks: what is learned, some of `TASKS`; see `gti_core.tuning.tasks`.
        instruction: fixed first part of the prompt.
        phrasings: further instructions that training windows draw from.
        max_history: most items in the prompt.
        drop: items dropped at a time from longer histories.
        loop: training settings. Epochs, steps and decay are not part of an unfinished run's
            identity: it can be continued with more or fewer of them.
    """

    mode: str = "lora"
    dtype: str = "bfloat16"
    lora: LoraOptions = field(default_factory=LoraOptions)
    tasks: tuple[str, ...] = ("next",)
    instruction: str = INSTRUCTION
    phrasings: tuple[str, ...] = ()
    max_history: int = 50
    drop: int = 10
    loop: LoopConfig = field(
        default_factory=lambda: LoopConfig(epochs=3.0, batch_size=8, lr=5e-4, rows_lr=5e-4)
    )

    def __post_init__(self) -> None:
        for value, allowed in ((self.mode, MODES), (self.dtype, DTYPES)):
            if value not in allowed:
                raise PipelineError(f"{value!r} is not one of {', '.join(allowed)}")
        unknown = sorted(set(self.tasks) - set(TASKS))
        if unknown or len(set(self.tasks)) != len(self.tasks) or "next" not in self.tasks:
            raise PipelineError(
                f"tasks must be next and any of {', '.join(TASKS[1:])}, each once, "
                f"not {', '.join(self.tasks) or 'none'}"
            )
        if not 1 <= self.drop <= self.max_history:
            raise PipelineError(f"drop must lie between 1 and max_history, got {self.drop}")


@dataclass(frozen=True)
class Finetuned:
    """What the stage wrote.

    Args:
        stage: the stage.
        grounded: the grounded rows and data it was made from.
        prompt: the template it was trained with.
        rows: the tuned SID rows, as in `Grounded.rows`.
        adapter: LoRA matrices, or for mode "full" every parameter of the backbone.
    """

    stage: Stage
    grounded: Grounded
    prompt: AppendOnlyPrompt
    rows: dict[str, Tensor]
    adapter: dict[str, Tensor]

    @property
    def mode(self) -> str:
        """ "lora" or "full"."""
        return str(self.stage.options["mode"])

    @property
    def lora(self) -> LoraOptions:
        """Adapter options; meaningful in mode "lora"."""
        return LoraOptions(**self.stage.options["lora"])

    @property
    def search(self) -> SearchPrompt | None:
        """The search template it was trained with; None when search was no task."""
        data = self.stage.figures.get("search")
        return None if data is None else SearchPrompt.from_json(data)


def load_finetuned(folder: Path) -> Finetuned:
    """Load a finished stage. Raises PipelineError."""
    from safetensors.torch import load_file

    stage = read_stage(folder, KIND)
    return Finetuned(
        stage,
        load_grounded(stage.input_folder),
        AppendOnlyPrompt.from_json(stage.figures["prompt"]),
        load_file(folder / "rows.safetensors"),
        load_file(folder / "adapter.safetensors"),
    )


def apply_adapter(model: Any, mode: str, adapter: dict[str, Tensor], lora: LoraOptions) -> None:
    """Put the tuned weights into a plain backbone, in place. Raises BundleError on a misfit."""
    from gti_core.errors import BundleError

    if mode == "lora":
        merge_into(model, adapter, lora)
        return
    try:
        result = model.load_state_dict(adapter, strict=False)
    except RuntimeError as error:
        raise BundleError(f"the tuned weights do not fit the backbone: {error}") from error
    missing = set(result.missing_keys) - {"lm_head.weight"}
    if missing or result.unexpected_keys:
        raise BundleError(f"the tuned weights do not fit the backbone: {sorted(missing)[:3]}")


def model_of(finetuned: Finetuned, *, cache_dir: Path, dtype: str = "float32") -> SidLM:
    """The tuned model, adapter merged, ready to evaluate."""
    import torch

    from gti_core.lm import SidLM, load_backbone

    folder = resolve_backbone(finetuned.grounded.backbone, cache_dir)
    model = load_backbone(folder, torch.float32)
    apply_adapter(model, finetuned.mode, finetuned.adapter, finetuned.lora)
    model.to(getattr(torch, dtype))
    rows = finetuned.rows
    lm = SidLM(model, finetuned.grounded.vocabulary, rows["rows_in"], rows.get("rows_out"))
    return lm.eval()


def finetune(
    grounded_folder: Path,
    output: Path,
    options: FinetuneOptions,
    *,
    cache_dir: Path,
    progress: Progress | None = None,
) -> Stage:
    """Run the stage; an interrupted run goes on from its checkpoint.

    Args:
        grounded_folder: folder of ``gti ground``.
        output: folder to write: rows.safetensors, adapter.safetensors, stage.json.
        options: options.
        cache_dir: where the demo backbone is converted to.
        progress: called with (step, steps, running loss).
    """
    import torch

    from gti_core.fusion import prepare_training
    from gti_core.grounding.corpus import GroundingCorpus
    from gti_core.lm import SidLM, encode_text, load_backbone, load_tokenizer
    from gti_core.pipeline.stage import identity_of
    from gti_core.tuning.loop import CHECKPOINT, Examples, train
    from gti_core.tuning.precision import mixed
    from gti_core.tuning.sequences import SequenceExamples
    from gti_core.tuning.tasks import Epoch, SearchExamples, mixture, search_prompt

    grounded = load_grounded(grounded_folder)
    recorded = asdict(options)
    identity, finished = begin_stage(output, KIND, recorded, grounded.stage.identity)
    if finished is not None:
        return finished
    lasting = {
        **recorded,
        "loop": {**recorded["loop"], "epochs": None, "steps": None, "decay": None},
    }
    run = identity_of(KIND, lasting, grounded.stage.identity)
    folder = resolve_backbone(grounded.backbone, cache_dir)
    full = options.mode == "full"
    model = load_backbone(folder, torch.float32 if full else getattr(torch, options.dtype))
    model.requires_grad_(full)
    lm = SidLM(model, grounded.vocabulary, grounded.rows["rows_in"], grounded.rows.get("rows_out"))
    if not full:
        attach(model, options.lora, seed=options.loop.seed)
    prepare_training(model)
    tokenizer = load_tokenizer(folder)
    instruction_ids = encode_text(tokenizer, options.instruction)
    prompt = AppendOnlyPrompt(
        options.instruction, tuple(instruction_ids), options.max_history, options.drop
    )
    catalog, vocabulary = grounded.tokens.catalog, grounded.vocabulary
    sequences = SequenceExamples(
        grounded.tokens.prepared.split.train,
        catalog,
        vocabulary,
        prompt,
        [encode_text(tokenizer, text) for text in options.phrasings],
    )
    epochs: list[Epoch] = [sequences.epoch]
    if "align" in options.tasks:
        epochs.append(GroundingCorpus(catalog.items, vocabulary, tokenizer).sample)
    search = search_prompt(tokenizer) if "search" in options.tasks else None
    if search is not None:
        epochs.append(SearchExamples(catalog.items, vocabulary, tokenizer, search).epoch)
    examples = Examples(mixture(epochs), options.loop)
    done = train(
        lm,
        examples,
        options.loop,
        output,
        identity=run,
        progress=progress,
        forward=partial(mixed, model) if options.dtype == "bfloat16" else nullcontext,
    )
    write_safetensors(output / "rows.safetensors", rows_of(lm))
    tuned = dict(model.named_parameters()) if full else adapter_state(model)
    state = {name: tensor.detach().to(torch.bfloat16) for name, tensor in tuned.items()}
    write_safetensors(output / "adapter.safetensors", state)
    losses = done.losses or []
    stage = finish_stage(
        output,
        KIND,
        identity=identity,
        options=recorded,
        input_folder=grounded_folder,
        input_identity=grounded.stage.identity,
        files=["rows.safetensors", "adapter.safetensors"],
        figures={
            "prompt": prompt.to_json(),
            "search": None if search is None else search.to_json(),
            "windows_per_epoch": len(sequences),
            "examples_per_epoch": examples.per_epoch,
            "steps": done.steps,
            "seconds": round(done.seconds, 1),
            "tokens": done.tokens,
            "loss_first": losses[0],
            "loss_last": round(sum(losses[-50:]) / len(losses[-50:]), 4),
        },
    )
    (output / CHECKPOINT).unlink(missing_ok=True)
    return stage
