"""Planning time: one rank's plan beside stock's, and the whole checkpoint's at simulated scale.

    python benchmarks/bench_plan.py                 # prints two tables, under two minutes
    python benchmarks/bench_plan.py --out FILE      # and appends result lines

Times are processor time of one process, so that a busy machine does not change them; ours and
stock's are taken in turns in one run. The process group is torch's fake one: nothing is sent, and
messages are measured by pickling them. Cyclic garbage collection is on, as in a training job.
"""

import argparse
import dataclasses
import gc
import math
import pickle
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import Results, cpu_seconds
from peak_memory import PeakMemory
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.metadata import TensorProperties as Properties
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardplan.layouts import BufferDescription, Cut, DTensorStorage, FSDPFlatBuffer, Grids
from shardplan.planner import LayoutAwareSavePlanner, SafetensorsReader
from shardplan.planner.planning.metadata import checkpoint_metadata
from shardplan.planner.saving.agreement import compare
from shardplan.planner.saving.messages import PlanMessage
from shardplan.planner.storage.format.commit import CHECKPOINT
from shardplan.planner.storage.format.messages import decode_message, encode_message
from shardplan.planner.storage.places.files import files_at
from shardplan.planner.storage.writing.join import join
from shardplan.planner.without_gc import without_gc

RANKS = 8
SHAPES = ((16, 16), (32, 4), (64,), (24, 4, 5))


class Block(torch.nn.Module):
    """Four sharded parameters, of the kinds that a transformer layer has."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        for name, (rows, *rest) in zip("abcd", SHAPES, strict=True):
            local = torch.zeros(rows // RANKS, *rest)
            shard = DTensor.from_local(local, mesh, [Shard(0)])
            self.register_parameter(name, torch.nn.Parameter(shard))


def model(count: int, mesh: DeviceMesh) -> torch.nn.Module:
    """Returns a model with `count` DTensor parameters."""
    root = torch.nn.Module()
    root.layers = torch.nn.ModuleList(Block(mesh) for _ in range(count // len(SHAPES)))
    return root


def local_plans(results: Results, counts: list[int], rounds: int) -> None:
    """Times one rank's plan: reading the model, first plan, unchanged plan, and stock's plan."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp_shard",))
    for count in counts:
        net = model(count, mesh)
        state = {"model": net.state_dict()}
        made: list[LayoutAwareSavePlanner] = []  # the calls below run before the next round

        def read() -> None:
            made[:] = [LayoutAwareSavePlanner(net)]  # noqa: B023

        def plan() -> None:
            made[0].set_up_planner(state)  # noqa: B023
            made[0].create_local_plan()  # noqa: B023

        def stock() -> None:
            planner = DefaultSavePlanner()
            planner.set_up_planner(state)  # noqa: B023
            planner.create_local_plan()

        times: dict[str, list[float]] = {"read": [], "first": [], "again": [], "stock": []}
        for _ in range(rounds):
            for name, call in (("read", read), ("first", plan), ("again", plan), ("stock", stock)):
                times[name].append(cpu_seconds(call, 1))
            gc.collect()
        best = {name: min(values) for name, values in times.items()}
        results.add(
            kind="local",
            parameters=count,
            read_model_s=best["read"],
            first_plan_s=best["first"],
            unchanged_plan_s=best["again"],
            stock_plan_s=best["stock"],
            first_to_stock=(best["read"] + best["first"]) / best["stock"],
            unchanged_to_stock=best["again"] / best["stock"],
        )


