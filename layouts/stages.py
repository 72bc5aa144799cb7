"""The stages after storage: they take a rank's boxes from the local tensor to the global one.

| stage | does | stands for |
|---|---|---|
| `Concat` | cuts at the parts' borders, each part a tensor of its own | SwiGLU, GDN, Mamba, MLA |
| `Interleave` | the same for parts that repeat in groups | grouped QKV |
| `Shard` | shifts the offsets by the rank's place, widens the shape | TP, experts in one tensor |
| `Fuse` | puts the parts back as one tensor, in canonical order | `components="fused"` |
| `Unpad` | drops the padding at a tensor's end | vocabularies |
| `Permute` | reorders the dims | frameworks that store the transpose |
| `ExpertIndex` | fills the hole in the name with the global expert | grouped, sequential experts |
| `Unstack` | moves a leading expert dim into the name | stacked experts, on disk one by one |
| `Stack` | moves the expert in the name to a leading dim | single experts, on disk one tensor |

A stage names axes, never ranks, and is evaluated at a grid's coordinate. All numbers count
elements; nothing here imports torch.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .errors import LayoutError
from .grid import Grid
from .slab import Box, Frame, Shape

STAGES: dict[str, type["Stage"]] = {}


class Stage:
    """One step of a layout; subclasses are frozen dataclasses of integers, texts and tuples.

    A class of another package is found by its name when a checkpoint that has it is read; import it,
    or register a provider of the package as an entry point `shardplan.layouts`.
    """

    __slots__ = ()

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        known = STAGES.setdefault(cls.__name__, cls)
        # A dataclass with slots is made twice.
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise LayoutError(
                f"{cls.__module__}.{cls.__qualname__}: {known.__module__} has a stage of this name. "
                "Checkpoints name stages; give it another name."
            )
        STAGES[cls.__name__] = cls

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the stage's answer depends on."""
        return ()

    def apply(self, frames: tuple[Frame, ...], grid: Grid) -> tuple[Frame, ...]:
        """Returns the frames one space further, at the grid's coordinate."""
        raise NotImplementedError

    def describe(self, grid: Grid) -> str:
        """Returns what the stage does at the grid's coordinate, in one sentence."""
        return str(self)


def _on_each(
    frames: tuple[Frame, ...], dim: int, change: Callable[[Frame], Iterable[Frame]]
) -> tuple[Frame, ...]:
    """Applies `change` to every frame after checking that it has `dim`."""
    changed: list[Frame] = []
    for frame in frames:
        if not 0 <= dim < len(frame.shape):
            raise LayoutError(
                f"dim {dim} of a tensor with {len(frame.shape)} dims (shape {frame.shape})"
            )
        changed += change(frame)
    return tuple(changed)


def _resized(shape: Shape, dim: int, size: int) -> Shape:
    return shape[:dim] + (size,) + shape[dim + 1 :]


Part = tuple[str, int]


def _check_parts(what: str, parts: Iterable[Part]) -> None:
    for suffix, size in parts:
        if size < 0:
            raise LayoutError(
                f"{what}: the part {suffix!r} can't have {size} rows. Give sizes of at least 0."
            )


@dataclass(frozen=True, slots=True)
class Concat(Stage):
    """Cuts a fused tensor at its parts' borders; each part becomes a tensor of its own.

    Attributes:
        dim: Dim along which the parts lie one after another.
        parts: `(suffix, size)` of each part in local order; the sizes are tensor-parallel local.
        what: What the parts are called in an error, such as `'SwiGLU halves'`.
        whole: Where each part is a parameter in models without the fusion, with scalars of its
            own: the suffix of the fused tensor. Else the fused tensor has the layout's name.
    """

    dim: int
    parts: tuple[Part, ...]
    what: str = "components"
    whole: str | None = None

    def __post_init__(self) -> None:
        _check_parts(self.what, self.parts)

    def apply(self, frames: tuple[Frame, ...], grid: Grid) -> tuple[Frame, ...]:
        total = sum(size for _, size in self.parts)

        def change(frame: Frame) -> Iterable[Frame]:
            if total != frame.shape[self.dim]:
                named = " + ".join(f"{suffix.lstrip('._')} {size}" for suffix, size in self.parts)
                raise LayoutError(
                    f"{self.what} cover {total} rows of dim {self.dim} ({named}) but the local "
                    f"tensor has {frame.shape[self.dim]} ({grid.facts()}). Give the sizes that "
                    "this tensor-parallel rank holds."
                )
            start = 0
            for suffix, size in self.parts:
                boxes = (b.narrow(self.dim, start, start + size, start) for b in frame.boxes)
                yield Frame(
                    frame.suffix + suffix,
                    _resized(frame.shape, self.dim, size),
                    tuple(b for b in boxes if b is not None),
                    frame.expert,
                )
                start += size

        return _on_each(frames, self.dim, change)

    def describe(self, grid: Grid) -> str:
        named = ", ".join(f"{suffix.lstrip('._')} {size}" for suffix, size in self.parts)
        return f"cut along dim {self.dim} into {self.what}: {named}"


