"""``gti worker``, ``gti onboard`` and ``gti compact``: new items from the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from service.cli_common import Output, phases, with_settings
from service.settings import KEY_VARIABLE, WORKER_SETTINGS, load_settings

DEFAULT_URL = "http://127.0.0.1:8000"


def register(app: typer.Typer) -> None:
    """Add the commands to the ``gti`` command."""
    app.command()(with_settings(worker, WORKER_SETTINGS))
    app.command()(onboard)
    app.command()(with_settings(compact, ("bundle", "data_dir", "store")))


def worker(
    *,
    name: Annotated[str | None, typer.Option(hidden=True)] = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
    **flags: str | bool | None,
) -> None:
    """Ground new items for a running service, in the foreground.

    The service starts one by itself; this is for one on another machine, or with more threads.
    """
    settings = load_settings(flags)
    from gti_core.bundle import DEMO_BUNDLE, load_bundle
    from gti_core.onboarding.grounder import OnlineGrounder
    from service.logs import configure_logging
    from service.onboarding.worker_process import open_store, work

    configure_logging(settings.log_level, settings.log_format)
    bundle = load_bundle(settings.bundle or DEMO_BUNDLE)
    settings.cache_dir.mkdir(parents=True, exist_ok=True)
    store = open_store(settings.store_url, bundle)
    grounder = OnlineGrounder(bundle, settings.cache_dir, encoder_dir=settings.text_encoder)
    work(store, bundle, grounder, name=name, parent=parent)


def onboard(
    file: Annotated[Path, typer.Argument(help="Items: JSONL, CSV, TSV, Parquet or RecBole.")],
    url: Annotated[str, typer.Option(help="Address of the service.")] = DEFAULT_URL,
    item: Annotated[str, typer.Option(help="Column of the item's id.")] = "item_id",
    title: Annotated[str, typer.Option(help="Column of the title.")] = "title",
    attributes: Annotated[str, typer.Option(help="Columns to keep, with commas.")] = "",
    replace: Annotated[
        bool, typer.Option(help="Items with a known id and other content take its place.")
    ] = False,
) -> None:
    """Send items to a running service and wait until they are served. Exit 1 if they are not.

    A service that asks for keys gets the one in the variable GTI_KEY, which needs scope admin.
    """
    from gti_core.data.readers import ItemColumns, read_items
    from service.client import AdminClient

    names = tuple(name for name in attributes.split(",") if name)
    items = read_items(file, columns=ItemColumns(item, title, attributes=names))
    client = AdminClient(url, os.environ.get(KEY_VARIABLE))
    with phases() as report:
        job = client.onboard(items, replace=replace, report=report)
    for entry in job["items"]:
        refused = job["state"] == "live" and entry["passed"] is False
        fate = "known" if entry["known"] else "rejected" if refused else job["state"]
        reasons = f": {'; '.join(entry['reasons'])}" if entry["reasons"] else ""
        typer.echo(f"{entry['item_id']}\t{fate}{reasons}")
    for reason in job["reasons"]:
        typer.echo(reason, err=True)
    rejected = sum(entry["passed"] is False for entry in job["items"])
    if job["state"] != "live":
        why = job["error"] or (
            f"{rejected} of {len(job['items'])} items were rejected, nothing has changed"
            if job["state"] == "rejected"
            else "no reason was given"
        )
        typer.echo(f"gti: job {job['job_id']} is {job['state']}: {why}", err=True)
        raise typer.Exit(1)
    typer.echo(f"served from version {job['version']}", err=True)
    if rejected:
        typer.echo(f"gti: {rejected} of {len(job['items'])} items were rejected", err=True)
        raise typer.Exit(1)


def compact(
    *,
    output: Output,
    drop_retired: Annotated[
        bool, typer.Option(help="Leave items out that are out of service.")
    ] = False,
    **flags: str | bool | None,
) -> None:
    """Make a new base bundle of the bundle and all that was onboarded since."""
    settings = load_settings(flags)
    from gti_core.bundle import DEMO_BUNDLE, load_bundle
    from gti_core.bundle.delta import CatalogState
    from service.onboarding.compact import compact_bundle
    from service.onboarding.states import States
    from service.onboarding.worker_process import open_store

    bundle = load_bundle(settings.bundle or DEMO_BUNDLE)
    store = open_store(settings.store_url, bundle)
    states = States(store, CatalogState.of(bundle.catalog, bundle.vocabulary))
    number = store.versions.current()
    made = compact_bundle(bundle, number, states.at(number), output, drop_retired=drop_retired)
    typer.echo(f"{output}: {len(made.catalog)} items of version {number}, digest {made.digest}")
