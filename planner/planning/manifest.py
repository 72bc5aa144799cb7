"""What a pipeline stage saves, as plain data: from it anyone can write down the whole checkpoint.

| name | is |
|---|---|
| `Group` | values of one kind: a section or an optimizer slot, for many parameters |
| `Extra` | a value that belongs to no parameter |
| `StageManifest` | layouts, groups and extras of one pipeline stage |
| `stage_metadata` | DCP's metadata for a stage: every chunk of every rank, from layouts alone |
| `Laid` | the value of a parameter that a key stands for |
| `value_names`, `all_value_names` | the names of a parameter's scalars on disk |
| `separate_parts` | components that have scalars of their own |
"""

import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from shardplan.layouts import (
    EXPERT,
    Concat,
    Fuse,
    Grid,
    IncompleteCheckpointError,
    Join,
    Layout,
)
from shardplan.layouts.coverage import tiling_faults
from shardplan.layouts.errors import summary
from shardplan.layouts.layout import evaluate
from shardplan.layouts.slab import Box, Frame, Shape
from shardplan.layouts.stages import Stage, Unpad
from shardplan.layouts.storage import Whole

from ..state.entries import Path, Place, key_of
from .ownership import Ownership, parts, take
from .table import Chunk

Stored = TensorStorageMetadata | BytesStorageMetadata

SHARD = "shard"  # laid out as its parameter
VALUE = "value"  # one tensor for the whole parameter, such as a step
OBJECT = "object"  # one Python value for the whole parameter


@dataclass(frozen=True, slots=True)
class Kind:
    """What the values of a group have in common.

    Attributes:
        chunk: Which of the model's chunks the parameters belong to.
        place: What stands around the parameter's name in their keys.
        role: SHARD, VALUE or OBJECT.
        dtype: Data type of the tensors, None for Python values.
        shape: Shape of a VALUE, empty otherwise.
    """

    chunk: int
    place: Place
    role: str
    dtype: torch.dtype | None
    shape: tuple[int, ...] = ()

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize if self.dtype is not None else 1

    @property
    def is_word(self) -> bool:
        """Whether a value has at most 8 bytes, so that it can stand for its own digest."""
        return self.role == VALUE and self.itemsize * math.prod(self.shape) <= 8


