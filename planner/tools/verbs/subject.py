"""Which tensor of which checkpoint or recipe `explain` and `show` are asked about."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from shardplan.layouts import LayoutError

from ...checkpoints.opened import Checkpoint
from ...cli.options import keys_like
from ...cli.output import errors, many, plain
from ..recipes.files import Recipe, load_recipe, shipped
from ..recipes.parallel import Parallel
from ..recipes.parameters import Parameter
from .panels import find_parameters

Source_ = Annotated[
    str, typer.Argument(metavar="CKPT|RECIPE", help="A checkpoint, or a recipe's name or file.")
]
Param = Annotated[
    str, typer.Option("--param", "-p", help="The tensor: its name, a part of it, or a pattern.")
]
Config = Annotated[
    str | None,
    typer.Option(
        "--config", "-c", help="Configuration: its name in the recipe, or tp=2,ep=8,dp_shard=64."
    ),
]


def source_of(text: str) -> Recipe | Path:
    """Returns the recipe or the checkpoint that an argument means."""
    path = Path(text)
    if path.exists() and path.suffix != ".toml":
        return path
    try:
        return load_recipe(text)
    except LayoutError as error:
        if path.suffix == ".toml" or "neither a recipe" not in str(error):
            raise
        raise LayoutError(
            f"{text}: neither a checkpoint that exists nor a recipe. Shipped recipes: "
            f"{', '.join(shipped())}."
        ) from None


def key_of(checkpoint: Checkpoint, pattern: str) -> str:
    """Returns the first key that a pattern means; says so if there are others.

    Raises:
        CheckpointError: If there is none; some that look like it are named.
    """
    wanted = keys_like(pattern)
    if pattern in checkpoint.tensors:
        return pattern
    found = [key for key in checkpoint.tensors if wanted(key)]
    if not found:
        checkpoint.tensor(pattern)  # raises, with keys that look like it
    _hint(pattern, found)
    return found[0]


def parameter_of(recipe: Recipe, pattern: str) -> Parameter:
    """Returns the first of a recipe's parameters that a pattern means; says so if there are others."""
    found = find_parameters(recipe.numbers, keys_like(pattern), pattern)
    _hint(pattern, [parameter.name for parameter in found])
    return found[0]


def _hint(pattern: str, found: list[str]) -> None:
    """Says that a pattern means several tensors, of which the first is shown."""
    if len(found) > 1:
        others = ", ".join(found[1:4]) + (", …" if len(found) > 4 else "")
        text = (
            f"{pattern!r} means {many(len(found), 'tensor')}; this is the first. Others: {others}"
        )
        errors().print(plain(text))


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
