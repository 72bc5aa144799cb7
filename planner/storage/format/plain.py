"""Python values as JSON, never pickle: plain data comes back as it was, the rest is refused.

Numbers, text, lists and dicts with text keys are themselves. Anything else is a dict with one key
that begins with `$`:

| value | is written as |
|---|---|
| tuple, set, frozenset, `torch.Size` | `{"$tuple": [...]}` and so on |
| dict with other keys, or keys that begin with `$`; `OrderedDict` | `{"$dict": [[key, value], ...]}` |
| bytes, bytearray, `BytesIO` | `{"$bytes": base64}` |
| float that is not finite, complex, long integer | `{"$float": "nan"}`, `{"$complex": [re, im]}`, `{"$int": hex}` |
| tensor, numpy array or scalar | `{"$tensor": [dtype, shape, base64]}` |
| dtype, device, range, slice, date, time, path | `{"$dtype": "bfloat16"}` and so on |
| enum, dataclass, `Namespace` | class name and fields; enum and dataclass come back where the program has their class |
"""

import argparse
import base64
import collections
import dataclasses
import datetime
import enum
import io
import logging
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from shardplan.layouts import CheckpointError, UnstorableValueError

from ...state.views import bytes_of
from .dtypes import dtype_name, dtype_of

# No records: their field names would be lost.
_ARRAY = re.compile(r"[<>|=]?(b1|[iufc]\d+|[SU]\d+|[mM]8(\[\w+\])?)\Z")
_LONG = 1 << 63
_BUILT_IN = (dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, complex)
_LOG = logging.getLogger("shardplan")


