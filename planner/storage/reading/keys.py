"""The keys of one pipeline stage, found from its layouts without listing them all.

| name | is |
|---|---|
| `StageKeys` | what each key of a stage stands for, and its stored form once it is asked for |
| `around` | what stands around a parameter's name in a key |

A key is a parameter's name with something around it, and few things are: a section, a slot. So a key
is found by taking these away and looking the name up. Chunk lists, which may be as long as there are
ranks, are made for the layouts of those keys only that somebody asks for.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from shardplan.layouts import Grid, Layout, Shard, clean_name
from shardplan.layouts.layout import EXPERT, evaluate
from shardplan.layouts.storage import Whole

from ...planning.manifest import (
    SHARD,
    ChunkLists,
    Extra,
    Kind,
    Laid,
    Members,
    StageManifest,
    Stored,
    all_value_names,
    stored_extra,
    value_names,
)
from ...planning.ownership import Ownership
from ...state.entries import Path, Place, stock_path

Around = tuple[str, str]


_Tensors = dict[tuple[str, int | None], tuple[torch.Size, list[ChunkStorageMetadata]]]


class _Row(NamedTuple):
    """A name on disk: its parameter's position among the layouts, and what of it has the name."""

    member: int
    suffix: str
    expert: int | None
    name: str


class _Names:
    """The names on disk of a chunk's parameters in one role."""

    def __init__(self, layouts: tuple[Layout, ...], rows: list[list[_Row]]) -> None:
        self.layouts = layouts
        self.rows = rows
        self.by_name: dict[str, list[_Row]] = {}
        for row in itertools.chain.from_iterable(rows):
            self.by_name.setdefault(row.name, []).append(row)


@dataclass(slots=True)
class _Values:
    """The values of one kind, and the names that they have."""

    kind: Kind
    members: Members
    known: _Names | None = None


def around(place: Place) -> Around:
    """Returns what stands before and behind a parameter's name in the key of its value."""
    before = "".join(f"{element}." for element in place.before)
    after = "".join(f".{element}" for element in place.after)
    return before + place.head, place.tail + after


