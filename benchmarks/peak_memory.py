"""Peak memory of a call: this process, the processes that it starts, and the GPU.

| name | is |
|---|---|
| `PeakMemory` | measures while it is entered |
"""

import threading
from pathlib import Path

import torch

_EVERY = 0.01  # seconds between two looks


def _resident(pid: str) -> int:
    """Returns anonymous and shared resident bytes of a process; cached file pages do not count."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    wanted = ("RssAnon:", "RssShmem:")
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(wanted))


def _children(pid: str) -> list[str]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        found = [child for t in tasks for child in (t / "children").read_text().split()]
    except OSError:
        return []
    return found + [grandchild for child in found for grandchild in _children(child)]


def _pinned() -> int:
    """Returns page-locked bytes that torch holds; resident memory does not always show them."""
    if not torch.cuda.is_available():
        return 0
    stats = getattr(torch.cuda, "host_memory_stats", dict)()
    return int(stats.get("allocated_bytes.current", 0))


class PeakMemory:
    """Highest memory use while entered, above that at the start.

    Resident memory is looked at every 10 ms in a thread, so a shorter peak can be missed. Memory
    that two processes share counts in both.

    Attributes:
        host_bytes: Anonymous and shared memory of this process and its children.
        pinned_bytes: Page-locked memory of torch's allocator.
        device_bytes: GPU memory of torch's allocator, None without a GPU.
    """

    host_bytes = 0
    pinned_bytes = 0
    device_bytes: int | None = None

    def __enter__(self) -> "PeakMemory":
        self._done = threading.Event()
        self._start = self._resident()
        self._pinned = _pinned()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._device = torch.cuda.memory_allocated()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._look()
        self._done.set()
        self._thread.join()
        if torch.cuda.is_available():
            self.device_bytes = torch.cuda.max_memory_allocated() - self._device

    def _resident(self) -> int:
        return _resident("self") + sum(map(_resident, _children("self")))

    def _look(self) -> None:
        self.host_bytes = max(self.host_bytes, self._resident() - self._start)
        self.pinned_bytes = max(self.pinned_bytes, _pinned() - self._pinned)

    def _watch(self) -> None:
        while not self._done.wait(_EVERY):
            self._look()