def to_plain(key: str, value: Any) -> Any:
    """Returns a value as plain data.

    Args:
        key: Its key, for errors.
        value: The value.

    Raises:
        UnstorableValueError: If it, or something in it, would not come back as it is.
    """
    try:
        return _write(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnstorableValueError(
            f"{key}: a value of type {type(value).__name__} can't be stored as plain data: {error}. "
            "This format has no pickles. Keep the value out of the state dict, or turn it into "
            "numbers, text, lists, dicts and tensors."
        ) from None


def from_plain(key: str, data: Any, like: Iterable[type] = ()) -> Any:
    """Returns the value that `to_plain` wrote.

    Where an enum or a dataclass stands inside of a container, and the program holds none of its
    class, it comes back as it is stored (`{"$enum": [class, name]}`), with a warning in the log.

    Args:
        key: Its key, for errors.
        data: Parsed JSON.
        like: Enums and dataclasses that may come back; those the program itself holds.

    Raises:
        CheckpointError: If the data is none of this version, or needs another class.
    """
    classes = {_class_name(cls): cls for cls in like}
    inside = not (isinstance(data, dict) and data.keys() & {"$enum", "$dataclass"})
    try:
        if inside and (unknown := sorted(set(_unknown(data, classes)))):
            # Nothing of it is lost, and the rest of the container is there.
            _LOG.warning(
                "%s: the program holds no %s in this place, so values of it come back as they are "
                "stored, such as {'$enum': [class, name]}",
                key,
                ", ".join(unknown),
            )
        return _read(data, classes, inside)
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from None
    except Exception as error:  # damaged data fails in every way
        raise CheckpointError(f"{key}: the stored value can't be read: {error!r}") from None


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _text(data: Any) -> str:
    return base64.b64encode(data).decode()


def _write(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -_LONG <= value < _LONG else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        return [_write(v) for v in value]
    if kind is dict:
        if all(type(k) is str and not k.startswith("$") for k in value):
            return {k: _write(v) for k, v in value.items()}
        return {"$dict": [[_write(k), _write(v)] for k, v in value.items()]}
    writer = _WRITERS.get(kind)
    if writer is not None:
        return writer(value)
    return _write_other(value)


def _write_other(value: Any) -> Any:
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise TypeError(f"a {value.layout} tensor on {value.device} is not plain data")
        if type(value) is not torch.Tensor or value.requires_grad:
            raise TypeError("a tensor that requires a gradient is not plain data; detach() it")
        local = value.resolve_conj().resolve_neg().cpu()
        raw = bytes_of(local).numpy().tobytes()
        return {"$tensor": [dtype_name(local.dtype), list(local.shape), _text(raw)]}
    plain_array = type(value) is np.ndarray or isinstance(value, np.generic)
    if plain_array and value.dtype.names is None and _ARRAY.match(value.dtype.str):
        name = "$array" if isinstance(value, np.ndarray) else "$scalar"
        raw = np.ascontiguousarray(value).tobytes()
        return {name: [value.dtype.str, list(value.shape), _text(raw)]}
    if isinstance(value, enum.Enum) and type(value).__members__.get(value.name) is value:
        return {"$enum": [_class_name(type(value)), value.name]}
    if type(value) is type(pathlib.Path()):
        return {"$path": str(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _write(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if vars_beside := sorted(getattr(value, "__dict__", {}).keys() - fields.keys()):
            raise TypeError(f"{type(value).__qualname__} has {vars_beside} beside its fields")
        if isinstance(value, _BUILT_IN):
            raise TypeError(f"{type(value).__qualname__} holds more than its fields")
        return {"$dataclass": [_class_name(type(value)), fields]}
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} is not plain data")


def _moment(name: str, value: Any) -> Any:
    """Writes a date or time, if its text says all of it: no zone by name, no fold."""
    if repr(type(value).fromisoformat(value.isoformat())) != repr(value):
        raise TypeError(f"{value!r} has more than its text {value.isoformat()} says")
    return {name: value.isoformat()}


_WRITERS: dict[type, Callable[[Any], Any]] = {
    tuple: lambda v: {"$tuple": [_write(x) for x in v]},
    set: lambda v: {"$set": [_write(x) for x in v]},
    frozenset: lambda v: {"$frozenset": [_write(x) for x in v]},
    torch.Size: lambda v: {"$size": list(v)},
    collections.OrderedDict: lambda v: {"$ordered": [[_write(k), _write(x)] for k, x in v.items()]},
    bytes: lambda v: {"$bytes": _text(v)},
    bytearray: lambda v: {"$bytearray": _text(v)},
    io.BytesIO: lambda v: {"$bytesio": _text(v.getbuffer())},
    complex: lambda v: {"$complex": [_write(v.real), _write(v.imag)]},
    torch.dtype: lambda v: {"$dtype": dtype_name(v)},
    torch.device: lambda v: {"$device": str(v)},
    range: lambda v: {"$range": [v.start, v.stop, v.step]},
    slice: lambda v: {"$slice": [_write(v.start), _write(v.stop), _write(v.step)]},
    datetime.datetime: lambda v: _moment("$datetime", v),
    datetime.date: lambda v: _moment("$date", v),
    datetime.time: lambda v: _moment("$time", v),
    datetime.timedelta: lambda v: {"$timedelta": [v.days, v.seconds, v.microseconds]},
    argparse.Namespace: lambda v: {"$namespace": [[k, _write(x)] for k, x in vars(v).items()]},
}


def _unknown(data: Any, classes: dict[str, type]) -> Iterator[str]:
    """Yields the classes of enums and dataclasses in stored data that the program does not hold."""
    if isinstance(data, dict):
        if data.keys() & {"$enum", "$dataclass"}:
            name = str(next(iter(data.values()))[0])
            if name not in classes:
                yield name
        for value in data.values():
            yield from _unknown(value, classes)
    elif isinstance(data, list):
        for value in data:
            yield from _unknown(value, classes)


def _read(data: Any, classes: dict[str, type], inside: bool = False) -> Any:
    def read(inner: Any) -> Any:
        return _read(inner, classes, inside)

    if isinstance(data, list):
        return [read(v) for v in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        return {k: read(v) for k, v in data.items()}
    ((name, inner),) = data.items()
    if not name.startswith("$"):
        return {name: read(inner)}
    if name in ("$enum", "$dataclass"):
        if inside and inner[0] not in classes:
            return data
        return _own(name, inner, classes)
    if name in _PAIRS:
        return _PAIRS[name]((read(k), read(v)) for k, v in inner)
    if name in _SEQUENCES:
        return _SEQUENCES[name](read(v) for v in inner)
    if name not in _READERS:
        raise CheckpointError(f"a stored value of kind {name!r} is of a newer version")
    return _READERS[name](inner)


def _own(name: str, inner: Any, classes: dict[str, type]) -> Any:
    """Returns an enum or a dataclass, if the program itself holds one of its class."""
    cls: Any = classes.get(inner[0])
    if cls is None:
        raise CheckpointError(
            f"the stored value has a {inner[0]}, and the state dict holds none in its place. Load "
            "it into a value of the same class."
        )
    if name == "$enum":
        return cls[inner[1]]
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if gone := sorted(inner[1].keys() - fields.keys()):
        raise CheckpointError(
            f"the stored {inner[0]} has {', '.join(gone)}, which the program's class has no field "
            "for. Give the class that field, or leave the value out of the state dict."
        )
    made = object.__new__(cls)
    for field in fields.values():
        stored = field.name in inner[1]
        value = _read(inner[1][field.name], classes) if stored else _default(inner[0], field)
        object.__setattr__(made, field.name, value)
    return made


def _default(owner: str, field: dataclasses.Field[Any]) -> Any:
    """Returns the default of a field that the class did not have when it was saved."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    if field.default is dataclasses.MISSING:
        raise CheckpointError(
            f"the stored {owner} has no {field.name}, and the program's class gives that field no "
            "default. Give it one, or leave the value out of the state dict."
        )
    return field.default


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _tensor(inner: Any) -> torch.Tensor:
    dtype, shape, text = inner
    raw = bytearray(_bytes(text))
    empty = torch.empty(0, dtype=dtype_of(dtype))
    return (torch.frombuffer(raw, dtype=empty.dtype) if raw else empty).reshape(shape)


def _array(inner: Any) -> Any:
    dtype, shape, text = inner
    if not _ARRAY.match(dtype):
        raise CheckpointError(f"a stored array has the dtype {dtype!r}")
    return np.frombuffer(bytearray(_bytes(text)), dtype=np.dtype(dtype)).reshape(shape)


_PAIRS: dict[str, Callable[[Any], Any]] = {
    "$dict": dict,
    "$ordered": collections.OrderedDict,
    "$namespace": lambda pairs: argparse.Namespace(**dict(pairs)),
}
_SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$size": torch.Size,
    "$complex": lambda parts: complex(*parts),
    "$slice": lambda parts: slice(*parts),
}
_READERS: dict[str, Callable[[Any], Any]] = {
    "$int": lambda v: int(v, 16),
    "$float": float,
    "$bytes": _bytes,
    "$bytearray": lambda v: bytearray(_bytes(v)),
    "$bytesio": lambda v: io.BytesIO(_bytes(v)),
    "$dtype": dtype_of,
    "$device": torch.device,
    "$range": lambda v: range(*v),
    "$datetime": datetime.datetime.fromisoformat,
    "$date": datetime.date.fromisoformat,
    "$time": datetime.time.fromisoformat,
    "$timedelta": lambda v: datetime.timedelta(*v),
    "$path": pathlib.Path,
    "$tensor": _tensor,
    "$array": _array,
    "$scalar": lambda v: _array(v)[()],
}
