"""The ``gti`` command. `main` is the entry point.

Heavy libraries are imported by the commands that need them, so that ``gti --help`` answers
at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gti_core.errors import GtiError
from service import __version__
from service.cli_admin import register as register_admin
from service.cli_common import with_settings
from service.cli_compare import register as register_compare
from service.cli_keys import register as register_keys
from service.cli_pipeline import register
from service.cli_research import register as register_research
from service.settings import ConfigError, Settings, load_settings

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


def serve(**flags: str | bool | None) -> None:
    """Serve recommendations over HTTP until stopped.

    Every flag has an environment twin; the flag wins.
    """
    settings = load_settings(flags)
    from service.__main__ import run

    run(settings)


app.command("serve")(with_settings(serve, tuple(Settings.model_fields)))


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
register_admin(app)
register_keys(app)


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


if __name__ == "__main__":
    # Unlike ``python -m service``, this loads no web framework: the worker starts so.
    main()
