"""What the commands share: options, number lists, progress bars."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from gti_core.errors import PipelineError
from service.settings import Settings, env_name, flag

Output = Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")]
CacheDir = Annotated[
    Path,
    typer.Option(
        "--data-dir", envvar="GTI_DATA_DIR", help="Where converted backbones are kept (in cache/)."
    ),
]
Seed = Annotated[int, typer.Option(help="Seed; the same seed gives the same result.")]
DEFAULT_DATA_DIR = Path(".gti")


_KINDS = {
    str(int): "INTEGER",
    str(float): "NUMBER",
    str(float | None): "NUMBER",
    str(Path): "PATH",
    str(Path | None): "PATH",
}


def with_settings(command: Callable[..., None], names: Sequence[str]) -> Callable[..., None]:
    """The command with an option per field of `Settings`, handed over as ``**flags``.

    Values are text or, for switches, true and false: pydantic checks flags and variables alike.
    Named parameters that the command has of its own stay.
    """
    own = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    options = [_option(name) for name in names]
    command.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    command.__annotations__ = {option.name: option.annotation for option in [*own, *options]}
    return command


def _option(name: str) -> inspect.Parameter:
    field = Settings.model_fields[name]
    default = "" if field.default is None else f", default {field.default}"
    text = f"{field.description}  [{env_name(name)}{default}]"
    if field.annotation in (bool, bool | None):
        # The variable is read by `Settings`, as every variable is.
        switch = f"{flag(name)}/{flag(f'no_{name}')}"
        annotation: Any = Annotated[bool | None, typer.Option(switch, help=text)]
    else:
        choices = [choice for choice in get_args(field.annotation) if isinstance(choice, str)]
        option = typer.Option(
            flag(name),
            envvar=env_name(name),
            metavar="|".join(choices) or _KINDS.get(str(field.annotation), "TEXT"),
            help=text,
            show_default=False,
            show_envvar=False,
        )
        annotation = Annotated[str | None, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def numbers(text: str, flag: str) -> tuple[int, ...]:
    """Whole numbers of an option. Raises PipelineError naming the flag."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise PipelineError(f"{flag} takes whole numbers with commas, not {text!r}") from None


def _bar(*columns: Any) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description:<14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        *columns,
        console=Console(stderr=True),
    )


@contextlib.contextmanager
def phases() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar per named phase."""
    with _bar() as bar:
        tasks: dict[str, Any] = {}

        def report(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=total)
            bar.update(tasks[phase], completed=done, total=total)

        yield report


@contextlib.contextmanager
def steps(name: str) -> Iterator[Callable[[int, int, float], None]]:
    """A progress bar with the running loss."""
    from rich.progress import TextColumn

    with _bar(TextColumn("loss {task.fields[loss]:.3f}")) as bar:
        task = None

        def report(done: int, total: int, loss: float) -> None:
            nonlocal task
            if task is None:
                task = bar.add_task(name, total=total, loss=loss)
            bar.update(task, completed=done, total=total, loss=loss)

        yield report


@contextlib.contextmanager
def runs() -> Iterator[Callable[[str, int, int, float | None], None]]:
    """A progress bar per named run, with the running loss where there is one."""
    from rich.progress import TextColumn

    with _bar(TextColumn("{task.fields[note]}")) as bar:
        tasks: dict[str, Any] = {}

        def report(name: str, done: int, total: int, loss: float | None) -> None:
            note = "" if loss is None else f"loss {loss:.3f}"
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total, note=note)
            bar.update(tasks[name], completed=done, total=total, note=note)

        yield report
