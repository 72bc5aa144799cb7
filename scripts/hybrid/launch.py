"""Starts the job under torchrun and reads what it reports."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LAUNCHER = HERE.parent / "launch" / "torchrun_local.sh"
GRACE_SECONDS = 40.0
"""torchrun gives its own processes 30 seconds before it kills them."""


class JobFailed(Exception):
    """A run ended without having done its work; the text is the end of its log."""


def run_job(
    processes: int, arguments: list[str], log: Path, timeout: float
) -> Generator[dict[str, Any], None, None]:
    """Runs the job, yielding its events as they come.

    Args:
        processes: Number of ranks.
        arguments: Command line of `train.py`.
        log: File for all that is not an event.
        timeout: Seconds until a run that hangs is ended.

    Raises:
        JobFailed: It exited with a status other than 0, or took too long. Status 1 after a
            comparison that found differences counts as success here: the events tell.
    """
    command = ["bash", str(LAUNCHER), "-n", str(processes), str(HERE / "train.py"), *arguments]
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONWARNINGS": "ignore"}
    different = False
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=file,
            stdin=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,
        )
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            _signal(process, signal.SIGTERM)

        timer = threading.Timer(timeout, expire)
        timer.daemon = True
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                event = _parse(line)
                if event is None:
                    file.write(line)
                    continue
                different = different or bool(event.get("different"))
                yield event
            status = process.wait()
        finally:
            timer.cancel()
            _end(process)
    if expired.is_set():
        raise JobFailed(f"no end after {timeout:.0f} s\n{_tail(log)}")
    if status and not different:
        raise JobFailed(f"exit status {status}\n{_tail(log)}")


def _parse(line: str) -> dict[str, Any] | None:
    if not line.startswith('{"event"'):
        return None
    try:
        event: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return None
    return event


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends torchrun, which ends its ranks; they are in sessions of their own."""
    if process.poll() is not None:
        return
    _signal(process, signal.SIGTERM)
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGKILL)
        process.wait()


def _tail(log: Path, lines: int = 30) -> str:
    """What the first rank that failed says, or else the end of the log."""
    text = log.read_text(errors="replace").splitlines()
    traced = [line for line in text if line.startswith("[rank")]
    first = [line for line in traced if line.split(":")[0] == traced[0].split(":")[0]]
    return "\n".join((first or text)[-lines:])
