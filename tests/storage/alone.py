"""All ranks in one process, none of which learns anything of another: DCP's steps without collectives."""

import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardplan.planner.storage import SafetensorsReader, SafetensorsWriter


def save(
    path: Path,
    states: Sequence[dict[str, Any]],
    planners: Sequence[Any],
    make_writer: Callable[..., Any] = SafetensorsWriter,
    **options: Any,
) -> list[Exception | None]:
    """Saves one state dict per rank; returns each rank's error."""
    errors: list[Exception | None] = [None] * len(states)
    # The ranks are threads without a process group, so they are told which save it is.
    options = {"sync": False, "timeout": 20.0, "save_id": secrets.token_hex(8), **options}

    def run(rank: int) -> None:
        writer = make_writer(path, **options)
        try:
            drive(rank, states[rank], writer, planners[rank])
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def drive(rank: int, state: dict[str, Any], writer: Any, planner: Any) -> None:
    """DCP's steps of a save without collectives, as a trainer may drive them itself."""
    meta = writer.storage_meta()
    planner.set_up_planner(state_dict=state, storage_meta=meta, is_coordinator=rank == 0)
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    plan = writer.prepare_global_plan(plans)[0]
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])


def saved(
    path: Path, states: Sequence[dict[str, Any]], planners: Sequence[Any], **options: Any
) -> None:
    """Saves one state dict per rank and raises the first rank's error, if there is one."""
    for error in save(path, states, planners, **options):
        if error is not None:
            raise error


def load(
    path: Path, states: Sequence[dict[str, Any]], planners: Sequence[Any], **options: Any
) -> list[SafetensorsReader]:
    """Loads one state dict per rank, in place; returns the readers."""
    readers = []
    for rank, (state, planner) in enumerate(zip(states, planners, strict=True)):
        reader = SafetensorsReader(path, **options)
        readers.append(reader)
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0, rank=rank, use_collectives=True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        plan = reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
        reader.read_data(planner.finish_plan(plan), planner).wait()
    return readers
