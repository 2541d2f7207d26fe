"""The ``gti`` command. `main` is the entry point.

Heavy libraries are imported by the commands that need them, so that ``gti --help`` answers
at once.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from gti_core.errors import GtiError
from service import __version__
from service.cli_compare import register as register_compare
from service.cli_pipeline import register
from service.cli_research import register as register_research
from service.settings import ConfigError, Settings, env_name, flag, load_settings

app = typer.Typer(
    name="gti",
    help="GTI Serve: recommendations from a language model with grounded semantic IDs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

EXIT_FAILED = 1
EXIT_CONFIG = 2


def serve(**flags: str | None) -> None:
    """Serve recommendations over HTTP until stopped.

    Every flag has an environment twin; the flag wins.
    """
    settings = load_settings(flags)
    from service.__main__ import run

    run(settings)


_KINDS = {
    str(int): "INTEGER",
    str(float): "NUMBER",
    str(float | None): "NUMBER",
    str(Path): "PATH",
    str(Path | None): "PATH",
}


def _serve_options() -> list[inspect.Parameter]:
    """One option per field of `Settings`, as text: pydantic checks flags and variables alike."""
    options = []
    for name, field in Settings.model_fields.items():
        choices = [choice for choice in get_args(field.annotation) if isinstance(choice, str)]
        kind = "|".join(choices) or _KINDS.get(str(field.annotation), "TEXT")
        default = "" if field.default is None else f", default {field.default}"
        option = typer.Option(
            flag(name),
            envvar=env_name(name),
            metavar=kind,
            help=f"{field.description}  [{env_name(name)}{default}]",
            show_default=False,
            show_envvar=False,
        )
        options.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[str | None, option],
            )
        )
    return options


def _with_options(options: list[inspect.Parameter]) -> Any:
    serve.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    serve.__annotations__ = {option.name: option.annotation for option in options}
    return serve


app.command("serve")(_with_options(_serve_options()))


@app.command()
def openapi(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write; - for standard output.")
    ] = Path("openapi.yaml"),
) -> None:
    """Write the OpenAPI document of the service."""
    import yaml

    from service.app import openapi_document

    text = yaml.safe_dump(openapi_document(), sort_keys=False, allow_unicode=True, width=100)
    if str(output) == "-":
        typer.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
        typer.echo(f"wrote {output}")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"gti-serve {__version__}")


register(app)
register_research(app)
register_compare(app)


def main() -> None:
    """Entry point. What goes wrong on purpose, or in the file system, is one line on stderr.

    Exit 1, or 2 for settings.
    """
    try:
        app(prog_name="gti")
    except ConfigError as error:
        typer.echo(f"gti: {error}", err=True)
        sys.exit(EXIT_CONFIG)
    except (GtiError, OSError) as error:
        typer.echo(f"gti: {error}", err=True)
        sys.exit(EXIT_FAILED)
