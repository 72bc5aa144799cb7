"""A rank's write items, from what it holds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardplan.layouts import EXPERT, CheckpointError, Grid, Layout
from shardplan.layouts.errors import summary
from shardplan.layouts.layout import digest, evaluate
from shardplan.layouts.slab import Box, Shape, contiguous_strides
from shardplan.layouts.stages import Stage

from ..compat import local_tensor
from ..planning.holdings import Holding, Holdings, sort_values
from ..planning.manifest import OBJECT, SHARD, Extra, Kind, Members, StageManifest, value_names
from ..planning.ownership import deal, parts, take, writer_of_value
from ..planning.table import Chunk, LayoutTable
from ..planning.tied import same_memory, shared_memory
from ..state.described import Description, describe
from ..state.entries import Path, key_of
from ..state.per_rank import Seat
from ..state.values import bytes_digest, value_digest
from .messages import PER_RANK, Tie, Told, pack, pack_words
from .subgroup import restrict


class Source(NamedTuple):
    """Where the data of a write item comes from.

    Attributes:
        number: Position of the value in the state dict.
        box: The view of the value's storage; None for a Python value.
        part: Offsets of the box where the tensor describes itself and `box` is a view of that
            part of it.
    """

    number: int
    box: Box | None
    part: Shape | None = None


class _Piece(NamedTuple):
    """A box that a rank writes, or may have to write, of a layout's frame."""

    suffix: str
    expert: int | None
    data: TensorWriteData
    offsets: torch.Size
    box: Box
    nbytes: int
    shared: bool


@dataclass(slots=True)
class WritePlan:
    """What a rank writes.

    Attributes:
        items: The write items, those of extras last.
        sources: The source of each item.
        spare: Items and sources of extras, which the first rank of the stage writes if it holds
            them; another rank writes those that its reply names.
        chunks: The model's chunks and self-describing tensors, on the grids of the ranks that save.
        ranks: Global ranks that save, None for all.
        groups: Which values the rank has.
        singles: Positions of the values that stand for a whole parameter, in the order of each
            kind's members.
        extras: Position and path of the values that belong to no parameter.
        per_rank: Position, path on disk and, for the first rank of the stage, the paths of all
            ranks' values of each `PerRank`.
        described: Position, path and description of each tensor that describes itself.
        compared: Positions of those whose values other ranks that hold the same box must have.
        tied: Position of each tensor that may be the same memory as an earlier one, with that
            one's; only the memory at the time of a save tells.
        ties: What is told of those that are, by the position of the later one.
    """

    items: list[WriteItem] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    spare: list[tuple[WriteItem, Source]] = field(default_factory=list)
    chunks: tuple[Chunk, ...] = ()
    ranks: tuple[int, ...] | None = None
    groups: dict[Kind, Members] = field(default_factory=dict)
    singles: dict[Kind, list[int]] = field(default_factory=dict)
    extras: list[tuple[int, Path]] = field(default_factory=list)
    per_rank: list[tuple[int, Path, list[Path]]] = field(default_factory=list)
    described: list[tuple[int, Path, Description]] = field(default_factory=list)
    compared: set[int] = field(default_factory=set)
    tied: dict[int, int] = field(default_factory=dict)
    ties: dict[int, Tie | tuple[str, str]] = field(default_factory=dict)

    def manifest(self, values: Sequence[Any]) -> StageManifest:
        """Returns what the rank knows of its stage, with digests of the extras' values."""
        extras = []
        for number, path in self.extras:
            value = values[number]
            tensor = value if isinstance(value, torch.Tensor) else None
            extras.append(
                Extra(
                    path,
                    value_digest(value, key_of(path)),
                    None if tensor is None else tensor.dtype,
                    () if tensor is None else tuple(tensor.shape),
                )
            )
        extras += [Extra(path, PER_RANK) for _, _, paths in self.per_rank for path in paths]
        return StageManifest(self.chunks, self.groups, tuple(sorted(extras, key=lambda e: e.key)))

    def told(self, values: Sequence[Any], manifest: StageManifest) -> Told:
        """Returns what the rank says of its values beside what layouts say.

        Args:
            values: The values of this save.
            manifest: What `manifest` returned for them.
        """
        per_rank = []
        for number, path, _ in self.per_rank:
            value, key = values[number], key_of(path)
            digest = "" if value.axes is None else value_digest(value.value, key)
            per_rank.append((key, value.label, digest))
        tied = [
            self.ties[number]
            for number, other in self.tied.items()
            if same_memory(values[number], values[other])
        ]
        return Told(
            pack(e for e in manifest.extras if e.digest != PER_RANK),
            tuple(
                (kind, pack_words(self._words(kind, [values[n] for n in numbers]), len(numbers)))
                for kind, numbers in self.singles.items()
            ),
            tuple(per_rank),
            tuple(
                (path, replace(said, mark=bytes_digest(values[number])))
                if number in self.compared
                else (path, said)
                for number, path, said in self.described
            ),
            tuple(tie for tie in tied if isinstance(tie, Tie)),
            tuple(tie for tie in tied if not isinstance(tie, Tie)),
        )

    def _words(self, kind: Kind, values: list[Any]) -> bytes:
        """Returns the digests of values of a kind, one behind the other."""
        if kind.is_word:
            return _bytes_of(values)
        names = list(self.chunks[kind.chunk].layouts)
        known: dict[tuple[type, Any], bytes] = {}
        words = []
        for order, value in zip(self.groups[kind], values, strict=True):
            ident = (type(value), value) if type(value) in (int, bool, str) else None
            word = None if ident is None else known.get(ident)
            if word is None:
                word = bytes.fromhex(value_digest(value, kind.place.key(names[order])))
                if ident is not None:
                    known[ident] = word
            words.append(word)
        return b"".join(words)

    def digest(self, table: LayoutTable) -> str:
        """Returns a digest of the layouts, equal on all ranks of a stage.

        Args:
            table: The model's layouts.
        """
        lone = [
            layout.to_json()
            for c in self.chunks[len(table.chunks) :]
            for layout in c.layouts.values()
        ]
        return digest((table.digest, lone))


