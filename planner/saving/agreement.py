"""How the plan messages of all ranks compare, and what they make together.

One rule holds for every value, in every storage and with collectives or without: boxes of tensors
are covered exactly once; everything else is equal on all ranks, per rank by declaration, or held
by some ranks only under a key of its own. Anything else is an error that names key and ranks.

Ranks that agree send and receive little that grows with the number of tensors: one bit per value,
digests of scalars that compress well, and one manifest per stage. Only when a digest of layouts
differs does the coordinator send a manifest back, so that the rank can name the parameter.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from shardplan.layouts import Grids, Layout, RanksDisagreeError
from shardplan.layouts.errors import summary

from ..planning.manifest import SHARD, Kind, Members, StageManifest, value_names
from ..planning.ownership import _named_axes as named_axes
from .messages import PlanMessage, PlanReply, global_rank, unpack_words
from .settling import Settled, settle

_Mask = npt.NDArray[np.bool_]
_Class = tuple[str, tuple[str, ...]]  # family, and axes along which a value has other names


@dataclass(slots=True)
class Agreement:
    """The outcome of `compare`.

    Attributes:
        stages: The joined manifest of each pipeline stage.
        replies: One answer for each rank.
        settled: What the ranks told beside their layouts.
    """

    stages: list[StageManifest] = field(default_factory=list)
    replies: list[PlanReply] = field(default_factory=list)
    settled: Settled = field(default_factory=Settled)

    @property
    def fault(self) -> str | None:
        """Why nothing may be written, None if all agree."""
        return next((reply.fault for reply in self.replies if reply.fault), None)


def compare(messages: Sequence[PlanMessage]) -> Agreement:
    """Checks that all ranks' plans belong together and joins them.

    Args:
        messages: One for each rank that saves, in the order of their places.

    Raises:
        RanksDisagreeError: If the ranks' coordinates do not make up the grid, a rank lacks a value
            that it stores a part of, or two hold different values under one key.
        CheckpointError: If the boxes of a tensor do not cover it.
    """
    _check_places(messages, range(1))
    leaders: dict[int, int] = {}
    for rank, message in enumerate(messages):
        if message.manifest is not None:
            leaders.setdefault(message.grids[0].stage, rank)
    differing = [
        rank
        for rank, message in enumerate(messages)
        if message.digest != messages[leaders[message.grids[0].stage]].digest
    ]
    if differing:
        return _disagreement(messages, leaders, differing)
    for rank, message in enumerate(messages):
        if len(message.grids) != len(messages[0].grids):
            raise RanksDisagreeError(
                f"rank {global_rank(messages, rank)} plans for {len(message.grids)} chunks of the "
                f"model and rank {global_rank(messages, 0)} for {len(messages[0].grids)}. Build "
                "every planner with the same model."
            )
    _check_places(messages, range(1, len(messages[0].grids)))
    stages = []
    for stage, leader in sorted(leaders.items()):
        ranks = [r for r, m in enumerate(messages) if m.grids[0].stage == stage]
        manifest = messages[leader].manifest
        assert manifest is not None  # leaders are the ranks that sent one
        stages.append(_Stage(messages, manifest, ranks).join())
    settled, stages = settle(messages, leaders, stages)
    replies = [
        PlanReply(
            frozenset(settled.skip.get(rank, ())),
            frozenset(settled.write.get(rank, ())),
            frozenset(settled.skip_boxes.get(rank, ())),
        )
        for rank in range(len(messages))
    ]
    for (_, leader), manifest in zip(sorted(leaders.items()), stages, strict=True):
        others = tuple(extra for extra in manifest.extras if extra.writer is not None)
        replies[leader] = replace(replies[leader], extras=others)
    return Agreement(stages, replies, settled)


def _check_places(messages: Sequence[PlanMessage], chunks: Sequence[int]) -> None:
    """Checks that the ranks' coordinates are each point of the grids of some chunks once."""
    faults: list[str] = []
    for rank, message in enumerate(messages):
        if message.ranks != messages[0].ranks:
            raise RanksDisagreeError(
                f"message {rank} is of a save by the ranks {message.ranks or 'of all'}, and message "
                f"0 of one by {messages[0].ranks or 'all'}. Pass every planner the process_group "
                "that dcp.save is called with."
            )
    for chunk in chunks:
        for family in ("dense", "expert"):
            seen: dict[tuple[int, ...], int] = {}
            first = messages[0].grids[chunk].of(family)
            for rank, message in enumerate(messages):
                grid = message.grids[chunk].of(family)
                if (grid.axes, grid.sizes) != (first.axes, first.sizes):
                    faults.append(
                        f"rank {rank} has the {family} axes {dict(zip(grid.axes, grid.sizes, strict=True))} "
                        f"but rank 0 has {dict(zip(first.axes, first.sizes, strict=True))}"
                    )
                other = seen.setdefault(grid.coordinate, rank)
                if other != rank:
                    faults.append(
                        f"ranks {other} and {rank} are at one place of the {family} grid "
                        f"({grid.facts()})"
                    )
            if first.world_size != len(messages):
                faults.append(
                    f"the {family} grid has {first.world_size} ranks but {len(messages)} save"
                )
    if faults:
        raise RanksDisagreeError(
            f"the ranks' grids do not fit together: {summary(dict.fromkeys(faults))}. Give every "
            "planner the pg_collection or grid of its own rank, and save from all of these ranks."
        )


