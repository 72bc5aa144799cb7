"""Tensors that describe themselves: which boxes of a global tensor a local one holds.

| description | from |
|---|---|
| attributes `global_shape`, `global_offsets`, `local_offsets`, `local_sizes` | torch ≥ 2.14's `CheckpointableTensor` |
| hooks `__create_write_items__`, `__create_chunk_list__`, `__get_tensor_shard__` | DCP's protocol for tensor subclasses, or set on one tensor |
| `ShardedTensor` | FSDP1, and torch's older sharding |
| mesh and placements of a DTensor | where it lies on some of the ranks, and no layout knows the others |

Such a tensor knows its own rank's boxes and nothing of the other ranks', so its boxes travel in
DCP's plan step, as they do with stock planners. A layout knows them for every rank; where a
parameter has one of a flat buffer, that is used and the tensor's own word is not asked for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from shardplan.layouts import Grid, LayoutError, ParamInfo
from shardplan.layouts.fsdp import dtensor_cuts
from shardplan.layouts.grid import mesh_axes
from shardplan.layouts.layout import evaluate
from shardplan.layouts.model import own_names
from shardplan.layouts.slab import Box, Shape, contiguous_strides

from ..compat import ShardedTensor, local_tensor

_ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
_HOOKS = ("__create_write_items__", "__create_chunk_list__")
_PLAIN = (torch.Tensor, Parameter)

Part = tuple[Shape, Shape]


@dataclass(frozen=True, slots=True)
class Description:
    """What a tensor says of itself.

    Attributes:
        shape: Shape of the global tensor; None if the tensor has no box and does not say.
        dtype: Its data type.
        parts: `(offsets, sizes)` of each box that this rank holds, empty ones left out.
        mark: What ranks must have alike that hold one box: a digest of the values where nothing
            else says that they are replicas.
    """

    shape: Shape | None
    dtype: torch.dtype
    parts: tuple[Part, ...]
    mark: str = ""


def describes_itself(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor says which boxes of a global tensor it holds.

    A DTensor's placements do not count, but what is set on its local tensor does.
    """
    local = local_tensor(tensor)
    own = local.__dict__
    if type(local) in _PLAIN:
        return bool(own) and (all(a in own for a in _ATTRIBUTES) or any(h in own for h in _HOOKS))
    return (
        isinstance(local, ShardedTensor)
        or all(hasattr(local, a) for a in _ATTRIBUTES)
        or any(hasattr(local, h) for h in _HOOKS)
    )


def described_parameters(model: Any) -> frozenset[str]:
    """Returns the names of a model's parameters that describe themselves, without wrappers' tokens.

    Args:
        model: A module; anything else has none.
    """
    if not isinstance(model, Module):
        return frozenset()
    return frozenset(fqn for fqn, tensor in own_names(model) if describes_itself(tensor))


def describe(key: str, tensor: torch.Tensor) -> Description:
    """Returns what a tensor says of itself.

    Args:
        key: Its key, for errors.
        tensor: A tensor that describes itself.

    Raises:
        LayoutError: If its boxes are not inside the global tensor, two of them begin at one
            place, or it does not hold what it says.
    """
    local = local_tensor(tensor)
    if isinstance(tensor, DTensor) and not describes_itself(tensor):
        return _placed(key, tensor)
    if isinstance(local, ShardedTensor):
        metadata = local.metadata()
        found = [(s.metadata.shard_offsets, s.metadata.shard_sizes) for s in local.local_shards()]
        said = _description(metadata.size, local.dtype, found)
    elif _has_attributes(local):
        lengths = {len(getattr(local, name)) for name in _ATTRIBUTES[1:]}
        if len(lengths) != 1:
            raise LayoutError(
                f"{key}: global_offsets, local_offsets and local_sizes have "
                f"{sorted(lengths)} entries. Give one of each for every box."
            )
        found = list(zip(local.global_offsets, local.local_sizes, strict=True))  # type: ignore[attr-defined]
        said = _description(local.global_shape, local.dtype, found)  # type: ignore[attr-defined]
    else:
        said = _asked(key, tensor)
    _check(key, tensor, said)
    return said


