"""What ranks send each other for one save: collectives, bytes, time; and Megatron-FSDP's own look-up.

    scripts/launch/torchrun_local.sh -n 4 benchmarks/bench_messages.py --out FILE

On real ranks, with gloo. The state is small, so that planning and metadata are what takes time.
Collectives are those that reach c10d; bytes are of the tensors that the busiest rank hands over.
Each way saves three times: the first save plans, the later ones may reuse the plan.
"""

import argparse
import importlib
import math
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from counting import Collectives
from measure import Results, Team, versions
from states import Sharding, Sizes, Subject, build
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardplan.planner import LayoutAwareSavePlanner, SafetensorsWriter

SAVES = 3


def saves(subject: Subject) -> dict[str, Callable[[Path], None]]:
    """Returns what each way does to save; a planner is kept where that is what it is for."""
    ours = LayoutAwareSavePlanner(subject.model)

    def stock(path: Path, **options: Any) -> None:
        dcp.save(
            subject.state,
            storage_writer=dcp.FileSystemWriter(path, sync_files=False),
            planner=DefaultSavePlanner(**options),
        )

    def with_stock_storage(path: Path) -> None:
        dcp.save(
            subject.state,
            storage_writer=dcp.FileSystemWriter(path, sync_files=False),
            planner=ours,
        )

    def own(path: Path, use_collectives: bool) -> None:
        dcp.save(
            subject.state,
            storage_writer=SafetensorsWriter(path, sync=False),
            planner=ours,
            use_collectives=use_collectives,
        )

    return {
        "stock": stock,
        "stock, cached plan": lambda path: stock(path, enable_plan_caching=True),
        "ours": with_stock_storage,
        "own-collectives": lambda path: own(path, True),
        "own": lambda path: own(path, False),
    }


def count(results: Results, team: Team, folder: Path, parameters: int) -> None:
    """Counts what each way sends."""
    sizes = Sizes(64, 2, vocabulary=64, small=max(0, parameters - 25))
    subject = build(sizes, Sharding.of("fsdp"), "cpu", seed=1)
    with Collectives() as overhead:  # team.run itself meets
        team.run(lambda: None)
    for name, save in saves(subject).items():
        for number in range(SAVES):
            path = folder / f"{name}-{number}"
            with Collectives() as counted:
                start = time.process_time()
                outcome = team.run(lambda: save(path))  # noqa: B023
                cpu = time.process_time() - start
            calls, nbytes = counted.count - overhead.count, counted.nbytes - overhead.nbytes
            highest = team.highest(calls, nbytes, cpu)
            if outcome.error:
                results.add(kind="error", way=name, error=outcome.error)
                break
            results.add(
                kind="messages",
                way=name,
                save=number + 1,
                ranks=team.ranks,
                parameters=len(subject.state["model"]),
                collectives=int(highest[0]),
                message_bytes=int(highest[1]),
                seconds=outcome.seconds,
                cpu_s=highest[2],
            )
            team.barrier()
            if team.rank == 0:
                shutil.rmtree(path, ignore_errors=True)


def megatron(results: Results, team: Team, count: int = 50) -> None:
    """Times Megatron-FSDP's look-up of where peers' shards lie, for each tensor, if it is here."""
    try:
        module = importlib.import_module("megatron_fsdp.uneven_dtensor")
        look_up = module.update_uneven_dtensor_chunk_metadata
    except (ImportError, AttributeError) as error:
        results.add(kind="error", way="megatron-fsdp", error=f"{type(error).__name__}: {error}")
        return
    mesh = init_device_mesh("cpu", (team.ranks,), mesh_dim_names=("dp_shard",))
    tensors = [
        DTensor.from_local(torch.zeros(4, 8), mesh, [Shard(0)], run_check=False)
        for _ in range(count)
    ]
    rounds = []
    for _ in range(3):
        outcome = team.run(lambda: [look_up(tensor) for tensor in tensors])
        if outcome.error:
            results.add(kind="error", way="megatron-fsdp", error=outcome.error)
            return
        rounds.append(outcome.seconds / count)
    results.add(
        kind="megatron",
        way="megatron-fsdp",
        ranks=team.ranks,
        seconds_per_tensor=statistics.median(rounds),
        at_20_000_tensors_s=math.ceil(20_000 * statistics.median(rounds)),
    )


def main() -> None:
    """Runs the benchmark as the command line says."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parameters", type=int, default=200)
    parser.add_argument("--dir", type=Path, help="where checkpoints go; default: TMPDIR")
    parser.add_argument("--out", type=Path, help="JSON lines file to append results to")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit("run it with torchrun: see benchmarks/README.md")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    team = Team(patience=150)
    name: list[str] = [""]
    if team.rank == 0:
        name = [tempfile.mkdtemp(prefix="shardplan-bench-", dir=args.dir)]
    dist.broadcast_object_list(name)
    results = Results("messages", versions=versions("megatron-fsdp"))
    try:
        count(results, team, Path(name[0]), args.parameters)
        megatron(results, team)
        team.barrier()
    finally:
        if team.rank == 0:
            shutil.rmtree(name[0], ignore_errors=True)
    if team.rank == 0:
        columns = {
            "way": "way",
            "save": "save",
            "ranks": "ranks",
            "parameters": "parameters",
            "collectives": "collectives",
            "message_bytes": "bytes, busiest rank",
            "seconds": "seconds",
            "cpu_s": "CPU seconds",
        }
        results.table("What one save sends", columns, kind="messages")
        columns = {"ranks": "ranks", "seconds_per_tensor": "seconds for each tensor"}
        results.table("Megatron-FSDP's look-up", columns, kind="megatron")
        results.write(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
