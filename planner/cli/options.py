"""Arguments and options that several verbs share."""

import dataclasses
import fnmatch
import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from shardplan.layouts import LayoutError

from ..checkpoints.opened import Checkpoint
from ..checkpoints.opening import open_checkpoint
from ..recipes.files import Recipe
from ..recipes.parallel import Parallel

Checkpoint_ = Annotated[
    str,
    typer.Argument(
        metavar="CKPT", help="A checkpoint's folder or file, or its URL, of any known format."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-pickle",
        help="Unpickle what the checkpoint holds, whatever it is. That can run any code: "
        "only for checkpoints whose origin you trust.",
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace a checkpoint that is there, as a whole, once the new one is complete.",
    ),
]
Filter = Annotated[
    str | None,
    typer.Option(
        "--filter",
        "-f",
        metavar="PATTERN",
        help="Only keys that have this in them; or a pattern with * and ?.",
    ),
]


Config = Annotated[
    str | None,
    typer.Option(
        "--config", "-c", help="Configuration: its name in the recipe, or tp=2,ep=8,dp_shard=64."
    ),
]


@contextmanager
def opened(path: str | Path, trust_pickle: bool = False) -> Iterator[Checkpoint]:
    """Opens a checkpoint for one verb; what its metadata is made of is never looked at for garbage.

    A million chunks are millions of objects: looking through them takes as long as reading them.
    """
    gc.disable()
    try:
        checkpoint = open_checkpoint(path, trust_pickle=trust_pickle)
        gc.freeze()
    finally:
        gc.enable()
    try:
        with checkpoint:
            yield checkpoint
    finally:
        gc.unfreeze()


def keys_like(pattern: str | None) -> Callable[[str], bool]:
    """Returns a test for keys.

    A pattern without `*`, `?` and `[` matches any part of a key; another one may begin anywhere
    and must reach to the key's end.
    """
    if pattern is None:
        return lambda key: True
    if not any(mark in pattern for mark in "*?["):
        return lambda key: pattern in key
    match = re.compile(fnmatch.translate("*" + pattern)).match
    return lambda key: match(key) is not None


def parse_configuration(recipe: Recipe, text: str | None) -> Parallel:
    """Returns a configuration by its name in the recipe, or from sizes such as `tp=2,ep=8`.

    Raises:
        LayoutError: If there is none of that name, or a size is no number.
    """
    if text is None or "=" not in text:
        return recipe.configuration(text)
    values: dict[str, Any] = {}
    known = [f.name for f in dataclasses.fields(Parallel)]
    for pair in text.replace(" ", "").split(","):
        name, _, value = pair.partition("=")
        if name not in known:
            raise LayoutError(f"--config {text}: no axis {name!r}. There are {', '.join(known)}.")
        try:
            values[name] = value if name in ("fsdp", "name") else int(value)
        except ValueError:
            raise LayoutError(f"--config {text}: {name} is {value!r}, not a number.") from None
    return Parallel(**values)
