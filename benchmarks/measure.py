"""What every benchmark shares: the machine it ran on, result lines, tables.

| name | does |
|---|---|
| `Results` | collects result lines, prints them as a table, appends them to a file |
| `cpu_seconds` | median processor time of a call, which other processes on the machine do not change |
"""

import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
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
    return {
        "cpu": name or platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30),
        "gpus": gpus,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def cpu_seconds(call: Callable[[], Any], rounds: int = 3) -> float:
    """Returns the median processor time of a call, in seconds."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times)


class Results:
    """Result lines of one benchmark run.

    Args:
        name: Name of the benchmark, and of its result file.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> None:
        """Adds a result line."""
        self.rows.append(row)

    def table(self, title: str, columns: dict[str, str], **only: Any) -> None:
        """Prints the lines that have the given values as a table.

        Args:
            title: Heading.
            columns: Heading of each column, by the name of its value.
            **only: Values that a line must have to be shown.
        """
        table = Table(title=title, title_justify="left")
        for heading in columns.values():
            table.add_column(heading, justify="right")
        for row in self.rows:
            if all(row.get(key) == value for key, value in only.items()):
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
            "command": shlex.join(
                ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
            ),
            "hardware": hardware(),
        }
        with path.open("a") as stream:
            for row in self.rows:
                stream.write(json.dumps({**facts, **row}) + "\n")


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
