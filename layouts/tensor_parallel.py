"""Tensor-parallel columns and rows: a dim of the parameter is sharded over `tp` or `etp`."""

from collections.abc import Mapping

from .grid import mesh_axes
from .provider import Level, ParamInfo, matcher
from .stages import Shard, Stage

_MODES = {"column": 0, "row": 1}


class TensorParallel:
    """Places tensor-parallel shards.

    | form | reads |
    |---|---|
    | `TensorParallel()` | the parameter's `_tensor_parallel_mode` (`column` dim 0, `row` dim 1), the placement that a DTensor had before Megatron-FSDP took it, else `tensor_model_parallel` and `partition_dim`, whatever other mode it has |
    | `TensorParallel({pattern: dim})` | the patterns, and the live marks where none matches |

    Experts are sharded over their own axis `etp`. A DTensor whose mesh has the tensor-parallel
    axis places itself and is left alone. What is not sharded is a replica and is written once.

    Args:
        dims: Dim that is sharded, for each pattern of names; None for a replicated parameter.

    Source: megatron_fsdp/utils.py, get_mcore_tensor_parallel_partition_dim.
    """

    name = "tensor-parallel"
    level = Level.PARALLEL

    def __init__(self, dims: Mapping[str, int | None] | None = None) -> None:
        self._rules = [(matcher([pattern]), dim) for pattern, dim in (dims or {}).items()]

    def dim(self, param: ParamInfo) -> int | None:
        """Returns the sharded dim of a parameter, None if it is replicated."""
        for matches, dim in self._rules:
            if matches(param.fqn):
                return dim
        if param.param is None:
            return None
        # A mode is guessed by the module's class: Mamba's gated norm is "replicated" and yet marked
        # as sharded, and the mark is right.
        mode = _MODES.get(param.attribute("_tensor_parallel_mode"))
        if mode is not None:
            return mode
        original = getattr(param.param, "orig_param", None)
        for placement in getattr(original, "placements", ()):
            if not placement.is_replicate():
                return int(placement.dim)
        if param.attribute("tensor_model_parallel", False):
            partition_dim = int(param.attribute("partition_dim", -1))
            return partition_dim if partition_dim >= 0 else None
        return None

    def claims(self, param: ParamInfo) -> bool:
        dim = self.dim(param)
        if dim is None:
            return False
        mesh = getattr(param.param, "device_mesh", None)
        if mesh is not None and getattr(param.param, "orig_param", None) is None:
            axes = {param.grid.resolve(axis) for axis in mesh_axes(mesh)}
            return param.axis("tp", "etp") not in axes
        return True

    def stages(self, param: ParamInfo) -> tuple[Stage, ...]:
        dim = self.dim(param)
        if dim is None or dim >= len(param.local_shape):
            raise param.fail(
                f"it is sharded along dim {dim} but has {len(param.local_shape)} dims "
                f"(shape {param.local_shape})",
                "Mend partition_dim, or pass TensorParallel({name: dim}).",
            )
        return (Shard(dim, param.axis("tp", "etp")),)
