"""Saves a state of a given size in a process of its own and prints how much more memory it took.

python tests/sources/peak_memory.py MIBIBYTES KIND FOLDER
"""

import resource
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from shardplan.planner import LayoutAwareSavePlanner, SafetensorsWriter

MIB = 1 << 20


def resident() -> int:
    """Bytes of memory of this process that are not pages of a file."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


def state(mibibytes: int, kind: str) -> dict[str, torch.Tensor]:
    numel = mibibytes * MIB // 4 // 32
    if kind == "views":
        buffer = torch.ones(32 * numel)
        return {f"w{i}": buffer[i * numel : (i + 1) * numel] for i in range(32)}
    return {f"w{i}": torch.ones(numel) for i in range(32)}


def main() -> None:
    warnings.filterwarnings("ignore")
    mibibytes, kind, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.set_num_threads(1)
    # What the first save of a process imports and allocates is no part of a state.
    dcp.save({"x": torch.ones(4)}, checkpoint_id=folder + "/warm", planner=LayoutAwareSavePlanner())
    held = state(mibibytes, kind)
    writer = SafetensorsWriter(folder + "/own") if kind == "views" else None
    before, peak, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, resident())
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    dcp.save(
        held,
        checkpoint_id=None if writer else folder + "/stock",
        storage_writer=writer,
        planner=LayoutAwareSavePlanner(),
    )
    done.set()
    thread.join()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 >= before
    print(max(peak - before, 0) / MIB)


if __name__ == "__main__":
    main()
