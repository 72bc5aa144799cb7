"""Process groups under the names of Megatron's `ProcessGroupCollection`, and FSDP2's meshes."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from config import Parallelism


@dataclass(frozen=True)
class ProcessGroups:
    """This rank's groups; None where the axis is off.

    `tp` and `dp_cp` belong to dense parameters, `ep`, `expt_tp` and `expt_dp` to experts. There
    is no pipeline.
    """

    tp: dist.ProcessGroup | None = None
    dp_cp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None
    ep: dist.ProcessGroup | None = None
    expt_tp: dist.ProcessGroup | None = None
    expt_dp: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True)
class ShardMeshes:
    """The 1-D meshes that FSDP2 shards over; None where a parameter stays whole."""

    dp_shard: DeviceMesh | None = None
    edp_shard: DeviceMesh | None = None


def build_groups(parallelism: Parallelism) -> tuple[ProcessGroups, ShardMeshes]:
    """Makes the groups and meshes of this rank; called by every rank of the world."""
    dense = init_device_mesh(
        "cpu",
        (parallelism.dp_size, parallelism.tp_size),
        mesh_dim_names=("dp_shard", "tp"),
    )
    expert = init_device_mesh(
        "cpu",
        (parallelism.edp_size, parallelism.ep_size, parallelism.etp_size),
        mesh_dim_names=("edp_shard", "ep", "expt_tp"),
    )

    def group(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup | None:
        return mesh.get_group(axis) if mesh[axis].size() > 1 else None

    groups = ProcessGroups(
        tp=group(dense, "tp"),
        dp_cp=group(dense, "dp_shard"),
        ep=group(expert, "ep"),
        expt_tp=group(expert, "expt_tp"),
        expt_dp=group(expert, "edp_shard"),
    )
    meshes = ShardMeshes(
        dp_shard=dense["dp_shard"] if parallelism.dp_size > 1 else None,
        edp_shard=expert["edp_shard"] if parallelism.edp_size > 1 else None,
    )
    return groups, meshes


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks of a group; 1 for an axis that is off."""
    return 1 if group is None else group.size()


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This rank's place in a group; 0 for an axis that is off."""
    return 0 if group is None else group.rank()