def _boxes(key: str, tensor: DTensor) -> tuple[Box, ...]:
    """Returns the boxes that a DTensor's own mesh and placements leave to this rank."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    grid = Grid(mesh_axes(mesh), tuple(mesh.shape), tuple(coordinate))
    cuts = dtensor_cuts(ParamInfo(key, tuple(tensor.shape), grid, False, None, tensor))
    held = tuple(sum(stop - start for start, stop in dim) for dim in cuts.held(grid))
    local = local_tensor(tensor)
    if tuple(local.shape) != held and (local.numel() or math.prod(held)):
        raise LayoutError(
            f"{key}: the DTensor's local part has shape {tuple(local.shape)}, but its placements "
            f"{tensor.placements} leave {held} of {tuple(tensor.shape)} to this rank "
            f"({grid.facts()}). Build it with the shape that its placements give."
        )
    (frame,) = evaluate((cuts,), grid, key)
    return frame.boxes


def _within(shape: Shape, box: Box) -> tuple[slice, ...]:
    """Returns where a box lies in a local tensor of a shape."""
    places, rest = [], box.start
    for step, size in zip(contiguous_strides(shape), box.sizes, strict=True):
        first, rest = divmod(rest, step)
        places.append(slice(first, first + size))
    return tuple(places)


def _placed(key: str, tensor: DTensor) -> Description:
    boxes = _boxes(key, tensor)
    return _description(tensor.shape, tensor.dtype, [(box.offsets, box.sizes) for box in boxes])


def _has_attributes(local: torch.Tensor) -> bool:
    return not any(hasattr(local, hook) for hook in _HOOKS)


def _description(
    shape: Sequence[int], dtype: torch.dtype, parts: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> Description:
    kept = tuple(
        (tuple(map(int, offsets)), tuple(map(int, sizes)))
        for offsets, sizes in parts
        if math.prod(sizes)
    )
    return Description(tuple(map(int, shape)), dtype, kept)


def _asked(key: str, tensor: Any) -> Description:
    """Asks a tensor's hooks; a DTensor passes the question on to its local tensor's."""
    hooks = tensor if isinstance(tensor, DTensor) else local_tensor(tensor)
    if hasattr(hooks, "__create_write_items__"):
        items = hooks.__create_write_items__(key, tensor)
        if items:
            data = [item.tensor_data for item in items]
            parts = [(d.chunk.offsets, d.chunk.sizes) for d in data]
            return _description(data[0].size, data[0].properties.dtype, parts)
        return Description(None, tensor.dtype, ())
    chunks = hooks.__create_chunk_list__()  # type: ignore[attr-defined]
    if not chunks:
        return Description(None, tensor.dtype, ())
    return _description(tensor.shape, tensor.dtype, [(c.offsets, c.sizes) for c in chunks])


def _check(key: str, tensor: torch.Tensor, said: Description) -> None:
    starts: set[Shape] = set()
    shape = said.shape or ()
    for offsets, sizes in said.parts:
        inside = len(offsets) == len(sizes) == len(shape) and all(
            o >= 0 and o + n <= whole for o, n, whole in zip(offsets, sizes, shape, strict=True)
        )
        if not inside:
            raise LayoutError(
                f"{key}: it says that it holds the box at {offsets} of sizes {sizes}, which is not "
                f"inside its global shape {said.shape}. Mend what describes it."
            )
        if offsets in starts:
            raise LayoutError(
                f"{key}: it names two boxes at {offsets} on one rank. Mend what describes it."
            )
        starts.add(offsets)
        try:
            held = part_of(key, tensor, offsets)
        except (IndexError, ValueError) as error:
            if isinstance(error, LayoutError):
                raise
            raise LayoutError(
                f"{key}: it describes a box at {offsets} of sizes {sizes}, which its tensor of shape "
                f"{tuple(tensor.shape)} does not have ({error}). Fix what describes it."
            ) from None
        if tuple(held.shape) != sizes:
            raise LayoutError(
                f"{key}: it says that the box at {offsets} has sizes {sizes}, but gives a tensor of "
                f"shape {tuple(held.shape)} for it. Mend what describes it."
            )


def part_of(key: str, tensor: torch.Tensor, offsets: Shape) -> torch.Tensor:
    """Returns the local tensor of the box of a tensor that begins at `offsets`.

    Args:
        key: The tensor's key, for errors.
        tensor: A tensor that describes itself.
        offsets: First element of the box in the global tensor.

    Raises:
        LayoutError: If the tensor has no such box.
    """
    local = local_tensor(tensor)
    if isinstance(tensor, DTensor) and not describes_itself(tensor):
        for box in _boxes(key, tensor):
            if box.offsets == offsets:
                return local[_within(tuple(local.shape), box)]
    elif isinstance(local, ShardedTensor):
        for shard in local.local_shards():
            if tuple(shard.metadata.shard_offsets) == offsets:
                return shard.tensor
    elif _has_attributes(local):
        for start, begin, sizes in zip(
            local.global_offsets,  # type: ignore[attr-defined]
            local.local_offsets,  # type: ignore[attr-defined]
            local.local_sizes,  # type: ignore[attr-defined]
            strict=True,
        ):
            if tuple(start) == offsets:
                return local[tuple(slice(b, b + n) for b, n in zip(begin, sizes, strict=True))]
    else:
        hooks = tensor if hasattr(tensor, "__get_tensor_shard__") else local
        if not hasattr(hooks, "__get_tensor_shard__"):
            return local
        asked = hooks.__get_tensor_shard__(MetadataIndex(key, torch.Size(offsets)))
        found = local_tensor(asked)
        if type(local) in _PLAIN and found.numel() and not _one_storage(found, local):
            raise LayoutError(
                f"{key}: its __get_tensor_shard__ gives memory of another tensor, as it does when "
                "async_save has copied the tensor and its hook still points to the first one. Let "
                "the hook find the tensor anew, set the attributes of CheckpointableTensor instead, "
                "or save with dcp.save."
            )
        return found
    raise LayoutError(f"{key}: it has no box at {offsets}. Mend what describes it.")


def _one_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
