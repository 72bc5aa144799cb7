"""Writes the golden checkpoints of this format version, once: `python tests/golden/make.py`.

Each is a checkpoint as `SafetensorsWriter` writes it, beside the values that it must give for ever:
`expected.safetensors` with whole global tensors, `expected.json` with Python values. A version that
has its folder is never written again; a new format version gets a folder of its own.
"""

import json
import secrets
import sys
import threading
from pathlib import Path

import torch
from safetensors.torch import save_file

from shardplan.layouts import (
    BufferDescription,
    Cut,
    DTensorStorage,
    ExpertGrid,
    FSDPFlatBuffer,
    Grids,
)
from shardplan.planner import LayoutAwareSavePlanner, PerRank, SafetensorsWriter
from shardplan.planner.storage.format.header import FORMAT_VERSION

HERE = Path(__file__).parent


def numbers(name, shape, dtype=torch.float32):
    """Values that say which tensor and which element they are."""
    count = torch.Size(shape).numel()
    first = sum(map(ord, name)) % 97
    return (torch.arange(count) + 1000 * first).to(dtype).view(shape)


def save(path, states, planners, **options):
    """Saves one state dict per rank; ranks are threads."""
    options = {"save_id": secrets.token_hex(8), "sync": False, **options}
    errors = []

    def run(rank):
        writer, planner = SafetensorsWriter(path, **options), planners[rank]
        try:
            planner.set_up_planner(states[rank], writer.storage_meta(), rank == 0)
            writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
            plan = writer.prepare_local_plan(planner.create_local_plan())
            plans, metadata = planner.create_global_plan([plan])
            plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
            writer.finish(metadata, [writer.write_data(plan, planner).wait()])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def dense(path):
    """Rows over 2 ranks, columns over 2: four files, and a parameter that all replicate."""
    shapes = {"w": (8, 6), "b": (6,)}
    whole = {f"model.{n}": numbers(n, s) for n, s in shapes.items()}
    whole["model.w"] = whole["model.w"].to(torch.bfloat16)
    rules = [DTensorStorage({"w": (Cut(0, "dp_shard"), Cut(1, "tp"))})]
    states, planners = [], []
    for rank in range(4):
        row, column = divmod(rank, 2)
        w = whole["model.w"][4 * row : 4 * row + 4, 3 * column : 3 * column + 3].clone()
        states.append({"model": {"w": w, "b": whole["model.b"]}})
        grid = Grids.from_sizes(rank, dp_shard=2, tp=2)
        planners.append(LayoutAwareSavePlanner(shapes, grid=grid, layouts=rules))
    save(path, states, planners)
    return whole, {}


def flat(path):
    """Three parameters in one flat buffer over 3 ranks, cut in the middle of rows, with padding."""
    shapes = {"a": (5, 3), "b": (7,), "c": (2, 4)}
    whole = {f"model.{n}": numbers(n, s) for n, s in shapes.items()}
    # Parameters begin at multiples of 4 elements: a at 0, b at 16, c at 24; a rank has 12 elements.
    starts, each = {"a": 0, "b": 16, "c": 24}, 12
    layouts = [FSDPFlatBuffer(buffers=[BufferDescription(shapes, 3, 4)])]
    states, planners = [], []
    for rank in range(3):
        local = {}
        for name, start in starts.items():
            flat = whole[f"model.{name}"].reshape(-1)
            low, high = (max(each * r - start, 0) for r in (rank, rank + 1))
            local[name] = flat[low:high].clone()
        states.append({"model": local})
        grid = Grids.from_sizes(rank, dp_shard=3)
        planners.append(LayoutAwareSavePlanner(shapes, grid=grid, layouts=layouts))
    save(path, states, planners)
    return whole, {}


def experts(path):
    """Four experts over two expert-parallel ranks, each of which names its own from 0."""
    name = "mlp.experts.linear_fc1.weight"
    whole = {f"model.{name}{g}": numbers(f"e{g}", (4, 2)) for g in range(4)}
    states, planners = [], []
    for rank in range(2):
        shapes = {f"{name}{i}": (4, 2) for i in range(2)}
        local = {f"{name}{i}": whole[f"model.{name}{2 * rank + i}"] for i in range(2)}
        states.append({"model": local})
        grid = Grids.from_sizes(rank, dp_shard=2, ep=2)
        own = LayoutAwareSavePlanner(shapes, grid=grid, layouts=[ExpertGrid(num_experts=4)])
        planners.append(own)
    save(path, states, planners)
    return whole, {}


