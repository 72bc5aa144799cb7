"""The demo: runs the job, resumes it under other configurations, and reports.

Exit status 0 only if every value that was loaded has the bits that were saved, and every resumed
run's losses stay within `LOSS_TOLERANCE` of the uninterrupted run's.

| file | holds |
|---|---|
| `drive`, `runs`, `launch` | this program; the runs it does; how one is started |
| `train` | one run, under torchrun |
| `checkpoint` | the calls of the library under test |
| `reference`, `parts` | the proof's own reader, and its table of what parameters are made of |
| `config`, `groups`, `sharding`, `collectives` | sizes, process groups, FSDP2, differentiable collectives |
| `model`, `gated_delta`, `attention`, `mlp`, `experts`, `dispatcher`, `tensor_parallel` | the model |
| `corpus`, `packing`, `initial`, `optimizer` | data, initial weights, AdamW |
"""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from launch import JobFailed, run_job
from runs import RUNS, Run

LOSS_TOLERANCE = 1e-3
"""Largest difference from the uninterrupted run's loss, in nats per token.

Computed in float32, eight steps on, the difference is 5e-7 (measured). The bound leaves room for one
token whose second and third best experts tie within rounding: sending it to the other one moves the
losses by up to 2e-4. A resume that forgets Adam's moments is off by 4e-2 after one step.
"""

TIMEOUT_SECONDS = 300.0


@dataclass(slots=True)
class Outcome:
    """What a run reported.

    Attributes:
        run: The run.
        losses: Loss of each step, by the number of steps taken.
        start: Steps taken when it was resumed.
        tensors: Global tensors compared after loading.
        values: Their elements.
        different: Names of those that differ in a bit.
        deviation: Largest difference from the uninterrupted losses, in nats per token.
        seconds: Wall time, start of the processes included.
        saved: It wrote the checkpoint that it should.
        error: Why it failed, if it did.
    """

    run: Run
    losses: dict[int, float] = field(default_factory=dict)
    start: int = 0
    tensors: int = 0
    values: int = 0
    different: list[str] = field(default_factory=list)
    deviation: float = 0.0
    seconds: float = 0.0
    saved: bool = False
    error: str | None = None

    def problems(self) -> list[str]:
        """All that is wrong with it, one line each."""
        found = [self.error] if self.error else []
        if self.different:
            shown = ", ".join(self.different[:8])
            found.append(f"{len(self.different)} of {self.tensors} tensors differ: {shown}")
        if not found:
            if self.run.source and not self.tensors:
                found.append("nothing was compared")
            if set(self.losses) != set(range(self.start + 1, self.run.until + 1)):
                found.append(f"steps {sorted(self.losses)} instead of up to {self.run.until}")
            if self.run.save_step and not self.saved:
                found.append("it did not save")
        if not self.deviation <= LOSS_TOLERANCE:
            found.append(f"its loss is off by {self.deviation:.1e}, more than {LOSS_TOLERANCE:.0e}")
        return found

    def take(self, event: dict[str, Any]) -> None:
        """Notes an event of the job."""
        match event["event"]:
            case "step":
                self.losses[event["step"]] = event["loss"]
            case "loaded":
                self.start = event["step"]
                self.tensors, self.values = event["tensors"], event["values"]
                self.different = event["different"]
            case "saved":
                self.saved = True


