"""Values that no layout explains: they must be equal on all ranks, and a digest tells.

| name | does |
|---|---|
| `value_digest` | 16 hexadecimal digits over a value, equal for equal values in any process |
| `to_bytes`, `from_bytes` | a value as DCP stores it, and back |
"""

import dataclasses
import enum
import hashlib
import io
import pickle
import struct
from collections.abc import Mapping
from typing import Any

import torch

from shardplan.layouts import CheckpointError

from .compat import local_tensor


def value_digest(value: Any) -> str:
    """Returns 16 hexadecimal digits over a value; pickle's would depend on object identity.

    Tensors count by dtype, shape and bytes; on an accelerator that copies them to the host.
    """
    hashed = hashlib.blake2b(digest_size=8)
    _update(hashed, value)
    return hashed.hexdigest()


def _update(hashed: Any, value: Any) -> None:
    hashed.update(type(value).__name__.encode() + b"\0")
    if isinstance(value, torch.Tensor):
        local = local_tensor(value).detach().cpu().contiguous()
        hashed.update(f"{local.dtype}{tuple(local.shape)}".encode())
        hashed.update(local.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        for key, child in value.items():
            _update(hashed, key)
            _update(hashed, child)
    elif isinstance(value, list | tuple):
        for child in value:
            _update(hashed, child)
    elif isinstance(value, set | frozenset):
        for text in sorted(value_digest(child) for child in value):
            hashed.update(text.encode())
    elif isinstance(value, float):
        hashed.update(struct.pack("<d", value))
    elif isinstance(value, bytes | bytearray):
        hashed.update(value)
    elif isinstance(value, io.BytesIO):
        hashed.update(value.getbuffer())
    elif isinstance(value, enum.Enum):
        hashed.update(value.name.encode())
    elif isinstance(value, str | int | bool | complex | None | torch.dtype | torch.device):
        hashed.update(repr(value).encode())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _update(hashed, getattr(value, field.name))
    else:
        try:
            hashed.update(pickle.dumps(value, protocol=4))
        except Exception as error:
            raise CheckpointError(f"a {type(value).__name__} can't be saved: {error}") from error
    hashed.update(b"\1")


def to_bytes(key: str, value: Any) -> io.BytesIO:
    """Returns a value as stock DCP stores it.

    Raises:
        CheckpointError: If it can't be pickled; the key is named.
    """
    stream = io.BytesIO()
    if isinstance(value, io.BytesIO):
        value.seek(0)
    try:
        torch.save(value, stream)
    except Exception as error:
        raise CheckpointError(
            f"{key}: a value of type {type(value).__name__} can't be saved: {error}. Keep it out "
            "of the state dict, or turn it into plain data."
        ) from error
    stream.seek(0)
    return stream


def from_bytes(key: str, stream: io.BytesIO, trust_pickle: bool) -> Any:
    """Returns a value that `to_bytes` or stock DCP stored.

    Args:
        key: Its key, for errors.
        stream: The stored bytes.
        trust_pickle: Whether arbitrary classes may be unpickled, which can run any code.

    Raises:
        CheckpointError: If the bytes hold a class that is not plain data.
    """
    try:
        value = torch.load(stream, map_location="cpu", weights_only=not trust_pickle)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{key}: the stored value is not plain data and was not unpickled ({error}). Pass "
            "trust_pickle=True to the load planner if you trust where the checkpoint comes from."
        ) from error
    if isinstance(value, io.BytesIO):
        value.seek(0)
    return value