def pipeline(path):
    """Two stages with a layer each, and a value that both have."""
    whole = {f"model.layers.{i}.w": numbers(f"l{i}", (3, 3)) for i in range(2)}
    states, planners = [], []
    for rank in range(2):
        name = f"layers.{rank}.w"
        states.append({"model": {name: whole[f"model.{name}"]}, "step": 7})
        grid = Grids.from_sizes(rank, pp=2)
        planners.append(LayoutAwareSavePlanner({name: (3, 3)}, grid=grid, layouts=()))
    save(path, states, planners)
    return whole, {"step": 7}


def optimizer(path):
    """Adam's state of a sharded parameter: averages, a step, options of a group."""
    whole = {"model.w": numbers("w", (6, 2))}
    whole |= {f"optimizer.state.w.{s}": numbers(s, (6, 2)) for s in ("exp_avg", "exp_avg_sq")}
    whole["optimizer.state.w.step"] = torch.tensor(5.0)
    states, planners = [], []
    for rank in range(2):
        rows = slice(3 * rank, 3 * rank + 3)
        slots = {
            s: whole[f"optimizer.state.w.{s}"][rows].clone() for s in ("exp_avg", "exp_avg_sq")
        }
        slots["step"] = torch.tensor(5.0)
        groups = [{"params": ["w"], "lr": 0.25, "betas": (0.9, 0.99)}]
        states.append(
            {
                "model": {"w": whole["model.w"][rows].clone()},
                "optimizer": {"state": {"w": slots}, "param_groups": groups},
            }
        )
        rules = [DTensorStorage({"w": (Cut(0, "dp_shard"),)})]
        grid = Grids.from_sizes(rank, dp_shard=2)
        planners.append(LayoutAwareSavePlanner({"w": (6, 2)}, grid=grid, layouts=rules))
    save(path, states, planners)
    return whole, {"optimizer.param_groups.0.lr": 0.25}


def python_values(path):
    """Plain data of several kinds, one value per rank, and one that only the second rank holds."""
    values = {"text": "ü", "none": None, "many": [1, 2.5, True], "bytes": "x"}
    states, planners = [], []
    for rank in range(2):
        state = {"values": {**values, "tuple": (1, "a")}, "rng": PerRank(f"rank {rank}")}
        if rank:
            state["second"] = {"only": 11}
        states.append(state)
        grid = Grids.from_sizes(rank, dp_replicate=2)
        planners.append(LayoutAwareSavePlanner(grid=grid))
    save(path, states, planners)
    plain = {f"values.{key}": value for key, value in values.items()}
    return {}, {**plain, "rng.rank_0": "rank 0", "rng.rank_1": "rank 1", "second.only": 11}


def replicas(path):
    """One tensor that three replicas cut among them, and small ones that they deal."""
    shapes = {"large": (192, 128), **{f"small{i}": (i + 1,) for i in range(5)}}
    whole = {f"model.{n}": numbers(n, s) for n, s in shapes.items()}
    states = [{"model": {n: whole[f"model.{n}"] for n in shapes}} for _ in range(3)]
    grids = [Grids.from_sizes(rank, dp_replicate=3) for rank in range(3)]
    planners = [LayoutAwareSavePlanner(shapes, grid=grid, layouts=()) for grid in grids]
    save(path, states, planners)
    return whole, {}


def tied(path):
    """One memory under two keys."""
    one = numbers("tied", (4, 4))
    shapes = {"embedding.weight": (4, 4), "output.weight": (4, 4)}
    own = LayoutAwareSavePlanner(shapes, grid=Grids.from_sizes(0), layouts=())
    save(path, [{"model": dict.fromkeys(shapes, one)}], [own])
    return {f"model.{name}": one for name in shapes}, {}


CASES = (dense, flat, experts, pipeline, optimizer, python_values, replicas, tied)


def main():
    folder = HERE / f"v{FORMAT_VERSION}"
    if folder.exists():
        sys.exit(
            f"{folder}: the golden checkpoints of this version are written, and stay as they are"
        )
    for case in CASES:
        path = folder / case.__name__
        tensors, values = case(path / "checkpoint")
        (path / "expected.json").write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
        save_file({key: t.clone() for key, t in tensors.items()}, path / "expected.safetensors")
        print(path)


if __name__ == "__main__":
    main()
