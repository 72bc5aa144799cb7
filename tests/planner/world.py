"""All ranks of a job in one process: DCP's own steps in order, messages pickled, no process group."""

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from shardplan.planner import LayoutAwareLoadPlanner, LayoutAwareSavePlanner


def sent(value: Any) -> Any:
    """What arrives of a value that DCP sends."""
    return pickle.loads(pickle.dumps(value))


def save(
    path: Path,
    states: Sequence[dict[str, Any]],
    planners: Sequence[LayoutAwareSavePlanner],
    make_writer: Callable[[Path], Any] = lambda path: dcp.FileSystemWriter(path, sync_files=False),
) -> Metadata:
    """Saves one state dict per rank the way `dcp.save` does on as many processes."""
    writers = [make_writer(path) for _ in states]
    plans = []
    for rank, (state, planner, writer) in enumerate(zip(states, planners, writers, strict=True)):
        planner.set_up_planner(
            state_dict=state, storage_meta=writer.storage_meta(), is_coordinator=rank == 0
        )
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        plans.append(sent(writer.prepare_local_plan(planner.create_local_plan())))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = []
    for plan, planner, writer in zip(plans, planners, writers, strict=True):
        final = planner.finish_plan(sent(plan))
        results.append(writer.write_data(final, planner).wait())
    writers[0].finish(metadata, results)
    return metadata


def load(
    path: Path,
    states: Sequence[dict[str, Any]],
    planners: Sequence[LayoutAwareLoadPlanner],
    make_reader: Callable[[Path], Any] = dcp.FileSystemReader,
) -> None:
    """Loads one state dict per rank, in place, the way `dcp.load` does on as many processes."""
    readers = [make_reader(path) for _ in states]
    plans = []
    for rank, (state, planner, reader) in enumerate(zip(states, planners, readers, strict=True)):
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0, rank=rank, use_collectives=True)
        plans.append(sent(reader.prepare_local_plan(planner.create_local_plan())))
    plans = readers[0].prepare_global_plan(planners[0].create_global_plan(plans))
    for plan, planner, reader in zip(plans, planners, readers, strict=True):
        reader.read_data(planner.finish_plan(sent(plan)), planner).wait()
