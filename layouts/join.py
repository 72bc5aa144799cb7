"""The stage that puts components together again, in another project's way."""

from collections.abc import Iterable
from dataclasses import dataclass

from .errors import LayoutError
from .grid import Grid
from .slab import Box, Frame
from .stages import Concat, Fuse, Stage

Joined = tuple[str, tuple[str, ...], int]


@dataclass(frozen=True, slots=True)
class Join(Stage):
    """Makes new tensors of components: whole ones in a row, or parts of each woven in groups.

    With one group, components lie one after another (`in_proj_qkv` of query, key and value).
    With several, each component is cut into that many equal parts and the parts take turns
    (`in_proj_qkvz`: one part of each for every key head). A single component is only renamed.

    Attributes:
        dim: Dim along which components lie.
        tensors: `(suffix, components, groups)` of each new tensor: its suffix, the suffixes of
            its components in order, and how many groups they are woven in.
    """

    dim: int
    tensors: tuple[Joined, ...]

    def __post_init__(self) -> None:
        for suffix, _, groups in self.tensors:
            if groups < 1:
                raise LayoutError(f"{suffix!r} can't be woven in {groups} groups")

    def apply(self, frames: tuple[Frame, ...], grid: Grid) -> tuple[Frame, ...]:
        given = {frame.suffix: frame for frame in frames}
        named = [part for _, parts, _ in self.tensors for part in parts]
        if sorted(named) != sorted(given) or len(given) != len(frames):
            raise LayoutError(
                f"components {sorted(given)} can't be joined as {sorted(named)}. Name every "
                "component once."
            )
        return tuple(
            self._join(suffix, [given[p] for p in parts], groups)
            for suffix, parts, groups in self.tensors
        )

    def describe(self, grid: Grid) -> str:
        made = ", ".join(
            f"{suffix.lstrip('._') or 'one tensor'} of {' + '.join(p.lstrip('._') for p in parts)}"
            + (f" woven in {groups} groups" if groups > 1 else "")
            for suffix, parts, groups in self.tensors
        )
        return f"joined along dim {self.dim}: {made}"

    def _join(self, suffix: str, parts: list[Frame], groups: int) -> Frame:
        dim = self.dim
        rank = len(parts[0].shape)
        if dim >= rank and len(parts) == 1 and groups == 1:
            return parts[0]._replace(suffix=suffix)
        for part in parts:
            if dim >= len(part.shape) or part.shape[dim] % groups:
                raise LayoutError(
                    f"{part.suffix.lstrip('._')}: shape {part.shape} can't be cut into {groups} "
                    f"equal parts along dim {dim}. Give the number of groups that it has."
                )
        each = [part.shape[dim] // groups for part in parts]
        stride = sum(each)
        boxes: list[Box] = []
        base = 0
        for part, size in zip(parts, each, strict=True):
            boxes += _weave(part.boxes, dim, size, stride, base, groups)
            base += size
        shape = parts[0].shape
        return Frame(
            suffix,
            shape[:dim] + (stride * groups,) + shape[dim + 1 :],
            tuple(boxes),
            parts[0].expert,
        )


def fused(split: Concat, over: int) -> tuple[Concat, "Fuse | Join"]:
    """Returns the stages that keep a tensor in one, in the order of some number of ranks.

    Args:
        split: The parts of the tensor.
        over: Number of tensor-parallel ranks whose tensors lie one after another; 1 is the
            canonical order, every part whole.
    """
    if over == 1:
        return split, Fuse(split.dim)
    return split, Join(split.dim, (("", tuple(suffix for suffix, _ in split.parts), over),))


def _weave(
    boxes: Iterable[Box], dim: int, size: int, stride: int, base: int, groups: int
) -> Iterable[Box]:
    """Yields boxes of one component in the joined tensor."""
    for box in boxes:
        if groups == 1 or size == stride:
            yield box.move(dim, base)
            continue
        if not size:
            continue
        first = box.offsets[dim] // size
        last = (box.offsets[dim] + box.sizes[dim] - 1) // size
        for group in range(first, last + 1):
            start = group * size
            part = box.narrow(dim, start, start + size, start - group * stride - base)
            if part is not None:
                yield part