def _disagreement(
    messages: Sequence[PlanMessage], leaders: dict[int, int], differing: Sequence[int]
) -> Agreement:
    rank = differing[0]
    leader = leaders[messages[rank].grids[0].stage]
    fault = (
        f"ranks {global_rank(messages, leader)} and {global_rank(messages, rank)} of one pipeline stage do not "
        f"plan the same checkpoint, and nothing was written ({len(differing)} of {len(messages)} "
        f"ranks differ from their stage's first). Rank {global_rank(messages, rank)}'s own error names "
        "the difference"
    )
    replies = []
    for number, message in enumerate(messages):
        lead = leaders[message.grids[0].stage]
        own = f"{global_rank(messages, number)} differs from rank {global_rank(messages, lead)}"
        replies.append(
            PlanReply(fault=own, other=messages[lead].manifest)
            if number in differing
            else PlanReply(fault=fault)
        )
    return Agreement(replies=replies)


class _Stage:
    """Joins the ranks of a pipeline stage: what any of them holds, the stage holds.

    Thousands of ranks have tens of thousands of values, so members are compared as the bits of
    whole integers; a loop over values runs only where something is wrong.

    Args:
        messages: Those of all ranks.
        manifest: What the stage's first rank sent.
        ranks: Numbers of the stage's messages.
    """

    def __init__(
        self, messages: Sequence[PlanMessage], manifest: StageManifest, ranks: Sequence[int]
    ) -> None:
        self._messages = messages
        self._ranks = ranks
        groups: dict[Kind, Members] = {}
        for rank in ranks:
            for kind, members in messages[rank].groups.items():
                known = groups.get(kind)
                groups[kind] = members if known is None else known.union(members)
        self._joined = replace(manifest, groups=groups)
        self._holding: dict[tuple[int, bool], _Holding] = {}

    def join(self) -> StageManifest:
        """Returns the stage's manifest.

        Raises:
            RanksDisagreeError: If the ranks' values do not fit together.
        """
        self._check_kinds()
        self._check_missing()
        for kind in self._joined.groups:
            if kind.role != SHARD:
                self._check_values(kind)
        return self._joined

    def _key(self, kind: Kind, index: int, rank: int) -> str:
        layout = self._joined.layouts(kind)[index]
        if kind.role == SHARD:
            return kind.place.key(layout.name)
        grid = self._messages[rank].grids[kind.chunk].of(layout.family)
        return kind.place.key(next(iter(value_names(layout, grid)), layout.name))

    def _name(self, rank: int) -> int:
        return global_rank(self._messages, rank)

    def _holder(self, kind: Kind, index: int) -> int:
        """Returns the first rank that holds a value in a kind."""
        return next(
            r for r in self._ranks if index in self._messages[r].groups.get(kind, Members())
        )

    def _check_kinds(self) -> None:
        """Checks that no value is of one dtype on one rank and of another on the next."""
        alike: dict[tuple[int, object], list[Kind]] = {}
        for kind in self._joined.groups:
            alike.setdefault((kind.chunk, kind.place), []).append(kind)
        differ: dict[str, None] = {}
        for kinds in alike.values():
            for number, kind in enumerate(kinds):
                for other in kinds[:number]:
                    both = self._joined.groups[kind].bits & self._joined.groups[other].bits
                    for index in Members(both):
                        held = sorted((self._holder(k, index), _form(k)) for k in (kind, other))
                        (a, first), (b, second) = held
                        key = self._key(other if other.role == SHARD else kind, index, a)
                        differ.setdefault(
                            f"{key}: {first} on rank {self._name(a)} and {second} on rank "
                            f"{self._name(b)}"
                        )
        if differ:
            raise RanksDisagreeError(
                f"{summary(differ)}. Give the value one dtype, shape and kind on every rank."
            )

    def _check_missing(self) -> None:
        """Checks that a rank which stores a part of a parameter holds all that others hold of it."""
        faults: list[str] = []
        for kind, union in self._joined.groups.items():
            lacking: dict[int, int] = {}
            for rank in self._ranks:
                held = self._messages[rank].groups.get(kind)
                missing = union.bits & ~(0 if held is None else held.bits)
                if missing:
                    lacking[rank] = missing
            if not lacking:
                continue
            holding = self._held(kind)
            holding.look_up(functools.reduce(operator.or_, lacking.values()))
            for rank, missing in lacking.items():
                grids = self._messages[rank].grids[kind.chunk]
                for index in Members(missing & holding.stored(grids)):
                    layout = self._joined.layouts(kind)[index]
                    numel = layout.storage.numel(grids.of(layout.family))
                    faults.append(
                        f"{self._key(kind, index, rank)}: rank {self._name(rank)} lacks it but "
                        f"stores {numel} elements of the parameter ({grids.facts()}), and rank "
                        f"{self._name(self._holder(kind, index))} holds it"
                    )
        if faults:
            raise RanksDisagreeError(
                f"{summary(faults)}. Let every rank that stores a part of a parameter hold the "
                "same slots for it, or none hold any."
            )

    def _held(self, kind: Kind) -> "_Holding":
        """Returns who stores what of a kind's parameters."""
        states = bool(kind.place.slot) and bool(self._joined.chunks[kind.chunk].state_layouts)
        ident = (kind.chunk, states)
        if ident not in self._holding:
            self._holding[ident] = _Holding(self._joined, kind)
        return self._holding[ident]

    def _check_values(self, kind: Kind) -> None:
        """Checks that values which stand for a whole parameter are equal on all ranks."""
        layouts = self._joined.layouts(kind)
        classes = self._held(kind).classes
        known: dict[
            tuple[tuple[str, ...], tuple[int, ...]],
            tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]],
        ] = {}
        seen: set[tuple[int, bytes, tuple[tuple[int, ...], ...]]] = set()
        for rank in self._ranks:
            message = self._messages[rank]
            members, packed = message.groups.get(kind), dict(message.told.values).get(kind)
            if members is None or packed is None:
                continue
            grids = message.grids[kind.chunk]
            places = tuple(
                tuple(grids.of(family).index(axis) for axis in axes) for family, axes in classes
            )
            if (members.bits, packed, places) in seen:
                continue
            seen.add((members.bits, packed, places))
            indices = _positions(members)
            raw = unpack_words(packed, len(indices))
            words = np.frombuffer(raw, np.uint8).reshape(len(indices), -1)
            for (ident, mask), place in zip(classes.items(), places, strict=True):
                own = mask[indices]
                some, told = indices[own], words[own]
                table = known.get((ident, place))
                if table is None:
                    empty = np.zeros((len(layouts), words.shape[1]), np.uint8)
                    table = known[ident, place] = (empty, np.full(len(layouts), -1))
                held, first = table
                differ = (first[some] >= 0) & (held[some] != told).any(axis=1)
                if differ.any():
                    index = int(some[differ][0])
                    raise RanksDisagreeError(
                        f"{self._key(kind, index, rank)}: ranks {self._name(int(first[index]))} and "
                        f"{self._name(rank)} hold different values for one parameter "
                        f"({grids.facts()}). Make them equal, store a tensor of the parameter's "
                        "shape, or wrap the value in PerRank if every rank is meant to have its own."
                    )
                new = first[some] < 0
                held[some[new]], first[some[new]] = told[new], rank


