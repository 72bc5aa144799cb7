"""What a call does underneath: bytes that it reads from files, collectives that it takes part in.

| name | counts |
|---|---|
| `Reads` | bytes that system calls return from files, while entered |
| `Collectives` | c10d collectives and the bytes that this rank hands to them, while entered |
"""

import contextlib
import io
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.filesystem import FileSystem

_OS = ("read", "pread", "readv", "preadv")
_C10D = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "recv",
)


class _File(io.FileIO):
    """A file that tells what is read from it."""

    tell_read: Callable[[int], None]

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer) or 0
        self.tell_read(count)
        return count

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(-1 if size is None else size) or b""
        self.tell_read(len(data))
        return data

    def readall(self) -> bytes:
        data = super().readall() or b""
        self.tell_read(len(data))
        return data


class Reads:
    """Counts bytes that `os.read`, `pread`, `readv`, `preadv` and torch's file streams return.

    Sockets and what is read through memory maps do not count.

    Attributes:
        nbytes: What was read.
    """

    nbytes = 0

    def __enter__(self) -> "Reads":
        self._lock = threading.Lock()
        self._real = {name: getattr(os, name) for name in _OS}
        self._stream = FileSystem.create_stream
        for name, real in self._real.items():
            setattr(os, name, self._counted(real))
        FileSystem.create_stream = self._create_stream()  # type: ignore[method-assign]
        return self

    def __exit__(self, *failure: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        FileSystem.create_stream = self._stream  # type: ignore[method-assign]

    def _add(self, count: int) -> None:
        with self._lock:
            self.nbytes += count

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            found = real(*args, **options)
            self._add(found if isinstance(found, int) else len(found))
            return found

        return call

    def _create_stream(self) -> Callable[..., Any]:
        real, add = self._stream, self._add

        @contextlib.contextmanager
        def create_stream(system: FileSystem, path: Any, mode: str) -> Iterator[Any]:
            if mode != "rb":
                with real(system, path, mode) as stream:
                    yield stream
                return
            file = _File(Path(path), "rb")
            file.tell_read = add
            with io.BufferedReader(file) as stream:
                yield stream

        return create_stream


class Collectives:
    """Counts what reaches c10d: an object collective is made of several.

    Attributes:
        calls: How often each collective was called.
        nbytes: Bytes of the tensors that this rank handed over, as sender or receiver.
    """

    def __enter__(self) -> "Collectives":
        self.calls: Counter[str] = Counter()
        self.nbytes = 0
        self._depth = 0
        self._real = {name: getattr(distributed_c10d, name) for name in _C10D}
        for name, real in self._real.items():
            counted = self._counted(name, real)
            for module in (distributed_c10d, torch.distributed):
                setattr(module, name, counted)
        return self

    def __exit__(self, *failure: object) -> None:
        for name, real in self._real.items():
            for module in (distributed_c10d, torch.distributed):
                setattr(module, name, real)

    @property
    def count(self) -> int:
        """All calls together."""
        return sum(self.calls.values())

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if not self._depth:
                self.calls[name] += 1
                self.nbytes += sum(map(_nbytes, (*args, *options.values())))
            self._depth += 1
            try:
                return real(*args, **options)
            finally:
                self._depth -= 1

        return call


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.itemsize
    if isinstance(value, list | tuple):
        return sum(map(_nbytes, value))
    return 0
