"""Brute force for layouts: real tensors, cut with torch the way real frameworks cut them.

Nothing here comes from shardplan. A `Program` is plain data that says how a parameter is laid
out. The oracle goes from the checkpoint to the rank, the other way round than the library: it
numbers every element of every global tensor, then chunks, concatenates, pads, stacks and flattens
these tensors until it has what one rank really stores.

| name | is |
|---|---|
| `Program` | how one parameter is laid out, as plain data |
| `global_tensors` | the tensors of the checkpoint, each element with its own number |
| `local_tensor` | what a tensor-parallel rank holds before any FSDP cut |
| `storage` | the flat memory that a rank holds, full of those numbers; -1 is padding |
| `faults` | what is wrong with the slabs that a library gives for every rank |
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Shard, _StridedShard

PADDING = -1
Coordinate = dict[str, int]
Key = tuple[str, int | None]  # suffix and global expert
Tensors = dict[Key, torch.Tensor]


@dataclass(frozen=True)
class Program:
    """How one parameter is laid out.

    Storage is one of

        ("whole",)
        ("buffer", axes, offset, shard_size)
        ("ranges", axes, ((start, stop), ...))
        ("cuts", ((dim, axis, split_factor, sizes or None), ...))

    and the steps, from the local tensor to the global ones, are any of

        ("concat", dim, ((suffix, size), ...))        ("interleave", dim, groups, ((suffix, size), ...))
        ("shard", dim, axis)                          ("fuse", dim)
        ("join", dim, ((suffix, (component, ...), groups), ...))
        ("unpad", dim, size)                          ("permute", dims)
        ("expert", local index, local count, axis, table or None)
        ("unstack",)                                  ("stack", number of experts)
    """

    axes: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    storage: tuple[Any, ...]
    steps: tuple[tuple[Any, ...], ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def used(self) -> list[str]:
        """The axes that what a rank holds depends on."""
        names: list[str] = []
        if self.storage[0] in ("buffer", "ranges"):
            names += self.storage[1]
        elif self.storage[0] == "cuts":
            names += [axis for _, axis, _, _ in self.storage[1]]
        for step in self.steps:
            if step[0] == "shard":
                names.append(step[2])
            elif step[0] == "expert":
                names.append(step[3])
        return [axis for axis, _ in self.axes if axis in names]

    def coordinates(self, axes: Iterable[str] | None = None) -> Iterator[Coordinate]:
        """Every coordinate along `axes` (all axes if not given), the others at 0."""
        axes = set(self.sizes if axes is None else axes)
        ranges = [range(size if axis in axes else 1) for axis, size in self.axes]
        for indices in itertools.product(*ranges):
            yield dict(zip(self.sizes, indices, strict=True))


# Chains of shapes ---------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _trail(program: Program) -> list[dict[Key, tuple[int, ...]]]:
    """The shapes before each step and after the last one."""
    sizes = program.sizes
    shapes: dict[Key, tuple[int, ...]] = {("", None): program.shape}
    trail = [shapes]
    for step in program.steps:
        after: dict[Key, tuple[int, ...]] = {}
        for (suffix, expert), shape in shapes.items():
            at = list(shape)
            match step:
                case ("concat", dim, parts):
                    for name, size in parts:
                        after[suffix + name, expert] = (*at[:dim], size, *at[dim + 1 :])
                case ("interleave", dim, groups, parts):
                    for name, size in parts:
                        after[suffix + name, expert] = (*at[:dim], size * groups, *at[dim + 1 :])
                case ("shard", dim, axis):
                    at[dim] *= sizes[axis]
                    after[suffix, expert] = tuple(at)
                case ("fuse", dim):
                    before = after.get(("", expert))
                    at[dim] += before[dim] if before else 0
                    after["", expert] = tuple(at)
                case ("join", dim, joined):
                    for name, parts, _ in joined:
                        if suffix in parts:
                            before = after.get((name, expert))
                            at[dim] += before[dim] if before else 0
                            after[name, expert] = tuple(at)
                case ("unpad", dim, size):
                    at[dim] = size
                    after[suffix, expert] = tuple(at)
                case ("permute", dims):
                    after[suffix, expert] = tuple(at[d] for d in dims)
                case ("expert", local, count, axis, table):
                    blocks = table or [
                        range(r * count, r * count + count) for r in range(sizes[axis])
                    ]
                    for block in blocks:
                        after[suffix, block[local]] = shape
                case ("unstack",):
                    for index in range(at[0]):
                        after[suffix, index] = shape[1:]
                case ("stack", experts):
                    after[suffix, None] = (experts, *shape)
                case _:
                    raise AssertionError(step)
        shapes = after
        trail.append(shapes)
    return trail


def global_tensors(program: Program) -> Tensors:
    """The tensors of the checkpoint; each element of all of them has its own number."""
    tensors, first = {}, 0
    for key, shape in _trail(program)[-1].items():
        numel = math.prod(shape)
        tensors[key] = torch.arange(first, first + numel).view(shape)
        first += numel
    return tensors


def local_tensor(program: Program, tensors: Tensors, at: Coordinate) -> torch.Tensor:
    """What the rank at a coordinate holds before any FSDP cut: the steps, undone one by one."""
    sizes, trail = program.sizes, _trail(program)
    for step, before in zip(reversed(program.steps), reversed(trail[:-1]), strict=True):
        tensors = _undo(step, tensors, before, sizes, at)
    (local,) = tensors.values()
    assert program.shape == local.shape, (program, local.shape)
    return local


def _undo(
    step: tuple[Any, ...],
    tensors: Tensors,
    before: Mapping[Key, tuple[int, ...]],
    sizes: Mapping[str, int],
    at: Coordinate,
) -> Tensors:
    match step:
        case ("concat", dim, parts):
            return {
                (s, e): torch.cat([tensors[s + name, e] for name, _ in parts], dim)
                for s, e in before
            }
        case ("interleave", dim, groups, parts):
            rows = {}
            for s, e in before:
                members = [
                    tensors[s + name, e].unflatten(dim, (groups, size)) for name, size in parts
                ]
                rows[s, e] = torch.cat(members, dim + 1).flatten(dim, dim + 1)
            return rows
        case ("shard", dim, axis):
            return {
                key: torch.tensor_split(tensor, sizes[axis], dim)[at[axis]]
                for key, tensor in tensors.items()
            }
        case ("fuse", dim):
            (fused,) = tensors.values()
            parts = torch.split(fused, [shape[dim] for shape in before.values()], dim)
            return dict(zip(before, parts, strict=True))
        case ("join", dim, joined):
            components = {}
            for name, names, groups in joined:
                woven = tensors[name, None].unflatten(
                    dim, (groups, tensors[name, None].shape[dim] // groups)
                )
                each = [before[part, None][dim] // groups for part in names]
                for part, rows in zip(names, torch.split(woven, each, dim + 1), strict=True):
                    components[part, None] = rows.flatten(dim, dim + 1)
            return components
        case ("unpad", dim, _):
            padded = {}
            for key, tensor in tensors.items():
                shape = list(before[key])
                shape[dim] -= tensor.shape[dim]
                tail = torch.full(shape, PADDING)
                padded[key] = torch.cat([tensor, tail], dim)
            return padded
        case ("permute", dims):
            back = sorted(range(len(dims)), key=lambda d: dims[d])
            return {key: tensor.permute(back) for key, tensor in tensors.items()}
        case ("expert", local, count, axis, table):
            block = range(at[axis] * count, (at[axis] + 1) * count)
            index = block[local] if table is None else table[at[axis]][local]
            return {(s, None): t for (s, e), t in tensors.items() if e == index}
        case ("unstack",):
            return {
                (s, None): torch.stack([tensors[s, e] for e in range(shape[0])])
                for (s, _), shape in before.items()
            }
        case ("stack", _):
            return {(s, e): tensors[s, None][e] for s, e in before}
    raise AssertionError(step)


# Storage ------------------------------------------------------------------------------------------


def storage(program: Program, local: torch.Tensor, at: Coordinate) -> torch.Tensor:
    """The flat memory of the rank: what its FSDP cut leaves of the local tensor."""
    sizes = program.sizes
    match program.storage:
        case ("whole",):
            return local.reshape(-1)
        case ("ranges", axes, ranges):
            start, stop = ranges[_position(axes, sizes, at)]
            return local.reshape(-1)[start:stop]
        case ("buffer", axes, offset, shard_size):
            # A real buffer: the parameter at its offset, neighbours and padding around it.
            world = math.prod(sizes[axis] for axis in axes)
            values = torch.full((world * shard_size,), PADDING)
            mine = torch.zeros(world * shard_size, dtype=torch.bool)
            values[offset : offset + local.numel()] = local.reshape(-1)
            mine[offset : offset + local.numel()] = True
            rank = _position(axes, sizes, at)
            return values.view(world, shard_size)[rank][mine.view(world, shard_size)[rank]]
        case ("cuts", cuts):
            for dim, axis, split_factor, parts in cuts:
                local = dtensor_shards(local, dim, sizes[axis], split_factor, parts)[at[axis]]
            return local.reshape(-1)
    raise AssertionError(program.storage)


def dtensor_shards(
    tensor: torch.Tensor,
    dim: int,
    count: int,
    split_factor: int = 1,
    sizes: tuple[int, ...] | None = None,
) -> list[torch.Tensor]:
    """What torch itself leaves to each rank of a mesh axis."""
    if sizes is not None:
        return list(torch.split(tensor, list(sizes), dim))
    placement = Shard(dim) if split_factor == 1 else _StridedShard(dim, split_factor=split_factor)
    shards, _ = placement._split_tensor(tensor, count, with_padding=False)
    return shards


def fsdp2_shard(tensor: torch.Tensor, dim: int, order: Iterable[tuple[int, int]]) -> torch.Tensor:
    """What FSDP2 leaves to a rank: `(count, rank)` of each sharding, the first made first."""
    for count, rank in order:
        tensor = dtensor_shards(tensor, dim, count)[rank]
    return tensor


def _position(axes: Iterable[str], sizes: Mapping[str, int], at: Coordinate) -> int:
    names = list(axes)
    world = torch.arange(math.prod(sizes[axis] for axis in names))
    return int(world.view([sizes[axis] for axis in names])[tuple(at[axis] for axis in names)])


# The check ----------------------------------------------------------------------------------------

Box = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]


def faults(
    program: Program,
    slabs: Callable[[Coordinate], Iterable[Box]],
    key: Callable[[str, int | None], str],
) -> list[str]:
    """What is wrong with a library's slabs, over all ranks; empty if nothing is.

    Args:
        program: The layout in question.
        slabs: For a coordinate, `(key, global_shape, offsets, sizes, start, strides)` of each.
        key: The name on disk for a suffix and an expert.
    """
    named = {key(*k): tensor for k, tensor in global_tensors(program).items()}
    tensors = global_tensors(program)
    covered = {name: torch.zeros_like(tensor) for name, tensor in named.items()}
    for at in program.coordinates(program.used):
        held = storage(program, local_tensor(program, tensors, at), at).clone()  # at offset 0
        taken = torch.zeros_like(held)
        boxes = list(slabs(at))
        for name, shape, offsets, sizes, start, strides in boxes:
            if name not in named:
                return [f"{at}: no tensor is called {name!r}"]
            if shape != named[name].shape:
                return [f"{at}: {name} has shape {tuple(named[name].shape)}, not {shape}"]
            if math.prod(sizes) == 0:
                return [f"{at}: an empty slab of {name}"]
            last = start + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
            if start < 0 or last >= held.numel():
                return [f"{at}: {name} reads [{start}, {last}] of {held.numel()} elements"]
            place = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            wanted = named[name][place]
            found = held.as_strided(sizes, strides, start)
            if not torch.equal(wanted, found):
                return [f"{at}: {name} {offsets}+{sizes} reads {found.tolist()}"]
            covered[name][place] += 1
            taken.as_strided(sizes, strides, start).add_(1)
        if not torch.equal(taken, (held != PADDING).long()):
            return [f"{at}: elements are in {taken.tolist()} slabs of {held.tolist()}"]
    return [
        f"{name}: elements are covered {times.tolist()} times"
        for name, times in covered.items()
        if not bool((times == 1).all())
    ]


def replica_faults(program: Program, slabs: Callable[[Coordinate], Iterable[Box]]) -> list[str]:
    """Coordinates that differ only along unused axes must hold the same slabs."""
    first: dict[tuple[int, ...], list[Box]] = {}
    for at in program.coordinates():
        same = tuple(at[axis] for axis in program.used)
        boxes = list(slabs(at))
        if first.setdefault(same, boxes) != boxes:
            return [f"{at}: a replica holds {boxes}, not {first[same]}"]
    return []
