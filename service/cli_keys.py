"""``gti keys``: who may call the service."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

import typer

from service.access.keyfile import add_key, read_keys, revoke_key
from service.access.keys import parse_expiry
from service.cli_common import with_settings
from service.settings import load_settings

SETTINGS = ("data_dir", "keys_file")


def register(app: typer.Typer) -> None:
    """Add the commands to the ``gti`` command."""
    keys = typer.Typer(
        help="Keys of those who may call the service. A running one follows within a second.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    keys.command("add")(with_settings(add, SETTINGS))
    keys.command("list")(with_settings(show, SETTINGS))
    keys.command("revoke")(with_settings(revoke, SETTINGS))
    app.add_typer(keys, name="keys")


def add(
    *,
    name: Annotated[str, typer.Argument(help="What the key is for; stands in the audit log.")],
    scope: Annotated[
        Literal["read", "admin"],
        typer.Option(help="read asks for recommendations; admin changes the catalogue too."),
    ],
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="90d|2027-01-31",
            help="After so many days, or at the end of a day (UTC). Without it, never.",
        ),
    ] = None,
    **flags: str | bool | None,
) -> None:
    """Make a key and print it. It is shown once: only its hash is kept."""
    path = load_settings(flags).keys_path
    now = _now()
    until = None if expires is None else parse_expiry(expires, now)
    key, record = add_key(path, name, scope, now, until)
    typer.echo(key)
    typer.echo(
        f"key {record.id} in {path}: this is the only time that it is shown. Send it as "
        "Authorization: Bearer KEY or X-API-Key: KEY; gti onboard takes it from GTI_KEY",
        err=True,
    )


def show(**flags: str | bool | None) -> None:
    """List the keys, without their secrets."""
    now = _now()
    rows = [("id", "name", "scope", "created", "expires", "state")]
    rows += [
        (
            record.id,
            record.name,
            record.scope,
            _moment(record.created),
            _moment(record.expires) if record.expires else "never",
            record.state(now),
        )
        for record in read_keys(load_settings(flags).keys_path)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


def revoke(
    *,
    key_id: Annotated[str, typer.Argument(metavar="ID", help="The key's id, from gti keys list.")],
    **flags: str | bool | None,
) -> None:
    """Take a key back. A running service refuses it within a second."""
    record = revoke_key(load_settings(flags).keys_path, key_id, _now())
    typer.echo(f"key {record.id} ({record.name}) is revoked")


def _now() -> datetime:
    # Whole seconds: what is kept is what is shown.
    return datetime.now(UTC).replace(microsecond=0)


def _moment(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
