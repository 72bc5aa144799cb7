"""A stager for `dcp.async_save`: training waits for the bus, and for nothing else."""

import contextlib
import copy
import gc
import mmap
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor
from torch.nn import Buffer, Parameter

from shardplan.layouts import CheckpointError

from ..compat import ShardedTensor, local_tensor, with_local

_ALIGNMENT = 64
_GRACE = 0.5  # seconds in which a thread lets go of what it saved
_PAUSE = 0.005
_PLAIN = (torch.Tensor, Parameter, Buffer)
_IMMUTABLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


class HostMemory:
    """One run of host memory, page-locked where there is a GPU.

    It is locked after it was made, since torch's own allocator of page-locked memory rounds sizes
    up to the next power of two. Locking pages that are not there yet takes six times as long as
    first having the kernel lay them out, in huge pages where it can.

    Args:
        nbytes: Its size.
        shared: Whether other processes may map it, for async saves in a process of their own.
    """

    def __init__(self, nbytes: int, shared: bool) -> None:
        if shared or not nbytes:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8)
            self.tensor.share_memory_()  # type: ignore[no-untyped-call]
        else:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
            self.tensor = torch.frombuffer(pages, dtype=torch.uint8)
        self.tensor[:: mmap.PAGESIZE].zero_()
        self._locked = False
        if torch.cuda.is_available() and nbytes:
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = cudart.cudaHostRegister(self.tensor.data_ptr(), nbytes, 0)
            self._locked = int(status) == 0  # copies from unlocked memory are slower, not wrong

    def close(self) -> None:
        """Unlocks the memory; what was staged in it is no longer to be used."""
        if self._locked:
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cudart.cudaHostUnregister(self.tensor.data_ptr())
            self._locked = False


class _Span(NamedTuple):
    """A run of one storage's bytes that is copied as a whole.

    Attributes:
        source: Its bytes as a tensor, or the tensor itself where it is copied alone.
        start: First byte in the storage.
        place: First byte in the host memory.
        nbytes: Its length.
    """

    source: torch.Tensor
    start: int
    place: int
    nbytes: int


