"""Megatron-FSDP's flat buffers, read from live parameters; Megatron itself is not imported.

| strategy | what a rank stores of a parameter in a state dict |
|---|---|
| `no_shard` | all of it |
| `optim`, `optim_grads` (ZeRO-1, ZeRO-2) | its slice, though the buffer holds the whole |
| `optim_grads_params` (ZeRO-3) | its slice |
| the same with outer replicas (HSDP) | its slice of the inner axis |
| the same with an outer sharded axis (hybrid FSDP) | its slice of both axes, the outer one faster |
| version 2 (`experimental`) | its slice of all axes that are cut, the last one slowest |

Sources: megatron_fsdp/param_and_grad_buffer.py (version 1), megatron_fsdp/experimental/dbuffer.py
and layout.py (version 2), megatron_fsdp/utils.py (`FSDPDistributedIndex`).
"""

import math
from typing import Any

from .errors import LayoutError
from .grid import DENSE_AXES, Grid, Grids, mesh_axes
from .provider import ParamInfo
from .slab import Shape
from .stages import Stage
from .storage import FlatBuffer

_GROUP = "_mfsdp_parameter_group"


def is_managed(param: ParamInfo) -> bool:
    """Returns whether Megatron-FSDP keeps a parameter.

    Between a forward and the next state dict the module holds the raw parameters, which count too:
    they are marked when they take the sharded ones' place.
    """
    live = param.param
    if live is None:
        return False
    if hasattr(live, "megatron_fsdp_slice") or version_2_group(live) is not None:
        return True
    if hasattr(live, "orig_param") and hasattr(live, "megatron_fsdp_dist_index"):
        return True
    buffers = _buffers(param)
    return buffers is not None and live in getattr(buffers, "param_to_param_group", ())


def original(tensor: Any) -> Any:
    """Returns the tensor-parallel rank's own parameter, which carries all of its marks."""
    return getattr(tensor, "orig_param", tensor)


def rank_shape(tensor: Any) -> Shape:
    """Returns a parameter's shape before any FSDP cut.

    For Megatron-FSDP that is the shape on the tensor-parallel rank, also where tensor
    parallelism is a DTensor's.
    """
    own = original(tensor)
    managed = own is not tensor or hasattr(tensor, "_megatron_fsdp_model")
    if managed and hasattr(own, "placements"):
        own = own.to_local()
    return tuple(int(size) for size in own.shape)


def storage(param: ParamInfo) -> Stage:
    """Returns a parameter's place in its flat buffer.

    Raises:
        LayoutError: If its buffer can't be read, or is not cut as the grid says.
    """
    group = version_2_group(param.param)
    return _version_1(param) if group is None else _version_2(param, group)


def _buffers(param: ParamInfo) -> Any:
    """Returns the `ParamAndGradBuffer` of the model that a parameter belongs to, if any."""
    model = getattr(param.param, "_megatron_fsdp_model", None)
    return getattr(model, "param_and_grad_buffer", None)


def _whole(shape: Shape) -> FlatBuffer:
    """Returns the storage of a rank that keeps everything, whatever its DTensor's mesh says."""
    return FlatBuffer(shape, (), 0, max(math.prod(shape), 1))