@dataclass(frozen=True, slots=True)
class Members:
    """Which parameters of a chunk a group has: one bit each, in the order of the layouts.

    Attributes:
        bits: Bit `i` is set if parameter `i` is a member.
    """

    bits: int = 0

    @classmethod
    def of(cls, indices: Iterable[int]) -> "Members":
        """Returns the group of some parameters."""
        ordered = list(indices)
        packed = bytearray((max(ordered, default=0) >> 3) + 1)
        for index in ordered:
            packed[index >> 3] |= 1 << (index & 7)
        return cls(int.from_bytes(packed, "little"))

    def __contains__(self, index: int) -> bool:
        return bool(self.bits >> index & 1)

    def __iter__(self) -> Iterator[int]:
        packed = self.bits.to_bytes((self.bits.bit_length() + 7) // 8, "little")
        for byte, value in enumerate(packed):
            while value:
                low = value & -value
                yield (byte << 3) + low.bit_length() - 1
                value ^= low

    def union(self, other: "Members") -> "Members":
        """Returns the members of either group."""
        return self if self.bits == other.bits else Members(self.bits | other.bits)

    def missing(self, other: "Members") -> "Members":
        """Returns the members of `other` that this group lacks."""
        return Members(other.bits & ~self.bits)


@dataclass(frozen=True, slots=True)
class Extra:
    """A value that belongs to no parameter: it must be equal on every rank that has it.

    Attributes:
        path: Its path in the state dict.
        digest: Digest of the value.
        dtype: Data type of a tensor, None for a Python value.
        shape: Shape of a tensor.
        writer: Place of the rank that writes it; None if that is the first rank of the stage.
        late: Whether it is in that rank's second file.
        boxes: Of a tensor that describes itself: offsets, sizes and writer's place of each chunk.
    """

    path: Path
    digest: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    writer: int | None = None
    late: bool = False
    boxes: tuple[tuple[Shape, Shape, int], ...] | None = None

    @property
    def key(self) -> str:
        """Its key on disk."""
        return key_of(self.path)


@dataclass(frozen=True, slots=True)
class StageManifest:
    """Everything that the ranks of one pipeline stage save.

    Attributes:
        chunks: The model's chunks with grids and layouts.
        groups: Which parameters have values of which kind.
        extras: Values that belong to no parameter.
    """

    chunks: tuple[Chunk, ...]
    groups: dict[Kind, Members] = field(default_factory=dict)
    extras: tuple[Extra, ...] = ()

    def layouts(self, kind: Kind) -> tuple[Layout, ...]:
        """Returns the layouts of a group's parameters, members or not, in order."""
        chunk = self.chunks[kind.chunk]
        slot = kind.place.slot
        return tuple(chunk.layout(fqn, slot) for fqn in chunk.layouts)


class Laid(NamedTuple):
    """The value of a parameter that a key stands for.

    Attributes:
        kind: Section, slot, role and dtype.
        layout: The parameter's layout.
        suffix: The component, of a laid-out tensor.
        expert: The expert, of a laid-out tensor.
        name: The parameter's name on disk, of a value.
    """

    kind: Kind
    layout: Layout
    suffix: str = ""
    expert: int | None = None
    name: str = ""

    @property
    def unpadded(self) -> bool:
        """Whether it is a tensor whose padding stays out of the checkpoint."""
        stages = self.layout.stages if self.kind.role == SHARD else ()
        return any(type(stage) is Unpad for stage in stages)


Tensors = list[tuple[Frame, torch.Size, list[ChunkStorageMetadata]]]


class ChunkLists:
    """The chunks of all ranks for a layout, made once for layouts that cut tensors alike.

    Args:
        grid: The grid of the layouts' family; the coordinate does not matter.
        rules: The numbers of ownership of the save; of this version if not given.
    """

    def __init__(self, grid: Grid, rules: Ownership | None = None) -> None:
        self._rules = rules
        self._start = grid.at(**{axis: 0 for axis in grid.axes if axis != "pp"})
        self._alike: dict[Hashable, Tensors] = {}
        self._known: dict[tuple[int, int], tuple[tuple[Stage, ...], Tensors]] = {}

    def of(self, layout: Layout, itemsize: int) -> Tensors:
        """Returns each global tensor of a layout with its shape and the chunks that are written.

        Raises:
            IncompleteCheckpointError: If the chunks of all ranks do not cover a tensor exactly once.
        """
        ident = (id(layout.stages), itemsize)
        known = self._known.get(ident)
        if known is None:
            alike = (self._pattern(layout), layout.stages[1:], itemsize)
            tensors = self._alike.get(alike)
            if tensors is None:
                tensors = self._alike[alike] = self._make(layout, itemsize)
            # The stages are kept so that nothing else gets their id.
            known = self._known[ident] = (layout.stages, tensors)
        return known[1]

    def _pattern(self, layout: Layout) -> Hashable:
        axes = layout.storage.axes
        if any(axis in axes for stage in layout.stages[1:] for axis in stage.axes):
            return layout.storage  # the boxes depend on which rank has which part
        return layout.storage.pattern(self._start)

    def _make(self, layout: Layout, itemsize: int) -> Tensors:
        outer = [axis for axis in layout.axes if axis not in layout.storage.axes]
        replicas = self._start.count(layout.replica_axes(self._start))
        frames: dict[tuple[str, int | None], tuple[Frame, list[Box]]] = {}
        for place in self._start.walk(outer):
            for grid in list(layout.storage.holders(place)) or (place,):
                for frame in evaluate(layout.stages, grid, layout.fqn):
                    boxes = frames.setdefault((frame.suffix, frame.expert), (frame, []))[1]
                    for box in frame.boxes:
                        cuts = parts(box.sizes, itemsize, replicas, self._rules)
                        boxes += [box] if cuts is None else [take(box, cut) for cut in cuts]
        made, faults = [], []
        for frame, boxes in frames.values():
            for fault in tiling_faults(frame.shape, ((b.offsets, b.sizes) for b in boxes)):
                faults.append(f"{layout.key(frame)}: {fault} of shape {frame.shape}")
            chunks = [
                ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in boxes
            ]
            if not chunks and math.prod(frame.shape) == 0:
                zeros = torch.Size([0] * len(frame.shape))
                chunks = [ChunkStorageMetadata(zeros, torch.Size(frame.shape))]
            made.append((frame._replace(boxes=()), torch.Size(frame.shape), chunks))
        if faults:
            raise IncompleteCheckpointError(
                f"{layout.fqn}: {summary(faults)} (axes {layout.axes}). The providers' answers "
                "do not fit together; shardplan.layouts.prove(layout, grid) shows it offline."
            )
        return made


def stage_metadata(
    manifest: StageManifest, rules: Ownership | None = None
) -> Iterator[tuple[str, Path, Stored, Laid | Extra]]:
    """Yields key, path, stored form and origin of everything that a stage's ranks write.

    Args:
        manifest: The stage's manifest.
        rules: The numbers of ownership of the save; of this version if not given.

    Raises:
        IncompleteCheckpointError: If the ranks' chunks do not cover a tensor exactly once.
    """
    lists: dict[tuple[int, str], ChunkLists] = {}
    for kind, members in manifest.groups.items():
        chunk = manifest.chunks[kind.chunk]
        properties = TensorProperties(dtype=kind.dtype) if kind.dtype is not None else None
        layouts = manifest.layouts(kind)
        for index in members:
            layout = layouts[index]
            family = (kind.chunk, layout.family)
            if family not in lists:
                lists[family] = ChunkLists(chunk.grids.of(layout.family), rules)
            if kind.role == SHARD and properties is not None:
                for frame, size, chunks in lists[family].of(layout, kind.itemsize):
                    name = layout.key(frame)
                    stored = TensorStorageMetadata(properties, size, chunks)
                    laid = Laid(kind, layout, frame.suffix, frame.expert)
                    yield kind.place.key(name), kind.place.path(name), stored, laid
                continue
            for name in all_value_names(layout, chunk.grids.of(layout.family)):
                yield (
                    kind.place.key(name),
                    kind.place.path(name),
                    _whole(properties, kind.shape),
                    Laid(kind, layout, name=name),
                )
    for extra in manifest.extras:
        yield extra.key, extra.path, stored_extra(extra), extra


def stored_extra(extra: Extra) -> Stored:
    """Returns the stored form of a value that belongs to no parameter."""
    found = None if extra.dtype is None else TensorProperties(dtype=extra.dtype)
    if found is None or extra.boxes is None:
        return _whole(found, extra.shape)
    chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n, _ in extra.boxes]
    if not chunks:  # nobody wrote anything of a tensor without elements
        chunks = [ChunkStorageMetadata(torch.Size([0] * len(extra.shape)), torch.Size(extra.shape))]
    return TensorStorageMetadata(found, torch.Size(extra.shape), chunks)