@dataclass(frozen=True, slots=True)
class Interleave(Stage):
    """Cuts a fused tensor whose parts repeat in groups; each part becomes a tensor of its own.

    Attributes:
        dim: Dim along which the groups lie one after another.
        groups: Number of groups that the local tensor holds.
        parts: `(suffix, size)` of each part inside one group.
        what: What the parts are called in an error.
    """

    dim: int
    groups: int
    parts: tuple[Part, ...]
    what: str = "components"

    def __post_init__(self) -> None:
        _check_parts(self.what, self.parts)
        if self.groups < 0:
            raise LayoutError(f"{self.what}: there can't be {self.groups} groups")

    def apply(self, frames: tuple[Frame, ...], grid: Grid) -> tuple[Frame, ...]:
        group = sum(size for _, size in self.parts)

        def change(frame: Frame) -> Iterable[Frame]:
            if group * self.groups != frame.shape[self.dim]:
                raise LayoutError(
                    f"{self.what} of {self.groups} groups of {group} rows cover "
                    f"{group * self.groups} rows of dim {self.dim} but the local tensor has "
                    f"{frame.shape[self.dim]} ({grid.facts()}). Give the number of groups that "
                    "this tensor-parallel rank holds."
                )
            begin = 0
            for suffix, size in self.parts:
                boxes = []
                for g in range(self.groups):
                    start = g * group + begin
                    for box in frame.boxes:
                        cut = box.narrow(self.dim, start, start + size, start - g * size)
                        if cut is not None:
                            boxes.append(cut)
                yield Frame(
                    frame.suffix + suffix,
                    _resized(frame.shape, self.dim, size * self.groups),
                    tuple(boxes),
                    frame.expert,
                )
                begin += size

        return _on_each(frames, self.dim, change)

    def describe(self, grid: Grid) -> str:
        named = ", ".join(f"{suffix.lstrip('._')} {size}" for suffix, size in self.parts)
        return f"cut along dim {self.dim} into {self.groups} groups of {named}"


@dataclass(frozen=True, slots=True)
class Shard(Stage):
    """Places a tensor-parallel rank's tensor in the global one: even shards along an axis.

    Uneven shards start from the global tensor instead: `Cuts` with `Cut(sizes=...)`.

    Attributes:
        dim: Dim of the tensor that is sharded.
        axis: Mesh axis that it is sharded over.
    """

    dim: int
    axis: str

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,)

    def apply(self, frames: tuple[Frame, ...], grid: Grid) -> tuple[Frame, ...]:
        count, index = grid.size(self.axis), grid.index(self.axis)

        def change(frame: Frame) -> Iterable[Frame]:
            size = frame.shape[self.dim]
            yield Frame(
                frame.suffix,
                _resized(frame.shape, self.dim, size * count),
                tuple(box.move(self.dim, index * size) for box in frame.boxes),
                frame.expert,
            )

        return _on_each(frames, self.dim, change)

    def describe(self, grid: Grid) -> str:
        index, count = grid.index(self.axis), grid.size(self.axis)
        return f"shard {index} of {count} along {self.axis}: dim {self.dim} moves by {index} shards"


@dataclass(frozen=True, slots=True)
class Fuse(Stage):
    """Puts the parts back as one tensor under the parameter's own name, in canonical order.

    Canonical is what a model without tensor parallelism holds: every part whole, one after
    another.

    Attributes:
        dim: Dim along which the parts lie.
    """

    dim: int

    def apply(self, frames: tuple[Frame, ...], grid: Grid) -> tuple[Frame, ...]:
        total = sum(frame.shape[self.dim] for frame in frames)
        boxes: list[Box] = []
        start = 0
        for frame in frames:
            boxes += (box.move(self.dim, start) for box in frame.boxes)
            start += frame.shape[self.dim]
        return (
            Frame("", _resized(frames[0].shape, self.dim, total), tuple(boxes), frames[0].expert),
        )

    def describe(self, grid: Grid) -> str:
        return f"the components are one tensor again, along dim {self.dim}"


@dataclass(frozen=True, slots=True)
class Unpad(Stage):
    """Drops the padding at the end of a dim: only its first `size` elements are on disk.

    Attributes:
        dim: Dim that is padded.
        size: True size of the global tensor along it.
    """

    dim: int
    size: int

    def __post_init__(self) -> None:
        if self.size < 0:
            raise LayoutError(f"the true size of dim {self.dim} can't be {self.size}")

    def apply(self, frames: tuple[Frame, ...], grid: Grid) -> tuple[Frame, ...]:
        def change(frame: Frame) -> Iterable[Frame]:
            if frame.shape[self.dim] < self.size:
                raise LayoutError(
                    f"the true size {self.size} of dim {self.dim} is larger than the padded "
                    f"tensor's {frame.shape[self.dim]} ({grid.facts()}). Padding can only add."
                )
            boxes = (box.narrow(self.dim, 0, self.size) for box in frame.boxes)
            yield Frame(
                frame.suffix,
                _resized(frame.shape, self.dim, self.size),
                tuple(b for b in boxes if b is not None),
                frame.expert,
            )

        return _on_each(frames, self.dim, change)

    def describe(self, grid: Grid) -> str:
        return f"only the first {self.size} of dim {self.dim} are kept: the rest is padding"


