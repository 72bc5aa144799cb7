"""The report is the whole truth: every key of a checkpoint is loaded or left out by name, every key asked for is filled or named."""

import alone
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from shardplan.planner import (
    CheckpointError,
    DamagedCheckpointError,
    DtypeMismatchError,
    Grids,
    IncompleteCheckpointError,
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    LoadPolicies,
    MissingKeyError,
    SafetensorsReader,
    SafetensorsWriter,
    ShapeMismatchError,
    UnexpectedKeyError,
)

NAMES = ("a", "b.c", "d")
SLOTS = ("m", "v")


def grid():
    return Grids.from_sizes(0)


@st.composite
def entries(draw):
    """Leaves of a state dict: their section ('' for none), what stands there, and which are held."""
    model = draw(st.booleans())
    flat = draw(st.booleans())
    found = {}
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1)):
        found[("", name) if flat else ("model", name)] = "tensor"
    if not flat:
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True)):
            for slot in SLOTS:
                found[("optim", "state", name, slot)] = "tensor"
            found[("optim", "state", name, "step")] = "number"
        for word in draw(st.lists(st.sampled_from(("lr", "epoch")), unique=True)):
            found[("train", word)] = "number"
    return model, flat, found


def nested(leaves, fill):
    state = {}
    for path, kind in leaves.items():
        at = state
        parts = path[1:] if path[0] == "" else path
        for element in parts[:-1]:
            at = at.setdefault(element, {})
        value = float(sum(map(ord, "".join(parts)))) if fill else -1.0
        at[parts[-1]] = torch.full((2,), value) if kind == "tensor" else value
    return state


def key(path):
    return ".".join(path[1:] if path[0] == "" else path)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_key_is_loaded_or_named(tmp_path_factory, data):
    model, flat, leaves = data.draw(entries())
    saved = {p: k for p, k in leaves.items() if data.draw(st.booleans(), label=f"save {key(p)}")}
    asked = {p: k for p, k in leaves.items() if data.draw(st.booleans(), label=f"ask {key(p)}")}
    if not saved or not set(saved) & set(asked):
        return
    shapes = dict.fromkeys(NAMES, (2,)) if model else None
    path = tmp_path_factory.mktemp("c")
    save_planner = LayoutAwareSavePlanner(shapes, grid=grid(), **({"layouts": ()} if model else {}))
    alone.saved(path, [nested(saved, True)], [save_planner])
    state = nested(asked, False)
    policies = LoadPolicies(missing="report")
    planner = LayoutAwareLoadPlanner(
        shapes, grid=grid(), policies=policies, **({"layouts": ()} if model else {})
    )
    alone.load(path, [state], [planner])
    report = planner.report
    # The oracle: sets of keys, from what the test itself saved and asked for.
    have, want = {key(p) for p in saved}, {key(p) for p in asked}
    sections = {k.partition(".")[0] for k in want & have}
    left = {k for k in have - want if flat or k.partition(".")[0] in sections}
    assert have & want == set(report.loaded)
    assert want - have == set(report.missing)
    assert left == set(report.unexpected)
    for p in asked:
        at = state
        for element in p[1:] if p[0] == "" else p:
            at = at[element]
        expected = float(sum(map(ord, "".join(p[1:] if p[0] == "" else p)))) if p in saved else -1.0
        assert expected == (float(at[0]) if isinstance(at, torch.Tensor) else at), key(p)


def save(path, state, shapes=None):
    writer = SafetensorsWriter(path, sync=False)
    planner = LayoutAwareSavePlanner(shapes, grid=grid())
    dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)


def load(path, state, shapes=None, **options):
    planner = LayoutAwareLoadPlanner(shapes, grid=grid(), **options)
    dcp.load(state, storage_reader=SafetensorsReader(path), planner=planner, no_dist=True)
    return planner.report


def error_of(call, *args, **options):
    with pytest.raises(BaseException) as caught:
        call(*args, **options)
    return next(iter(caught.value.failures.values()))[0]


def ones(*names):
    return {name: torch.ones(2) for name in names}