class _Holding:
    """Which coordinates store elements of which parameters, for the layouts of a kind."""

    def __init__(self, manifest: StageManifest, kind: Kind) -> None:
        self._layouts = manifest.layouts(kind)
        self._grids = manifest.chunks[kind.chunk].grids
        self._maps: dict[tuple[str, tuple[str, ...]], dict[tuple[int, ...], int]] = {}
        alike: dict[tuple[object, str], list[int]] = {}
        for index, layout in enumerate(self._layouts):
            alike.setdefault((layout.storage, layout.family), []).append(index)
        self._waiting = [(Members.of(numbers).bits, numbers[0]) for numbers in alike.values()]

    @functools.cached_property
    def classes(self) -> dict[_Class, _Mask]:
        """For each family and axes along which a value has other names: the parameters."""
        known: dict[tuple[int, str], list[int]] = {}
        for index, layout in enumerate(self._layouts):
            known.setdefault((id(layout.stages), layout.family), []).append(index)
        found: dict[_Class, _Mask] = {}
        for numbers in known.values():
            layout = self._layouts[numbers[0]]
            ident = (layout.family, tuple(named_axes(layout)))
            found.setdefault(ident, np.zeros(len(self._layouts), bool))[numbers] = True
        return found

    def look_up(self, bits: int) -> None:
        """Finds the holders of some parameters, for `stored`."""
        waiting = []
        for own, index in self._waiting:
            if not own & bits:
                waiting.append((own, index))
                continue
            layout = self._layouts[index]
            grid = self._grids.of(layout.family)
            start = grid.at(**{axis: 0 for axis in grid.axes if axis != "pp"})
            axes = layout.storage.axes
            stored = self._maps.setdefault((layout.family, axes), {})
            for holder in layout.storage.holders(start):
                place = tuple(holder.index(axis) for axis in axes)
                stored[place] = stored.get(place, 0) | own
        self._waiting = waiting

    def stored(self, grids: Grids) -> int:
        """Returns the bits of the parameters that a rank stores elements of, of those looked up."""
        bits = 0
        for (family, axes), stored in self._maps.items():
            grid = grids.of(family)
            bits |= stored.get(tuple(grid.index(axis) for axis in axes), 0)
        return bits