@dataclass(frozen=True, slots=True)
class Permute(Stage):
    """Reorders the dims: dim `i` on disk is dim `dims[i]` of the tensor.

    Attributes:
        dims: A permutation, as `torch.Tensor.permute` takes it.
    """

    dims: tuple[int, ...]

    def apply(self, frames: tuple[Frame, ...], grid: Grid) -> tuple[Frame, ...]:
        def reorder(values: Shape) -> Shape:
            return tuple(values[d] for d in self.dims)

        permuted = []
        for frame in frames:
            if sorted(self.dims) != list(range(len(frame.shape))):
                raise LayoutError(
                    f"{self.dims} does not reorder the {len(frame.shape)} dims of shape "
                    f"{frame.shape}"
                )
            boxes = tuple(
                Box(reorder(b.offsets), reorder(b.sizes), b.start, reorder(b.strides))
                for b in frame.boxes
            )
            permuted.append(Frame(frame.suffix, reorder(frame.shape), boxes, frame.expert))
        return tuple(permuted)

    def describe(self, grid: Grid) -> str:
        return f"dims in the order {self.dims}"


@dataclass(frozen=True, slots=True)
class ExpertIndex(Stage):
    """Gives the tensor its global expert index, which fills the hole in the parameter's name.

    Attributes:
        local_expert_index: Index among the experts that the rank holds.
        num_local_experts: How many each rank holds; rank `r` holds a block of this length.
        axis: Expert-parallel axis.
        table: Global index of every expert of every rank, where they are no blocks.
    """

    local_expert_index: int
    num_local_experts: int
    axis: str = "ep"
    table: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.local_expert_index < self.num_local_experts:
            raise LayoutError(
                f"local expert {self.local_expert_index} is not in [0, {self.num_local_experts}), "
                "the experts that each rank holds. Are the names global already?"
            )

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.axis,)

    def expert_index(self, grid: Grid) -> int:
        """Returns the global expert index at the grid's coordinate."""
        rank = grid.index(self.axis)
        if self.table is not None:
            return self.table[rank][self.local_expert_index]
        return rank * self.num_local_experts + self.local_expert_index

    def apply(self, frames: tuple[Frame, ...], grid: Grid) -> tuple[Frame, ...]:
        index = self.expert_index(grid)
        return tuple(frame._replace(expert=index) for frame in frames)

    def describe(self, grid: Grid) -> str:
        return (
            f"local expert {self.local_expert_index} of {self.num_local_experts} on "
            f"{self.axis} rank {grid.index(self.axis)} is expert {self.expert_index(grid)}"
        )


@dataclass(frozen=True, slots=True)
class Unstack(Stage):
    """Moves a leading expert dim into the name: one tensor for each expert on disk.

    The expert dim must be global already (`Shard(0, 'ep')` comes before).
    """

    def apply(self, frames: tuple[Frame, ...], grid: Grid) -> tuple[Frame, ...]:
        unstacked = []
        for frame in frames:
            for expert in range(frame.shape[0] if frame.shape else 0):
                boxes = []
                for box in frame.boxes:
                    row = box.narrow(0, expert, expert + 1)
                    if row is not None:
                        boxes.append(
                            Box(row.offsets[1:], row.sizes[1:], row.start, row.strides[1:])
                        )
                unstacked.append(Frame(frame.suffix, frame.shape[1:], tuple(boxes), expert))
        return tuple(unstacked)

    def describe(self, grid: Grid) -> str:
        return "one tensor for each expert of the leading dim"


@dataclass(frozen=True, slots=True)
class Stack(Stage):
    """Moves the expert in the name to a leading dim: all experts are one tensor on disk.

    Attributes:
        num_experts: Number of experts of the layer, over all ranks.
    """

    num_experts: int

    def apply(self, frames: tuple[Frame, ...], grid: Grid) -> tuple[Frame, ...]:
        stacked = []
        for frame in frames:
            index = frame.expert
            if index is None or not 0 <= index < self.num_experts:
                raise LayoutError(
                    f"expert {index} can't be stacked as one of {self.num_experts} "
                    f"({grid.facts()}). Give the number of experts of the whole layer."
                )
            boxes = tuple(
                Box((index, *b.offsets), (1, *b.sizes), b.start, (1, *b.strides))
                for b in frame.boxes
            )
            stacked.append(Frame(frame.suffix, (self.num_experts, *frame.shape), boxes))
        return tuple(stacked)

    def describe(self, grid: Grid) -> str:
        return f"one tensor of all {self.num_experts} experts"
