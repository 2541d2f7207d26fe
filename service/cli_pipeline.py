"""The pipeline's commands: prepare, tokenize, ground, finetune, evaluate, export, demo.

Each writes a folder that the next one reads; called again after an interruption, a command goes
on where it stopped, and does nothing where it was finished.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gti_core.quiet import quiet_libraries
from service.cli_common import (
    DEFAULT_DATA_DIR,
    CacheDir,
    Output,
    Seed,
    numbers,
    phases,
    steps,
)


def register(app: typer.Typer) -> None:
    """Add the pipeline's commands to the ``gti`` command."""
    for command in (prepare, tokenize, ground, finetune, evaluate, export, demo):
        app.command()(command)


def prepare(
    output: Output,
    dataset: Annotated[str | None, typer.Option(help="A known data set: movielens-100k.")] = None,
    unisrec: Annotated[
        Path | None,
        typer.Option(help="Folder with NAME.text, NAME.item2index, NAME.test.inter."),
    ] = None,
    items: Annotated[
        Path | None,
        typer.Option(help="Item file (RecBole .item, JSONL, JSON, CSV, TSV, Parquet)."),
    ] = None,
    interactions: Annotated[
        Path | None, typer.Option(help="Log, one interaction a row (same formats).")
    ] = None,
    sequences: Annotated[
        Path | None, typer.Option(help="RecBole sequence file, one user's history a row.")
    ] = None,
    item_ids: Annotated[
        Path | None, typer.Option(help="Tab-separated, no header: item file's id, log's id.")
    ] = None,
    split: Annotated[str, typer.Option(help="leave-one-out or chronological.")] = "leave-one-out",
    name: Annotated[str | None, typer.Option(help="Name of the data set.")] = None,
    user_column: Annotated[str, typer.Option(help="User id, in the log.")] = "user_id",
    item_column: Annotated[str, typer.Option(help="Item id, in both files.")] = "item_id",
    time_column: Annotated[
        str, typer.Option(help='Timestamp column; "" when the file is in order of time.')
    ] = "timestamp",
    title_column: Annotated[str, typer.Option(help="Title, in the item file.")] = "title",
    description_column: Annotated[
        str | None, typer.Option(help='Description; default "description" where there is one.')
    ] = None,
    attribute: Annotated[
        list[str] | None, typer.Option(help="Attribute column to keep; may be repeated.")
    ] = None,
    drop_unknown: Annotated[
        bool, typer.Option("--drop-unknown", help="Leave out interactions with unknown items.")
    ] = False,
    skip_blank: Annotated[
        bool, typer.Option("--skip-blank", help="Leave out items without text.")
    ] = False,
) -> None:
    """Read item texts and a log, split them."""
    from gti_core.data.readers import InteractionColumns, ItemColumns
    from gti_core.pipeline import prepare as stage

    sources = stage.Sources(
        dataset,
        unisrec,
        items,
        interactions,
        sequences,
        item_ids,
        ItemColumns(item_column, title_column, description_column, tuple(attribute or ())),
        InteractionColumns(user_column, item_column, time_column or None),
        drop_unknown,
        skip_blank,
    )
    prepared = stage.prepare(sources, output, split=split, name=name)
    counts = ", ".join(
        f"{value:,} {key.replace('_', ' ')}" for key, value in prepared.counts.items()
    )
    typer.echo(f"{prepared.name}: {counts} -> {output}")


