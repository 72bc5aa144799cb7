"""The manifest of one pipeline stage: layouts as JSON, from which all chunks follow.

It grows with the number of parameters and not with the number of ranks. Chains of stages
that parameters share are written once; a parameter in a flat buffer adds its offset.
"""

import base64
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from shardplan.layouts import CheckpointError, Grid, Grids, Layout, LayoutError, ModelLayouts
from shardplan.layouts.serial import stage_from_json, stage_to_json
from shardplan.layouts.stages import Stage
from shardplan.layouts.storage import FlatBuffer

from ...planning.manifest import OBJECT, SHARD, VALUE, Extra, Kind, Members, StageManifest
from ...planning.table import Chunk
from ...state.entries import Index, Path, Place
from .dtypes import dtype_name, dtype_of

# More than any machine has; what a hostile manifest may make the reader count through.
MAX_RANKS = 1 << 22
MAX_INT = (1 << 63) - 1


class _Chains:
    """The distinct chains of stages of a manifest, numbered as they come."""

    def __init__(self) -> None:
        self.stages: dict[Stage, int] = {}
        self.chains: dict[tuple[str, tuple[int, ...]], int] = {}
        self._rows: dict[tuple[int, str], list[int]] = {}
        self._kept: list[Any] = []

    def row(self, layout: Layout) -> list[int]:
        """Returns the number of a layout's chain, and its offset if it is in a flat buffer."""
        ident = (id(layout.stages), layout.family)
        row = self._rows.get(ident)
        if row is None:
            self._kept.append(layout.stages)  # an id stays taken while its object lives
            first, rest = layout.stages[0], layout.stages[1:]
            offset = None
            if isinstance(first, FlatBuffer):
                first, offset = dataclasses.replace(first, offset=0), first.offset
            numbers = tuple(self.stages.setdefault(s, len(self.stages)) for s in (first, *rest))
            chain = self.chains.setdefault((layout.family, numbers), len(self.chains))
            row = self._rows[ident] = [chain] if offset is None else [chain, offset]
        return row


def manifest_to_json(manifest: StageManifest, digest: str) -> dict[str, Any]:
    """Returns the manifest of a pipeline stage as plain data, without extras.

    Args:
        manifest: The manifest.
        digest: Digest of the layouts, equal on all ranks of the stage.

    Raises:
        CheckpointError: If a path has an element that JSON can't hold.
    """
    chains = _Chains()
    chunks = [
        {
            "section": chunk.section,
            "dense": _grid_to_json(chunk.grids.dense),
            "expert": _grid_to_json(chunk.grids.expert),
            "layouts": _rows(chains, chunk.layouts),
            "state_layouts": _rows(chains, chunk.state_layouts),
        }
        for chunk in manifest.chunks
    ]
    return {
        "digest": digest,
        "stages": [stage_to_json(s) for s in chains.stages],
        "chains": [[family, list(numbers)] for family, numbers in chains.chains],
        "chunks": chunks,
        "groups": groups_to_json(manifest.groups),
    }


def groups_to_json(groups: Mapping[Kind, Members]) -> list[Any]:
    """Returns groups of values as plain data."""
    return [[*kind_to_json(kind), bits_to_text(members)] for kind, members in groups.items()]


def extra_to_json(extra: Extra) -> list[Any]:
    """Returns a value that belongs to no parameter as plain data."""
    row = [
        path_to_json(extra.path),
        extra.digest,
        None if extra.dtype is None else dtype_name(extra.dtype),
        list(extra.shape),
        extra.writer,
        int(extra.late),
    ]
    boxes = extra.boxes
    return row if boxes is None else [*row, [[list(o), list(n), place] for o, n, place in boxes]]


def extra_from_json(data: Any) -> Extra:
    """Returns the extra that `extra_to_json` wrote.

    Raises:
        ValueError: If the data is none.
    """
    path, digest, dtype, shape, place, late, *rest = data
    boxes = None
    if rest:
        boxes = tuple((_shape(o), _shape(n), _number(p)) for o, n, p in rest[0])
        if any(len(o) != len(shape) or len(n) != len(shape) for o, n, _ in boxes):
            raise ValueError(f"boxes of other dims than the shape {shape}")
    return Extra(
        path_from_json(path),
        str(digest),
        None if dtype is None else dtype_of(dtype),
        _shape(shape),
        None if place is None else _number(place),
        bool(_number(late)),
        boxes,
    )


def _number(data: Any) -> int:
    if type(data) is not int or not 0 <= data <= MAX_INT:
        raise ValueError(f"{data!r} is not a number")
    return data


def _rows(chains: _Chains, layouts: dict[str, Layout]) -> list[list[Any]]:
    rows = []
    for fqn, layout in layouts.items():
        row: list[Any] = [fqn, *chains.row(layout)]
        if layout.name != fqn or layout.fqn != fqn:
            row += [None] * (3 - len(row))
            row += [layout.name] if layout.fqn == fqn else [layout.name, layout.fqn]
        rows.append(row)
    return rows