def _version_1(param: ParamInfo) -> Stage:
    own, buffers = original(param.param), _buffers(param)
    try:
        group = buffers.parameter_groups[buffers.param_to_param_group[own]]
        buffer = group.model_weight_buffer or group.main_weight_buffer
        if buffer is None and not hasattr(param.param, "megatron_fsdp_slice"):
            return _whole(param.local_shape)
        item = buffer.item_index_map[buffer.param_idx[own]]
        bucket = buffer.bucket_index
        offset = int(item.global_data_index) - int(bucket.global_data_index)
        world, size = int(buffer.dp_world_size), int(bucket.size)
    except (AttributeError, KeyError, TypeError) as error:
        raise param.fail(
            f"it has a megatron_fsdp_slice but no readable buffer ({error!r})",
            "Pass FSDPFlatBuffer({name: ranges}) for this version of Megatron-FSDP.",
        ) from None
    inner = _axis(param, "dp_shard", "edp_shard", "dp_shard_dim")
    outer = _axis(param, "dp_replicate", "edp_replicate", "dp_outer_dim")
    axes: tuple[str, ...] = (inner,)
    if world != param.grid.count(axes):
        axes = (inner, outer)  # hybrid FSDP: the outer axis counts faster
    if world != param.grid.count(axes):
        raise param.fail(
            f"its buffer is cut into {world} slices but {axes} has {param.grid.count(axes)} ranks",
            "Pass the pg_collection that Megatron-FSDP was given.",
        )
    if size % world:
        raise param.fail(
            f"its buffer of {size} elements can't be cut into {world} equal slices",
            "Pass FSDPFlatBuffer({name: ranges}) for this version of Megatron-FSDP.",
        )
    made = FlatBuffer(param.local_shape, axes, offset, max(size // world, 1))
    _check_slice(param, made)
    return made


def _axis(param: ParamInfo, dense: str, expert: str, role: str) -> str:
    """Returns the grid's axis for one of Megatron-FSDP's roles."""
    axis = param.axis(dense, expert)
    if axis not in param.grid.axes:
        index = getattr(param.param, "megatron_fsdp_dist_index", None)
        axis = param.grid.resolve(str(getattr(index, role, axis))) or axis
    return axis


def _check_slice(param: ParamInfo, made: FlatBuffer) -> None:
    """Compares the slice that the buffer's index gives this rank with the parameter's own."""
    own = getattr(param.param, "megatron_fsdp_slice", None)
    start, stop = made.bounds(param.grid)
    if (
        own is None
        or (own.start, own.stop) == (start, stop)
        or own.stop - own.start == stop - start == 0
    ):
        return
    raise param.fail(
        f"its megatron_fsdp_slice is [{own.start}, {own.stop}) but the grid gives this rank "
        f"[{start}, {stop})",
        "Pass the pg_collection that Megatron-FSDP was given, or grid= with this rank's place.",
    )


def version_2_group(tensor: Any) -> Any:
    """Returns a parameter's version-2 group; newer releases keep a weak reference to it."""
    group = getattr(tensor, _GROUP, None)
    if group is not None and not hasattr(group, "main_weight") and callable(group):
        group = group()
    return group


def _version_2(param: ParamInfo, group: Any) -> Stage:
    members = getattr(group, "fsdp_parameters", None)
    if members is None:
        pairs = list(zip(group.sharded_parameters, group.unsharded_parameters, strict=True))
    else:
        pairs = [(getattr(m, "sharded", m), getattr(m, "unsharded", m)) for m in members]
    index = next((i for i, pair in enumerate(pairs) if any(p is param.param for p in pair)), None)
    if index is None:
        raise param.fail(
            "its Megatron-FSDP parameter group does not list it",
            "Build the planner with the model that Megatron-FSDP wrapped.",
        )
    buffer = group.main_weight
    axes = []
    for name, placement in zip(mesh_axes(buffer.mesh), buffer.placements, strict=True):
        if type(placement).__name__ == "Flat" or getattr(placement, "dim", None) == 0:
            axes.append(_mesh_axis(param, name))
    axes.reverse()  # the last axis of the mesh is the slowest
    count = param.grid.count(axes)
    size = int(buffer.layout.size)
    offset = int(buffer.layout.tensor_to_offset[index])
    if size % count:
        raise param.fail(
            f"its buffer of {size} elements can't be cut into {count} equal slices of {axes}",
            "Pass the grid that Megatron-FSDP was given.",
        )
    return FlatBuffer(param.local_shape, tuple(axes), offset, max(size // count, 1))


def _mesh_axis(param: ParamInfo, name: str) -> str:
    axis = param.grid.resolve(name)
    if axis is None:
        raise param.fail(
            f"its mesh axis {name!r} is not one of the grid's axes {param.grid.axes}",
            "Pass the grid that the mesh was made from (grid=Grids.from_mesh(mesh)).",
        )
    return axis


def carried_dist_index(model: Any) -> Any:
    """Returns the `FSDPDistributedIndex` of a model or of what it wraps, None if there is none."""
    seen = 0
    while model is not None and seen < 16:
        for name in ("megatron_fsdp_dist_index", "dist_index"):
            found = getattr(model, name, None)
            if hasattr(found, "dp_shard_dim"):
                return found
        model = getattr(model, "module", None)
        seen += 1
    return None


def dist_index_grids(
    index: Any, *, world_size: int, ep_rank: int | None = None, ep_size: int | None = None
) -> Grids:
    """Returns the grids of this rank from Megatron-FSDP's own meshes.

    | axis | dim of the mesh |
    |---|---|
    | dp_replicate, dp_shard, tp | `dp_outer_dim`, `dp_shard_dim`, `tp_dim` of the device mesh |
    | edp_replicate, edp_shard, etp | the same of the expert mesh, which has no expert axis |
    | ep | `ep_rank` and `ep_size`, where the expert mesh is not the whole world |

    Args:
        index: An `FSDPDistributedIndex`.
        world_size: Number of ranks of the job.
        ep_rank: This rank's expert-parallel rank; needs `ep_size`.
        ep_size: Expert-parallel size.

    Raises:
        LayoutError: If the meshes do not span the world, or the expert grid is not known.
    """
    roles = {index.dp_outer_dim: 1, index.dp_shard_dim: 2, index.tp_dim: 3}
    roles.pop(None, None)
    dense = _mesh_places(index.device_mesh, roles)
    rest = world_size // math.prod(size for _, size in dense.values())
    axes = DENSE_AXES
    places = {axes[role]: place for role, place in dense.items()}
    if rest != 1:
        raise LayoutError(
            f"grid: Megatron-FSDP's device mesh has {world_size // rest} ranks of {world_size}. "
            "Pass the model's pg_collection, or grid= with the pipeline axis."
        )
    expert_mesh = index.expt_device_mesh
    inner = dense if expert_mesh is None else _mesh_places(expert_mesh, roles)
    count = world_size // math.prod(size for _, size in inner.values())
    if ep_rank is None or ep_size is None:
        ep_rank, ep_size = 0, 1
    if count != ep_size:
        raise LayoutError(
            f"grid: Megatron-FSDP's expert mesh leaves {count} expert-parallel ranks, but the "
            f"expert-parallel size is {ep_size}. Pass the model's pg_collection, or ep_rank= "
            "and ep_size=."
        )
    names = {1: "edp_replicate", 2: "edp_shard", 3: "etp"}
    found = {names[role]: place for role, place in inner.items()}
    found["ep"] = (ep_rank, ep_size)
    order = ("edp_replicate", "edp_shard", "ep", "etp")
    return Grids(
        _grid(places, tuple(a for a in axes if a in places)),
        _grid(found, tuple(a for a in order if a in found)),
    )


def _mesh_places(mesh: Any, roles: dict[str, int]) -> dict[int, tuple[int, int]]:
    """Returns this rank's index and the size of each dim that has a role."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise LayoutError(f"grid: this rank is not on Megatron-FSDP's mesh {mesh}")
    return {
        roles[name]: (int(index), int(size))
        for name, index, size in zip(mesh_axes(mesh), coordinate, mesh.shape, strict=True)
        if name in roles
    }


def _grid(places: dict[str, tuple[int, int]], axes: tuple[str, ...]) -> Grid:
    return Grid(axes, tuple(places[a][1] for a in axes), tuple(places[a][0] for a in axes))
