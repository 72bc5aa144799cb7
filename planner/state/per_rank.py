"""Values that differ between ranks on purpose: random state, the place in a data set.

| key in the state dict | keys on disk |
|---|---|
| `rng`: `PerRank(value)` | `rng.rank_0`, `rng.rank_1`, … |
| `loader`: `PerRank(value, axes=("dp_shard",))` | `loader.dp_shard_0`, `loader.dp_shard_1`, … |
"""

from collections.abc import Iterable
from typing import Any

from shardplan.layouts import Grid, Grids, LayoutError

from .entries import Path


class PerRank:
    """A value of which every rank has its own, such as the state of its random generators.

    Put it into the state dict in place of the value, on every rank, at save and at load; a load
    sets `value`. What happens when the number of ranks has changed is the load planner's policies
    `fewer_ranks` and `more_ranks`.

    Args:
        value: Anything that a state dict may hold; it is stored as one value.
        axes: Mesh axes along which the value differs; along the others it must be equal. By
            default all axes: each rank has its own.

    Attributes:
        value: The value; after a load the one that was loaded.
        axes: The axes, None for all.

    >>> PerRank(7, axes=("dp_shard",))
    PerRank(7, axes=('dp_shard',))
    """

    __slots__ = ("axes", "value")

    def __init__(self, value: Any = None, axes: Iterable[str] | None = None) -> None:
        self.value = value
        self.axes = None if axes is None else tuple(axes)

    def __repr__(self) -> str:
        axes = "" if self.axes is None else f", axes={self.axes!r}"
        return f"PerRank({self.value!r}{axes})"

    @property
    def label(self) -> str:
        """The word before the index in a key, `'rank'` or the axes' names."""
        return "rank" if self.axes is None else "-".join(self.axes)


class Seat:
    """A rank's place among those that have values of their own.

    Args:
        key: The value's key, for errors.
        value: The value.
        grids: The rank's grids.

    Attributes:
        index: The rank's place along the axes.
        count: How many places there are.
        first: Whether no other rank at this place comes before it on the axes along which the
            value is equal, pipeline stages aside.

    Raises:
        LayoutError: If the grids have no such axes.
    """

    def __init__(self, key: str, value: PerRank, grids: Grids) -> None:
        grid = _grid(key, value, grids)
        axes = grid.axes if value.axes is None else value.axes
        self._grid, self._axes, self._label = grid, axes, value.label
        self.index = grid.linear(axes)
        self.count = grid.count(axes)
        others = [a for a in grid.axes if a not in axes and a != "pp"]
        self.first = grid.linear(others) == 0

    def path(self, path: Path) -> Path:
        """Returns the path on disk of this rank's value."""
        return (*path, f"{self._label}_{self.index}")

    def paths(self, path: Path) -> list[Path]:
        """Returns the paths on disk of the values of all ranks of this pipeline stage."""
        walked = self._grid.walk([axis for axis in self._axes if axis != "pp"])
        return [(*path, f"{self._label}_{place.linear(self._axes)}") for place in walked]


def _grid(key: str, value: PerRank, grids: Grids) -> Grid:
    for grid in (grids.dense, grids.expert):
        if value.axes is None or set(value.axes) <= set(grid.axes):
            return grid
    raise LayoutError(
        f"{key}: PerRank names the axes {value.axes}, but the grid has {grids.dense.axes} and for "
        f"experts {grids.expert.axes} ({grids.facts()}). Name axes of one of them."
    )


def indices_saved(stored: Iterable[str], prefix: str) -> list[int]:
    """Returns the indices of the ranks that a checkpoint has values of, sorted.

    Args:
        stored: The checkpoint's keys.
        prefix: The value's key with its label, such as `'rng.rank_'`.
    """
    rests = (key[len(prefix) :] for key in stored if key.startswith(prefix))
    return sorted(int(rest) for rest in rests if rest.isdigit())