def manifest_from_json(data: Any, ranks: int) -> tuple[StageManifest, str]:
    """Returns the manifest of a pipeline stage, and the digest that its ranks' files must have.

    Args:
        data: Plain data.
        ranks: Number of ranks that its grids must have.

    Raises:
        ValueError: If the data is not such a manifest, or impossible.
    """
    try:
        _check_numbers(data["stages"])
        stages = [stage_from_json(stage) for stage in data["stages"]]
        chains = [(family, tuple(stages[i] for i in ids)) for family, ids in data["chains"]]
        chunks = tuple(_chunk(chains, chunk, ranks) for chunk in data["chunks"])
        groups = {}
        for row in data["groups"]:
            kind = kind_from_json(row[:5], len(chunks))
            groups[kind] = bits_from_text(row[5], len(chunks[kind.chunk].layouts))
        return StageManifest(chunks, groups), str(data["digest"])
    except (LayoutError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise ValueError(f"not the manifest of a pipeline stage: {error!r}") from None


def _chunk(chains: list[tuple[str, tuple[Stage, ...]]], data: Any, ranks: int) -> Chunk:
    grids = Grids(_grid(data["dense"], ranks), _grid(data["expert"], ranks))
    shared: dict[tuple[int, int], tuple[Stage, ...]] = {}
    layouts = _layouts(chains, data["layouts"], shared)
    section = data["section"]
    if section is not None and not isinstance(section, str):
        raise ValueError(f"section {section!r}")
    return Chunk(section, grids, layouts, dict(_layouts(chains, data["state_layouts"], shared)))


def _layouts(
    chains: list[tuple[str, tuple[Stage, ...]]],
    rows: Iterable[Any],
    shared: dict[tuple[int, int], tuple[Stage, ...]],
) -> ModelLayouts:
    layouts = ModelLayouts()
    for row in rows:
        key, chain, *rest = row
        family, stages = chains[chain]
        if rest and rest[0] is not None:
            place = (chain, rest[0])
            if place not in shared:
                first = stages[0]
                if not isinstance(first, FlatBuffer) or not 0 <= rest[0] <= MAX_INT:
                    raise ValueError(f"{key} has the offset {rest[0]!r} in {first}")
                shared[place] = (dataclasses.replace(first, offset=int(rest[0])), *stages[1:])
            stages = shared[place]
        name = rest[1] if len(rest) > 1 else key
        fqn = rest[2] if len(rest) > 2 else key
        if not (isinstance(name, str) and isinstance(fqn, str) and isinstance(key, str)):
            raise ValueError(f"{row!r} has a name that is no text")
        layouts[key] = Layout(fqn, name, stages, family)
    return layouts


def _grid_to_json(grid: Grid) -> list[Any]:
    return [list(grid.axes), list(grid.sizes), grid.index("pp")]


def _grid(data: Any, ranks: int) -> Grid:
    axes, sizes, stage = data
    _check_numbers(sizes)
    coordinate = tuple(stage if axis == "pp" else 0 for axis in axes)
    grid = Grid(tuple(map(str, axes)), tuple(sizes), coordinate)
    if grid.world_size != ranks:
        raise ValueError(f"the grid {data!r} has {grid.world_size} ranks but {ranks} saved")
    return grid


def _check_numbers(data: Any, depth: int = 0) -> None:
    """Checks that all numbers in plain data are sizes or places: no fraction, none below 0."""
    if depth > 16:
        raise ValueError("nested deeper than any layout")
    if isinstance(data, dict):
        data = list(data.values())
    if isinstance(data, list):
        for item in data:
            _check_numbers(item, depth + 1)
    elif not (data is None or type(data) is str or (type(data) is int and 0 <= data <= MAX_INT)):
        raise ValueError(f"{data!r} is no size")


def _shape(data: Any) -> tuple[int, ...]:
    _check_numbers(data)
    return tuple(data)


def kind_to_json(kind: Kind) -> list[Any]:
    """Returns a kind as `[chunk, place, role, dtype, shape]`."""
    before, head, tail, after = kind.place
    return [
        kind.chunk,
        [path_to_json(before), head, tail, path_to_json(after)],
        kind.role,
        None if kind.dtype is None else dtype_name(kind.dtype),
        list(kind.shape),
    ]


def kind_from_json(data: Any, chunks: int) -> Kind:
    """Returns the kind that `kind_to_json` wrote.

    Raises:
        ValueError: If the data is none.
    """
    chunk, (before, head, tail, after), role, dtype, shape = data
    if type(chunk) is not int or not 0 <= chunk < chunks or role not in (SHARD, VALUE, OBJECT):
        raise ValueError(f"{data!r} is no kind of value")
    place = Place(path_from_json(before), str(head), str(tail), path_from_json(after))
    return Kind(chunk, place, role, None if dtype is None else dtype_of(dtype), _shape(shape))


def path_to_json(path: Path) -> list[Any]:
    """Returns a path as plain data: text, `[position]` in a list, or an integer key.

    Raises:
        CheckpointError: If an element is none of these.
    """
    data: list[Any] = []
    for element in path:
        if isinstance(element, Index):
            data.append([int(element)])
        elif type(element) in (str, int):
            data.append(element)
        else:
            raise CheckpointError(
                f"{'.'.join(map(str, path))}: the key {element!r} is a {type(element).__name__}, "
                "and a manifest holds text and integers. Rename it."
            )
    return data


def path_from_json(data: Any) -> Path:
    """Returns the path that `path_to_json` wrote.

    Raises:
        ValueError: If the data is none.
    """
    path: list[Any] = []
    for element in data:
        if type(element) is list and len(element) == 1 and type(element[0]) is int:
            path.append(Index(element[0]))
        elif type(element) in (str, int):
            path.append(element)
        else:
            raise ValueError(f"{element!r} is no element of a path")
    return tuple(path)


def bits_to_text(members: Members) -> str:
    """Returns a group's members as text: base64 of the bits, bit 0 of byte 0 first."""
    packed = members.bits.to_bytes((members.bits.bit_length() + 7) // 8, "little")
    return base64.b64encode(packed).decode()


def bits_from_text(text: Any, count: int) -> Members:
    """Returns the members that `bits_to_text` wrote.

    Raises:
        ValueError: If the text is none, or names a parameter that there is not.
    """
    bits = int.from_bytes(base64.b64decode(str(text), validate=True), "little")
    if bits >> count:
        raise ValueError(f"a group has more members than the {count} parameters of its chunk")
    return Members(bits)
