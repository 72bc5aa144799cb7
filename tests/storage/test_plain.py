"""Python values as JSON: what is plain comes back as it was, the rest is refused by name."""

import argparse
import collections
import dataclasses
import datetime
import enum
import io
import json
import math
import pathlib
import random

import numpy as np
import pytest
import torch

from shardplan.planner import CheckpointError
from shardplan.planner.storage.format.header import chunk_name, split_name
from shardplan.planner.storage.format.plain import from_plain, to_plain


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Settings:
    rate: float
    names: tuple


def back(value, like=()):
    return from_plain("key", json.loads(json.dumps(to_plain("key", value))), like)


VALUES = [
    None,
    True,
    0,
    -(1 << 200),
    1.5,
    -0.0,
    math.inf,
    1e-320,
    "text \ud800 ß",
    [1, [2, None]],
    (1, (2,)),
    {"a": 1, "b": {"c": [1.0]}},
    {0: "a", (1, 2): "b", "$x": 3},
    {"$tuple": [1]},
    {},
    set(range(3)),
    frozenset({"a"}),
    b"\x00\xff",
    bytearray(b"abc"),
    1 + 2j,
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cpu"),
    range(1, 9, 3),
    slice(None, 3),
    datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC),
    datetime.date(2026, 1, 2),
    datetime.timedelta(days=1, microseconds=3),
    pathlib.Path("/a/b"),
    collections.OrderedDict([("b", 1), ("a", 2)]),
    argparse.Namespace(lr=0.1, betas=(0.9, 0.95)),
    random.getstate(),
    np.float32(2.5),
    np.int64(-3),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_plain_values_come_back(value):
    found = back(value)
    assert type(value) is type(found) and value == found
    assert repr(value) == repr(found)


def test_nan_and_streams_and_arrays():
    assert math.isnan(back(math.nan))
    stream = io.BytesIO(b"abc")
    stream.read()
    assert b"abc" == back(stream).read()
    for array in (np.arange(6, dtype=np.int16).reshape(2, 3), np.array("text"), np.zeros((0, 2))):
        found = back(array)
        assert array.dtype == found.dtype and array.shape == found.shape
        assert array.tobytes() == found.tobytes()
    state = np.random.RandomState(3).get_state()
    assert state[1].tolist() == back(state)[1].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.bool])
def test_tensors(dtype):
    for tensor in (
        torch.ones(2, 3).to(dtype),
        torch.tensor(1).to(dtype),
        torch.empty(0, 4).to(dtype),
    ):
        found = back([tensor])[0]
        assert tensor.dtype is found.dtype and tensor.shape == found.shape
        assert torch.equal(tensor.float(), found.float())


def test_own_classes_come_back_where_the_program_has_them():
    value = {"c": Colour.RED, "s": Settings(0.5, ("a",))}
    assert value == back(value, (Colour, Settings))
    with pytest.raises(CheckpointError, match=r"key: the stored value has a .*Colour"):
        back(value)


class Other:
    pass


@pytest.mark.parametrize("value", [Other(), print, lambda: 0, np.array([Other()]), [Other()]])
def test_what_is_not_plain_is_refused_by_name(value):
    with pytest.raises(CheckpointError, match=r"key: a value of type .*no pickles"):
        to_plain("key", value)


def test_value_that_holds_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(CheckpointError, match="key: a value of type list"):
        to_plain("key", value)


@pytest.mark.parametrize(
    "data",
    [
        {"$new": 1},
        {"$tensor": ["float32", [1 << 40], ""]},
        {"$tensor": ["system", [1], "AAAA"]},
        {"$array": ["O", [1], "AAAAAAAAAAA="]},
        {"$array": ["<f4", [9], "AAAA"]},
        {"$bytes": "%"},
        {"$int": "x"},
        {"$enum": ["os.system", "x"]},
        {"$datetime": "soon"},
        {"$tuple": 5},
    ],
)
def test_damaged_values_are_errors(data):
    with pytest.raises(CheckpointError, match="key: "):
        from_plain("key", data)


@pytest.mark.parametrize("key", ["w", "a@1", "a@", "a@1,2", "@", "x@y", "a.b@3"])
@pytest.mark.parametrize("offsets", [(), (0,), (7,), (0, 0), (3, 0)])
def test_names_of_chunks_go_both_ways(key, offsets):
    assert (key, offsets) == split_name(chunk_name(key, offsets), len(offsets))


def test_names_of_different_chunks_differ():
    keys = ["w", "w@1", "w@", "w@1,2", "w@0"]
    names = [chunk_name(k, o) for k in keys for o in ((0,), (1,), (2,))]
    assert len(names) == len(set(names))
