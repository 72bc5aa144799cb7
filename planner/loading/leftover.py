"""Keys of a checkpoint that nothing in a load accounts for."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from shardplan.layouts import EXPERT, Grid, Layout, clean_name
from shardplan.layouts.layout import evaluate
from shardplan.layouts.stages import Stage
from shardplan.layouts.storage import Whole
from shardplan.layouts.variants import variants

from ..planning.holdings import Holding
from ..planning.manifest import SHARD, all_value_names, value_names
from ..planning.optimizer import components
from ..planning.table import Chunk
from ..state.entries import Path, Place, key_of

_Names = tuple[tuple[str, int | None], ...]


def loaded_parts(
    loaded: Iterable[str], paths: Sequence[Path], values: Sequence[Any]
) -> Callable[[str], bool]:
    """Returns what tells whether a key of the checkpoint is in a part of it that is loaded.

    The parts are sections, which hold the keys with one first word, and the keys beside them, which
    have one word only. The tensors of a state dict without sections are one part, all of it.

    Args:
        loaded: The checkpoint's keys that this rank loads.
        paths: Paths of the state dict.
        values: Its values.
    """
    sections = {key.partition(".")[0] for key in loaded}
    tensors = [p for p, v in zip(paths, values, strict=True) if isinstance(v, torch.Tensor)]
    # `layers.0.weight` beside sections is of a model that has none.
    flat = any(len(path) == 1 and "." in key_of(path) for path in tensors) or all(
        len(path) == 1 for path in tensors or paths
    )
    beside = any(
        len(path) == 1 and not (isinstance(value, Mapping | list) and not value)
        for path, value in zip(paths, values, strict=True)
    )

    def counts(key: str) -> bool:
        section, dot, _ = key.partition(".")
        return flat or section in sections or (beside and not dot)

    return counts


def skipped_parts(stored: Iterable[str], counts: Callable[[str], bool]) -> list[str]:
    """Returns the sections of a checkpoint, and the keys beside them, that no load asked for."""
    return list(dict.fromkeys(key.partition(".")[0] for key in stored if not counts(key)))


def unexpected_keys(
    stored: Iterable[str],
    loaded: Iterable[str],
    held: Sequence[Holding],
    chunks: Sequence[Chunk],
    group_prefixes: Sequence[str],
    rank_prefixes: Sequence[str],
    counts: Callable[[str], bool],
    by_number: Sequence[Callable[[str], str]] = (),
) -> list[str]:
    """Returns the keys in the loaded sections that neither this rank nor another shard asks for.

    A rank that stores nothing of a parameter has no optimizer state for it, and other ranks hold
    other experts: what the layouts of this rank's chunks explain is expected, in any form that
    it may have on disk. What this rank stores and does not ask for, such as the state of a
    parameter that is frozen now, is not.

    Args:
        stored: The checkpoint's keys.
        loaded: Those that this rank loads.
        held: What this rank holds.
        chunks: The model's chunks.
        group_prefixes: Keys of the lists of parameter groups, with their last dot.
        rank_prefixes: Keys of values of which every rank has its own, up to the index.
        counts: Whether a key of the checkpoint is in a part of it that is loaded.
        by_number: Each gives the key by name for one of an optimizer's state by number.
    """
    known = set(loaded)
    left = [key for key in stored if key not in known and counts(key)]
    if not left:
        return []
    places: dict[int, dict[tuple[Place, bool], set[int]]] = {}
    for holding in held:
        found = places.setdefault(holding.kind.chunk, {})
        sharded = holding.kind.role == SHARD
        found.setdefault((holding.kind.place, sharded), set()).add(holding.order)
    explained: set[str] = set()
    grouped: set[str] = set()
    for number, chunk in enumerate(chunks):
        names = _ChunkNames(chunk)
        for (place, sharded), orders in places.get(number, {}).items():
            explained.update(map(place.key, names.of(place.slot, sharded)))
            lacking = names.lacking(place.slot, sharded, orders)
            explained.difference_update(map(place.key, lacking))
        grouped.update(names.of("", False) if group_prefixes else ())

    # A key that the checkpoint has as it is stands for itself, and else for what its name is but
    # for wrappers' tokens.
    alike = {clean_name(key) for key in explained.difference(known, left)}

    def expected(key: str) -> bool:
        for named in by_number:
            key = named(key)
        if key in explained or clean_name(key) in alike:
            return True
        if any(key.startswith(p) and key[len(p) :].isdigit() for p in rank_prefixes):
            return True
        prefix = next((p for p in group_prefixes if key.startswith(p)), None)
        if prefix is None:
            return False
        # A parameter's name and an option; one that is a mapping has dots of its own.
        heads = accumulate(key[len(prefix) :].split(".")[:-1], "{}.{}".format)
        return any(head in grouped for head in heads)

    return [key for key in left if not expected(key)]


def unfilled(
    empty: Iterable[str],
    left: Sequence[str],
    chunks: Sequence[Chunk],
    has_model: bool = True,
) -> dict[str, list[str]]:
    """Returns empty containers below which the checkpoint has values of this rank's parameters.

    An optimizer that has not stepped has an empty `state`, and so has a rank that stores nothing.

    Args:
        empty: Keys of empty containers.
        left: The checkpoint's keys that nothing asks for.
        chunks: The model's chunks.
        has_model: Whether there are layouts to tell which values are of this rank's parameters;
            without, all are taken to be.

    Returns:
        For each such container the checkpoint's keys below it.
    """
    below = {key: [k for k in left if k.startswith(key + ".")] for key in empty}
    if not any(below.values()):
        return {}
    if not has_model:
        return {key: keys for key, keys in below.items() if keys}
    names = set()
    for chunk in chunks:
        for fqn in chunk.layouts:
            # An optimizer's state may be cut where the parameter is not.
            layout = chunk.layout(fqn, "state")
            for frame in layout.frames(chunk.grids.of(layout.family)):
                if frame.boxes:
                    names.add(layout.key(frame))

    def mine(name: str) -> bool:
        return name in names or (name.isdigit() and bool(names))

    found = {
        key: [k for k in keys if mine(k[len(key) + 1 :].rpartition(".")[0])]
        for key, keys in below.items()
    }
    return {key: keys for key, keys in found.items() if keys}


class _ChunkNames:
    """All names on disk of a chunk's parameters, at every coordinate and in every form."""

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        self._known: dict[tuple[tuple[Stage, ...], str], _Names] = {}
        self._made: dict[tuple[bool, bool], list[str]] = {}

    def of(self, slot: str, sharded: bool) -> list[str]:
        """Returns the names of a slot: its components if it is sharded, else the parameters'."""
        own_layouts = bool(slot) and bool(self._chunk.state_layouts)
        ident = (own_layouts, sharded)
        if ident not in self._made:
            self._made[ident] = [
                name
                for fqn in self._chunk.layouts
                for name in self._names(self._chunk.layout(fqn, slot), sharded)
            ]
        return self._made[ident]

    def lacking(self, slot: str, sharded: bool, held: Collection[int]) -> Iterator[str]:
        """Yields the names of a slot's values that this rank stores a part of and does not hold."""
        for order, fqn in enumerate(self._chunk.layouts):
            if order in held:
                continue
            layout = self._chunk.layout(fqn, slot)
            grid = self._chunk.grids.of(layout.family)
            if not layout.storage.numel(grid):
                continue
            if EXPERT not in layout.name:
                yield from self._names(layout, sharded)
            elif sharded:
                yield from (layout.key(frame) for frame in layout.frames(grid) if frame.boxes)
            else:
                yield from value_names(layout, grid)

    def _names(self, layout: Layout, sharded: bool) -> Iterable[str]:
        grid = self._chunk.grids.of(layout.family)
        for form in variants(layout, grid):
            if not sharded:
                names = all_value_names(form, grid)
                yield from names
                yield from (name + part for name in names for part in components(form))
                continue
            for suffix, expert in self._frames(form, grid):
                yield form.key_of(suffix, expert)

    def _frames(self, layout: Layout, grid: Grid) -> _Names:
        stages = (Whole(layout.local_shape), *layout.stages[1:])  # storage changes no name
        known = self._known.get((stages, layout.family))
        if known is None:
            found: dict[tuple[str, int | None], None] = {}
            for place in grid.walk([axis for axis in layout.axes if axis == "ep"]):
                frames = evaluate(stages, place, layout.fqn)
                found.update(((frame.suffix, frame.expert), None) for frame in frames)
            known = self._known[stages, layout.family] = tuple(found)
        return known
