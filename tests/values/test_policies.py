"""Policies of a load: their defaults lose nothing, and what they allow is in the report."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shardplan.planner import (
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    LoadPolicies,
    SafetensorsReader,
    SafetensorsWriter,
)


@pytest.fixture
def path(tmp_path):
    state = {"w": torch.arange(4.0), "n": 3, "opt": {"state": {0: {"m": torch.ones(2)}}}}
    dcp.save(state, checkpoint_id=str(tmp_path), planner=LayoutAwareSavePlanner())
    return str(tmp_path)


def load(path, state, **given):
    planner = LayoutAwareLoadPlanner(**given)
    dcp.load(state, checkpoint_id=path, planner=planner)
    return planner.report


def test_defaults_lose_nothing():
    chosen = LoadPolicies()
    assert ("error", "error", "error") == (chosen.missing, chosen.fewer_ranks, chosen.more_ranks)
    assert ("widen", "report", "error") == (chosen.dtype, chosen.unexpected, chosen.meta)


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("missing", "ignore"),
        ("dtype", "any"),
        ("padding", None),
        ("meta", "disk"),
        ("more_ranks", ""),
    ],
)
def test_a_choice_that_does_not_exist(name, choice):
    with pytest.raises(ValueError, match=f"^{name}={choice!r} is n"):
        LoadPolicies(**{name: choice})


def test_missing(path):
    state = {"w": torch.zeros(4), "other": torch.full((2,), -1.0)}
    with pytest.raises(CheckpointException, match=r"other: not in the checkpoint"):
        load(path, state)
    assert [0, 0, 0, 0] == state["w"].tolist()
    for given in ({"strict": False}, {"policies": LoadPolicies(missing="report")}):
        report = load(path, state, **given)
        assert (["w"], ["other"]) == (report.loaded, report.missing)
        assert ([0, 1, 2, 3], [-1, -1]) == (state["w"].tolist(), state["other"].tolist())


def tied():
    """Two names of one memory, a view of it, and a tensor of its own."""
    weight = torch.arange(6.0).reshape(2, 3)
    return {"head": weight, "embedding": weight, "rows": weight[1:], "own": torch.ones(2, 3)}


@pytest.mark.parametrize("own", [True, False])
def test_tensors_of_one_meta_storage_get_one_memory(tmp_path, own):
    writer = {"storage_writer": SafetensorsWriter(tmp_path)} if own else {"checkpoint_id": tmp_path}
    dcp.save(tied(), planner=LayoutAwareSavePlanner(), **writer)
    weight = torch.empty(2, 3, device="meta")
    state = {"head": weight, "embedding": torch.nn.Parameter(weight), "rows": weight[1:]}
    state["own"] = torch.empty(2, 3, device="meta")
    planner = LayoutAwareLoadPlanner(policies=LoadPolicies(meta="cpu"))
    reader = {"storage_reader": SafetensorsReader(tmp_path)} if own else {"checkpoint_id": tmp_path}
    dcp.load(state, planner=planner, **reader)
    for key, value in tied().items():
        assert torch.equal(value, state[key])
    places = {key: value.untyped_storage().data_ptr() for key, value in state.items()}
    assert places["head"] == places["embedding"] == places["rows"] != places["own"]
    assert state["rows"].data_ptr() == state["head"][1].data_ptr()


def test_nothing_found_is_always_an_error(path):
    with pytest.raises(CheckpointException, match=r"none of the 1 requested keys .* x"):
        load(path, {"x": 1}, strict=False)


def test_unexpected(path):
    """A key of a section that was loaded, which nothing asks for."""
    state = {"opt": {"state": {0: {"m": torch.zeros(2)}}}}
    report = load(path, state)
    assert [] == report.unexpected  # other sections may be left out
    extended = {"opt": {"state": {0: {"m": torch.ones(2)}}, "lr": 0.5}}
    dcp.save(extended, checkpoint_id=path + "x", planner=LayoutAwareSavePlanner())
    report = load(path + "x", state)
    assert ["opt.lr"] == report.unexpected
    with pytest.raises(CheckpointException, match=r"opt\.lr: nothing asks for it"):
        load(path + "x", state, policies=LoadPolicies(unexpected="error"))


def test_dtype(path):
    half = {"w": torch.zeros(4, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointException, match=r"w: saved as torch\.float32, wanted as .*cast"):
        load(path, half)
    report = load(path, half, policies=LoadPolicies(dtype="cast"))
    assert {"w": ("torch.float32", "torch.bfloat16")} == report.converted
    assert [0, 1, 2, 3] == half["w"].tolist()
    with pytest.raises(CheckpointException, match="allows no conversion"):
        load(path, {"w": torch.zeros(4, dtype=torch.float64)}, dtype="exact")


F8 = {
    "e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
    "e8m0fnu": torch.float8_e8m0fnu,
}
# By the formats' definitions: exponent and mantissa bits, bias, infinities.
KEPT_BY = {
    "e4m3fn": {"float16", "bfloat16", "float32", "float64"},
    "e5m2": {"float16", "bfloat16", "float32", "float64"},
    "e4m3fnuz": {"float16", "bfloat16", "float32", "float64"},
    "e5m2fnuz": {"float16", "bfloat16", "float32", "float64"},
    "e8m0fnu": {"bfloat16", "float32", "float64"},
}


@pytest.mark.parametrize("name", F8)
def test_floats_of_one_byte_widen_only_where_all_256_values_stay(name, tmp_path):
    saved = torch.arange(256, dtype=torch.uint8).view(F8[name])
    dcp.save({"w": saved}, checkpoint_id=str(tmp_path), planner=LayoutAwareSavePlanner())
    others = {str(t).removeprefix("torch.float8_"): t for t in F8.values() if t != F8[name]}
    wide = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    others |= {str(t).removeprefix("torch."): t for t in wide}
    for other, dtype in others.items():
        state = {"w": torch.zeros(256).to(dtype)}
        if other in KEPT_BY[name]:
            load(str(tmp_path), state)
            assert torch.equal(
                saved.double().nan_to_num(3.25), state["w"].double().nan_to_num(3.25)
            )
        else:
            with pytest.raises(CheckpointException, match=r"w: saved as .*precision would be lost"):
                load(str(tmp_path), state)


@pytest.mark.parametrize("dtype", ["widen", "cast"])
def test_float4_loads_into_float4_only(dtype, tmp_path):
    four = torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    state = {"a": four, "b": torch.ones(4), "c": torch.ones(4, dtype=torch.float8_e5m2)}
    dcp.save(state, checkpoint_id=str(tmp_path), planner=LayoutAwareSavePlanner())
    blank = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    for live in ({"a": torch.zeros(4)}, {"b": blank}, {"c": blank}):
        with pytest.raises(CheckpointException, match=r"float4 packs two values .* that was saved"):
            load(str(tmp_path), live, dtype=dtype)
    dcp.save({"a": four[:1]}, checkpoint_id=f"{tmp_path}/1", planner=LayoutAwareSavePlanner())
    for one in (torch.zeros(1), 0.0):
        with pytest.raises(CheckpointException, match=r"a: .* that was saved"):
            load(f"{tmp_path}/1", {"a": one}, dtype=dtype)
    load(str(tmp_path), {"a": blank}, dtype=dtype)  # as the error says
    assert [0, 1, 2, 3] == blank.view(torch.uint8).tolist()


def test_the_short_forms_win_over_policies(path):
    state = {"w": torch.zeros(4), "x": 0}
    report = load(path, state, policies=LoadPolicies(missing="error"), strict=False)
    assert ["x"] == report.missing


def test_the_report_as_text(path):
    report = load(path, {"w": torch.zeros(4), "x": 0}, strict=False)
    assert "1 loaded; 1 missing (x); 2 unexpected (n, opt.state.0.m)" == str(report)