def _bytes_of(tensors: list[Any]) -> bytes:
    """Returns the bytes of tensors of one dtype and shape, with one copy for each device."""
    devices: dict[torch.device, list[int]] = {}
    shards = list(map(local_tensor, tensors))
    for number, shard in enumerate(shards):
        devices.setdefault(shard.device, []).append(number)
    found = [b""] * len(shards)
    for numbers in devices.values():
        with torch.no_grad():
            together = torch.stack([shards[n] for n in numbers]).cpu().reshape(-1)
        raw = together.view(torch.uint8).numpy().tobytes()
        if len(devices) == 1:
            return raw
        nbytes = len(raw) // len(numbers)
        for at, number in enumerate(numbers):
            found[number] = raw[at * nbytes : (at + 1) * nbytes]
    return b"".join(found)


class _Pieces:
    """The boxes that a rank writes of a layout, made once for each distinct chain of stages."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._known: dict[tuple[tuple[Stage, ...], torch.dtype], list[_Piece]] = {}

    def of(self, layout: Layout, dtype: torch.dtype) -> list[_Piece]:
        ident = (layout.stages, dtype)
        known = self._known.get(ident)
        if known is None:
            known = self._known[ident] = self._make(layout, dtype)
        return known

    def _make(self, layout: Layout, dtype: torch.dtype) -> list[_Piece]:
        grid = self.grid
        axes = layout.replica_axes(grid)
        replicas, replica = grid.count(axes), grid.linear(axes)
        properties = TensorProperties(dtype=dtype)
        made = []
        for frame in evaluate(layout.stages, grid, layout.fqn):
            size = torch.Size(frame.shape)
            for whole in frame.boxes:
                cuts = parts(whole.sizes, dtype.itemsize, replicas)
                box = whole if cuts is None else take(whole, cuts[replica])
                offsets = torch.Size(box.offsets)
                chunk = ChunkStorageMetadata(offsets, torch.Size(box.sizes))
                made.append(
                    _Piece(
                        frame.suffix,
                        frame.expert,
                        TensorWriteData(chunk, properties, size),
                        offsets,
                        box,
                        math.prod(box.sizes) * dtype.itemsize,
                        cuts is None and replicas > 1,
                    )
                )
        return made


def write_plan(
    table: LayoutTable,
    values: Sequence[tuple[Path, Any]],
    ranks: tuple[int, ...] | None = None,
    options_apart: bool = False,
) -> WritePlan:
    """Returns what a rank writes of its values.

    Args:
        table: The model's layouts.
        values: Paths and values of the state dict.
        ranks: Global ranks that save; None for all.
        options_apart: Whether optimizer options by parameter name are keys that other ranks may
            lack, though they store some of the parameter.

    Raises:
        LayoutError: If a tensor does not fit its parameter's layout.
        CheckpointError: If two values have one key.
    """
    holdings = sort_values(table, values)
    if any(chunk.layouts for chunk in table.chunks):
        holdings.extras = [e for e in holdings.extras if not _lacks_state(e[1], values[e[0]][1])]
    if options_apart:
        _set_apart(holdings)
    holdings.chunks = restrict(holdings.chunks, ranks)
    grids = holdings.chunks[0].grids
    plan = WritePlan(chunks=holdings.chunks, ranks=ranks, extras=holdings.extras)
    pieces: dict[tuple[int, str], _Pieces] = {}
    shared: dict[tuple[int, str, tuple[str, ...]], list[tuple[int, str, int]]] = {}
    pending: list[tuple[WriteItem, Source]] = []
    members: dict[Kind, list[int]] = {}
    singles: dict[Kind, list[tuple[int, int]]] = {}
    seen: dict[str, int] = {}
    clashes: list[str] = []

    def claim(key: str, number: int) -> None:
        other = seen.setdefault(key, number)
        if other != number:
            clashes.append(f"{key}: the values {values[other][0]} and {values[number][0]}")

    def share(number: int, layout: Layout, nbytes: int, item: WriteItem, source: Source) -> None:
        """Lets replicas take turns: those of one chunk, family and set of axes among themselves."""
        axes = layout.replica_axes(pieces[number, layout.family].grid)
        waiting = shared.setdefault((number, layout.family, axes), [])
        waiting.append((nbytes, item.index.fqn, len(pending)))
        pending.append((item, source))

    for held in holdings.held:
        kind, layout = held.kind, held.layout
        chunk = holdings.chunks[kind.chunk]
        members.setdefault(kind, []).append(held.order)
        family = (kind.chunk, layout.family)
        if family not in pieces:
            pieces[family] = _Pieces(chunk.grids.of(layout.family))
        if kind.role == SHARD and kind.dtype is not None:
            name, key = None, ""
            for piece in pieces[family].of(layout, kind.dtype):
                if (piece.suffix, piece.expert) != name:
                    name = (piece.suffix, piece.expert)
                    key = kind.place.key(layout.key_of(piece.suffix, piece.expert))
                    claim(key, held.number)
                item = WriteItem(
                    MetadataIndex(key, piece.offsets), WriteItemType.SHARD, tensor_data=piece.data
                )
                source = Source(held.number, piece.box)
                if piece.shared:
                    share(kind.chunk, layout, piece.nbytes, item, source)
                else:
                    plan.items.append(item)
                    plan.sources.append(source)
            continue
        singles.setdefault(kind, []).append((held.order, held.number))
        grid = pieces[family].grid
        for known in value_names(layout, grid):
            key = kind.place.key(known)
            claim(key, held.number)
            if writer_of_value(layout, grid):
                share(kind.chunk, layout, *_value_item(key, held))
    plan.groups = {kind: Members.of(orders) for kind, orders in members.items()}
    for kind, pairs in singles.items():
        plan.singles[kind] = [number for _, number in sorted(pairs)]
    for number, path in (*holdings.extras, *holdings.described, *holdings.per_rank):
        claim(key_of(path), number)
    if clashes:
        raise CheckpointError(
            f"{summary(clashes)} of the state dict would have one key. Rename one of them, or "
            "pass the provider that tells them apart (ExpertGrid, PipelineLayers)."
        )
    for (chunk_number, of_family, axes), waiting in shared.items():
        grid = pieces[chunk_number, of_family].grid
        for number in deal(waiting, grid.count(axes), grid.linear(axes)):
            plan.items.append(pending[number][0])
            plan.sources.append(pending[number][1])
    for number, path in holdings.extras:
        value = values[number][1]
        box = _whole(tuple(value.shape)) if isinstance(value, torch.Tensor) else None
        item, source = _extra_item(key_of(path), value), Source(number, box)
        if grids.leads_stage:
            plan.items.append(item)
            plan.sources.append(source)
        else:
            plan.spare.append((item, source))
    for number, path in holdings.per_rank:
        seat = Seat(key_of(path), values[number][1], grids)
        plan.per_rank.append((number, seat.path(path), seat.paths(path)))
        if seat.first:
            plan.items.append(_extra_item(key_of(seat.path(path)), None))
            plan.sources.append(Source(number, None))
    for number, path in holdings.described:
        alike = holdings.alike.get(number, True)
        _add_described(plan, number, path, values[number][1], alike)
    _find_ties(plan, holdings, values)
    return plan


def _set_apart(holdings: Holdings) -> None:
    """Makes extras of optimizer options by parameter name."""
    held = []
    for holding in holdings.held:
        kind, layout = holding.kind, holding.layout
        if kind.role == SHARD or "param_groups" not in kind.place.before:
            held.append(holding)
            continue
        grid = holdings.chunks[kind.chunk].grids.of(layout.family)
        names = value_names(layout, grid)
        holdings.extras += [(holding.number, kind.place.path(name)) for name in names]
    holdings.held = held


def _lacks_state(path: Path, value: Any) -> bool:
    """Whether a value is the state of an optimizer that holds none, as on a rank without elements.

    It is no value of the checkpoint: other ranks and stages have values below its key.
    """
    return path[-1] == "state" and isinstance(value, Mapping) and not value


def _add_described(
    plan: WritePlan, number: int, path: Path, tensor: torch.Tensor, alike: bool
) -> None:
    """Adds the items of a tensor that describes itself."""
    key = key_of(path)
    said = describe(key, tensor)
    if not alike and said.parts:
        plan.compared.add(number)
    plan.described.append((number, path, said))
    properties = TensorProperties(dtype=said.dtype)
    for offsets, sizes in said.parts:
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        data = TensorWriteData(chunk, properties, torch.Size(said.shape or ()))
        index = MetadataIndex(key, chunk.offsets)
        plan.items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        plan.sources.append(Source(number, _whole(sizes), offsets))


def _find_ties(plan: WritePlan, holdings: Holdings, values: Sequence[tuple[Path, Any]]) -> None:
    """Finds tensors that are one memory and may be stored once."""
    shared = shared_memory([value for _, value in values])
    if not shared:
        return
    held = {h.number: h for h in holdings.held if h.kind.role == SHARD}
    extras = dict(holdings.extras)
    for number, other in shared.items():
        if number in held and other in held:
            a, b = held[number], held[other]
            twins = a.kind == b.kind and a.layout.stages == b.layout.stages
            if not twins or EXPERT in a.layout.name + b.layout.name:
                continue
            plan.ties[number] = Tie(a.kind, a.order, b.order)
        elif number in extras and other in extras:
            plan.ties[number] = (key_of(extras[number]), key_of(extras[other]))
        else:
            continue
        plan.tied[number] = other


def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape, 0, contiguous_strides(shape))


def _value_item(key: str, held: Holding) -> tuple[int, WriteItem, Source]:
    """Returns bytes, item and source of a value that stands for a whole parameter."""
    kind = held.kind
    if kind.role == OBJECT or kind.dtype is None:
        return 64, WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO), Source(held.number, None)
    item = _tensor_item(key, kind.dtype, kind.shape)
    return kind.itemsize, item, Source(held.number, _whole(kind.shape))


def _tensor_item(key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> WriteItem:
    size, zeros = torch.Size(shape), torch.Size([0] * len(shape))
    data = TensorWriteData(ChunkStorageMetadata(zeros, size), TensorProperties(dtype=dtype), size)
    return WriteItem(MetadataIndex(key, zeros), WriteItemType.TENSOR, tensor_data=data)


def _extra_item(key: str, value: Any) -> WriteItem:
    if isinstance(value, torch.Tensor):
        return _tensor_item(key, value.dtype, tuple(value.shape))
    return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
