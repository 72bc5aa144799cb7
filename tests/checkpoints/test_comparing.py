"""diff of values that are no tensors: the same types and bits are equal, anything else is not."""

import argparse
import collections
import dataclasses
import datetime
import io
import pathlib

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli.command import shardplan

from shardplan.layouts import Grids
from shardplan.planner import LayoutAwareSavePlanner, PerRank, SafetensorsWriter
from shardplan.planner.checkpoints.comparing import identical

NAN = float("nan")
OTHER_NAN = float(np.array(0x7FF8000000000001, dtype=np.uint64).view(np.float64))


@dataclasses.dataclass
class Point:
    x: object
    y: object = None


def masked(mask):
    return np.ma.MaskedArray(np.arange(3), mask)


def values():
    """Made anew by every call, so that nothing is identical by being the same object."""
    return {
        "rng": {"torch": torch.arange(5), "numpy": ("MT19937", np.arange(624), 3, 0, 0.0)},
        "list": [torch.ones(2), [np.zeros((2, 0)), torch.tensor(NAN)]],
        "tensor": torch.tensor([NAN, -0.0]),
        "odd dtype": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "view": torch.arange(6).reshape(2, 3).t(),
        "sparse": torch.eye(3).to_sparse(),
        "nan": NAN,
        "structured": np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
        "masked": masked([True, False, False]),
        "objects": np.array([1, "a", None], dtype=object),
        "scalar": np.float32(2.5),
        "keys": {1: "a", "1": "b", (1, 2.0): "c", None: "d"},
        "ordered": collections.OrderedDict(b=1, a=2),
        "sets": {frozenset({1, 2}), ("x", NAN)},
        "stream": io.BytesIO(b"abc"),
        "point": Point(torch.ones(1), {"deep": [np.ones(1)]}),
        "options": argparse.Namespace(a=torch.ones(2)),
        "when": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        "path": pathlib.PurePosixPath("a/b"),
        "dtype": torch.bfloat16,
        "big": 1 << 100,
    }


@pytest.mark.parametrize("name", values())
def test_equal_values_are_identical(name):
    assert identical(values()[name], values()[name])
    assert identical(values(), values())


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (NAN, OTHER_NAN),
        (0.0 + 0.0j, complex(0.0, -0.0)),
        ([1], (1,)),
        ({1: 2}, {True: 2}),
        ({1: 2}, {1.0: 2}),
        ({"a": 1}, collections.OrderedDict(a=1)),
        ({0.0}, {-0.0}),
        ({(1,)}, {(True,)}),
        (b"a", bytearray(b"a")),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(1, 2)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.ones(1), 1.0),
        (torch.eye(2), torch.eye(2).to_sparse()),
        (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse()),
        (np.ones(2), np.ones(2, dtype=np.float32)),
        (np.zeros(1), -np.zeros(1)),
        (np.ones(2), np.ones((2, 1))),
        (np.float32(1), np.float64(1)),
        (masked([True, False, False]), masked([False, False, False])),
        (
            np.zeros(1, dtype=[("a", "i4"), ("b", "f4")]),
            np.zeros(1, dtype=[("a", "i4"), ("c", "f4")]),
        ),
        (np.array([1, None], dtype=object), np.array([1.0, None], dtype=object)),
        (Point(1), Point(1.0)),
        (argparse.Namespace(a=np.ones(2)), argparse.Namespace(a=np.zeros(2))),
        (io.BytesIO(b"a"), io.BytesIO(b"b")),
        (
            datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.UTC),
            datetime.datetime(
                2026, 1, 2, 14, tzinfo=datetime.timezone(datetime.timedelta(hours=2))
            ),
        ),
    ],
)
def test_other_types_or_bits_are_different(left, right):
    assert not identical(left, right)
    assert not identical({"a": [left]}, {"a": [right]})
    assert identical(left, left) and identical(right, right)


def save(path, own, rng):
    state = {"rng": PerRank({"torch": rng, "lists": [rng, (1, NAN)]}), "w": torch.zeros(3)}
    writer = {"storage_writer": SafetensorsWriter(path, sync=False)} if own else {}
    planner = LayoutAwareSavePlanner(grid=Grids.from_sizes(0))
    dcp.save(state, checkpoint_id=path, planner=planner, no_dist=True, **writer)


@pytest.mark.parametrize("own", [True, False])
def test_diff_of_values_of_each_rank(tmp_path, own):
    for name, rng in (("a", torch.arange(9)), ("b", torch.arange(9)), ("c", torch.ones(9))):
        save(tmp_path / name, own, rng)
    save(tmp_path / "d", not own, torch.arange(9))
    for name in "abd":
        answer = shardplan("diff", tmp_path / "a", tmp_path / name, "--values")
        assert (0, "") == (answer.status, answer.err)
        assert "equal: 2 keys, every value of 12 B bit by bit" in answer.out
    answer = shardplan("diff", tmp_path / "a", tmp_path / "c", "--values", "--json")
    assert 1 == answer.status
    assert [("rng.rank_0", "object")] == [(d["key"], d["kind"]) for d in answer.json["differences"]]


def test_diff_of_a_complex_and_a_real_tensor(tmp_path):
    for name, dtype in (("a", torch.complex64), ("b", torch.float32)):
        torch.save({"w": torch.tensor([1.0, 2.0], dtype=dtype)}, tmp_path / name)
    answer = shardplan("diff", tmp_path / "a", tmp_path / "b", "--values", "--json")
    assert {"dtype": 1} == answer.json["counts"]


def test_diff_of_half_bytes(tmp_path):
    """0x21 and 0x25 are the pairs (0.5, 1) and (3, 1), low half first."""
    for name, byte in (("a", 0x21), ("b", 0x25)):
        packed = torch.tensor([[0x77, byte]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        dcp.save({"w": packed}, checkpoint_id=tmp_path / name)
    answer = shardplan("diff", tmp_path / "a", tmp_path / "b", "--values", "--json")
    (found,) = answer.json["differences"]
    assert (1, 2.5) == (found["elements"], found["max_abs"])
