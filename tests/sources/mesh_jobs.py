"""What real ranks do with DTensors on meshes that have only some of them, or whose root has no names."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor, zeros

from shardplan.layouts import DEFAULT_LAYOUTS, ExpertGrid, Grids
from shardplan.planner import (
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    SafetensorsReader,
    SafetensorsWriter,
)


def save(state: dict[str, Any], path: str, storage: str, planner: Any) -> None:
    if storage == "torch":
        dcp.save(state, checkpoint_id=path, planner=planner)
    else:
        apart = {"use_collectives": False} if storage == "own, apart" else {}
        dcp.save(
            state, storage_writer=SafetensorsWriter(path, sync=False), planner=planner, **apart
        )
    dist.barrier()


def load(state: dict[str, Any], path: str, storage: str, planner: Any) -> None:
    reader = {"checkpoint_id": path} if storage == "torch" else {}
    if storage != "torch":
        reader["storage_reader"] = SafetensorsReader(path)
    dcp.load(state, planner=planner, **reader)


def stage(number: int) -> nn.Module:
    """A pipeline stage whose layers have the numbers that they have in the whole model."""
    torch.manual_seed(number)
    module = nn.Module()
    module.layers = nn.ModuleDict({str(number): nn.Linear(4, 6)})
    return module


MESHES = {
    "apart": lambda: [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])][dist.get_rank() // 2],
    "by name": lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))["fsdp"],
    "flattened": lambda: init_device_mesh(
        "cpu", (2, 2, 1), mesh_dim_names=("pp", "dp_shard", "cp")
    )["dp_shard", "cp"]._flatten("dp_shard_cp"),
    "unflattened": lambda: init_device_mesh("cpu", (4,), mesh_dim_names=("world",))._unflatten(
        0, (2, 2), ("pp", "shard")
    )["shard"],
    "names of one's own": lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))["y"],
}


def stages(mesh: str, storage: str, path: str, given: str) -> None:
    """Each rank has the keys of its own stage only, with an optimizer that has stepped."""
    model = stage(dist.get_rank() // 2)
    fully_shard(model, mesh=MESHES[mesh]())
    optimizer = torch.optim.AdamW(model.parameters())
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.ones_like(parameter) * (number + 1)
    optimizer.step()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    slots = {names[id(p)]: dict(optimizer.state[p]) for p in model.parameters()}
    state = {"model": model.state_dict(), "optim": {"state": slots}}
    options: dict[str, Any] = {"model": model} if "model" in given else {}
    if "grid" in given:
        options["grid"] = Grids.from_sizes(dist.get_rank(), pp=2, dp_shard=2)
    wanted = {key: local(value).clone() for key, value in flat(state).items()}
    save(state, path, storage, LayoutAwareSavePlanner(**options))
    for value in flat(state).values():
        local(value).zero_()
    load(state, path, storage, LayoutAwareLoadPlanner(**options))
    assert {
        key for key, value in flat(state).items() if not torch.equal(local(value), wanted[key])
    } == set()


def flat(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, value in state.items():
        inner = flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        found.update(inner)
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def submesh(storage: str, path: str) -> None:
    """A tensor of ranks 0 and 2, which ranks 1 and 3 hold without an element, and one of all ranks."""
    rank = dist.get_rank()
    whole, part = DeviceMesh("cpu", range(4)), DeviceMesh("cpu", [0, 2])
    full = torch.arange(10.0).reshape(5, 2)
    state = {
        "all": distribute_tensor(torch.arange(6.0), whole, [Shard(0)]),
        "some": distribute_tensor(full, part, [Shard(0)])
        if rank in (0, 2)
        else zeros([5, 2], device_mesh=part, placements=[Shard(0)]),
    }
    save(state, path, storage, LayoutAwareSavePlanner())
    found = {"all": torch.zeros(6), "some": torch.zeros(5, 2)}
    load(found, path, storage, LayoutAwareLoadPlanner())
    assert torch.equal(torch.arange(6.0), found["all"]) and torch.equal(full, found["some"])


def one_key(mesh: str, storage: str, path: str, equal: bool) -> None:
    """Both halves of the ranks hold a tensor of one name, with equal values or not."""
    value = 1.0 if equal else 1.0 + dist.get_rank() // 2
    tensor = distribute_tensor(torch.full((4, 2), value), MESHES[mesh](), [Shard(0)])
    planner = LayoutAwareSavePlanner()
    save({"w": tensor}, path, storage, planner)
    found = {"w": torch.zeros(4, 2)}
    load(found, path, storage, LayoutAwareLoadPlanner())
    assert torch.equal(torch.full((4, 2), value), found["w"])


def numbered(mesh: str, path: str) -> None:
    """A raw optimizer state numbers its parameters, each stage from 0."""
    model = stage(dist.get_rank() // 2)
    fully_shard(model, mesh=MESHES[mesh]())
    optimizer = torch.optim.AdamW(model.parameters())
    planner = LayoutAwareSavePlanner(model, optimizer=optimizer)
    save({"optim": optimizer.state_dict()}, path, "torch", planner)


def experts(name: str, path: str, given: str) -> None:
    """Stacked experts over ep and efsdp of one world, the rest over fsdp, under any name."""
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (4,), ("fsdp",))
    sparse = world._unflatten(0, (2, 2), ("efsdp", "ep"))
    full = torch.arange(48.0).reshape(4, 6, 2)
    block = nn.Module()
    block.w1 = nn.Parameter(distribute_tensor(full, sparse["ep"], [Shard(0)]))
    model = nn.Module()
    model.linear = nn.Linear(2, 8)
    model.add_module(name, block)
    fully_shard(block, mesh=sparse["efsdp"], shard_placement_fn=lambda parameter: Shard(1))
    fully_shard(model, mesh=dense["fsdp"])
    options: dict[str, Any] = {"model": model} if "model" in given else {}
    if "grid" in given:
        options["grid"] = Grids.from_sizes(dist.get_rank(), dp_shard=4, ep=2)
    if "layouts" in given:
        others = [p for p in DEFAULT_LAYOUTS if not isinstance(p, ExpertGrid)]
        options["layouts"] = [*others, ExpertGrid(tokens=(name,))]
    save(model.state_dict(), path, "torch", LayoutAwareSavePlanner(**options))
    found = {f"{name}.w1": torch.zeros(4, 6, 2)}
    load(found, path, "torch", LayoutAwareLoadPlanner())
    assert torch.equal(full, found[f"{name}.w1"])
    key = f"{name}.w1"
    state = {key: model.state_dict()[key]}
    wanted = local(state[key]).clone()
    local(state[key]).zero_()
    load(state, path, "torch", LayoutAwareLoadPlanner(**options))
    assert torch.equal(wanted, local(state[key]))


def key_order(storage: str, path: str) -> None:
    """Ranks list the same tensors in another order."""
    mesh = init_device_mesh("cpu", (4,))
    state = {
        key: DTensor.from_local(torch.full((2,), value), mesh, [Shard(0)], run_check=False)
        for key, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))
    }
    state["r"] = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
    if dist.get_rank() % 2:
        state = dict(reversed(state.items()))
    save(state, path, storage, LayoutAwareSavePlanner())
    found = {key: torch.zeros(8) for key in "abc"}
    load(found, path, storage, LayoutAwareLoadPlanner())
    assert [[1.0] * 8, [2.0] * 8, [3.0] * 8] == [found[key].tolist() for key in "abc"]


ORDERS = {
    "1-d, no names": ([0, 1, 2, 3], [3, 2, 1, 0], None, [Shard(0)]),
    "1-d": ([0, 1, 2, 3], [0, 2, 1, 3], ("dp_shard",), [Shard(0)]),
    "2-d": ([[0, 1], [2, 3]], [[0, 2], [1, 3]], ("dp", "tp"), [Shard(0), Shard(1)]),
}


def orders(case: str, storage: str, path: str, given: str) -> None:
    """Two tensors on meshes that differ only in the order of their ranks."""
    first, second, names, placements = ORDERS[case]
    own = torch.full((2, 2), float(dist.get_rank()))
    state = {
        key: DTensor.from_local(
            own.clone(), DeviceMesh("cpu", ranks, mesh_dim_names=names), placements, run_check=False
        )
        for key, ranks in (("t", first), ("u", second))
    }
    options: dict[str, Any] = {}
    if given == "model":
        options["model"] = nn.Module()
        for key, value in state.items():
            options["model"].register_parameter(key, nn.Parameter(value))
    elif given == "grid":
        options["grid"] = Grids.from_sizes(dist.get_rank(), dp_shard=4)
        options["model"] = nn.Module()
        options["model"].u = nn.Parameter(state["u"])
    whole = {}
    for key, ranks in (("t", first), ("u", second)):  # not by full_tensor: groups sort their ranks
        rows = torch.tensor(ranks, dtype=torch.float32).repeat_interleave(2, 0)
        whole[key] = (
            rows[:, None].expand(-1, 2) if rows.dim() == 1 else rows.repeat_interleave(2, 1)
        )
    save(state, path, storage, LayoutAwareSavePlanner(**options))
    found = {key: torch.full_like(value, -1) for key, value in whole.items()}
    load(found, path, storage, LayoutAwareLoadPlanner())
    assert {key for key, value in whole.items() if not torch.equal(value, found[key])} == set()
    for value in state.values():
        local(value).fill_(-1)
    load(state, path, storage, LayoutAwareLoadPlanner(**options))
    assert all(torch.equal(own, local(value)) for value in state.values())