def _positions(members: Members) -> npt.NDArray[np.int64]:
    """Returns the numbers of a group's members."""
    raw = members.bits.to_bytes((members.bits.bit_length() + 7) // 8, "little")
    return np.flatnonzero(np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little"))


def _form(kind: Kind) -> str:
    """Says what a value is: its dtype, and its shape if that is not the parameter's."""
    if kind.dtype is None:
        return "a Python value"
    return str(kind.dtype) if kind.role == SHARD else f"{kind.dtype} of shape {kind.shape}"


def first_difference(mine: StageManifest, other: StageManifest) -> str:
    """Returns a sentence on the first thing in which two manifests of a stage differ."""
    for chunk, theirs in zip(mine.chunks, other.chunks, strict=False):
        for a, b, here in (
            (chunk.layouts, theirs.layouts, "only this rank has it"),
            (theirs.layouts, chunk.layouts, "this rank lacks it"),
        ):
            if a.keys() > b.keys():
                fqn = min(a.keys() - b.keys())
                counts = f"{len(chunk.layouts)} parameters here and {len(theirs.layouts)} there"
                return f"{fqn}: {here} ({counts})"
        for own, their in zip(chunk.layouts.values(), theirs.layouts.values(), strict=False):
            if own.fqn != their.fqn:
                return f"{own.fqn}: the other rank has {their.fqn} in its place"
            if own != their:
                return f"{own.fqn}: laid out as {_stages(own)} here and as {_stages(their)} there"
        if len(chunk.layouts) != len(theirs.layouts):
            return f"{len(chunk.layouts)} parameters here and {len(theirs.layouts)} there"
        if chunk.state_layouts != theirs.state_layouts:
            return "the layouts of optimizer state differ"
        if chunk.grids.dense.sizes != theirs.grids.dense.sizes:
            return f"the grids differ: {chunk.grids.facts()} here and {theirs.grids.facts()} there"
    own_extras = {extra.key: extra for extra in mine.extras}
    their_extras = {extra.key: extra for extra in other.extras}
    for key in sorted(own_extras.keys() | their_extras.keys()):
        if key not in their_extras:
            return f"{key}: only this rank has it, and no layout explains it"
        if key not in own_extras:
            return f"{key}: this rank lacks it, and no layout explains it"
        own_dtype, their_dtype = own_extras[key].dtype, their_extras[key].dtype
        if own_dtype != their_dtype:
            return (
                f"{key}: {own_dtype or 'a Python value'} here and "
                f"{their_dtype or 'a Python value'} there, and no layout explains it"
            )
        if own_extras[key] != their_extras[key]:
            return f"{key}: the two ranks hold different values, and no layout explains it"
    a, b = mine.chunks[len(other.chunks) :], other.chunks[len(mine.chunks) :]
    if a or b:
        fqn = min(f for chunk in (*a, *b) for f in chunk.layouts)
        return f"{fqn}: {'only this rank has it' if a else 'this rank lacks it'}"
    return "their order of parameters or values differs"


def _stages(layout: Layout) -> str:
    return " → ".join(str(stage) for stage in layout.stages)
