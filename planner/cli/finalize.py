"""The verb `finalize`: a checkpoint in the library's own format that stock tools can list."""

from typing import Annotated

import typer

from ..storage import finalize
from .options import Json
from .output import console, plain, say_json, verb


@verb
def finalize_(
    ckpt: Annotated[
        str, typer.Argument(metavar="CKPT", help="A checkpoint in our own format: folder or URL.")
    ],
    json_: Json = False,
) -> None:
    """Write stock DCP's .metadata beside a checkpoint in our own format.

    Stock tools then list it. They can also load it if it was saved with
    SafetensorsWriter(stock=True); otherwise a stock load names our reader.
    """
    readable = finalize(ckpt)
    if json_:
        say_json({"path": ckpt, "stock_load": readable})
        return
    can = "list and load" if readable else "list, but not load (save with stock=True for that),"
    console().print(f"{plain(ckpt)}: .metadata is written; stock DCP can {can} this checkpoint")
