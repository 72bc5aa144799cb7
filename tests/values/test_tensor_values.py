"""Tensors of every kind: what comes back as it was, what is refused by name."""

import gc
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.testing._internal.two_tensor import TwoTensor

from shardplan.planner import (
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    LoadPolicies,
    SafetensorsReader,
    SafetensorsWriter,
)


def save(path, state, **given):
    dcp.save(state, checkpoint_id=str(path), planner=LayoutAwareSavePlanner(**given))


def load(path, state, **given):
    planner = LayoutAwareLoadPlanner(**given)
    dcp.load(state, checkpoint_id=str(path), planner=planner)
    return planner.report


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype, tmp_path):
    bits = torch.tensor([0, 1] * 16 if dtype == torch.bool else range(32), dtype=torch.uint8)
    state = {"w": torch.zeros(32, dtype=torch.uint8).view(dtype)}
    save(tmp_path, {"w": bits.view(dtype)})
    load(tmp_path, state)
    assert bits.tolist() == state["w"].view(torch.uint8).tolist()
    stock = {"w": torch.zeros(32, dtype=torch.uint8).view(dtype)}
    dcp.load(stock, checkpoint_id=str(tmp_path))
    assert bits.tolist() == stock["w"].view(torch.uint8).tolist()


BASE = torch.arange(24.0)
FORMS = {
    "0-d": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "transposed": BASE.view(4, 6).t(),
    "every second column": BASE.view(4, 6)[:, ::2],
    "view of a large storage": torch.arange(1e6)[5:9],
    "expanded": torch.arange(3.0).expand(2, 3),
    "channels last": BASE.view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "one element with a stride": BASE.view(4, 6)[:1, 1],
    "one element of two dims with strides": BASE.view(4, 6)[2:3, 3::4],
    "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "requires grad": torch.nn.Parameter(torch.arange(4.0)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_comes_back_with_its_values(form, tmp_path):
    tensor = FORMS[form]
    state = {"w": torch.full_like(tensor.detach().resolve_conj().resolve_neg(), -1).contiguous()}
    save(tmp_path, {"w": tensor})
    load(tmp_path, state)
    assert tensor.tolist() == state["w"].tolist()


@pytest.mark.parametrize("form", ["0-d", "empty", "transposed", "every second column", "conjugate"])
def test_a_target_of_any_form_is_filled_where_it_is(form, tmp_path):
    tensor = FORMS[form]
    values = tensor.resolve_conj().contiguous() * 2
    target = tensor.clone(memory_format=torch.preserve_format)
    if form == "every second column":
        target = torch.full((4, 6), -1.0)[:, ::2]
    if form == "conjugate":
        target = torch.zeros(2, dtype=torch.complex64).conj()
    place = target.data_ptr()
    save(tmp_path, {"w": values})
    state = {"w": target}
    load(tmp_path, state)
    assert state["w"] is target
    assert (place, values.tolist()) == (target.data_ptr(), target.tolist())


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("wrap", [lambda t: (t,), lambda t: {3: [t]}], ids=["tuple", "dict"])
def test_one_element_with_a_stride_inside_a_python_value(wrap, own, tmp_path):
    writer = {"storage_writer": SafetensorsWriter(tmp_path)} if own else {"checkpoint_id": tmp_path}
    dcp.save({"a": wrap(BASE.view(4, 6)[:1, 5])}, planner=LayoutAwareSavePlanner(), **writer)
    state = {"a": wrap(torch.zeros(1))}
    reader = {"storage_reader": SafetensorsReader(tmp_path)} if own else {"checkpoint_id": tmp_path}
    dcp.load(state, planner=LayoutAwareLoadPlanner(), **reader)
    assert str(wrap(torch.tensor([5.0]))) == str(state["a"])


@pytest.mark.parametrize("own", [True, False])
def test_tied_elements_with_a_stride_are_filled_from_two_copies(own, tmp_path):
    writer = {"storage_writer": SafetensorsWriter(tmp_path)} if own else {"checkpoint_id": tmp_path}
    copies = {"a": torch.tensor([7.0]), "b": torch.tensor([7.0])}
    dcp.save(copies, planner=LayoutAwareSavePlanner(), **writer)
    matrix = torch.zeros(2, 3)
    state = {"a": matrix[:1, 1], "b": matrix[:1, 1]}
    reader = {"storage_reader": SafetensorsReader(tmp_path)} if own else {"checkpoint_id": tmp_path}
    dcp.load(state, planner=LayoutAwareLoadPlanner(), **reader)
    assert [[0, 7, 0], [0, 0, 0]] == matrix.tolist()


REFUSED = {
    "wrapper subclass": (
        lambda: TwoTensor(torch.ones(3), torch.ones(3)),
        r"TwoTensor wraps .*\(a, b\)",
    ),
    "sparse": (lambda: torch.eye(3).to_sparse(), r"layout torch\.sparse_coo"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "needs its scale and zero point",
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "no one shape",
    ),
    "int4": (
        lambda: torch.ones(3, dtype=torch.uint8).view(torch.int4),
        r"can't store torch\.int4\. Store view\(torch\.uint8\)",
    ),
    "bits": (
        lambda: torch.ones(3, dtype=torch.uint8).view(torch.bits8),
        r"can't store torch\.bits8",
    ),
    "meta": (
        lambda: torch.empty(3, device="meta"),
        r"meta tensor of shape \(3,\) has no data",
    ),
}


@pytest.mark.filterwarnings("ignore")  # torch's own, of its prototypes
@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_come_back_as_something_else_is_refused_by_name(kind, tmp_path):
    make, reason = REFUSED[kind]
    with pytest.raises(CheckpointException, match=rf"section\.w: .*{reason}"):
        save(tmp_path, {"section": {"w": make()}})
    assert not (tmp_path / ".metadata").exists()


def test_a_plain_subclass_is_stored_as_its_elements(tmp_path):
    class Marked(torch.Tensor):
        pass

    save(tmp_path, {"w": torch.arange(3.0).as_subclass(Marked)})
    state = {"w": torch.zeros(3)}
    dcp.load(state, checkpoint_id=str(tmp_path))
    assert [0.0, 1.0, 2.0] == state["w"].tolist()


def test_a_meta_target_is_an_error_or_gets_memory(tmp_path):
    save(tmp_path, {"w": torch.arange(3.0), "b": torch.ones(2)})
    state = {"w": torch.empty(3, device="meta"), "b": torch.zeros(2)}
    with pytest.raises(CheckpointException, match=r"w: a meta tensor of shape \(3,\) has no data"):
        load(tmp_path, state)
    assert [0.0, 0.0] == state["b"].tolist()
    report = load(tmp_path, state, policies=LoadPolicies(meta="cpu"))
    assert [0.0, 1.0, 2.0] == state["w"].tolist()
    assert ["w"] == report.materialized


def test_a_target_whose_elements_share_memory_is_refused(tmp_path):
    save(tmp_path, {"w": torch.ones(2, 3)})
    with pytest.raises(CheckpointException, match=r"w: several elements .* share memory"):
        load(tmp_path, {"w": torch.zeros(3).expand(2, 3)})


# Tied tensors -------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embed = torch.nn.Embedding(6, 2)
        self.head = torch.nn.Linear(2, 6, bias=False)
        with torch.no_grad():
            self.embed.weight.copy_(torch.arange(12.0).view(6, 2))
            self.head.weight.copy_(torch.arange(12.0).view(6, 2) + 100)
        if tied:
            self.head.weight = self.embed.weight


def stored_bytes(path):
    return sum(file.stat().st_size for file in path.glob("*.distcp"))


@pytest.mark.parametrize("given", [True, False], ids=["model", "no model"])
def test_a_tied_weight_is_stored_once_and_any_reader_finds_both(given, tmp_path):
    one, two = Tied(), Tied(tied=False)
    save(tmp_path / "one", {"m": one.state_dict()}, model=one if given else None)
    save(tmp_path / "two", {"m": two.state_dict()}, model=two if given else None)
    assert 2 * stored_bytes(tmp_path / "one") == stored_bytes(tmp_path / "two")
    for read in (load, lambda path, state: dcp.load(state, checkpoint_id=str(path))):
        state = {"m": {"embed.weight": torch.zeros(6, 2), "head.weight": torch.zeros(6, 2)}}
        read(tmp_path / "one", state)
        assert list(range(12)) == state["m"]["embed.weight"].flatten().tolist()
        assert list(range(12)) == state["m"]["head.weight"].flatten().tolist()


def test_two_copies_do_not_silently_become_one(tmp_path):
    save(tmp_path, {"m": Tied(tied=False).state_dict()})
    with pytest.raises(
        CheckpointException, match=r"m\.embed\.weight and m\.head\.weight: they share their memory"
    ):
        load(tmp_path, {"m": Tied().state_dict()})


def test_two_equal_copies_of_stock_fill_one_memory(tmp_path):
    dcp.save({"m": Tied().state_dict()}, checkpoint_id=str(tmp_path))
    model = Tied()
    model.embed.weight.detach().fill_(-1)
    load(tmp_path, {"m": model.state_dict()})
    assert list(range(12)) == model.head.weight.flatten().tolist()


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_one_key_is_enough_for_one_memory_and_not_for_two(kept, tmp_path):
    save(tmp_path, {"m": {kept: torch.arange(12.0).view(6, 2)}})
    model = Tied()
    model.embed.weight.detach().fill_(-1)
    report = load(tmp_path, {"m": model.state_dict()})
    other = {"embed.weight": "m.head.weight", "head.weight": "m.embed.weight"}[kept]
    assert (list(range(12)), [other]) == (model.head.weight.flatten().tolist(), report.tied)
    with pytest.raises(CheckpointException, match=rf"{other}: not in the checkpoint"):
        load(tmp_path, {"m": Tied(tied=False).state_dict()})


def test_a_tie_that_ends_between_two_saves_is_noticed(tmp_path):
    weight, planner = torch.arange(4.0), LayoutAwareSavePlanner()
    dcp.save({"a": weight, "b": weight}, checkpoint_id=str(tmp_path / "1"), planner=planner)
    dcp.save({"a": weight, "b": weight + 1}, checkpoint_id=str(tmp_path / "2"), planner=planner)
    state = {"a": torch.zeros(4), "b": torch.zeros(4)}
    load(tmp_path / "2", state)
    assert [[0, 1, 2, 3], [1, 2, 3, 4]] == [state["a"].tolist(), state["b"].tolist()]


# What a planner keeps -----------------------------------------------------------------------------


def test_a_planner_keeps_no_tensor_and_the_second_save_has_the_second_values(tmp_path):
    planner = LayoutAwareSavePlanner()
    for number in range(2):
        tensor = torch.full((3,), float(number))
        alive = weakref.ref(tensor)
        dcp.save({"w": tensor}, checkpoint_id=str(tmp_path / str(number)), planner=planner)
        del tensor
        gc.collect()
        assert alive() is None
    state = {"w": torch.zeros(3)}
    load(tmp_path / "1", state)
    assert [1.0, 1.0, 1.0] == state["w"].tolist()


@pytest.mark.parametrize("state", [{"a.b": 1, "a": {"b": 2}}, {"a": {0: 1, "0": 2}}], ids=str)
def test_two_values_of_one_key_are_refused(state, tmp_path):
    with pytest.raises(CheckpointException, match=r"a\.(b|0): the values .* would have one key"):
        save(tmp_path, state)


@pytest.mark.parametrize("key", ["a/b", "..", "ü" * 300, "", " \n", "module"], ids=ascii)
def test_any_text_is_a_key(key, tmp_path):
    save(tmp_path, {"s": {key: torch.arange(2.0), key + "x": 5}})
    state = {"s": {key: torch.zeros(2), key + "x": 0}}
    load(tmp_path, state)
    assert ([0.0, 1.0], 5) == (state["s"][key].tolist(), state["s"][key + "x"])


def rows(m):
    return {"a": m[:2], "b": m[1:3]}


def crossing(m):
    return {"a": m[:, 1], "b": m[2], "c": m[:, 0]}


def with_parent(m):
    return {"a": m[1:, ::2], "b": m, "c": m[3, 1:3]}


def other_dtype(m):
    return {"a": m[0], "b": m.view(torch.int64)[0, 1:]}


def through_a_tie(m):
    return {"a": m[:2], "b": m[:2], "c": m[1]}


PARTLY_SHARED = [rows, crossing, with_parent, other_dtype, through_a_tie]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("model", [True, False])
@pytest.mark.parametrize("views", PARTLY_SHARED)
def test_tensors_that_share_a_part_of_their_memory(views, model, own, tmp_path):
    """They are filled if what was saved agrees there, and else an error names two of them."""
    if model:
        shapes = {key: tuple(t.shape) for key, t in views(torch.zeros(4, 6)).items()}
        given = {"model": shapes, "layouts": ()}
    else:
        given = {}

    def run(state, number, kind):
        at = tmp_path / str(number)
        writer = SafetensorsWriter(at, sync=False) if own else FileSystemWriter(at)
        if kind is LayoutAwareSavePlanner:
            dcp.save(state, storage_writer=writer, planner=kind(**given))
            return
        reader = SafetensorsReader(at) if own else FileSystemReader(at)
        dcp.load(state, storage_reader=reader, planner=kind(**given))

    saved = BASE.view(4, 6) + 1
    run({key: t.clone() for key, t in views(saved).items()}, 0, LayoutAwareSavePlanner)
    live = torch.zeros(4, 6)
    run(views(live), 0, LayoutAwareLoadPlanner)
    for key, tensor in views(live).items():
        assert views(saved)[key].tolist() == tensor.tolist()
    for number, changed in enumerate(views(saved), 1):
        different = {key: t.clone() for key, t in views(saved).items()}
        different[changed] += 1
        run(different, number, LayoutAwareSavePlanner)
        state = views(torch.zeros(4, 6))
        if views is crossing and changed == "c":
            expected = r"[bc] and [bc]: they share a part of their memory here"
        elif views is through_a_tie and changed in "ab":
            expected = r"[abc] and [abc]: they share "
        else:
            expected = (
                rf"({changed} and [abc]|[abc] and {changed}): they share a part of their memory"
            )
        with pytest.raises(CheckpointException, match=expected):
            run(state, number, LayoutAwareLoadPlanner)
        del state[changed]  # as the error says
        run(state, number, LayoutAwareLoadPlanner)


@pytest.mark.parametrize("own", [True, False])
def test_columns_of_one_matrix_are_filled_where_they_are(own, tmp_path):
    """Their runs of memory meet, and they share no element."""
    writer = {"storage_writer": SafetensorsWriter(tmp_path)} if own else {"checkpoint_id": tmp_path}
    saved = {"a": torch.arange(8.0).view(4, 2), "b": -torch.ones(4), "c": torch.full((4, 3), 5.0)}
    dcp.save(saved, planner=LayoutAwareSavePlanner(), **writer)
    matrix = torch.zeros(4, 6)
    state = {"a": matrix[:, :2], "b": matrix[:, 2], "c": matrix[:, 3:]}
    reader = {"storage_reader": SafetensorsReader(tmp_path)} if own else {"checkpoint_id": tmp_path}
    dcp.load(state, planner=LayoutAwareLoadPlanner(), **reader)
    assert [[2.0 * i, 2.0 * i + 1, -1, 5, 5, 5] for i in range(4)] == matrix.tolist()


def test_a_part_that_the_checkpoint_lacks_keeps_what_the_other_key_fills(tmp_path):
    save(tmp_path, {"a": torch.arange(6.0).view(2, 3)})
    matrix = torch.full((4, 3), -1.0)
    report = load(tmp_path, {"a": matrix[:2], "b": matrix[1:]}, strict=False)
    assert (["a"], ["b"]) == (report.loaded, report.missing)
    assert [[0, 1, 2], [3, 4, 5], [-1, -1, -1], [-1, -1, -1]] == matrix.tolist()
