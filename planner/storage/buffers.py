"""Host buffers of bounded size that a save or a load passes its bytes through."""

import queue
from collections.abc import Sequence
from typing import Any

import torch

from ..state.views import bytes_of

DEFAULT_NBYTES = 128 << 20
_LARGEST = 16 << 20


class Buffer:
    """A run of host memory.

    Attributes:
        tensor: It as a tensor of bytes.
        memory: It as a writable memoryview of bytes.
        address: Of its first byte.
    """

    __slots__ = ("address", "memory", "tensor")

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.memory: Any = memoryview(self.tensor.numpy())  # type: ignore[arg-type]
        self.address = self.tensor.data_ptr()


class Buffers:
    """Buffers that are made when first needed, kept, and lent again.

    Args:
        nbytes: Bytes of all buffers together.
        pinned: Whether they are page-locked.
    """

    def __init__(self, nbytes: int, pinned: bool) -> None:
        self.size = max(min(nbytes // 4, _LARGEST) >> 20 << 20, 1 << 20)
        self.pinned = pinned
        self._unmade = max(nbytes // self.size, 2)
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()

    def borrow(self) -> Buffer:
        """Returns a buffer; waits until one comes back if all are lent."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            if self._unmade:
                self._unmade -= 1
                return Buffer(self.size, self.pinned)
            return self._free.get()

    def give_back(self, buffer: Buffer) -> None:
        """Takes back a buffer."""
        self._free.put(buffer)


# What a worker waits for before it may look at a buffer: `event.synchronize()` of each.
Mark = tuple[Any, ...]


class Copies:
    """Copies between devices and host buffers; from and to CUDA on a stream of their own."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._used: set[Any] = set()

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies a tensor into host memory, at once or soon."""
        if not source.is_cuda:
            target.copy_(source)
            return
        stream = self._stream(source.device)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(stream)  # it may be let go of before the copy is made

    def together_to_host(self, target: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        """Copies tensors of one GPU one behind the other into host bytes, soon.

        They are brought together on the GPU first, so that one copy over the bus does.
        """
        stream = self._stream(sources[0].device)
        with torch.cuda.stream(stream):
            data = torch.cat([bytes_of(source) for source in sources])
            target.copy_(data, non_blocking=True)
        for source in sources:
            source.record_stream(stream)

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies host memory into a tensor, at once or soon."""
        if not target.is_cuda:
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream(target.device)):
            target.copy_(source, non_blocking=True)

    def _stream(self, device: torch.device) -> Any:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if stream not in self._used:
            stream.wait_stream(torch.cuda.current_stream(device))
            self._used.add(stream)
        return stream

    def mark(self) -> Mark:
        """Returns what tells when all copies since the last mark are done."""
        events = tuple(stream.record_event() for stream in self._used)
        self._used.clear()
        return events


def memory_of(tensor: torch.Tensor) -> Any:
    """Returns the bytes of a contiguous host tensor as a memoryview that shares its memory."""
    return memoryview(bytes_of(tensor).numpy())  # type: ignore[arg-type]
