"""What every verb says, and how: tables for people, JSON for machines, progress, exit statuses.

| status | means |
|---|---|
| 0 | all is well |
| 1 | the answer is no: a checkpoint is not sound, two differ, a plan does not fit |
| 2 | it could not be answered: no such file, a damaged checkpoint, wrong arguments |
"""

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, ParamSpec

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from shardplan.layouts import CheckpointError, LayoutError

NO = 1
UNANSWERED = 2
_PATIENCE = 1.0  # seconds before a bar appears

P = ParamSpec("P")


def console() -> Console:
    """Returns the console for answers."""
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def errors() -> Console:
    """Returns the console for errors and progress."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def say_json(value: Any) -> None:
    """Prints a value as JSON."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))


def stop(message: str, *, as_json: bool = False, status: int = UNANSWERED) -> NoReturn:
    """Prints an error and ends the command.

    Raises:
        typer.Exit: Always, with the status.
    """
    if as_json:
        say_json({"error": message})
    else:
        errors().print(f"[bold red]shardplan:[/] {plain(message)}")
    raise typer.Exit(status)


def verb(function: Callable[P, None]) -> Callable[P, None]:
    """Makes the library's own errors, and those of the file system, messages with status 2."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except (CheckpointError, LayoutError, ValueError) as error:
            stop(_for_command(str(error)), as_json=bool(kwargs.get("json_")))
        except BrokenPipeError:
            raise typer.Exit(0) from None
        except OSError as error:
            text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            stop(text, as_json=bool(kwargs.get("json_")))

    return run


def _for_command(text: str) -> str:
    """Returns an error's text with the command's flags in place of the library's arguments."""
    for name in ("overwrite", "tensors_only"):
        text = text.replace(f"{name}=True", f"--{name.replace('_', '-')}")
    return text


@contextmanager
def progress(what: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Gives a function that is told the bytes of each step; a bar appears after a second.

    Args:
        what: What is being done.
        total: Bytes in all.
        quiet: Whether to show nothing.
    """
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=errors(),
        transient=True,
    )
    task = bar.add_task(what, total=max(total, 1))
    begin, shown = time.monotonic(), False

    def advance(count: int) -> None:
        nonlocal shown
        bar.advance(task, count)
        if not shown and not quiet and time.monotonic() - begin > _PATIENCE:
            bar.start()
            shown = True

    try:
        yield advance
    finally:
        if shown:
            bar.stop()


def size(count: float) -> str:
    """Returns a number of bytes as text.

    >>> size(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB" if count < 1024 else f"{count / 1024:.1f} PiB"


def number(count: float) -> str:
    """Returns a number with thin groups of digits.

    >>> number(1234567)
    '1,234,567'
    """
    return f"{count:,}"


def many(count: float, noun: str) -> str:
    """Returns a number of things; the noun is given in the singular and ends regularly.

    >>> many(1, "file"), many(2000, "key")
    ('1 file', '2,000 keys')
    """
    return f"{number(count)} {noun}{'' if count == 1 else 's'}"


def plain(text: str) -> str:
    """Keeps rich from reading `[…]` in a message as markup."""
    return text.replace("[", "\\[")