def description(count: int, ranks: int, flat: bool) -> tuple[dict[str, tuple[int, ...]], Any]:
    """Returns names and local shapes of a model, and the provider that says how it is cut."""
    scale = ranks
    shapes = {
        f"layers.{i}.{name}": (rows * scale // RANKS, *rest)
        for i in range(count // len(SHAPES))
        for name, (rows, *rest) in zip("abcd", SHAPES, strict=True)
    }
    if flat:
        return shapes, FSDPFlatBuffer(buffers=[BufferDescription(shapes, ranks, alignment=8)])
    return shapes, DTensorStorage({"*": (Cut(0, "dp_shard"),)})


def global_plans(results: Results, counts: list[int], ranks: list[int]) -> None:
    """Times the coordinator: comparing all ranks' messages and writing down the metadata."""
    for count in counts:
        for world in ranks:
            for flat in (False, True):
                _global_plan(results, count, world, flat)


def _global_plan(results: Results, count: int, world: int, flat: bool) -> None:
    shapes, provider = description(count, world, flat)
    grids = Grids.from_sizes(0, dp_shard=world)
    planner = LayoutAwareSavePlanner(shapes, grid=grids, layouts=[provider])
    storage = {
        fqn: torch.zeros(layout.storage.numel(grids.dense))
        for fqn, layout in planner.layouts.items()
    }
    planner.set_up_planner({"model": storage})
    first = planner.create_local_plan().planner_data
    other = dataclasses.replace(first, manifest=None)
    messages = [first] + [
        dataclasses.replace(other, grids=(Grids.from_sizes(rank, dp_shard=world),))
        for rank in range(1, world)
    ]
    start = time.process_time()
    agreement = compare(messages)
    metadata = checkpoint_metadata(agreement.stages)
    seconds = time.process_time() - start
    del agreement, metadata
    gc.collect()
    with PeakMemory() as peak:
        agreement = compare(messages)
        metadata = checkpoint_metadata(agreement.stages)
    chunks = sum(len(m.chunks) for m in metadata.state_dict_metadata.values())
    own = _own_storage(messages)
    results.add(
        kind="global",
        parameters=count,
        ranks=world,
        layout="flat" if flat else "even",
        **own,
        chunks=chunks,
        seconds=seconds,
        message_bytes=len(pickle.dumps(other)),
        first_message_bytes=len(pickle.dumps(first)),
        metadata_bytes=len(pickle.dumps(metadata)),
        host_bytes=peak.host_bytes,
        stock_seconds=_stock_global(shapes, world) if count * world <= 40_000 else None,
    )


def _own_storage(messages: Sequence[PlanMessage]) -> dict[str, Any]:
    """Returns what our own storage's manifest costs: told by a rank, compared and published, read."""
    save, first = "0123456789abcdef", messages[0]
    assert first.manifest is not None
    with tempfile.TemporaryDirectory() as folder, without_gc():
        files = files_at(folder)
        start = time.process_time()
        reports = [encode_message(first, 0)]
        told = time.process_time() - start
        reports += [encode_message(message, rank) for rank, message in enumerate(messages) if rank]
        start = time.process_time()
        decoded = [decode_message("a report", report) for report in reports]
        raw = join(save, decoded, together=False).commit.encode()
        files.put(CHECKPOINT, raw, sync=False)
        committed = time.process_time() - start
        start = time.process_time()
        metadata = SafetensorsReader(folder).read_metadata()
        layouts = first.manifest.chunks[0].layouts
        stored = [metadata.state_dict_metadata[f"model.{fqn}"] for fqn in layouts]
        opened = time.process_time() - start
        assert len(stored) == len(layouts)
        return {
            "report_s": told,
            "commit_s": committed,
            "open_s": opened,
            "report_bytes": len(reports[-1]),
            "manifest_bytes": len(raw),
        }


def growth(results: Results) -> None:
    """Adds how time and metadata grow with the number of ranks: the exponent of a power law."""
    plans = [row for row in results.rows if row["kind"] == "global"]
    for count, layout in dict.fromkeys((r["parameters"], r["layout"]) for r in plans):
        found = sorted(
            ((r["ranks"], r) for r in plans if (r["parameters"], r["layout"]) == (count, layout)),
            key=lambda pair: pair[0],
        )
        (low, first), (high, last) = found[0], found[-1]
        if low == high:
            continue

        def exponent(name: str, a: dict[str, Any] = first, b: dict[str, Any] = last) -> float:
            return math.log(b[name] / a[name]) / math.log(b["ranks"] / a["ranks"])

        results.add(
            kind="growth",
            parameters=count,
            layout=layout,
            from_ranks=low,
            to_ranks=high,
            seconds_exponent=exponent("seconds"),
            metadata_exponent=exponent("metadata_bytes"),
        )


def _stock_global(shapes: dict[str, tuple[int, ...]], world: int) -> float:
    """Returns the time that stock's coordinator takes for even shards, plans unpickled."""
    plans = []
    for rank in range(world):
        items = []
        for fqn, shape in shapes.items():
            rows = shape[0] // world
            offsets = torch.Size((rank * rows, *(0 for _ in shape[1:])))
            chunk = ChunkStorageMetadata(offsets, torch.Size((rows, *shape[1:])))
            data = TensorWriteData(chunk, Properties(dtype=torch.float32), torch.Size(shape))
            index = MetadataIndex(fqn, offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        names = {fqn: ("model", fqn) for fqn in shapes}
        plans.append(pickle.dumps(SavePlan(items, planner_data=names)))
    planner = DefaultSavePlanner()
    return cpu_seconds(lambda: planner.create_global_plan([pickle.loads(p) for p in plans]), 1)


def main() -> None:
    """Runs the benchmark as the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parameters", type=int, nargs="+", default=[1_000, 5_000, 20_000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4_096])
    parser.add_argument("--rounds", type=int, default=3, help="the fastest of so many is shown")
    parser.add_argument("--out", type=Path, help="JSON lines file to append results to")
    args = parser.parse_args()
    dist.init_process_group("fake", rank=RANKS - 1, world_size=RANKS, store=FakeStore())
    results = Results("plan")
    local_plans(results, args.parameters, args.rounds)
    results.table(
        f"One rank of {RANKS}: seconds of processor time",
        {
            "parameters": "parameters",
            "read_model_s": "read model",
            "first_plan_s": "first plan",
            "unchanged_plan_s": "unchanged plan",
            "stock_plan_s": "stock plan",
            "first_to_stock": "(read + first) ÷ stock",
            "unchanged_to_stock": "unchanged ÷ stock",
        },
        kind="local",
    )
    global_plans(
        results, list(dict.fromkeys((args.parameters[-1], args.parameters[0]))), args.ranks
    )
    results.table(
        "The whole checkpoint, on the coordinator: seconds of processor time",
        {
            "parameters": "parameters",
            "ranks": "ranks",
            "layout": "layout",
            "chunks": "chunks",
            "seconds": "ours",
            "stock_seconds": "stock",
            "message_bytes": "bytes from a rank",
            "first_message_bytes": "from a stage's first",
            "metadata_bytes": "metadata bytes",
            "host_bytes": "peak host bytes",
        },
        kind="global",
    )
    results.table(
        "Our own storage, no message sent: seconds of processor time, and bytes",
        {
            "parameters": "parameters",
            "ranks": "ranks",
            "layout": "layout",
            "report_s": "a stage's first rank reports",
            "commit_s": "rank 0 compares all and commits",
            "open_s": "a rank reads all of it",
            "report_bytes": "bytes of another rank's report",
            "manifest_bytes": "bytes of the manifest",
        },
        kind="global",
    )
    growth(results)
    results.table(
        "Growth with the number of ranks: 0 is flat, 1 is linear",
        {
            "parameters": "parameters",
            "layout": "layout",
            "from_ranks": "from ranks",
            "to_ranks": "to ranks",
            "seconds_exponent": "exponent of seconds",
            "metadata_exponent": "of metadata bytes",
        },
        kind="growth",
    )
    results.write(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
