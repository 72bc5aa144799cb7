"""Python values as DCP stores them: what comes back, what is refused, what a digest tells."""

import collections
import dataclasses
import datetime
import enum
import io
import pathlib
import pickle
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from shardplan.layouts import CheckpointError
from shardplan.planner.state.values import from_bytes, to_bytes, value_digest


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Progress:
    step: int = 0
    color: Color = Color.RED


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    step: int = 0


class Plain:
    def __init__(self, value: int) -> None:
        self.value = value


def back(value: Any, like: Any = None, trust_pickle: bool = False) -> Any:
    return from_bytes("state.x", to_bytes("state.x", value), trust_pickle, like)


@pytest.mark.parametrize(
    "value",
    [
        0,
        -(10**40),
        2.5,
        float("inf"),
        True,
        None,
        "",
        "ünïcode / with.dots",
        b"",
        b"\0\1",
        bytearray(b"x"),
        1 + 2j,
        (1, (2, [3])),
        [],
        [[], {}],
        {},
        {0: "zero", "0": "text", (1, 2): None},
        {1, 2},
        frozenset([1]),
        range(3, 9, 2),
        slice(1, None),
        collections.OrderedDict(b=1, a=2),
        collections.Counter("aab"),
        datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC),
        datetime.timedelta(seconds=3),
        pathlib.PurePosixPath("a/b"),
        torch.float8_e4m3fn,
        torch.device("cpu"),
        torch.Size([2, 3]),
        np.float32(1.5),
        np.int64(7),
        random.Random(3).getstate(),
    ],
    ids=repr,
)
def test_plain_data_comes_back_without_trust(value: Any) -> None:
    loaded = back(value)
    assert value == loaded
    assert type(value) is type(loaded)


def test_numpy_arrays_and_their_random_state_come_back() -> None:
    state = np.random.RandomState(5).get_state()
    loaded = back({"array": np.arange(6, dtype=np.int16).reshape(2, 3), "rng": state})
    assert [[0, 1, 2], [3, 4, 5]] == loaded["array"].tolist()
    assert np.int16 == loaded["array"].dtype
    assert state[1].tolist() == loaded["rng"][1].tolist()


def test_bytesio_is_stored_whole_and_comes_back_at_its_start() -> None:
    stream = io.BytesIO(b"extra state")
    stream.seek(0, io.SEEK_END)
    loaded = back(stream)
    assert b"extra state" == loaded.read()
    assert 11 == stream.tell()  # the caller's own stream is left where it was


def test_bytesio_that_stock_stored_comes_back_at_its_start() -> None:
    stream = io.BytesIO(b"hello")
    stream.seek(0, io.SEEK_END)
    stored = io.BytesIO()
    torch.save(stream, stored)
    stored.seek(0)
    assert b"hello" == from_bytes("x", stored, trust_pickle=False).read()


@pytest.mark.parametrize("value", [Color.RED, Level.HIGH, Progress(7), Fixed(8)], ids=repr)
def test_enums_and_dataclasses_come_back_where_the_program_holds_their_class(value: Any) -> None:
    like = {"nested": [dataclasses.replace(value) if dataclasses.is_dataclass(value) else value]}
    assert value == back(value, like=like)
    assert type(value) is type(back(value, like=like))


def test_a_class_that_the_program_does_not_hold_is_refused_by_name() -> None:
    with pytest.raises(
        CheckpointError, match=r"^state\.x: .*Color, which is not plain data.*trust"
    ):
        back(Color.RED, like=Level.HIGH)
    assert back(Color.RED, trust_pickle=True) is Color.RED


def test_a_class_of_no_enum_or_dataclass_needs_trust_even_where_the_program_holds_it() -> None:
    with pytest.raises(CheckpointError, match=r"^state\.x: .*Plain, which is not plain data"):
        back(Plain(1), like=Plain(2))
    assert 1 == back(Plain(1), trust_pickle=True).value


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return pathlib.Path.touch, (pathlib.Path("/nonexistent/was-run"),)


def test_code_in_a_checkpoint_is_not_run() -> None:
    stored = io.BytesIO()
    torch.save(Harmful(), stored)
    stored.seek(0)
    with pytest.raises(CheckpointError, match="not plain data"):
        from_bytes("x", stored, trust_pickle=False, like=Harmful())


def test_what_can_not_be_pickled_is_refused_by_key() -> None:
    with pytest.raises(
        CheckpointError, match=r"^loader\.lock: a value of type .*lock can't be saved"
    ):
        to_bytes("loader.lock", threading.Lock())
    with pytest.raises(
        CheckpointError, match=r"^loader\.fn: a value of type function can't be saved"
    ):
        value_digest(lambda: 1, "loader.fn")


@pytest.mark.parametrize("stored", [b"", b"PK\3\4 half a file", b"\x80\x02."])
def test_damaged_bytes_are_an_error_with_the_key(stored: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^state\.x: "):
        from_bytes("state.x", io.BytesIO(stored), trust_pickle=False)


def test_digests_are_equal_for_equal_values_only() -> None:
    shared = [1, 2]
    once, twice = [shared, shared], [[1, 2], [1, 2]]
    assert pickle.dumps(once) != pickle.dumps(twice)  # identity, which ranks need not share
    assert value_digest(once) == value_digest(twice)
    tensor = torch.arange(6.0).view(2, 3)
    assert value_digest(tensor) == value_digest(tensor.t().contiguous().t())
    assert value_digest({3, 1, 2}) == value_digest({1, 2, 3})
    different = [1, 1.0, True, "1", b"1", [1], (1,), {1: 1}, {1: 2}, None, tensor, tensor.double()]
    assert len(different) == len({value_digest(value) for value in different})
    conjugated = torch.tensor([1 + 2j]).conj()
    assert value_digest(conjugated) == value_digest(conjugated.resolve_conj())
