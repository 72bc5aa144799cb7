"""Which process is saving, so that a later one can tell whether it still runs."""

import os
import socket
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """Returns what identifies this process on its machine: host, boot, pid namespace, pid, start."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "boot": _boot(), "pid": pid, "start": _start(pid)}


def has_ended(process: dict[str, Any]) -> bool:
    """Returns whether a process ran on this machine and runs no more; False where nobody can tell."""
    here = this_process()
    if (process.get("host"), process.get("boot")) != (here["host"], here["boot"]) or not _boot():
        return False
    pid = process.get("pid")
    return not isinstance(pid, int) or _start(pid) != process.get("start")


def _boot() -> str:
    """Returns an id of this boot and pid namespace; empty where the system tells none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start(pid: int) -> str:
    """Returns when a process started, in clock ticks since boot; empty if it does not run."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The name in parentheses may hold anything; the start is field 22, the state field 3.
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]
