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
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planner import CheckpointError, UnstorableValueError
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
        back(Colour.RED)


def test_own_classes_inside_of_a_container_come_back_as_they_are_stored(caplog):
    """`args` of a training script: a Namespace with enums, loaded by a program without them."""
    args = argparse.Namespace(lr=0.1, colour=Colour.RED, more=[Settings(0.5, ("a",))])
    found = back(args)
    assert 0.1 == found.lr
    assert {"$enum": [f"{__name__}.Colour", "RED"]} == found.colour
    assert [
        {"$dataclass": [f"{__name__}.Settings", {"rate": 0.5, "names": {"$tuple": ["a"]}}]}
    ] == (found.more)
    assert "key: the program holds no" in caplog.text and "Colour" in caplog.text
    assert args == back(args, (Colour, Settings))


def version(*fields, **given):
    """A dataclass State of this module, as one version of a program has it."""
    return dataclasses.make_dataclass("State", fields, namespace={"__module__": __name__}, **given)


@pytest.mark.parametrize("given", [{}, {"frozen": True}, {"slots": True}], ids=str)
def test_a_field_that_the_class_has_no_longer_is_named(given):
    old, new = version("seen", "epoch", "more"), version("seen", **given)
    for wrap in (lambda v: v, lambda v: [v], lambda v: {"a": (v,)}):
        stored = to_plain("run.s", wrap(old(1, 2, 3)))
        with pytest.raises(CheckpointError, match=r"^run\.s: .*State has epoch, more, which .* no"):
            from_plain("run.s", stored, [new])
        again = version("seen", "epoch", "more", **given)  # as the error says
        assert wrap(again(1, 2, 3)) == from_plain("run.s", stored, [again])


@pytest.mark.parametrize("given", [{}, {"frozen": True}, {"slots": True}], ids=str)
def test_a_field_that_is_new_gets_its_default(given):
    stored = to_plain("run.s", [version("seen")(4)])
    late = dataclasses.field(default_factory=list)
    mark = dataclasses.field(default="x", init=False)
    new = version("seen", ("tags", list, late), ("rate", float, 0.5), ("mark", str, mark), **given)
    found = from_plain("run.s", stored, [new])
    assert [(4, [], 0.5, "x")] == [(v.seen, v.tags, v.rate, v.mark) for v in found]
    with pytest.raises(CheckpointError, match=r"^run\.s: .*State has no epoch, .* no default"):
        from_plain("run.s", stored, [version("seen", "epoch", **given)])


class Other:
    pass


class Bits(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass
class Output(collections.OrderedDict):
    logits: int = 0


def with_more(value):
    value.late = 1
    return value


Point = collections.namedtuple("Point", "x y")
RECORDS = np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])


@pytest.mark.parametrize(
    "value",
    [
        Other(),
        print,
        lambda: 0,
        np.array([Other()]),
        [Other()],
        np.ma.masked_array([1, 2], mask=[0, 1]),
        RECORDS,
        RECORDS[0],
        RECORDS.view(np.recarray),
        np.ones((1, 1)).view(np.matrix),
        datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(0), "Z")),
        datetime.time(1, fold=1),
        pathlib.PurePosixPath("a"),
        pathlib.PureWindowsPath("a"),
        Point(1, 2),
        collections.Counter("aab"),
        collections.defaultdict(int, a=1),
        Bits.A | Bits.B,
        Output(1),
        with_more(Settings(0.5, ())),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True),
        torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"),
    ],
    ids=lambda v: type(v).__name__,
)
@pytest.mark.parametrize("inside", [False, True])
def test_what_would_not_come_back_as_it_is_is_refused_by_name(value, inside):
    with pytest.raises(UnstorableValueError, match=r"key: a value of type .*no pickles"):
        to_plain("key", {"a": [value]} if inside else value)


ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    st.binary().map(bytearray),
    st.datetimes(timezones=st.sampled_from([None, datetime.UTC])).map(lambda t: t.replace(fold=0)),
    st.dates(),
    st.times().map(lambda t: t.replace(fold=0)),
    st.timedeltas(),
    st.sampled_from([torch.float16, torch.device("meta"), range(3), slice(1, None), Colour.RED]),
    st.sampled_from([pathlib.Path("/a"), torch.Size([1]), np.datetime64(5, "3D"), np.bool_(True)]),
    st.sampled_from(["<i2", ">f4", "|b1", "<c8", "<U2", "|S3", "<M8[us]"]).map(
        lambda code: np.zeros((2, 1), code)
    ),
    st.sampled_from([torch.arange(3), torch.tensor(2.5, dtype=torch.bfloat16), torch.ones(2, 0)]),
)
KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.integers()))
NESTED = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(KEYS, inner),
        st.dictionaries(KEYS, inner).map(collections.OrderedDict),
        st.frozensets(KEYS),
        st.frozensets(KEYS).map(set),
        st.builds(Settings, st.floats(), inner),
        st.dictionaries(st.text(min_size=1), inner).map(lambda d: argparse.Namespace(**d)),
    ),
    max_leaves=12,
)


def same(a, b):
    """Whether two values have equal types and contents at every depth, order included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, set | frozenset):
        return same(sorted(a, key=repr), sorted(b, key=repr))
    if isinstance(a, argparse.Namespace | Settings):
        return same(vars(a), vars(b))
    return repr(a) == repr(b)


@given(NESTED)
def test_whatever_is_accepted_comes_back_with_its_types(value):
    assert same(value, back(value, (Colour, Settings)))


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
