"""Real processes that talk through gloo: started once, given one job after another.

Jobs are functions of `gloo_jobs`, or of the module before the colon in their name; each runs in a process group of its own, of as
many ranks as it needs, so 4 processes serve worlds of 4, 2 and 1.
"""

import contextlib
import datetime
import importlib
import itertools
import os
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = 100.0  # seconds for a job; the test's own timeout is longer


class RankFailure(Exception):
    """A job raised on a rank, or did not come back."""


def _serve(rank: int, pipe: Any) -> None:
    """Runs jobs until the parent closes the pipe."""
    torch.set_num_threads(1)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    while True:
        try:
            name, store, world_size, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            module, _, function = name.rpartition(":")
            job = getattr(importlib.import_module(module or "gloo_jobs"), function)
            os.environ["WORLD_SIZE"] = str(world_size)
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=60),
            )
            try:
                answer = (True, job(*arguments))
            finally:
                dist.destroy_process_group()
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


class Ranks:
    """Processes that wait for jobs."""

    def __init__(self, count: int, folder: Path) -> None:
        context = mp.get_context("spawn")
        self._stores = (str(folder / f"store{i}") for i in itertools.count())
        self._pipes, self._processes = [], []
        for rank in range(count):
            own, other = context.Pipe()
            process = context.Process(target=_serve, args=(rank, other))
            process.start()
            other.close()
            self._pipes.append(own)
            self._processes.append(process)

    def run(self, job: str, world_size: int, *arguments: Any) -> list[Any]:
        """Runs a job on the first ranks and returns what each returned.

        Raises:
            RankFailure: With the traceback of the first rank that raised.
        """
        store = next(self._stores)
        for pipe in self._pipes[:world_size]:
            pipe.send((job, store, world_size, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes[:world_size]):
            if not pipe.poll(PATIENCE):
                self.stop()
                raise RankFailure(f"{job}: rank {rank} of {world_size} did not come back")
            answers.append(pipe.recv())
        faults = [f"rank {r}: {text}" for r, (well, text) in enumerate(answers) if not well]
        if faults:
            raise RankFailure("\n".join(faults))
        return [answer for _, answer in answers]

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def started(count: int) -> Iterator[Ranks]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(count, Path(folder))
        try:
            yield ranks
        finally:
            ranks.stop()