class PinnedStager(AsyncStager):
    """Copies a state dict to host memory that is made once and used for every save.

    Tensors that are views of one buffer are copied with it, in one go, and are views of one buffer
    in host memory too, so tied tensors stay tied. Copies run on a stream of their own; `stage`
    returns when they are done, and training may go on. Host memory of the size of the rank's own
    shards is held until `close`.

    One save at a time: the next one is staged into the same memory, so `stage` waits until the last
    one is over. Wait for the future of an `async_save` before the next one. Where something else
    than a save still holds what was staged last, such as the error of a save that failed, it keeps
    its memory and the next save gets new memory.

    Args:
        shared: Whether the save runs in a process of its own
            (`AsyncCheckpointerType.PROCESS`), which then maps the memory instead of copying it.
    """

    _synchronize_after_execute = False

    def __init__(self, shared: bool = False) -> None:
        self._shared = shared
        self._memory: HostMemory | None = None
        self._streams: dict[torch.device, Any] = {}
        self._staged: list[weakref.ref[torch.Tensor]] = []
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that are held."""
        return 0 if self._memory is None else self._memory.tensor.numel()

    def prepare(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the host memory for a state dict, so that the first save does not have to wait.

        It may run in a thread of its own, beside the first training steps.
        """
        _, total = _spans(_tensors(state_dict))
        with self._lock:
            self._hold(total)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns a copy of a state dict in host memory.

        Waits for a save in another thread that still uses what was staged before.

        Raises:
            CheckpointError: If it holds a tensor that has no one local part.
        """
        with self._lock:
            self._wait()
            tensors = _tensors(state_dict)
            spans, total = _spans(tensors)
            memory = self._hold(total)
            streams: dict[torch.device, Any] = {}
            for span in {id(span): span for span in spans.values()}.values():
                self._copy(memory, span, streams)
            staged = {
                id(tensor): _rebuilt(tensor, spans[id(tensor)], memory.tensor) for tensor in tensors
            }
            copied: dict[str, Any] = _rewritten(state_dict, staged)
            self._staged = list(map(weakref.ref, staged.values()))
            for stream in streams.values():
                stream.synchronize()
            return copied

    def _wait(self) -> None:
        """Waits for the save that uses the memory, and leaves the memory to whoever else does."""
        checked = time.monotonic()
        while self._in_use():
            if _saves_elsewhere():
                checked = time.monotonic()
            elif time.monotonic() > checked + _GRACE:
                gc.collect()  # an error that was caught may hold tensors in a cycle
                if self._in_use():
                    self.close()
            time.sleep(_PAUSE)

    def _in_use(self) -> bool:
        self._staged = [reference for reference in self._staged if reference() is not None]
        return bool(self._staged)

    def _hold(self, nbytes: int) -> HostMemory:
        """Returns host memory of at least so many bytes."""
        if self._memory is None or self._memory.tensor.numel() < nbytes:
            self.close()
            self._memory = HostMemory(nbytes, self._shared)
        return self._memory

    def _copy(self, memory: HostMemory, span: _Span, streams: dict[torch.device, Any]) -> None:
        """Begins the copy of a span, on a stream that is put among `streams`."""
        source = span.source
        target = memory.tensor[span.place : span.place + span.nbytes].view(source.dtype)
        target = target.view(source.shape)
        if not source.is_cuda:
            target.copy_(source)
            return
        device = source.device
        stream = streams.get(device)
        if stream is None:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream = streams[device] = self._streams[device]
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def synchronize_staging(self) -> None:
        """Has nothing to do: `stage` returns when the copies are done."""

    def close(self) -> None:
        """Gives the host memory back, as soon as nothing holds what was staged in it."""
        self._staged = []
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _saves_elsewhere() -> bool:
    """Whether another thread runs code that saves."""
    own = threading.get_ident()
    for thread, top in sys._current_frames().items():
        frame: FrameType | None = top if thread != own else None
        while frame is not None:
            name = str(frame.f_globals.get("__name__", ""))
            if name.startswith(("torch.distributed.checkpoint.", f"{__package__}.")):
                return True
            frame = frame.f_back
    return False


def _tensors(value: Any) -> list[torch.Tensor]:
    """Returns the tensors of a nested state dict."""
    found: list[torch.Tensor] = []
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            if isinstance(item, ShardedTensor):
                raise CheckpointError(
                    "a ShardedTensor has no one local part that could be staged. Pass torch's "
                    "DefaultStager as async_stager=."
                )
            found.append(item)
        elif isinstance(item, Mapping):
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item
    return found


def _spans(tensors: Iterable[torch.Tensor]) -> tuple[dict[int, _Span], int]:
    """Returns the span that each tensor is copied with, by its id, and the bytes of all spans.

    Tensors of one storage share a span if they fill at least half of it. A conjugate or negative
    view has other values than the bytes of its storage and is copied alone.
    """
    storages: dict[tuple[Any, int], list[tuple[torch.Tensor, torch.Tensor, int, int]]] = {}
    lone: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tensor in tensors:
        local = local_tensor(tensor).detach()
        if local.is_conj() or local.is_neg():
            lone.append((tensor, local))
            continue
        start = int(local.storage_offset()) * local.itemsize
        steps = zip(local.shape, local.stride(), strict=True)
        extent = int(sum((n - 1) * s for n, s in steps)) + 1
        stop = start + (extent * local.itemsize if local.numel() else 0)
        storage = local.untyped_storage()
        storages.setdefault((local.device, storage.data_ptr()), []).append(
            (tensor, local, start, stop)
        )
    spans: dict[int, _Span] = {}
    place = 0
    for views in storages.values():
        first = min(start for _, _, start, _ in views) // _ALIGNMENT * _ALIGNMENT
        last = max(stop for _, _, _, stop in views)
        filled = sum(stop - start for start, stop in {(a, b) for _, _, a, b in views})
        if last - first <= max(2 * filled, _ALIGNMENT):
            nbytes = last - first
            source = torch.empty(0, dtype=torch.uint8, device=views[0][1].device)
            # Memory from elsewhere, such as numpy's, may have several storages of several sizes.
            storage = max((local.untyped_storage() for _, local, *_ in views), key=_storage_nbytes)
            source.set_(storage, first, (nbytes,))  # type: ignore[call-overload]
            span = _Span(source, first, place, nbytes)
            spans |= {id(tensor): span for tensor, *_ in views}
            place += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        else:
            lone += ((tensor, local) for tensor, local, _, _ in views)
    for tensor, local in lone:
        nbytes = local.numel() * local.itemsize
        spans[id(tensor)] = _Span(local, -1, place, nbytes)
        place += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return spans, place


def _storage_nbytes(storage: torch.UntypedStorage) -> int:
    return storage.nbytes()


def _rebuilt(tensor: torch.Tensor, span: _Span, memory: torch.Tensor) -> Any:
    """Returns the staged form of a tensor."""
    local = local_tensor(tensor).detach()
    if span.start < 0:
        raw = memory[span.place : span.place + span.nbytes]
        staged = raw.view(local.dtype).view(local.shape)
    else:
        at = span.place + local.storage_offset() * local.itemsize - span.start
        staged = torch.empty(0, dtype=local.dtype)
        place = at // local.itemsize
        staged.set_(memory.untyped_storage(), place, local.shape, local.stride())
    if type(local) not in _PLAIN:
        staged = staged.as_subclass(type(local))
    with contextlib.suppress(AttributeError):
        staged.__dict__.update(local.__dict__)
    if not isinstance(tensor, DTensor):
        return staged
    return with_local(tensor, staged)


def _rewritten(value: Any, staged: Mapping[int, Any]) -> Any:
    """Returns a nested state dict with the staged tensors in place of its own."""
    if isinstance(value, torch.Tensor):
        return staged[id(value)]
    if isinstance(value, Mapping):
        return {key: _rewritten(child, staged) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_rewritten(child, staged) for child in value)
    return value if isinstance(value, _IMMUTABLE) else copy.deepcopy(value)
