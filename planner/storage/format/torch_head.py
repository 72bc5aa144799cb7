"""What stands before a chunk so that `torch.load` reads the two together as a tensor.

torch's older file form has all that describes a tensor in front and its bytes behind. So with
`SafetensorsWriter(stock=True)` each chunk has such a head before it, some 350 bytes long, as an
entry of its own; the file stays a safetensors file.
"""

import io
import pickle
from collections import OrderedDict
from functools import lru_cache
from typing import Any

import torch

from shardplan.layouts.slab import contiguous_strides

from ...compat import rebuild_tensor

# The first values of a file in torch's older form; see torch/serialization.py.
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
_ALIGNMENT = 64


class _Storage:
    """Stands for the bytes behind a head while it is pickled."""


class _Tensor:
    """Pickles as a tensor of a dtype and shape."""

    def __init__(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
        self._dtype, self._sizes = dtype, sizes

    def __reduce__(self) -> tuple[Any, ...]:
        strides = contiguous_strides(self._sizes)
        size = torch.Size(self._sizes)
        hooks: OrderedDict[str, Any] = OrderedDict()
        return rebuild_tensor(), (_Storage(), 0, size, strides, False, hooks, self._dtype)


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, nbytes: int) -> None:
        super().__init__(stream, 2)
        self._nbytes = nbytes

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", torch.ByteStorage, "0", "cpu", self._nbytes, None)
        return None


@lru_cache(maxsize=1024)
def torch_head(dtype: torch.dtype, sizes: tuple[int, ...]) -> bytes:
    """Returns what stands before a chunk's bytes so that `torch.load` reads both as a tensor.

    It is a multiple of 64 bytes long, so that the chunk stays aligned.
    """
    nbytes = dtype.itemsize
    for size in sizes:
        nbytes *= size
    body = io.BytesIO()
    _Pickler(body, nbytes).dump(_Tensor(dtype, sizes))
    pickle.dump(["0"], body, 2)
    tail = body.getvalue() + nbytes.to_bytes(8, "little", signed=True)
    for fill in range(_ALIGNMENT):
        front = io.BytesIO()
        pickle.dump(_MAGIC, front, 2)
        pickle.dump(_PROTOCOL, front, 2)
        pickle.dump({"little_endian": True, "fill": " " * fill}, front, 2)
        head = front.getvalue() + tail
        if len(head) % _ALIGNMENT == 0:
            return head
    raise AssertionError("a text of 64 lengths reaches every remainder")
