"""What the disk and the bus can do, and what was read from the disk.

| name | does |
|---|---|
| `plain_write`, `plain_read` | the same bytes by plain system calls: the limits |
| `PlainCopy` | the same bytes from device to page-locked host memory: the bus's limit |
| `make_durable` | fsync of every file below a folder |
| `drop_cache` | forgets the cached pages of files, so that the next read is cold |
| `bytes_read` | what came from a device for this process so far |
| `storage_facts` | the file system that a folder lies on |
"""

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_CALL = 16 << 20  # bytes of one system call
_COPY = 256 << 20  # bytes of one copy from the device


def plain_write(path: Path, tensors: Sequence[torch.Tensor]) -> float:
    """Writes tensors' bytes to one file, one after another, with fsync; returns the seconds.

    Args:
        path: The file.
        tensors: Contiguous host tensors. Small ones are joined first, outside the time.
    """
    views = _joined(tensors)
    start = time.perf_counter()
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for view in views:
            for at in range(0, len(view), _CALL):
                part = view[at : at + _CALL]
                while part:
                    part = part[os.write(number, part) :]
        os.fsync(number)
    finally:
        os.close(number)
    return time.perf_counter() - start


def plain_read(path: Path, tensors: Sequence[torch.Tensor]) -> float:
    """Reads as many bytes as tensors have from a file into memory; returns the seconds."""
    views = _joined(tensors)
    start = time.perf_counter()
    number = os.open(path, os.O_RDONLY)
    try:
        for view in views:
            for at in range(0, len(view), _CALL):
                part = view[at : at + _CALL]
                while part:
                    count = os.readv(number, [part])
                    if not count:
                        raise EOFError(f"{path}: shorter than the state")
                    part = part[count:]
    finally:
        os.close(number)
    return time.perf_counter() - start


def _joined(tensors: Sequence[torch.Tensor]) -> list[memoryview]:
    """Returns tensors' memory; those below 1 MiB as one buffer."""
    flat = [t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors if t.numel()]
    small = [t for t in flat if t.numel() < 1 << 20]
    large = [t for t in flat if t.numel() >= 1 << 20]
    if small:
        large.append(torch.cat(small))
    return [memoryview(t.numpy()) for t in large]


class PlainCopy:
    """Copies bytes from the device to page-locked memory, or within host memory without a GPU.

    Args:
        nbytes: How many; copied in runs of at most 256 MiB between the same two buffers.
        device: `'cpu'` or `'cuda'`.
    """

    def __init__(self, nbytes: int, device: str) -> None:
        size = max(1, min(nbytes, _COPY))
        self._runs, self._rest = divmod(nbytes, size)
        self._cuda = device == "cuda"
        self._source = torch.zeros(size, dtype=torch.uint8, device=device)
        self._target = torch.zeros(size, dtype=torch.uint8, pin_memory=self._cuda)

    def seconds(self) -> float:
        """Copies everything once."""
        if self._cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(self._runs):
            self._target.copy_(self._source, non_blocking=True)
        if self._rest:
            self._target[: self._rest].copy_(self._source[: self._rest], non_blocking=True)
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start


def files_of(folder: Path) -> list[Path]:
    """Returns all files below a folder, in order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def make_durable(folder: Path, rank: int = 0, ranks: int = 1) -> None:
    """Fsyncs this rank's share of the files below a folder, and the folder."""
    for path in [*files_of(folder), folder][rank::ranks]:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def drop_cache(paths: Sequence[Path]) -> None:
    """Lets the kernel forget the cached pages of files; they must be durable already."""
    for path in paths:
        number = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(number)


def bytes_read() -> int:
    """Returns the bytes that came from a device for this process so far; 0 if the kernel counts none.

    Whole pages, with what the kernel read ahead; a page that another process had read is not there.
    """
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def storage_facts(folder: Path) -> dict[str, Any]:
    """Returns the type of the file system that a folder lies on, and its size."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = os.statvfs(folder)
    done = subprocess.run(
        ["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=False
    )
    return {
        "file_system": done.stdout.strip() or "unknown",
        "disk_gib": round(facts.f_blocks * facts.f_frsize / 2**30),
    }
