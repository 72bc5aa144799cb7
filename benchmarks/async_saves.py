"""Asynchronous saves: how long a training job is held up, and when the checkpoint is durable.

| name | is |
|---|---|
| `Step` | a training step of a given length that changes the whole state |
| `AsyncWay` | a way to save in the background |
| `async_rounds` | measures all ways, each with several saves in a row |

A step computes, then waits for the copy of the state that the save needs, then changes the state.
Held up is what the call took before it returned, plus what all steps together took longer than as
many steps without a save, until the checkpoint is durable. It stands beside the copy of the same bytes, by all
ranks at once, into page-locked memory (without a GPU: into host memory).
"""

import argparse
import importlib
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from disk import PlainCopy, make_durable
from measure import Outcome, Results, Team
from states import Subject, whole_sums
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from ways import Ours, Own, SafetensorsWriter, Stock, TorchCheckpointing, Way

from shardplan.planner import PinnedStager

STEPS = 3  # at least, while a save runs
USUAL = 8  # before, after as many that do not count


class Step:
    """A training step: work of a given length, one all-reduce, and a change of the whole state.

    Args:
        subject: What is trained.
        device: `'cpu'` or `'cuda'`.
        seconds: How long the work takes.
    """

    def __init__(self, subject: Subject, device: str, seconds: float) -> None:
        self._locals = [local for _, local in subject.locals()]
        size = 4096 if device == "cuda" else 256
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._matrix = torch.full((size, size), 1 / size, dtype=dtype, device=device)
        self._flag = torch.zeros(1, device=device)
        self._cuda = device == "cuda"
        self._count = 1
        self._work()
        start = time.perf_counter()
        for _ in range(5):
            self._work()
        self._count = max(1, round(5 * seconds / (time.perf_counter() - start)))

    def _work(self) -> None:
        for _ in range(self._count):
            self._matrix = self._matrix @ self._matrix
        self._sync()

    def _sync(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def run(self, ready: Callable[[], Any], busy: bool) -> bool:
        """Makes one step; returns whether any rank is still busy.

        Args:
            ready: Gives a context in which the state may be changed, once it may be.
            busy: Whether this rank's save is still running.
        """
        self._work()
        self._flag.fill_(float(busy))
        dist.all_reduce(self._flag)
        with ready():
            for local in self._locals:
                local.add_(1)
            self._sync()
        return bool(self._flag.item())


class Started(NamedTuple):
    """A save that runs.

    Attributes:
        ready: Gives a context in which the state may be changed, once it may be.
        done: Completes when the checkpoint is written.
    """

    ready: Callable[[], Any]
    done: Future[Any]


class AsyncWay:
    """A way to save in the background, with torch's or another stager.

    Args:
        name: Shown in tables.
        way: The same way, synchronous; it loads what was saved.
        arguments: Returns the arguments for `dcp.async_save` but for state and group.
        stager: The stager, if it is not torch's default.
        ahead: Whether the stager is prepared beside training, before the first save.
    """

    def __init__(
        self,
        name: str,
        way: Way,
        arguments: Callable[[Subject, Path], dict[str, Any]],
        stager: Any = None,
        ahead: bool = False,
    ) -> None:
        self.name = name
        self.way = way
        self._arguments = arguments
        self._stager = stager
        self._ahead = ahead

    def prepare(self, subject: Subject, step: "Step") -> None:
        """Prepares the first save beside training, if the way does."""
        if self._ahead:
            with ThreadPoolExecutor(1) as pool:
                preparing = pool.submit(self._stager.prepare, subject.state)
                busy = True
                while busy:
                    busy = step.run(nullcontext, not preparing.done())
                preparing.result()

    def start(self, subject: Subject, path: Path, group: Any) -> Started:
        """Starts a save; all ranks call it."""
        given = self._arguments(subject, path)
        if self._stager is not None:
            given["async_stager"] = self._stager
        found = dcp.async_save(subject.state, process_group=group, **given)
        if isinstance(found, Future):
            return Started(nullcontext, found)
        staged = found.staging_completion

        def ready() -> Any:
            staged.result()
            return nullcontext()

        return Started(ready, found.upload_completion)

    def close(self) -> None:
        """Lets go of what is kept between saves."""
        self.way.close()
        if self._stager is not None:
            self._stager.close()


class AsyncTorchCheckpointing(AsyncWay):
    """The library `torch_checkpointing` as it is by default: in another process."""

    def __init__(self, folder: Path) -> None:
        library = importlib.import_module("torch_checkpointing")

        class Background(TorchCheckpointing):
            def config(self) -> Any:
                return library.AsyncCheckpointSaverConfig()

        super().__init__("torch_checkpointing", Background(folder), lambda *_: {})

    def start(self, subject: Subject, path: Path, group: Any) -> Started:
        manager = self.way.manager()  # type: ignore[attr-defined]
        done = manager.save(str(path), subject.state)
        return Started(manager.lock, done)


def async_ways(
    cuda: bool, threads: int, folder: Path, wanted: list[str]
) -> dict[str, Callable[[], AsyncWay]]:
    """Returns makers of all ways; each is made when its turn comes, so that only one holds buffers.

    Args:
        cuda: Whether the state is on a GPU.
        threads: Writing threads of all ways that take a number.
        folder: Where checkpoints will lie.
        wanted: Names to keep; all if empty.
    """

    def stock(subject: Subject, path: Path) -> dict[str, Any]:
        return {"storage_writer": dcp.FileSystemWriter(path, thread_count=threads)}

    def planned(planner: Ours) -> Callable[[Subject, Path], dict[str, Any]]:
        return lambda subject, path: {
            **stock(subject, path),
            "planner": planner.planner(subject),
        }

    def ours() -> AsyncWay:
        planner = Ours(threads)
        return AsyncWay("ours", planner, planned(planner))

    def own(name: str) -> AsyncWay:
        planner = Own(threads=threads)
        return AsyncWay(
            name,
            planner,
            lambda subject, path: {
                "storage_writer": SafetensorsWriter(path, threads=threads),
                "planner": planner.planner(subject),
                "use_collectives": False,
            },
            None if name == "own" else PinnedStager(),
            name == "own-prepared",
        )

    def pinned() -> AsyncWay:
        options = StagingOptions(
            use_pinned_memory=True,
            use_shared_memory=False,
            use_async_staging=True,
            use_non_blocking_copy=True,
        )
        return AsyncWay("stock-pinned", Stock(threads), stock, DefaultStager(options))

    made: dict[str, Callable[[], AsyncWay]] = {
        "own-stager": lambda: own("own-stager"),
        "own-prepared": lambda: own("own-prepared"),
        "own": lambda: own("own"),
        "ours": ours,
        "stock": lambda: AsyncWay("stock", Stock(threads), stock),
        "torch_checkpointing": lambda: AsyncTorchCheckpointing(folder),
    }
    if cuda:
        made["stock-pinned"] = pinned
    return {name: make for name, make in made.items() if not wanted or name in wanted}


def async_rounds(
    results: Results, subject: Subject, team: Team, folder: Path, args: argparse.Namespace
) -> None:
    """Measures every way: several saves in a row, then one load that checks the first of them."""
    group = dist.new_group(backend="gloo")  # training's own messages must not mix with a save's
    step = Step(subject, args.device, args.step)
    copy = PlainCopy(subject.nbytes, args.device)
    copy.seconds()
    steps: list[float] = []

    def train() -> None:
        for _ in range(2 * USUAL):
            start = time.perf_counter()
            step.run(nullcontext, False)
            steps.append(time.perf_counter() - start)

    team.run(train)  # beside what measures a save
    usual = statistics.mean(steps[USUAL:])
    makers = async_ways(args.device == "cuda", args.threads, folder, args.async_ways)
    for name, make in makers.items():
        try:
            way = make()
        except ImportError as error:
            results.add(kind="error", way=name, operation="async save", error=str(error))
            continue
        way.prepare(subject, step)
        for number in range(args.async_saves):
            path = folder / f"async-{number}"
            measured = Async(team, subject, way, path, group, step, usual)
            outcome = team.run(measured.run)
            if outcome.error is None and number == 0:
                outcome.error = measured.check()
            seconds = team.highest(
                measured.call, measured.held, measured.durable, team.run(copy.seconds).seconds
            )
            team.say(f"  async, {way.name}: {outcome.error or f'held {seconds[1]:.3f} s'}")
            if outcome.error is not None:
                results.add(
                    kind="error",
                    way=way.name,
                    operation="async save",
                    error=outcome.error,
                )
            else:
                _add(results, way, number, seconds, outcome, subject, usual, team, args)
            if team.rank == 0:
                shutil.rmtree(path, ignore_errors=True)
            team.barrier()
            if outcome.error is not None:
                break
        with suppress(Exception):  # of a way that has failed
            way.close()


def _add(
    results: Results,
    way: AsyncWay,
    number: int,
    seconds: list[float],
    outcome: Outcome,
    subject: Subject,
    usual: float,
    team: Team,
    args: argparse.Namespace,
) -> None:
    call, held, durable, copy = seconds
    results.add(
        kind="async",
        way=way.name,
        save=number + 1,
        ranks=team.ranks,
        device=args.device,
        sharding=args.sharding,
        rank_bytes=subject.nbytes,
        call_s=call,
        held_s=held,
        durable_s=durable,
        copy_s=copy,
        held_to_copy=held / copy,
        step_s=usual,
        host_bytes=outcome.host_bytes,
        device_bytes=outcome.device_bytes,
    )


class Async:
    """One asynchronous save with training beside it.

    Attributes:
        call: Seconds until the call returned.
        held: Seconds that training was held up, the call included.
        durable: Seconds until all files were durable.
    """

    def __init__(
        self,
        team: Team,
        subject: Subject,
        way: AsyncWay,
        path: Path,
        group: Any,
        step: Step,
        usual: float,
    ) -> None:
        self.call = self.held = self.durable = 0.0
        self._team = team
        self._subject = subject
        self._way = way
        self._path = path
        self._group = group
        self._step = step
        self._usual = usual
        self._sums: dict[str, int] = {}

    def run(self) -> None:
        """Saves while training goes on."""
        self._sums = whole_sums(self._subject)
        self._team.barrier()
        ended: list[float] = []
        start = time.perf_counter()
        started = self._way.start(self._subject, self._path, self._group)
        started.done.add_done_callback(lambda _: ended.append(time.perf_counter()))
        self.call = time.perf_counter() - start
        count = 0
        busy = True
        before = time.perf_counter()
        while busy or count < STEPS:
            busy = self._step.run(started.ready, not started.done.done())
            count += 1
        self.held = self.call + max(0.0, time.perf_counter() - before - count * self._usual)
        started.done.result()
        written = self._team.highest(ended[0] - start)[0]
        sync = time.perf_counter()
        make_durable(self._path, self._team.rank, self._team.ranks)
        self.durable = written + time.perf_counter() - sync

    def check(self) -> str | None:
        """Loads the checkpoint and returns what is wrong with it: later steps must not be in it."""
        self._subject.fill(None)
        self._way.way.load(self._subject, self._path)
        sums = whole_sums(self._subject)
        wrong = [key for key, value in self._sums.items() if sums[key] != value]
        return f"{len(wrong)} tensors are not as they were: {wrong[0]}" if wrong else None
