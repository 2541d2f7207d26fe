"""Commands for looking into trained models: diagnose."""

from __future__ import annotations

from typing import Annotated

import typer

from gti_core.quiet import quiet_libraries
from service.cli_common import DEFAULT_DATA_DIR, CacheDir, Output, phases


def register(app: typer.Typer) -> None:
    """Add these commands to the ``gti`` command."""
    app.command()(diagnose)


def diagnose(
    arms: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=FOLDER...",
            help="Folders of gti ground or gti finetune, each with a name for the plots.",
        ),
    ],
    output: Output,
    seed: Annotated[int, typer.Option(help="Seed of the choice of tokens shown.")] = 0,
    data_dir: CacheDir = DEFAULT_DATA_DIR,
) -> None:
    """Plots and figures of the SID rows, before and after fine-tuning, arms side by side."""
    quiet_libraries()
    from gti_core.diagnosis import report
    from gti_core.diagnosis.collect import Arm
    from gti_core.diagnosis.table import markdown_table

    named = [Arm.parse(text) for text in arms]
    with phases() as progress:
        done = report.diagnose(
            named, output, cache_dir=data_dir / "cache", seed=seed, progress=progress
        )
    typer.echo(markdown_table(done))
    typer.echo(f"-> {output / report.PAGE}")