def tokenize(
    input: Annotated[Path, typer.Option("--input", "-i", help="Folder of gti prepare.")],
    output: Output,
    sizes: Annotated[str, typer.Option(help="Codes per level.")] = "64,64,64",
    reserve: Annotated[
        str | None,
        typer.Option(help="Rows kept free per level for later items; default 256 at the last."),
    ] = None,
    quantizer: Annotated[str, typer.Option(help="kmeans or rqvae.")] = "kmeans",
    encoder: Annotated[
        Path | None, typer.Option(help="sentence-transformers folder; default all-MiniLM-L6-v2.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Give every item a semantic ID of its own from its text."""
    quiet_libraries()
    from gti_core.pipeline import tokenize as stage

    levels = numbers(sizes, "--sizes")
    free = numbers(reserve, "--reserve") if reserve else (0,) * (len(levels) - 1) + (256,)
    options = stage.TokenizeOptions(levels, quantizer, free, seed)
    with phases() as progress:
        done = stage.tokenize(input, output, options, encoder=encoder, progress=progress)
    report = done.figures["report"]
    typer.echo(
        f"{report['items']:,} items, sizes {report['sizes']}, "
        f"collisions before resolution {report['collision_rate']:.1%}, "
        f"moved {report['moved_share']:.1%}, "
        f"reconstruction error {report['reconstruction_error']:.3f} -> {output}"
    )


def ground(
    input: Annotated[Path, typer.Option("--input", "-i", help="Folder of gti tokenize.")],
    output: Output,
    backbone: Annotated[
        Path | None, typer.Option(help="Hugging Face folder; default SmolLM2-135M-Instruct.")
    ] = None,
    init: Annotated[str, typer.Option(help="mean, random or text-mean.")] = "mean",
    objective: Annotated[
        str,
        typer.Option(help="nll, regression, whitened, regression+nll, or none for the bare start."),
    ] = "nll",
    epochs: Annotated[float, typer.Option(help="Passes over two pairs per item.")] = 2.0,
    batch_size: Annotated[int, typer.Option(help="Pairs per step.")] = 32,
    lr: Annotated[float, typer.Option(help="Peak learning rate of the new rows.")] = 3e-3,
    whitening: Annotated[
        float, typer.Option(help="Of objective whitened: 0 as the texts lie, 1 orthogonal.")
    ] = 0.75,
    dtype: Annotated[
        str, typer.Option(help="Of the frozen backbone: bfloat16 or float32.")
    ] = "bfloat16",
    seed: Seed = 0,
    data_dir: CacheDir = DEFAULT_DATA_DIR,
) -> None:
    """Ground the new rows in the frozen backbone."""
    quiet_libraries()
    from gti_core.pipeline import ground as stage
    from gti_core.tuning.config import LoopConfig

    loop = LoopConfig(epochs=epochs, batch_size=batch_size, rows_lr=lr, seed=seed)
    options = stage.GroundOptions(init, objective, dtype, loop, whitening)
    with steps("ground") as progress:
        done = stage.ground(
            input,
            output,
            options,
            cache_dir=data_dir / "cache",
            backbone=backbone,
            progress=progress,
        )
    figures = done.figures
    typer.echo(
        f"{figures['steps']} steps, {figures['seconds']:.0f} s, "
        f"loss {figures['loss_first']} -> {figures['loss_last']}, effective rank "
        f"{figures['effective_rank_before']} -> {figures['effective_rank']} -> {output}"
    )


def finetune(
    input: Annotated[Path, typer.Option("--input", "-i", help="Folder of gti ground.")],
    output: Output,
    mode: Annotated[str, typer.Option(help="lora or full.")] = "lora",
    epochs: Annotated[float, typer.Option(help="Passes over all windows.")] = 3.0,
    batch_size: Annotated[int, typer.Option(help="Windows per step.")] = 8,
    lr: Annotated[float, typer.Option(help="Peak rate of adapters or backbone.")] = 1e-3,
    rows_lr: Annotated[float, typer.Option(help="Peak rate of the SID rows.")] = 1e-3,
    rank: Annotated[int, typer.Option(help="LoRA rank.")] = 16,
    max_history: Annotated[int, typer.Option(help="Most items in a prompt.")] = 50,
    tasks: Annotated[
        str,
        typer.Option(help="next, and any of align (six text families) and search, with commas."),
    ] = "next",
    instruction: Annotated[
        str | None, typer.Option(help="First part of every prompt; a newline is added.")
    ] = None,
    phrasing: Annotated[
        list[str] | None,
        typer.Option(help="Another instruction to train with; may be repeated."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the products: bfloat16 or float32.")] = "bfloat16",
    seed: Seed = 0,
    data_dir: CacheDir = DEFAULT_DATA_DIR,
) -> None:
    """Teach the grounded model to write the next item's semantic ID."""
    quiet_libraries()
    from gti_core.pipeline import finetune as stage
    from gti_core.tuning.config import LoopConfig
    from gti_core.tuning.lora import LoraOptions

    loop = LoopConfig(
        epochs=epochs, batch_size=batch_size, lr=lr, rows_lr=rows_lr, warmup=50, seed=seed
    )
    options = stage.FinetuneOptions(
        mode=mode,
        dtype=dtype,
        lora=LoraOptions(r=rank, alpha=2 * rank),
        max_history=max_history,
        drop=min(10, max_history),
        loop=loop,
        instruction=stage.INSTRUCTION if instruction is None else f"{instruction}\n",
        tasks=tuple(part.strip() for part in tasks.split(",")),
        phrasings=tuple(f"{text}\n" for text in phrasing or ()),
    )
    with steps("finetune") as progress:
        done = stage.finetune(
            input, output, options, cache_dir=data_dir / "cache", progress=progress
        )
    figures = done.figures
    typer.echo(
        f"{figures['steps']} steps, {figures['seconds']:.0f} s, "
        f"loss {figures['loss_first']} -> {figures['loss_last']} -> {output}"
    )


def evaluate(
    input: Annotated[
        Path, typer.Option("--input", "-i", help="Folder of gti finetune, or a bundle.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(help="Prepared data; needed for a bundle trained on your own files."),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write JSON here.")] = None,
    split: Annotated[str, typer.Option(help="test or valid.")] = "test",
    include_seen: Annotated[
        bool, typer.Option("--include-seen", help="Items of the history may come back.")
    ] = False,
    ks: Annotated[str, typer.Option(help="Cut-offs.")] = "5,10,20",
    beam_width: Annotated[int, typer.Option(help="Prefixes kept per level.")] = 30,
    batch_size: Annotated[int, typer.Option(help="Prompts decoded together.")] = 8,
    limit: Annotated[int, typer.Option(help="Only the first cases; 0 for all.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    data_dir: CacheDir = DEFAULT_DATA_DIR,
) -> None:
    """Recall@k and NDCG@k beside popularity and item-kNN."""
    quiet_libraries()
    from gti_core.pipeline import evaluate as stage
    from gti_core.pipeline.load import load_for_evaluation

    options = stage.EvaluateOptions(
        split, not include_seen, numbers(ks, "--ks"), beam_width, batch_size, limit
    )
    model = load_for_evaluation(input, data, cache_dir=data_dir / "cache", dtype=dtype)
    with phases() as progress:
        result = stage.evaluate(
            model.lm,
            model.catalog,
            model.prompt,
            model.prepared,
            options,
            output=json,
            progress=progress,
        )
    typer.echo(stage.markdown_table(result))


def export(
    input: Annotated[
        Path, typer.Option("--input", "-i", help="Folder of gti finetune, or a bundle.")
    ],
    output: Output,
    name: Annotated[str | None, typer.Option(help="Name of the bundle.")] = None,
    join_texts: Annotated[
        str | None,
        typer.Option(help="Leave texts out; join them when loaded from: movielens-100k."),
    ] = None,
    hf: Annotated[
        bool, typer.Option("--hf", help="Write a plain Hugging Face folder from a bundle.")
    ] = False,
    data_dir: CacheDir = DEFAULT_DATA_DIR,
) -> None:
    """Write a bundle, or a model folder for stock vLLM."""
    quiet_libraries()
    from gti_core.bundle import load_bundle
    from gti_core.pipeline import export as stage

    if hf:
        stage.export_model(load_bundle(input), output, cache_dir=data_dir / "cache")
        typer.echo(f"model folder -> {output}")
        return
    bundle = stage.export_bundle(input, output, name=name or output.name, join_texts=join_texts)
    typer.echo(f"bundle {bundle.name}, digest {bundle.digest[:16]} -> {output}")


def demo(
    work: Annotated[Path, typer.Option(help="Folder for the stages.")] = Path("runs/demo"),
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The bundle; default WORK/bundle.")
    ] = None,
    ground_epochs: Annotated[float, typer.Option(help="As in gti ground.")] = 2.0,
    epochs: Annotated[float, typer.Option(help="As in gti finetune.")] = 2.0,
    data_dir: CacheDir = DEFAULT_DATA_DIR,
) -> None:
    """Train the demo bundle from nothing (hours)."""
    if not (work / "prepared" / "meta.json").exists():
        prepare(work / "prepared", dataset="movielens-100k")
    tokenize(work / "prepared", work / "tokens")
    ground(work / "tokens", work / "grounded", epochs=ground_epochs, data_dir=data_dir)
    # Texts are among the tasks, so that a new item's own text can be asked for it.
    finetune(
        work / "grounded",
        work / "tuned",
        epochs=epochs,
        rows_lr=3e-3,
        tasks="next,align,search",
        data_dir=data_dir,
    )
    export(
        work / "tuned",
        output or work / "bundle",
        name="MovieLens-100K demo",
        join_texts="movielens-100k",
        data_dir=data_dir,
    )
