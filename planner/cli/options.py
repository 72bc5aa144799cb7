"""Arguments and options that several verbs share."""

import fnmatch
import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ..checkpoints.opened import Checkpoint
from ..checkpoints.opening import open_checkpoint

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
