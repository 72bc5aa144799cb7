"""What every verb says, and how: tables for people, JSON for machines, progress, exit statuses.

| status | means |
|---|---|
| 0 | all is well |
| 1 | the answer is no: a checkpoint is not sound, two differ, a plan does not fit |
| 2 | it could not be answered: no such file, a damaged checkpoint, wrong arguments |
"""

import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, ParamSpec

import rich.markup
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment

from shardplan.layouts import CheckpointError, LayoutError

NO = 1
UNANSWERED = 2
_PIPED_WIDTH = 1 << 16
# JSON has no such numbers; a literal that is too large reads as infinity everywhere.
_NUMBERS = {"Infinity": "1e999", "-Infinity": "-1e999", "NaN": "null"}
_NUMBER = re.compile(r'^( *(?:"(?:[^"\\]|\\.)*": )?)(-?Infinity|NaN)(,?)$', re.MULTILINE)
_PATIENCE = 1.0  # seconds before a bar appears

P = ParamSpec("P")


class _Console(Console):
    """Prints nothing that a terminal obeys but what rich itself adds, and survives a closed pipe."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.replace("\n", "").isprintable():
                yield segment
            else:
                lines = map(_escaped, segment.text.split("\n"))
                yield Segment("\n".join(lines), segment.style)

    def on_broken_pipe(self) -> None:
        _mute()


def _mute() -> None:
    """Goes on without a reader, as in `| head`: the exit status is still the answer's."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console() -> Console:
    """Returns the console for answers.

    What is piped has one row on one line, however long, so that `grep` finds names.
    """
    piped = not sys.stdout.isatty()
    width = _PIPED_WIDTH if piped else None
    return _Console(highlight=False, emoji=False, soft_wrap=piped, width=width)


def errors() -> Console:
    """Returns the console for errors and progress."""
    return _Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)


def say_json(value: Any) -> None:
    """Prints a value as JSON; what a terminal might obey is escaped, and parses to the same."""
    text = json.dumps(value, indent=1, ensure_ascii=False, default=str)
    text = _NUMBER.sub(lambda found: found[1] + _NUMBERS[found[2]] + found[3], text)
    text = re.sub(
        r"[^\n -~]", lambda c: c[0] if c[0].isprintable() else json.dumps(c[0])[1:-1], text
    )
    try:
        typer.echo(text)
    except BrokenPipeError:
        _mute()


def stop(message: str, *, as_json: bool = False, status: int = UNANSWERED) -> NoReturn:
    """Prints an error and ends the command.

    Raises:
        typer.Exit: Always, with the status.
    """
    if as_json:
        say_json({"error": message})
    else:
        # Lists of faults have one on a line.
        lines = "\n  ".join(map(plain, message.split("\n  ")))
        errors().print(f"[bold red]shardplan:[/] {lines}")
    raise typer.Exit(status)


def verb(function: Callable[P, None]) -> Callable[P, None]:
    """Makes the library's own errors, and those of the file system, messages with status 2."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except (CheckpointError, LayoutError, ValueError) as error:
            stop(_for_command(str(error)), as_json=bool(kwargs.get("json_")))
        except KeyboardInterrupt:
            stop("interrupted", as_json=bool(kwargs.get("json_")))
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
    """Gives a function that is told the bytes of each step; at a terminal a bar appears after a second.

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
    quiet = quiet or not bar.console.is_terminal  # elsewhere it would leave an empty line
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
    r"""Returns text that is printed as it is: no markup, and nothing that a terminal obeys.

    Keys and paths may come from anybody: an escape sequence in a key could hide or forge an
    answer, and so could a character that turns the direction of writing.

    >>> print(plain("[red]w\x1b[2J"))
    \[red]w\x1b[2J
    """
    return rich.markup.escape(_escaped(text))


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
