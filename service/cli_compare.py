"""``gti compare``: arms x seeds under one budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gti_core.quiet import quiet_libraries
from service.cli_common import DEFAULT_DATA_DIR, CacheDir, numbers, runs


def register(app: typer.Typer) -> None:
    """Add the command to the ``gti`` command."""
    app.command()(compare)


def compare(
    input: Annotated[Path, typer.Option("--input", "-i", help="Folder of gti tokenize.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder to keep every part in, to go on from.")
    ],
    arms: Annotated[
        str | None,
        typer.Option(
            help="Arms, with commas, of popularity, item-knn, item-knn-recency, sasrec, mean, "
            "random, text-mean, lc-rec, gti-nll, gti-regression, gti-whitened, gti-both, "
            "gti-multitask; default: the paper's table."
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, with commas.")] = "0",
    steps: Annotated[int, typer.Option(help="Fine-tuning steps of every arm.")] = 800,
    batch_size: Annotated[int, typer.Option(help="Windows per fine-tuning step.")] = 32,
    mode: Annotated[str, typer.Option(help="lora or full.")] = "lora",
    rank: Annotated[int, typer.Option(help="LoRA rank.")] = 16,
    dropout: Annotated[float, typer.Option(help="LoRA dropout; any slows it by a quarter.")] = 0.0,
    lr: Annotated[float, typer.Option(help="Peak rate of adapters or backbone.")] = 1e-3,
    rows_lr: Annotated[float, typer.Option(help="Peak rate of the SID rows.")] = 1e-2,
    max_history: Annotated[int, typer.Option(help="Most items in a prompt.")] = 20,
    instruction: Annotated[
        str, typer.Option(help="First part of every prompt; a newline is added.")
    ] = "History:",
    ground_epochs: Annotated[
        float, typer.Option(help="Passes of grounding over two pairs per item.")
    ] = 2.0,
    ground_batch_size: Annotated[int, typer.Option(help="Pairs per grounding step.")] = 32,
    ground_lr: Annotated[float, typer.Option(help="Peak rate of rows while grounding.")] = 1e-2,
    ks: Annotated[str, typer.Option(help="Cut-offs.")] = "5,10,20,50",
    beam_width: Annotated[int, typer.Option(help="Prefixes kept per level.")] = 50,
    decode_batch_size: Annotated[int, typer.Option(help="Prompts decoded together.")] = 16,
    limit: Annotated[int, typer.Option(help="Only the first so many cases; 0 for all.")] = 0,
    split: Annotated[str, typer.Option(help="test or valid.")] = "test",
    dtype: Annotated[str, typer.Option(help="Of the products: bfloat16 or float32.")] = "bfloat16",
    backbone: Annotated[
        Path | None, typer.Option(help="Hugging Face folder; default SmolLM2-135M-Instruct.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the JSON here.")] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Also write the tables here.")
    ] = None,
    data_dir: CacheDir = DEFAULT_DATA_DIR,
) -> None:
    """Compare initializations, groundings and baselines under one budget; resumable."""
    quiet_libraries()
    from gti_core.pipeline.arms import PAPER_ARMS
    from gti_core.pipeline.compare import CompareOptions, Comparison, compare
    from gti_core.pipeline.evaluate import EvaluateOptions
    from gti_core.pipeline.finetune import FinetuneOptions
    from gti_core.pipeline.ground import GroundOptions
    from gti_core.tuning.config import LoopConfig
    from gti_core.tuning.lora import LoraOptions

    # A checkpoint of full fine-tuning holds 1.6 GB, so fewer of them.
    every = 600.0 if mode == "full" else 120.0
    options = CompareOptions(
        arms=tuple(part.strip() for part in arms.split(",")) if arms else PAPER_ARMS,
        seeds=numbers(seeds, "--seeds"),
        ground=GroundOptions(
            dtype=dtype,
            loop=LoopConfig(epochs=ground_epochs, batch_size=ground_batch_size, rows_lr=ground_lr),
        ),
        finetune=FinetuneOptions(
            mode=mode,
            dtype=dtype,
            lora=LoraOptions(r=rank, alpha=2 * rank, dropout=dropout),
            instruction=f"{instruction}\n",
            max_history=max_history,
            drop=min(10, max_history),
            loop=LoopConfig(
                steps=steps,
                batch_size=batch_size,
                lr=lr,
                rows_lr=rows_lr,
                warmup=50,
                checkpoint_seconds=every,
            ),
        ),
        evaluate=EvaluateOptions(
            split=split,
            ks=numbers(ks, "--ks"),
            beam_width=beam_width,
            batch_size=decode_batch_size,
            limit=limit,
        ),
        dtype=dtype,
    )
    with runs() as progress:
        comparison = Comparison(
            input,
            output,
            options,
            cache_dir=data_dir / "cache",
            backbone=backbone,
            progress=progress,
        )
        tables = compare(comparison, json=json, markdown=markdown)
    typer.echo(tables)
