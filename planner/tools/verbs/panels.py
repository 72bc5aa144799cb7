"""Who holds what of a tensor, as rectangles: the data of pictures, of any checkpoint or recipe."""

import colorsys
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from shardplan.layouts import Grid, Layout, LayoutError
from shardplan.layouts.layout import evaluate
from shardplan.layouts.slab import Shape
from shardplan.layouts.stages import ExpertIndex

from ...checkpoints.opened import Checkpoint, similar
from ..recipes.forecast import Placement, holders
from ..recipes.numbers import Numbers
from ..recipes.parameters import Parameter, parameters

_RANK = re.compile(r"_*(\d+)(?:_|-of-\d+\.safetensors$)")


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Rows and columns that some ranks hold.

    Attributes:
        rows: First row and one past the last, in elements.
        columns: First column and one past the last.
        rank: The first rank that holds it; the number of the file where ranks are not known.
        copies: How many ranks hold it.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    rank: int
    copies: int = 1


@dataclass(slots=True)
class Panel:
    """A tensor as rows and columns.

    Attributes:
        title: What the panel shows.
        rows: Number of rows: dim 0 of all components, one below the other.
        columns: Number of columns: all other dims.
        parts: Name, first row and one past the last of each component.
        held: The rectangles.
        world: Number of ranks.
        who: What a number stands for: `rank`, or `file`.
    """

    title: str
    rows: int
    columns: int
    parts: list[tuple[str, int, int]] = field(default_factory=list)
    held: list[Rectangle] = field(default_factory=list)
    world: int = 1
    who: str = "rank"


def color(rank: int, world: int) -> tuple[float, float, float]:
    """Returns a rank's colour, the same in every picture: red, green and blue from 0 to 1.

    Few ranks have colours far apart; many run once through the spectrum.
    """
    if world <= 16:
        hue = (rank * 0.618034) % 1.0
        light = 0.70 + 0.08 * (rank % 2)
    else:
        hue = 0.83 * rank / max(world - 1, 1)
        light = 0.60 + 0.08 * (rank % 2)
    return colorsys.hls_to_rgb(hue, light, 0.62)


def find_parameters(
    numbers: Numbers, wanted: Callable[[str], bool], pattern: str
) -> list[Parameter]:
    """Returns the parameters whose global name a pattern means; one of that very name alone.

    Raises:
        LayoutError: If no name matches; some that look like it are named.
    """
    known = list(parameters(numbers))
    found = [p for p in known if p.name == pattern] or [p for p in known if wanted(p.name)]
    if not found:
        names = [p.name for p in known]
        raise LayoutError(f"--param {pattern}: no parameter matches. {similar(pattern, names)}")
    return found


def locate(placement: Placement, parameter: Parameter) -> tuple[Layout, Grid]:
    """Returns the layout of a global parameter, and a grid at its pipeline stage and ep rank."""
    for description, layouts in placement.stages:
        name = parameter.name
        if parameter.expert is not None:
            held = max(e.expert for e in description.globals.values() if e.expert is not None)
            name = re.sub(r"\d+$", str(parameter.expert % (held + 1)), name)
        if name not in layouts or description.globals[name].layer != parameter.layer:
            continue
        layout = layouts[name]
        grid = description.grids.of(layout.family)
        index = next((s for s in layout.stages if isinstance(s, ExpertIndex)), None)
        if index is not None and parameter.expert is not None:
            grid = grid.at(ep=parameter.expert // index.num_local_experts)
        return layout, grid
    raise LayoutError(f"{parameter.name}: no rank of {placement.parallel.title} has it.")


def of_recipe(placement: Placement, parameter: Parameter) -> Panel:
    """Returns who holds what of a parameter in a parallel configuration."""
    layout, grid = locate(placement, parameter)
    fixed = {"ep": grid.index("ep")} if parameter.expert is not None else {}
    used = set(layout.axes)
    free = [a for a in grid.axes if a not in used and a != "pp"]
    panel: Panel | None = None
    starts: dict[str, int] = {}
    for at in holders(layout.stages, grid):
        here = at.at(**fixed)
        frames = evaluate(layout.stages, here, layout.fqn)
        if panel is None:
            rows = 0
            parts = []
            for frame in frames:
                starts[frame.suffix] = rows
                count = frame.shape[0] if frame.shape else 1
                parts.append((frame.suffix.lstrip("._"), rows, rows + count))
                rows += count
            columns = math.prod(frames[0].shape[1:])
            named = [(_HALVES.get(name, name), a, b) for name, a, b in parts]
            title = f"{placement.parallel.title}"
            panel = Panel(title, rows, columns, named, [], grid.world_size)
        rank = _rank(here.at(**{axis: 0 for axis in free}))
        copies = grid.count(free)
        for frame in frames:
            for box in frame.boxes:
                for r, c in _flat(frame.shape, box.offsets, box.sizes):
                    base = starts[frame.suffix]
                    panel.held.append(Rectangle((base + r[0], base + r[1]), c, rank, copies))
    if panel is None:
        raise LayoutError(f"{parameter.name}: it has no elements.")
    return panel


def rank_of(file: str) -> int | None:
    """Returns the rank that a file's name tells of, None if it tells of none.

    >>> rank_of("__3_0.distcp"), rank_of("00f/00003-of-00008.safetensors"), rank_of("model.pt")
    (3, 3, None)
    """
    found = _RANK.match(file.rpartition("/")[2])
    return int(found[1]) if found else None


def of_checkpoint(checkpoint: Checkpoint, key: str) -> Panel:
    """Returns where a key's chunks lie: which rank's file, or which file, has which part."""
    stored = checkpoint.tensor(key)
    shape = tuple(stored.size)
    rows = shape[0] if shape else 1
    panel = Panel(f"{checkpoint.path.rstrip('/').rpartition('/')[2]}", rows, math.prod(shape[1:]))
    files = sorted(checkpoint.file_bytes())
    ranks = {name: rank for name in files if (rank := rank_of(name)) is not None}
    known = len(ranks) == len(files)
    panel.who = "rank" if known else "file"
    panel.world = max(ranks.values()) + 1 if known and ranks else len(files)
    for chunk in stored.chunks:
        name, _, _ = checkpoint.chunk_bytes(key, chunk)
        rank = ranks[name] if known else files.index(name)
        for r, c in _flat(shape, tuple(chunk.offsets), tuple(chunk.sizes)):
            panel.held.append(Rectangle(r, c, rank))
    return panel


_HALVES = {"w": "gate", "v": "up"}


def _rank(grid: Grid) -> int:
    """Returns the number of the rank at a coordinate; ranks count along the last axis first."""
    return grid.linear(grid.axes)


def _flat(
    shape: Shape, offsets: Shape, sizes: Shape
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yields a box as row and column ranges, where all dims but the first make the columns."""
    if not shape:
        yield (0, 1), (0, 1)
        return
    rows = (offsets[0], offsets[0] + sizes[0])
    if len(shape) == 1:
        yield rows, (0, 1)
        return
    last = max((d for d in range(1, len(shape)) if sizes[d] != shape[d]), default=1)
    inner = math.prod(shape[last + 1 :])
    for index in itertools.product(*(range(sizes[d]) for d in range(1, last))):
        start = 0
        for d, i in enumerate(index, 1):
            start = start * shape[d] + offsets[d] + i
        start = (start * shape[last] + offsets[last]) * inner
        yield rows, (start, start + sizes[last] * inner)