class StageKeys:
    """What each key of a stage stands for.

    Args:
        manifest: The stage's manifest.
        rules: The numbers of ownership of the save.
    """

    def __init__(self, manifest: StageManifest, rules: Ownership) -> None:
        self._manifest = manifest
        self._rules = rules
        self._extras = {extra.key: extra for extra in manifest.extras}
        self._values: dict[Around, list[_Values]] = {}
        for kind, members in manifest.groups.items():
            self._values.setdefault(around(kind.place), []).append(_Values(kind, members))
        self._known: dict[tuple[int, bool, bool], _Names] = {}
        self._lists: dict[tuple[int, str], ChunkLists] = {}
        self._tensors: dict[int, _Tensors] = {}
        self._properties: dict[torch.dtype, TensorProperties] = {}
        self._clean: dict[str, list[str]] | None = None

    def find(self, key: str) -> Laid | Extra | None:
        """Returns what a key stands for, None if the stage does not have it."""
        for (before, after), several in self._values.items():
            if not (key.startswith(before) and key.endswith(after)):
                continue
            name = key[len(before) : len(key) - len(after)]
            for values in several:
                names = values.known or self._names(values)
                for row in names.by_name.get(name, ()):
                    if row.member in values.members:
                        return _laid(values.kind, names.layouts[row.member], row)
        return self._extras.get(key)

    def items(self, prefix: str = "") -> Iterator[tuple[str, Laid | Extra]]:
        """Yields all keys with a prefix, and what they stand for."""
        for (before, after), several in self._values.items():
            if not (before.startswith(prefix) or prefix.startswith(before)):
                continue
            for values in several:
                names = self._names(values)
                for index in values.members:
                    for row in names.rows[index]:
                        key = f"{before}{row.name}{after}"
                        if key.startswith(prefix):
                            yield key, _laid(values.kind, names.layouts[index], row)
        for key, extra in self._extras.items():
            if key.startswith(prefix):
                yield key, extra

    def named_like(self, clean: str) -> list[str]:
        """Returns the keys that are a clean name but for wrappers' tokens."""
        if self._clean is None:
            self._clean = {}
            for key, _ in self.items():
                self._clean.setdefault(clean_name(key), []).append(key)
        return self._clean.get(clean, [])

    @staticmethod
    def path(origin: Laid | Extra) -> Path:
        """Returns the path of a value in the state dict, as stock DCP stores it."""
        if isinstance(origin, Extra):
            return stock_path(origin.path)
        name = origin.name or origin.layout.key_of(origin.suffix, origin.expert)
        return stock_path(origin.kind.place.path(name))

    def stored(self, origin: Laid | Extra) -> Stored:
        """Returns the stored form of what a key stands for.

        Raises:
            CheckpointError: If the chunks of all ranks do not cover a tensor exactly once.
        """
        if isinstance(origin, Extra):
            return stored_extra(origin)
        dtype = origin.kind.dtype
        if dtype is None:
            return BytesStorageMetadata()
        if origin.kind.role != SHARD:
            shape = origin.kind.shape
            size = torch.Size(shape)
            chunks = [ChunkStorageMetadata(torch.Size([0] * len(shape)), size)]
        else:
            size, chunks = self._tensor(origin)
        properties = self._properties.get(dtype)
        if properties is None:
            properties = self._properties[dtype] = TensorProperties(dtype=dtype)
        return TensorStorageMetadata(properties, size, chunks)

    def _tensor(self, laid: Laid) -> tuple[torch.Size, list[ChunkStorageMetadata]]:
        kind, layout = laid.kind, laid.layout
        lists = self._lists.get((kind.chunk, layout.family))
        if lists is None:
            grid = self._manifest.chunks[kind.chunk].grids.of(layout.family)
            lists = self._lists[kind.chunk, layout.family] = ChunkLists(grid, self._rules)
        made = lists.of(layout, kind.itemsize)
        tensors = self._tensors.get(id(made))
        if tensors is None:
            tensors = {(frame.suffix, frame.expert): (size, chunks) for frame, size, chunks in made}
            self._tensors[id(made)] = tensors  # `lists` keeps what it made
        return tensors[laid.suffix, laid.expert]

    def _names(self, values: _Values) -> _Names:
        if values.known is None:
            kind = values.kind
            slotted = bool(kind.place.slot and self._manifest.chunks[kind.chunk].state_layouts)
            ident = (kind.chunk, slotted, _sharded(kind))
            if ident not in self._known:
                self._known[ident] = self._names_of(kind)
            values.known = self._known[ident]
        return values.known

    def _names_of(self, kind: Kind) -> _Names:
        grids, layouts = self._manifest.chunks[kind.chunk].grids, self._manifest.layouts(kind)
        frames: dict[Hashable, list[tuple[str, int | None]]] = {}
        experts: dict[tuple[int, str], list[str]] = {}
        rows = []
        for index, layout in enumerate(layouts):
            grid = grids.of(layout.family)
            if not _sharded(kind):
                rows.append(_value_rows(index, layout, grid, experts))
                continue
            same = (layout.local_shape, layout.stages[1:], layout.family)
            found = frames.get(same)
            if found is None:
                found = frames[same] = _frames(layout, grid)
            rows.append([_Row(index, s, e, layout.key_of(s, e)) for s, e in found])
        return _Names(layouts, rows)


def _sharded(kind: Kind) -> bool:
    return kind.role == SHARD and kind.dtype is not None


def _frames(layout: Layout, grid: Grid) -> list[tuple[str, int | None]]:
    """Returns component and expert of each tensor that a layout has at any coordinate."""
    whole = (Whole(layout.local_shape), *layout.stages[1:])  # storage changes no name
    # A shard's coordinate moves boxes and changes no name.
    axes = [axis for stage in whole if not isinstance(stage, Shard) for axis in stage.axes]
    found: dict[tuple[str, int | None], None] = {}
    for place in grid.walk(list(dict.fromkeys(axes))):
        for frame in evaluate(whole, place, layout.fqn):
            found[frame.suffix, frame.expert] = None
    return list(found)


def _value_rows(
    index: int, layout: Layout, grid: Grid, known: dict[tuple[int, str], list[str]]
) -> list[_Row]:
    """Returns the names of a whole parameter's scalars; `known` are experts by their chain."""
    if EXPERT not in layout.name:
        return [_Row(index, "", None, name) for name in value_names(layout, grid)]
    experts = known.get((id(layout.stages), layout.family))
    if experts is None:
        experts = all_value_names(dataclasses.replace(layout, name=EXPERT), grid)
        known[id(layout.stages), layout.family] = experts
    return [_Row(index, "", None, layout.name.replace(EXPERT, expert)) for expert in experts]


def _laid(kind: Kind, layout: Layout, row: _Row) -> Laid:
    if _sharded(kind):
        return Laid(kind, layout, row.suffix, row.expert)
    return Laid(kind, layout, name=row.name)
