"""Recipe files: a model's numbers, what is saved of it, and some parallel configurations.

A recipe is TOML: `[model]` with the numbers, `[state]` with the dtype of each saved tensor of a
parameter, and one `[[parallel]]` for each configuration.
"""

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from shardplan.layouts import LayoutError

from .numbers import Numbers, numbers_from_table
from .parallel import Parallel, parallel_from_table

WEIGHT = "model"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model, what is saved of it, and configurations to plan for.

    Attributes:
        name: The model's name.
        source: Where its numbers are published.
        note: What the recipe leaves out or assumes.
        numbers: The numbers.
        state: Dtype of each saved tensor of a parameter: `model`, `exp_avg`, ….
        parallel: The configurations.
    """

    name: str
    source: str
    note: str
    numbers: Numbers
    state: dict[str, torch.dtype]
    parallel: tuple[Parallel, ...]

    def configuration(self, name: str | None) -> Parallel:
        """Returns a configuration by its name or position, the first if none is given.

        Raises:
            LayoutError: If there is none of that name.
        """
        if name is None:
            return self.parallel[0]
        for position, parallel in enumerate(self.parallel):
            if name in (parallel.name, str(position)):
                return parallel
        names = ", ".join(p.name for p in self.parallel)
        raise LayoutError(
            f"{self.name}: no configuration {name!r}. It has {names}; or give sizes, such as "
            "tp=2,ep=8,dp_shard=64."
        )


def shipped() -> list[str]:
    """Returns the names of the recipes that come with the package."""
    folder = resources.files(__package__)
    names = (item.name for item in folder.iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def load_recipe(name: str | Path) -> Recipe:
    """Returns a recipe by the name of a shipped one, or from a file.

    Raises:
        LayoutError: If there is no such recipe, or it has mistakes.
    """
    path = Path(name)
    text = None
    if path.suffix == ".toml" and path.is_file():
        text = path.read_text()
    else:
        wanted = str(name).lower().removesuffix(".toml")
        for known in shipped():
            if known.lower() == wanted:
                text = resources.files(__package__).joinpath(known + ".toml").read_text()
    if text is None:
        raise LayoutError(
            f"{name}: neither a recipe file (.toml) nor one of the shipped recipes: "
            f"{', '.join(shipped())}."
        )
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise LayoutError(f"{name}: no TOML: {error}") from None
    return _recipe(table, str(name))


def _recipe(table: dict[str, Any], where: str) -> Recipe:
    for part in ("model", "parallel"):
        if part not in table:
            raise LayoutError(f"{where}: a recipe needs [{part}].")
    state = {}
    for slot, text in table.get("state", {WEIGHT: "bfloat16"}).items():
        dtype = getattr(torch, str(text), None)
        if not isinstance(dtype, torch.dtype):
            raise LayoutError(f"{where}: [state]: {slot} = {text!r} is no dtype of torch.")
        state[slot] = dtype
    parallel = table["parallel"]
    rows = parallel if isinstance(parallel, list) else [parallel]
    return Recipe(
        str(table.get("name", where)),
        str(table.get("source", "")),
        str(table.get("note", "")),
        numbers_from_table(table["model"], where),
        state,
        tuple(parallel_from_table(row, where) for row in rows),
    )
