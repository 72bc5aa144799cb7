"""Flat optimizer shards of Megatron's `DistributedOptimizer` over DDP, as explicit storage.

The model's weights are whole on each data-parallel rank; the optimizer's state is what the rank's
slice of the gradient buffer holds, cut anywhere, also in mid-row. The buffer's own index says
where a parameter lies in its bucket, so any rank's slice follows.

Source: megatron/core/distributed/param_and_grad_buffer.py and
megatron/core/optimizer/distrib_optimizer.py (`_build_model_gbuf_range`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shardplan.layouts import FlatBuffer, FSDPFlatBuffer, LayoutProvider, Level, ParamInfo
from shardplan.layouts.stages import Stage

from .state import chunks_of, inner_optimizers


class DDPShards:
    """Places flat optimizer shards by the gradient buffers of a live DDP model.

    Args:
        places: Offset of each parameter in its bucket, the bucket's length and its number of
            slices, in elements, by the parameter's identity.
    """

    name = "megatron-ddp-shards"
    level = Level.STORAGE

    def __init__(self, places: Mapping[int, tuple[int, int, int]]) -> None:
        self._places = dict(places)

    def claims(self, param: ParamInfo) -> bool:
        return id(param.param) in self._places

    def stages(self, param: ParamInfo) -> tuple[Stage, ...]:
        offset, length, count = self._places[id(param.param)]
        axes: tuple[str, ...] = (param.axis("dp_shard", "edp_shard"),)
        if param.grid.count(axes) != count:
            axes = (param.axis("dp_replicate", "edp_replicate"), *axes)
        if param.grid.count(axes) != count or length % count:
            raise param.fail(
                f"its gradient bucket of {length} elements is cut into {count} slices but {axes} "
                f"has {param.grid.count(axes)} ranks",
                "Pass the pg_collection that the optimizer was given.",
            )
        return (FlatBuffer(param.local_shape, axes, offset, length // count),)


def ddp_shards(model: Any, optimizer: Any) -> tuple[LayoutProvider, ...]:
    """Returns the provider for an optimizer whose state is cut by DDP's gradient buffers.

    Args:
        model: The model, or its virtual pipeline chunks.
        optimizer: A Megatron optimizer, or None.

    Returns:
        One provider, or none if the state is laid out as the parameters are.
    """
    if optimizer is None or not any(
        getattr(part.owner, "model_param_group_index_map", None)
        for part in inner_optimizers(optimizer)
    ):
        return ()
    places: dict[int, tuple[int, int, int]] = {}
    for chunk in chunks_of(model):
        for name in ("buffers", "expert_parallel_buffers"):
            buffers = getattr(chunk, name, ())
            for buffer in () if callable(buffers) else buffers:
                count = int(buffer.data_parallel_world_size)
                for parameter, (start, _, bucket_id) in buffer.param_index_map.items():
                    bucket = buffer.buckets[bucket_id]
                    offset = int(start) - int(bucket.offset)
                    places[id(parameter)] = (offset, int(bucket.grad_data.numel()), count)
    return (DDPShards(places),)


def param_range_shards(
    ranges: Mapping[str, Sequence[tuple[int, int]]], *, axes: tuple[str, ...] | None = None
) -> FSDPFlatBuffer:
    """Returns the provider for flat optimizer shards that are known by number.

    Args:
        ranges: For each pattern of names, `[start, stop)` of the flattened parameter on each
            data-parallel rank, in elements: `param_range_map["param"]` of each rank, and
            `(0, 0)` where a rank has none.
        axes: Axes that the ranks count along; `dp_shard` or `edp_shard` if not given.

    Raises:
        LayoutError: If a range is none; when it is used, if there is not one for each rank.
    """
    return FSDPFlatBuffer(ranges, axes=axes)