BESIDE = {  # saved, asked for, unexpected, skipped
    "tensor": (
        {"model": ones("a"), **ones("step", "ema")},
        {"model": ones("a"), **ones("step")},
        (["ema"], []),
    ),
    "number": (
        {"model": ones("a"), "step": 3, "epoch": 1},
        {"model": ones("a"), "step": 0},
        (["epoch"], []),
    ),
    "flat model": (
        {**ones("w", "b"), "optim": ones("w", "b")},
        {**ones("w"), "optim": ones("w")},
        (["b", "optim.b"], []),
    ),
    "flat model of names with dots": (
        {**ones("layers.0.w", "head.w"), "optim": ones("m")},
        {**ones("layers.0.w"), "optim": ones("m")},
        (["head.w"], []),
    ),
    "section": (
        {"model": ones("a"), "optim": ones("m", "v"), "sched": {"lr": 1}},
        {"model": ones("a")},
        ([], ["optim", "sched"]),
    ),
    "section and what is beside": (
        {"model": ones("a"), "optim": ones("m"), **ones("ema"), "epoch": 1},
        {"model": ones("a")},
        ([], ["ema", "epoch", "optim"]),
    ),
    "section, a tensor beside the other": (
        {"model": ones("a"), "optim": ones("m"), **ones("ema", "step")},
        {"model": ones("a"), **ones("step")},
        (["ema"], ["optim"]),
    ),
    "empty container beside": (
        {"model": ones("a"), "optim": {"m": torch.ones(2)}, "epoch": 1},
        {"model": ones("a"), "other": {}},
        ([], ["epoch", "optim"]),
    ),
}


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("case", BESIDE)
def test_keys_beside_sections_and_whole_sections_are_named(case, own, tmp_path):
    saved, asked, expected = BESIDE[case]
    writer = SafetensorsWriter(tmp_path) if own else FileSystemWriter(tmp_path)
    dcp.save(saved, storage_writer=writer, planner=LayoutAwareSavePlanner(), no_dist=True)

    def load(**given):
        planner = LayoutAwareLoadPlanner(grid=grid(), policies=LoadPolicies(**given))
        reader = SafetensorsReader(tmp_path) if own else FileSystemReader(tmp_path)
        dcp.load(asked, storage_reader=reader, planner=planner, no_dist=True)
        return planner.report

    report = load(missing="report")
    assert expected == (sorted(report.unexpected), sorted(report.skipped))
    if expected[0]:
        assert isinstance(error_of(load, unexpected="error"), UnexpectedKeyError)
    else:
        load(missing="report", unexpected="error")


def test_state_of_a_parameter_without_live_state_is_named(tmp_path):
    shapes = {"a": (2,), "b": (2,)}

    def state(names):
        slots = {n: {"m": torch.ones(2), "step": torch.tensor(3.0)} for n in names}
        return {"model": {n: torch.ones(2) for n in shapes}, "optim": {"state": slots}}

    save(tmp_path, state("ab"), shapes)
    report = load(tmp_path, state("a"), shapes)
    assert {"optim.state.b.m", "optim.state.b.step"} == set(report.unexpected)
    error = error_of(load, tmp_path, state("a"), shapes, policies=LoadPolicies(unexpected="error"))
    assert isinstance(error, UnexpectedKeyError) and "optim.state.b.m" in str(error)
    load(tmp_path, state("ab"), shapes, policies=LoadPolicies(unexpected="error"))  # the advice


@pytest.mark.parametrize("given_model", [False, True])
def test_optimizer_that_has_not_stepped_is_not_filled_in_silence(tmp_path, given_model):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"model": model, "optimizer": optimizer} if given_model else {}
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"optim": optimizer.state_dict()}
    planner = LayoutAwareSavePlanner(grid=grid(), **options)
    dcp.save(
        state, storage_writer=SafetensorsWriter(tmp_path, sync=False), planner=planner, no_dist=True
    )
    fresh = torch.optim.AdamW(model.parameters())
    options = {"model": model, "optimizer": fresh} if given_model else {}

    def attempt(**more):
        planner = LayoutAwareLoadPlanner(grid=grid(), **options, **more)
        state = {"optim": fresh.state_dict()}
        dcp.load(state, storage_reader=SafetensorsReader(tmp_path), planner=planner, no_dist=True)

    error = error_of(attempt)
    assert isinstance(error, MissingKeyError) and "optim.state: empty here" in str(error)
    attempt(strict=False)  # the advice


def test_errors_of_each_kind_have_their_class_and_stocks_words(tmp_path):
    save(tmp_path, {"w": torch.ones(2, 2), "n": 5})
    cases = [
        ({"w": torch.ones(2, 2), "x": torch.ones(1)}, MissingKeyError, KeyError, "missing key"),
        ({"w": torch.ones(2, 3)}, ShapeMismatchError, ValueError, "size mismatch"),
        ({"w": torch.ones(4)}, ShapeMismatchError, ValueError, "size mismatch"),
        ({"w": torch.ones(2, 2, dtype=torch.int32)}, DtypeMismatchError, ValueError, "int32"),
        ({"n": torch.ones(2)}, DtypeMismatchError, ValueError, "python value"),
    ]
    for state, kind, builtin, words in cases:
        error = error_of(load, tmp_path, state)
        assert type(error) is kind and isinstance(error, builtin), error
        assert words in str(error).lower()


def stock_metadata(*chunks):
    parts = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks]
    properties = TensorProperties(dtype=torch.float32)
    return Metadata({"w": TensorStorageMetadata(properties, torch.Size((4, 2)), parts)})


@pytest.mark.parametrize(
    ("chunks", "kind"),
    [
        ([((0,), (8,))], DamagedCheckpointError),
        ([((0, 0, 0), (4, 2, 1))], DamagedCheckpointError),
        ([((0, 0), (2, 2))], IncompleteCheckpointError),
    ],
)
def test_chunks_that_do_not_fit_their_tensor_are_named(chunks, kind):
    planner = LayoutAwareLoadPlanner(grid=grid())
    planner.set_up_planner({"w": torch.zeros(4, 2)}, stock_metadata(*chunks), True)
    with pytest.raises(CheckpointError, match=r"^w: ") as caught:
        planner.create_local_plan()
    assert type(caught.value) is kind