def value_names(layout: Layout, grid: Grid) -> tuple[str, ...]:
    """Returns the names under which a rank knows a whole parameter's scalars.

    Components share their parameter's name, unless each is a parameter in other models; an expert
    has its global index in it, and stacked experts that are single on disk have one name each.
    """
    if EXPERT not in layout.name:
        return tuple(layout.name + suffix for suffix in separate_parts(layout) or ("",))
    for stage in layout.stages:
        index = getattr(stage, "expert_index", None)
        if index is not None:
            return (layout.key_of("", index(grid)),)
    whole = (Whole(layout.local_shape), *layout.stages[1:])
    held = (frame.expert for frame in evaluate(whole, grid, layout.fqn) if frame.boxes)
    return tuple(dict.fromkeys(layout.key_of("", expert) for expert in held))


def separate_parts(layout: Layout) -> tuple[str, ...]:
    """Returns the suffixes of the components that are parameters in models without a fusion."""
    if any(isinstance(stage, Fuse | Join) for stage in layout.stages):
        return ()
    for stage in layout.stages:
        if isinstance(stage, Concat) and stage.whole is not None:
            return tuple(suffix for suffix, _ in stage.parts)
    return ()


def all_value_names(layout: Layout, grid: Grid) -> list[str]:
    """Returns the names under which all ranks together know a whole parameter's scalars."""
    if EXPERT not in layout.name:
        return list(value_names(layout, grid))
    axes = [axis for stage in layout.stages[1:] for axis in stage.axes]
    return list(dict.fromkeys(n for place in grid.walk(axes) for n in value_names(layout, place)))


def _whole(properties: TensorProperties | None, shape: tuple[int, ...]) -> Stored:
    if properties is None:
        return BytesStorageMetadata()
    size = torch.Size(shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), size)
    return TensorStorageMetadata(properties, size, [chunk])
