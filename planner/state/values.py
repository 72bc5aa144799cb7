"""Values that no layout explains: they must be equal on all ranks, and a digest tells.

| value | comes back |
|---|---|
| numbers, text, bytes, `None`, tensors, nested lists, tuples, dicts, sets | always |
| `BytesIO`, numpy arrays and scalars, ranges, dates, paths | always; a `BytesIO` at its start |
| an enum or a dataclass | where the state dict holds one of the same class |
| anything else | only with `trust_pickle=True` |
"""

import dataclasses
import datetime
import enum
import hashlib
import io
import pathlib
import pickle
import re
import struct
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from shardplan.layouts import CheckpointError

from ..compat import local_tensor
from .views import bytes_of

# Classes that unpickle to plain data and run nothing else.
_SAFE: tuple[Any, ...] = (
    io.BytesIO,
    frozenset,
    range,
    slice,
    bytes,
    bytearray,
    int,
    float,
    str,
    bool,
    list,
    dict,
    set,
    datetime.date,
    datetime.time,
    datetime.datetime,
    datetime.timedelta,
    datetime.timezone,
    pathlib.PosixPath,
    pathlib.PurePosixPath,
    np.ndarray,
    np.dtype,
    *(type(np.dtype(code)) for code in np.typecodes["All"]),
    # How numpy pickles an array and a scalar; both only build data of a dtype in this list.
    np.ones(0).__reduce__()[0],
    np.float32(0).__reduce__()[0],
)
# torch's list of classes that may be unpickled is one for the whole process.
_UNPICKLING = threading.Lock()


def value_digest(value: Any, key: str = "a value") -> str:
    """Returns 16 hexadecimal digits over a value; pickle's would depend on object identity.

    Tensors count by dtype, shape and bytes; on an accelerator that copies them to the host.

    Args:
        value: The value.
        key: Its key, for errors.

    Raises:
        CheckpointError: If the value can't be pickled.
    """
    hashed = hashlib.blake2b(digest_size=8)
    try:
        _update(hashed, value)
    except (TypeError, AttributeError, pickle.PicklingError, RecursionError) as error:
        raise _unstorable(key, value, error) from error
    return hashed.hexdigest()


def bytes_digest(tensor: torch.Tensor) -> str:
    """Returns 16 hexadecimal digits over the bytes of a tensor's local part, of any size."""
    local = local_tensor(tensor).detach().resolve_conj().resolve_neg().cpu()
    return xxhash.xxh3_64_hexdigest(bytes_of(local).numpy().data)


def _unstorable(key: str, value: Any, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{key}: a value of type {type(value).__name__} can't be saved: {error}. Keep it out "
        "of the state dict, or turn it into plain data."
    )


def _update(hashed: Any, value: Any) -> None:
    hashed.update(type(value).__name__.encode() + b"\0")
    if isinstance(value, torch.Tensor):
        local = local_tensor(value).detach().resolve_conj().resolve_neg().cpu()
        hashed.update(f"{local.dtype}{tuple(local.shape)}".encode())
        hashed.update(bytes_of(local).numpy().data)
    elif isinstance(value, Mapping):  # equal in any order
        for text in sorted(value_digest(key) + value_digest(value[key]) for key in value):
            hashed.update(text.encode())
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
    elif isinstance(value, np.ndarray) and value.dtype != object:
        hashed.update(f"{value.dtype.str}{value.shape}".encode())
        hashed.update(np.ascontiguousarray(value).tobytes())
    else:
        hashed.update(pickle.dumps(value, protocol=4))
    hashed.update(b"\1")


def same_value(a: Any, b: Any) -> bool:
    """Returns whether two values are equal; NaN equals itself, and tensors their like.

    >>> same_value((1.0, float("nan")), (1, float("nan")))
    True
    """
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            one, other = (a, b) if isinstance(a, torch.Tensor) else (b, a)
            return one.numel() == 1 and same_value(one.item(), other)
        return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and bool(np.all((a == b) | ((a != a) & (b != b))))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return (
            isinstance(a, list) == isinstance(b, list)
            and len(a) == len(b)
            and all(map(same_value, a, b))
        )
    return bool(a == b) or bool(a != a and b != b)


def to_bytes(key: str, value: Any) -> io.BytesIO:
    """Returns a value as stock DCP stores it.

    Raises:
        CheckpointError: If it can't be pickled; the key is named.
    """
    stream = io.BytesIO()
    if isinstance(value, io.BytesIO):
        value = io.BytesIO(value.getbuffer())  # whole, and at its start
    try:
        torch.save(value, stream)
    except Exception as error:
        raise _unstorable(key, value, error) from error
    stream.seek(0)
    return stream


def from_bytes(key: str, stream: io.BytesIO, trust_pickle: bool, like: Any = None) -> Any:
    """Returns a value that `to_bytes` or stock DCP stored.

    Args:
        key: Its key, for errors.
        stream: The stored bytes.
        trust_pickle: Whether arbitrary classes may be unpickled, which can run any code.
        like: The value that it replaces; the enums and dataclasses in it may come back.

    Raises:
        CheckpointError: If the bytes hold a class that is not plain data, or are damaged.
    """
    try:
        if trust_pickle:
            value = torch.load(stream, map_location="cpu", weights_only=False)
        else:
            with _UNPICKLING, torch.serialization.safe_globals([*_SAFE, *classes_in(like)]):
                value = torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"has a {named[1]}, which" if named else f"({str(error).splitlines()[0]})"
        raise CheckpointError(
            f"{key}: the stored value {what} is not plain data, and was not unpickled. Load it into "
            "a value of the same class if that is an enum or a dataclass, or pass trust_pickle=True "
            "to the load planner if you trust where the checkpoint comes from."
        ) from None
    except Exception as error:  # damaged bytes fail in every way
        raise CheckpointError(
            f"{key}: the stored value can't be read: {error!r}. The file is damaged, or its classes "
            "are not installed."
        ) from error
    if isinstance(value, io.BytesIO):
        value.seek(0)
    return value


def classes_in(like: Any) -> Iterable[type]:
    """Yields the enums and dataclasses in a value that the program itself holds."""
    if isinstance(like, Mapping):
        for child in (*like, *like.values()):
            yield from classes_in(child)
    elif isinstance(like, list | tuple | set | frozenset):
        for child in like:
            yield from classes_in(child)
    elif isinstance(like, enum.Enum):
        yield type(like)
    elif dataclasses.is_dataclass(like) and not isinstance(like, type):
        yield type(like)
        for field in dataclasses.fields(like):
            yield from classes_in(getattr(like, field.name, None))