def drive(folder: Path, console: Console, spoil: bool) -> list[Outcome]:
    """Does all runs, one after the other, with a progress bar."""
    outcomes: list[Outcome] = []
    with Progress(
        TextColumn("[progress.description]{task.description:<44}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("", total=sum(_expected_steps(run) for run in RUNS))
        for run in RUNS:
            progress.update(task, description=_describe(run))
            source = next((each for each in outcomes if each.run.name == run.source), None)
            if source is None or source.saved:
                outcome = _do(run, folder, progress, task, spoil)
            else:
                outcome = Outcome(run, error=f"run {run.source} has not saved")
            baseline = (outcomes or [outcome])[0].losses
            outcome.deviation = max(
                (
                    abs(loss - baseline.get(step, float("inf")))
                    for step, loss in outcome.losses.items()
                ),
                default=0.0,
            )
            outcomes.append(outcome)
            mark = "[red]failed[/red]" if outcome.problems() else "[green]done[/green]"
            progress.console.print(f"{_describe(run)}: {mark} ({outcome.seconds:.1f} s)")
            if run is RUNS[0] and outcome.problems():
                break
    return outcomes


def _do(run: Run, folder: Path, progress: Progress, task: TaskID, spoil: bool) -> Outcome:
    sizes = run.parallelism
    arguments = [f"--until={run.until}"]
    for axis in ("tp", "dp", "ep", "etp"):
        arguments.append(f"--{axis}={getattr(sizes, f'{axis}_size')}")
    if run.source is not None:
        arguments.append(f"--load={folder / run.source}")
        arguments += ["--spoil"] if spoil else []
    if run.save_step is not None:
        arguments += [f"--save={folder / run.name}", f"--save-step={run.save_step}"]

    outcome = Outcome(run)
    started = time.perf_counter()
    log = folder / f"{run.name}.log"
    try:
        # Closed at once, however this ends: the ranks write into the folder that main removes.
        with closing(run_job(sizes.world_size, arguments, log, TIMEOUT_SECONDS)) as events:
            for event in events:
                outcome.take(event)
                progress.advance(task, event["event"] == "step")
    except JobFailed as error:
        outcome.error = str(error)
    outcome.seconds = time.perf_counter() - started
    return outcome


def _expected_steps(run: Run) -> int:
    start = next((other.save_step or 0 for other in RUNS if other.name == run.source), 0)
    return run.steps(start)


def _describe(run: Run) -> str:
    verb = f"resume {run.source} as" if run.source else "train"
    sizes = run.parallelism
    axes = {"TP": sizes.tp_size, "FSDP": sizes.dp_size, "EP": sizes.ep_size, "ETP": sizes.etp_size}
    ways = " ".join(f"{axis}{size}" for axis, size in axes.items() if size > 1)
    return f"{verb} {run.name}: {ways or 'one process'}"


def report(outcomes: list[Outcome]) -> Table:
    """The table at the end."""
    table = Table(
        title="Every loaded value against the saved one, bit by bit",
        caption="EDP: FSDP of the experts. loss: largest distance from run A's, in nats.",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for header in ("run", "from", "ranks", "TP", "FSDP", "EP", "ETP", "EDP"):
        table.add_column(header, justify="right")
    for header in ("tensors", "values", "diff", "loss", "s"):
        table.add_column(header, justify="right")
    for outcome in outcomes:
        run, sizes = outcome.run, outcome.run.parallelism
        axes = (sizes.tp_size, sizes.dp_size, sizes.ep_size, sizes.etp_size, sizes.edp_size)
        compared = ["", "", "", ""]
        if outcome.tensors:
            compared = [
                f"{outcome.tensors:,}",
                f"{outcome.values:,}",
                str(len(outcome.different)),
                f"{outcome.deviation:.0e}",
            ]
        table.add_row(
            run.name,
            f"{run.source}@{outcome.start}" if run.source else "",
            str(sizes.world_size),
            *("-" if size == 1 else str(size) for size in axes),
            *compared,
            f"{outcome.seconds:.0f}",
            style="red" if outcome.problems() else None,
        )
    return table


def main() -> int:
    """Runs the demo.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="demo", description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="leave checkpoints and logs in place")
    parser.add_argument(
        "--spoil", action="store_true", help="flip one bit after each load, to see the proof fail"
    )
    options = parser.parse_args()
    console = Console()
    signal.signal(signal.SIGTERM, _leave)
    folder = Path(tempfile.mkdtemp(prefix="shardplan-demo-"))
    started = time.perf_counter()
    try:
        outcomes = drive(folder, console, options.spoil)
    except KeyboardInterrupt:
        return 130
    finally:
        if options.keep:
            console.print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    console.print(report(outcomes))
    problems = [(outcome, problem) for outcome in outcomes for problem in outcome.problems()]
    for outcome, problem in problems:
        console.print(f"{_describe(outcome.run)}: {problem}", style="red", markup=False)
    unfinished = len(RUNS) - len(outcomes)
    verdict = "nothing differs" if not problems else f"{len(problems)} problems"
    console.print(
        f"{verdict}; loss tolerance {LOSS_TOLERANCE:.0e} nats; "
        f"{time.perf_counter() - started:.0f} s"
        + (f"; {unfinished} runs not started" if unfinished else "")
    )
    return 1 if problems or unfinished else 0


def _leave(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
