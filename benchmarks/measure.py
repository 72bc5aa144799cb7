"""What every benchmark shares: the machine it ran on, result lines, tables.

| name | does |
|---|---|
| `Results` | collects result lines, prints them as a table, appends them to a file |
| `cpu_seconds` | median processor time of a call, which other processes on the machine do not change |
| `spread` | median, least and most of several measurements |
| `Team` | the ranks of a run: times and errors of what all of them do together |
"""

import faulthandler
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peak_memory import PeakMemory
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent


def hardware() -> dict[str, Any]:
    """Returns what a result is worth nothing without: processor, memory, devices, versions."""
    name = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {
        "cpu": name or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30),
        "kernel": platform.release(),
        "gpus": gpus,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if gpus:
        facts["cuda"] = torch.version.cuda
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def versions(*names: str) -> dict[str, str]:
    """Returns the versions of those distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def revision() -> str | None:
    """Returns the commit of this checkout, with a + if files differ from it; None without git."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def cpu_seconds(call: Callable[[], Any], rounds: int = 3) -> float:
    """Returns the median processor time of a call, in seconds."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Returns median, least and most of some measurements, and all of them in order."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "rounds": [round(value, 6) for value in values],
    }


@dataclass(slots=True)
class Outcome:
    """What came of a call that all ranks made together.

    Attributes:
        seconds: From the moment when all began until the last one ended.
        host_bytes: Peak of further host memory, of the rank that used most.
        device_bytes: The same on GPUs.
        error: First error of any rank, None if there was none.
    """

    seconds: float = 0.0
    host_bytes: int = 0
    device_bytes: int = 0
    error: str | None = None


class Team:
    """All ranks of a run, or this process if there is only one.

    Args:
        verbose: Whether errors are printed with their traces.
        patience: Seconds that a call may take; then all stacks are printed and the run ends.
    """

    def __init__(self, verbose: bool = False, patience: float = 600) -> None:
        self._patience = patience
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._verbose = verbose

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.highest(0.0)

    def highest(self, *values: float) -> list[float]:
        """Returns the largest of each value over all ranks."""
        if self.ranks == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def sums(self, *values: int) -> list[int]:
        """Returns the sum of each value over all ranks."""
        if self.ranks == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def say(self, text: str) -> None:
        """Prints a line on the first rank."""
        if self.rank == 0:
            print(text, flush=True)

    def run(self, call: Callable[[], Any]) -> Outcome:
        """Makes a call on all ranks at once."""
        error = None
        faulthandler.dump_traceback_later(self._patience, exit=True)
        with PeakMemory() as peak:
            self.barrier()
            start = time.perf_counter()
            try:
                call()
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as failure:  # DCP's CheckpointException is no Exception
                error = f"{type(failure).__name__}: {failure}".splitlines()[0][:300]
                if self._verbose:
                    traceback.print_exc()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        faulthandler.cancel_dump_traceback_later()
        host = peak.host_bytes + peak.pinned_bytes
        highest = self.highest(
            seconds, float(host), float(peak.device_bytes or 0), float(error is not None)
        )
        if highest[3] and error is None:
            error = "failed on another rank"
        if self.ranks > 1 and highest[3]:
            errors: list[str | None] = [None] * self.ranks
            dist.all_gather_object(errors, error)
            error = next((e for e in errors if e and e != "failed on another rank"), error)
        return Outcome(highest[0], int(highest[1]), int(highest[2]), error)


class Results:
    """Result lines of one benchmark run.

    Args:
        name: Name of the benchmark, and of its result file.
        **facts: What every line carries beside the hardware.
    """

    def __init__(self, name: str, **facts: Any) -> None:
        self.name = name
        self.facts = facts
        self.rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> None:
        """Adds a result line."""
        self.rows.append(row)

    def table(self, title: str, columns: dict[str, str], **only: Any) -> None:
        """Prints the lines that have the given values as a table; nothing if there are none.

        Args:
            title: Heading.
            columns: Heading of each column, by the name of its value.
            **only: Values that a line must have to be shown.
        """
        rows = [r for r in self.rows if all(r.get(key) == value for key, value in only.items())]
        if not rows:
            return
        table = Table(title=title, title_justify="left")
        for heading in columns.values():
            table.add_column(heading, justify="right")
        for row in rows:
            table.add_row(*(_text(row.get(column)) for column in columns))
        console = Console(width=None if sys.stdout.isatty() else 110)
        console.print(table)

    def write(self, path: Path | None) -> None:
        """Appends the lines to a JSON lines file, each with command, date and hardware."""
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        facts = {
            "benchmark": self.name,
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "command": _command(),
            "revision": revision(),
            "hardware": hardware(),
            **self.facts,
        }
        with path.open("a") as stream:
            for row in self.rows:
                stream.write(json.dumps({**facts, **row}) + "\n")


def _command() -> str:
    """Returns the command line of this run, without folders of this machine."""
    given = sys.argv[1:]
    for option in ("--out", "--dir"):
        if option in given:
            at = given.index(option)
            given = given[:at] + given[at + 2 :]
    words = [f"benchmarks/{Path(sys.argv[0]).name}", *given]
    processes = os.environ.get("LOCAL_WORLD_SIZE")
    if processes is None:
        return shlex.join(["python", *words])
    nodes = int(os.environ["WORLD_SIZE"]) // int(processes)
    start = ["torchrun", f"--nproc-per-node={processes}"]
    return shlex.join([*start, *([f"--nnodes={nodes}"] if nodes > 1 else []), *words])


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, dict) and "median" in value:
        low, high = _text(value["min"]), _text(value["max"])
        return f"{_text(value['median'])} ({low}–{high})"
    if isinstance(value, float):
        return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
