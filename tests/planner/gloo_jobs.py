"""What real ranks do in `test_gloo`: the hybrid model as live modules under FSDP2, saved and loaded."""

import gc
import os
import socket
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hybrid
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hybrid import Config
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardplan.planner import LayoutAwareLoadPlanner, LayoutAwareSavePlanner

TP_DIMS = {
    "word_embeddings.weight": 0,
    "in_proj.weight": 0,
    "linear_qkv.weight": 0,
    "linear_fc1.weight": 0,
    "linear_proj.weight": 1,
    "linear_fc2.weight": 1,
}


def live_model(config: Config) -> torch.nn.Module:
    """The rank's model, marked as Megatron marks it, sharded by FSDP2 as the config says."""
    rank = dist.get_rank()
    root = torch.nn.Module()
    marks = {}
    for name, tensor in hybrid.local_tensors(config, rank, 0).items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        module.register_parameter(last, torch.nn.Parameter(tensor.clone()))
        if path[-1] == "linear_fc1":
            module.gated_linear_unit = True
        elif path[-1] == "word_embeddings":
            module.vocab_size = hybrid.VOCABULARY
        elif path[-1] == "in_proj":
            parent = root.get_submodule(".".join(path[:-1]))
            parent.in_proj_split_names = list(hybrid.GDN_ROWS)
            parent.in_proj_split_sections = [n // config.tp for n in hybrid.GDN_ROWS.values()]
        tail = f"{path[-1]}.{last.rstrip('0123456789')}"
        dim = TP_DIMS.get(tail) if last != "gate" else (2 if path[-1] == "experts" else 1)
        if dim is not None:
            marks[name] = {"tensor_model_parallel": True, "partition_dim": dim}
    dense = init_device_mesh(
        "cpu", (config.rep, config.dp, config.tp), mesh_dim_names=("dp_replicate", "dp_shard", "tp")
    )
    expert = init_device_mesh(
        "cpu",
        (config.rep, config.edp, config.ep, config.etp),
        mesh_dim_names=("dp_replicate", "edp_shard", "ep", "etp"),
    )
    outer = ("dp_replicate",) if config.rep > 1 else ()
    experts = [m for n, m in root.named_modules() if n.endswith(".experts")]
    of_experts = {p for module in experts for p in module.parameters()}
    if config.storage == "cuts":
        for module in experts:
            fully_shard(module, mesh=expert[(*outer, "edp_shard")])
        fully_shard(root, mesh=dense[(*outer, "dp_shard")], ignored_params=of_experts)
    for name, parameter in root.named_parameters():
        for mark, value in marks.get(name, {}).items():
            setattr(parameter, mark, value)
    root.pg_collection = SimpleNamespace(
        tp=dense.get_group("tp"),
        dp_cp=dense["dp_shard"].get_group(),
        ep=expert.get_group("ep"),
        expt_tp=expert.get_group("etp"),
        expt_dp=expert["edp_shard"].get_group(),
    )
    if config.rep > 1:
        from shardplan.layouts import Grids

        root.pg_collection = None
        root.grids = Grids.from_mesh(dense, expert)
    return root


def planner(kind: Any, model: torch.nn.Module, **options: Any) -> Any:
    return kind(model, grid=getattr(model, "grids", None), **options)


def like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor that is placed as a parameter is, with another local part."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def state_dict(config: Config, model: torch.nn.Module, blank: bool, add: float = 0.0) -> Any:
    """Model and Adam state of the rank, right (plus a number) or blank."""
    rank = dist.get_rank()

    def tensors(slot: str) -> dict[str, torch.Tensor]:
        found = hybrid.rank_chunks(config, rank, slot)[0]
        parameters = dict(model.named_parameters())
        return {
            name: like(parameters[name], torch.full_like(t, hybrid.BLANK) if blank else t + add)
            for name, t in found.items()
        }

    slots = {slot: tensors(slot) for slot in hybrid.SLOTS}
    weights = tensors("")
    state = {}
    for name in weights:
        step = hybrid.step_of(hybrid.step_name(config, rank, 0, name)) + add
        state[name] = {slot: values[name] for slot, values in slots.items()}
        state[name]["step"] = torch.tensor(hybrid.BLANK if blank else step)
    rate = -1.0 if blank else 0.5 + add
    return {
        "model": weights,
        "optimizer": {"state": state, "param_groups": [{"lr": rate, "params": list(weights)}]},
        "iteration": -1 if blank else 3,
    }


def wrong(config: Config, model: torch.nn.Module, state: Any, add: float = 0.0) -> list[str]:
    """What differs from what the rank must hold; padding rows are zero after a load."""
    expected = state_dict(config, model, False)

    def compare(expected: Any, actual: Any, path: str) -> list[str]:
        if isinstance(expected, dict):
            if list(expected) != list(actual):
                return [f"{path}: keys {list(actual)}"]
            return [f for k in expected for f in compare(expected[k], actual[k], f"{path}.{k}")]
        if isinstance(expected, list) and expected and isinstance(expected[0], dict):
            pairs = zip(expected, actual, strict=True)
            return [f for i, (e, a) in enumerate(pairs) for f in compare(e, a, f"{path}.{i}")]
        if isinstance(expected, torch.Tensor):
            local = [t.to_local() if isinstance(t, DTensor) else t for t in (expected, actual)]
            padding = local[0] == hybrid.SAVED_PADDING
            right = torch.where(padding, 0.0, local[0] + add)
            return [] if torch.equal(right, local[1]) else [f"{path}: {local[1]}, not {right}"]
        right = expected + add if path.endswith(".lr") else expected
        return [] if right == actual else [f"{path}: {actual}, not {right}"]

    return compare(expected, state, "")


# Jobs ---------------------------------------------------------------------------------------------


def save(config: Config, path: str) -> list[str]:
    """Saves; returns the object collectives that were made on this rank."""
    model = live_model(config)
    state = state_dict(config, model, blank=False)
    saver = planner(LayoutAwareSavePlanner, model)
    names: list[str] = []
    originals = {}
    for name in (
        "gather_object",
        "scatter_object_list",
        "broadcast_object_list",
        "all_gather_object",
    ):
        originals[name] = getattr(dist, name)

        def record(*args: Any, _name: str = name, **kwargs: Any) -> Any:
            names.append(_name)
            return originals[_name](*args, **kwargs)

        setattr(dist, name, record)
    try:
        dcp.save(state, checkpoint_id=path, planner=saver)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    return names


def load(config: Config, path: str) -> tuple[list[str], list[str], list[str]]:
    """Loads into a blank model; returns what is wrong, missing and unexpected."""
    model = live_model(config)
    state = state_dict(config, model, blank=True)
    loader = planner(LayoutAwareLoadPlanner, model)
    dcp.load(state, checkpoint_id=path, planner=loader)
    return wrong(config, model, state), loader.report.missing, loader.report.unexpected


def save_twice_and_let_go(config: Config, path: str) -> tuple[int, int, list[str]]:
    """Saves twice with one planner and new tensors; returns tensors alive, plans made, faults."""
    import shardplan.planner.save as module

    made = []
    original = module.write_plan

    def counting(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return original(*args, **kwargs)

    module.write_plan = counting  # type: ignore[assignment]
    try:
        model = live_model(config)
        saver = planner(LayoutAwareSavePlanner, model)
        watched = []
        for add in (0.0, 0.25):
            state = state_dict(config, model, blank=False, add=add)
            slots = state["optimizer"]["state"].values()
            tensors = [*state["model"].values(), *(t for slot in slots for t in slot.values())]
            watched += map(weakref.ref, tensors)
            del tensors, slots
            dcp.save(state, checkpoint_id=f"{path}/{add}", planner=saver)
            del state
    finally:
        module.write_plan = original
    gc.collect()
    alive = sum(reference() is not None for reference in watched)
    blank = state_dict(config, model, blank=True)
    loader = planner(LayoutAwareLoadPlanner, model)
    dcp.load(blank, checkpoint_id=f"{path}/0.25", planner=loader)
    faults = wrong(config, model, blank, add=0.25)
    held = [weakref.ref(t) for t in blank["model"].values()]
    del blank
    gc.collect()
    alive += sum(reference() is not None for reference in held)
    return alive, len(made), faults


def save_async(config: Config, path: str, process: bool) -> list[str]:
    """Saves by `async_save`, overwrites the tensors while it runs, loads; returns what is wrong."""
    if process:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        ports = [0]
        if dist.get_rank() == 0:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                ports = [free.getsockname()[1]]
        dist.broadcast_object_list(ports)
        os.environ["MASTER_PORT"] = str(ports[0])
    kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
    model = live_model(config)
    state = state_dict(config, model, blank=False)
    saver = planner(LayoutAwareSavePlanner, model)
    future = dcp.async_save(state, checkpoint_id=path, planner=saver, async_checkpointer_type=kind)
    for tensor in state["model"].values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(-3)
    future.result(timeout=60)
    dist.barrier()
    blank = state_dict(config, model, blank=True)
    dcp.load(blank, checkpoint_id=path, planner=planner(LayoutAwareLoadPlanner, model))
    return wrong(config, model, blank)


def disagree(config: Config, path: str) -> tuple[str, list[str]]:
    """Saves with a planner of another model on the last rank; returns the error and the files."""
    model = live_model(config)
    state = state_dict(config, model, blank=False)
    last = dist.get_rank() == dist.get_world_size() - 1
    if last:
        for module in model.modules():
            module.gated_linear_unit = False
    try:
        dcp.save(state, checkpoint_id=path, planner=planner(LayoutAwareSavePlanner, model))
        text = ""
    except BaseException as error:  # DCP's own exception is no Exception
        text = str(error)
    dist.barrier()
    return text, [file.name for file in Path(path).rglob("*") if file.is_file()]


def different_keys(config: Config, path: str) -> tuple[list[str], list[str]]:
    """Ranks with other keys in another order save and load: nothing waits for anything."""
    rank = dist.get_rank()
    model = live_model(config)
    state = state_dict(config, model, blank=False)
    slots = state["optimizer"]["state"]
    if rank % 2:  # torch's Adam makes no state where the local shard is empty
        slots = {name: slots[name] for name in reversed(slots)}
    empty = [
        n for n, t in state["model"].items() if isinstance(t, DTensor) and not t.to_local().numel()
    ]
    state["optimizer"]["state"] = {n: v for n, v in slots.items() if n not in empty}
    dcp.save(state, checkpoint_id=path, planner=planner(LayoutAwareSavePlanner, model))
    blank = state_dict(config, model, blank=True)
    blank["optimizer"]["state"] = {
        n: blank["optimizer"]["state"][n] for n in state["optimizer"]["state"]
    }
    dcp.load(blank, checkpoint_id=path, planner=planner(LayoutAwareLoadPlanner, model))
    whole = state_dict(config, model, blank=False)
    for name in whole["optimizer"]["state"].keys() - blank["optimizer"]["state"].keys():
        blank["optimizer"]["state"][name] = whole["optimizer"]["state"][name]
    blank["optimizer"]["state"] = {n: blank["optimizer"]["state"][n] for n in whole["model"]}
    return empty, wrong(config, model, blank)
