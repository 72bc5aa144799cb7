"""Cases from practice: what is no shard: options, steps, blobs, random states, dtypes."""

import io

import memory
import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from shardplan.layouts import FSDPFlatBuffer, Grids, PipelineLayers
from shardplan.planner import CheckpointError, LayoutAwareLoadPlanner, LayoutAwareSavePlanner


def round_trip(saved, template, model=None, **options):
    """Saves one rank's state dict and loads it into a template; returns the planner's report."""
    checkpoint = memory.save([saved], [LayoutAwareSavePlanner(model)])
    planner = LayoutAwareLoadPlanner(model, **options)
    memory.load(checkpoint, [template], [planner])
    return planner.report


# Optimizer options --------------------------------------------------------------------------------


def stage_optimizers(rates, decays):
    """Two pipeline stages with one parameter each; both call their layer 0."""
    return [
        {
            "optimizer": {
                "state": {"layers.0.w": {"step": torch.tensor(float(rank))}},
                "param_groups": [
                    {"lr": rates[rank], "decay": decays[rank], "params": ["layers.0.w"]}
                ],
            }
        }
        for rank in range(2)
    ]


def stage_planners(kind):
    return [
        kind(
            {"layers.0.w": (2,)},
            grid=Grids.from_sizes(rank, pp=2),
            layouts=[PipelineLayers(offset=rank)],
        )
        for rank in range(2)
    ]


def test_param_groups_of_pipeline_ranks():
    """`param_groups` of pipeline ranks overwrite each other."""
    states = stage_optimizers((0.1, 0.2), (None, "x"))
    checkpoint = memory.save(states, stage_planners(LayoutAwareSavePlanner))
    assert 0.1 == checkpoint.value("optimizer.param_groups.layers.0.w.lr")
    assert 0.2 == checkpoint.value("optimizer.param_groups.layers.1.w.lr")
    states = stage_optimizers((-1.0, -1.0), ("blank", "blank"))
    memory.load(checkpoint, states, stage_planners(LayoutAwareLoadPlanner))
    groups = [state["optimizer"]["param_groups"] for state in states]
    assert [
        [{"lr": 0.1, "decay": None, "params": ["layers.0.w"]}],
        [{"lr": 0.2, "decay": "x", "params": ["layers.0.w"]}],
    ] == groups
    steps = [state["optimizer"]["state"]["layers.0.w"]["step"] for state in states]
    assert [0.0, 1.0] == [float(step) for step in steps]


def test_one_group_for_parameters_that_were_saved_with_different_options():
    """`param_groups` of pipeline ranks: one group can't take two learning rates silently."""
    states = stage_optimizers((0.1, 0.2), (1, 1))
    checkpoint = memory.save(states, stage_planners(LayoutAwareSavePlanner))
    names = ["layers.0.w", "layers.1.w"]
    slots = {name: {"step": torch.tensor(-1.0)} for name in names}
    state = {"optimizer": {"state": slots, "param_groups": [{"lr": -1.0, "params": names}]}}
    planner = LayoutAwareLoadPlanner({"layers.0.w": (2,), "layers.1.w": (2,)})
    text = r"param_groups\.0\.lr: layers\.0\.w was saved with 0\.1 and layers\.1\.w with 0\.2"
    with pytest.raises(CheckpointError, match=text):
        memory.load(checkpoint, [state], [planner])
    assert -1.0 == state["optimizer"]["param_groups"][0]["lr"]


def test_integer_keys():
    """Integer dict keys: the loaded value goes to a new string key."""
    saved = {"opt": {"state": {0: {"step": 5, "m": torch.arange(2.0)}}}}
    template = {"opt": {"state": {0: {"step": -1, "m": torch.full((2,), -1.0)}}}}
    round_trip(saved, template)
    assert [0] == list(template["opt"]["state"])
    assert 5 == template["opt"]["state"][0]["step"]
    assert [0.0, 1.0] == template["opt"]["state"][0]["m"].tolist()


def test_integer_and_text_keys_that_look_alike():
    """Integer dict keys: {0: ..., "0": ...} would have one key, and both are named."""
    planner = LayoutAwareSavePlanner()
    planner.set_up_planner({"opt": {0: torch.zeros(1), "0": torch.ones(1)}})
    with pytest.raises(
        CheckpointError, match=r"opt\.0: the values \('opt', 0\) and \('opt', '0'\)"
    ):
        planner.create_local_plan()


# Values that no layout explains -------------------------------------------------------------------


def replicas(values, kind=LayoutAwareSavePlanner):
    planners = [
        kind(grid=Grids.from_sizes(r, dp_replicate=len(values))) for r in range(len(values))
    ]
    return [{"rng": {"state": value}, "t": torch.ones(2)} for value in values], planners


@pytest.mark.parametrize(
    "values",
    [
        ("rank0", "rank1"),
        (torch.tensor([0]), torch.tensor([1])),
        (torch.tensor([0]), torch.tensor([0.0])),
        (0, 0.0),
        ([1, (2, 3)], [1, [2, 3]]),
        (b"a", b"b"),
    ],
)
def test_per_rank_values_saved_as_if_replicated(values):
    """Per-rank RNG saved as if replicated: an error that names the key and the two ranks."""
    texts = errors_of_all_ranks(*replicas(values))
    assert any(text.startswith("rng.state: ") for text in texts)
    assert all("0" in text and "rank" in text for text in texts)
    assert "ranks 0 and 1" in texts[0]


def errors_of_all_ranks(states, planners):
    """What `dcp.save` would raise on each rank: its own error, or the coordinator's on all."""
    plans = []
    for state, planner in zip(states, planners, strict=True):
        planner.set_up_planner(state)
        plans.append(memory.world.sent(planner.create_local_plan()))
    try:
        replies, _ = planners[0].create_global_plan(plans)
    except CheckpointError as error:
        return [str(error)] * len(planners)
    texts = []
    for planner, reply in zip(planners, replies, strict=True):
        with pytest.raises(CheckpointError) as caught:
            planner.finish_plan(memory.world.sent(reply))
        texts.append(str(caught.value))
    return texts


def test_equal_values_on_every_rank_are_written_once():
    """Per-rank RNG saved as if replicated: equal values of any kind are fine."""
    states, planners = replicas([{"seed": (1, 2.5, None, b"x"), "on": True}] * 3)
    checkpoint = memory.save(states, planners)
    assert {("rng.state.seed", None), ("rng.state.on", None), ("t", (0,))} == set(checkpoint.data)
    assert (1, 2.5, None, b"x") == checkpoint.value("rng.state.seed")


# Blobs --------------------------------------------------------------------------------------------


def test_extra_state_of_another_length():
    """`_extra_state`: (a) uint8 (2322,) saved, template (4,)."""
    blob = torch.arange(2322).to(torch.uint8)
    template = {"model": {"attn._extra_state": torch.zeros(4, dtype=torch.uint8)}}
    report = round_trip({"model": {"attn._extra_state": blob}}, template)
    assert torch.equal(blob, template["model"]["attn._extra_state"])
    assert ["model.attn._extra_state"] == report.replaced


def test_extra_state_as_bytes_io():
    """`_extra_state`: (b) io.BytesIO positioned at its end, (c) b''."""
    stream = io.BytesIO()
    stream.write(b"hello")
    saved = {"model": {"a._extra_state": stream, "b._extra_state": b"", "c": torch.ones(1)}}
    template = {
        "model": {"a._extra_state": io.BytesIO(), "b._extra_state": b"x", "c": torch.zeros(1)}
    }
    round_trip(saved, template)
    assert b"hello" == template["model"]["a._extra_state"].read()
    assert b"" == template["model"]["b._extra_state"]


def test_extra_state_on_one_side_only():
    """`_extra_state`: (d) key absent on one side: tolerated, with a report."""
    w = {"w": torch.ones(1)}
    template = {"model": {"w": torch.zeros(1), "a._extra_state": b"mine"}}
    report = round_trip({"model": w}, template)
    assert (b"mine", 1.0) == (template["model"]["a._extra_state"], float(template["model"]["w"]))
    assert ["model.a._extra_state"] == report.missing
    template = {"model": {"w": torch.zeros(1)}}
    report = round_trip({"model": {**w, "a._extra_state": b"saved"}}, template)
    assert [["model.a._extra_state"], []] == [report.unexpected, report.missing]


# Dtypes and kinds ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "wanted", "policy"),
    [
        (torch.tensor([1.7, -2.9]), torch.int64, "cast"),
        (torch.tensor([2**24 + 1]), torch.float32, "cast"),
        (torch.tensor([70000.0]), torch.float16, "widen"),
        (torch.tensor([500.0]), torch.float8_e4m3fn, "widen"),
        (torch.tensor([1 + 2j]), torch.float32, "cast"),
        (torch.tensor([300]), torch.uint8, "cast"),
        (torch.tensor([1.0]), torch.float64, "exact"),
    ],
)
@pytest.mark.parametrize("shaped", [True, False])
def test_dtype_conversions_that_lose_something(saved, wanted, policy, shaped):
    """Silent dtype conversion at load: an error with the key and both dtypes."""
    saved = saved.repeat(2)
    template = {"model": {"w": torch.zeros(saved.shape, dtype=wanted)}}
    model = {"w": tuple(saved.shape)} if shaped else None
    with pytest.raises(CheckpointError, match=rf"model\.w: saved as {saved.dtype}, .* as {wanted}"):
        round_trip({"model": {"w": saved}}, template, model, dtype=policy)
    assert not template["model"]["w"].to(torch.float32).any()


@pytest.mark.parametrize(
    ("wanted", "policy", "expected"),
    [(torch.float32, "widen", [1.5, -2.0]), (torch.float16, "cast", [1.5, -2.0])],
)
def test_dtype_conversions_that_are_allowed(wanted, policy, expected):
    """Silent dtype conversion at load: float to float by policy, and reported."""
    saved = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    template = {"model": {"w": torch.zeros(2, dtype=wanted)}}
    report = round_trip({"model": {"w": saved}}, template, {"w": (2,)}, dtype=policy)
    assert expected == template["model"]["w"].tolist()
    assert wanted == template["model"]["w"].dtype
    assert {"model.w": ("torch.bfloat16", str(wanted))} == report.converted


STEPS = {
    "int": 5,
    "0-d": torch.tensor(5.0),
    "1-d": torch.tensor([5.0]),
    "0-d int": torch.tensor(5),
}


@pytest.mark.parametrize("wanted", STEPS)
@pytest.mark.parametrize("saved", STEPS)
@pytest.mark.parametrize("with_model", [True, False])
def test_optimizer_step_of_another_kind(saved, wanted, with_model):
    """Optimizer step changes kind (int / 0-d / 1-d tensor): converted exactly, with a report."""
    blank = STEPS[wanted]
    blank = torch.zeros_like(blank) if isinstance(blank, torch.Tensor) else type(blank)(0)
    template = {"optimizer": {"state": {"w": {"step": blank}}}}
    model = {"w": (3,)} if with_model else None
    report = round_trip({"optimizer": {"state": {"w": {"step": STEPS[saved]}}}}, template, model)
    found = template["optimizer"]["state"]["w"]["step"]
    expected = STEPS[wanted]
    assert type(expected) is type(found)
    if isinstance(expected, torch.Tensor):
        assert (expected.dtype, expected.shape) == (found.dtype, found.shape)
        assert found is blank
    assert 5 == found
    assert (saved != wanted) == ("optimizer.state.w.step" in report.converted)


@pytest.mark.parametrize("wanted", [0, torch.tensor(0)])
def test_optimizer_step_that_can_not_be_kept(wanted):
    """Optimizer step changes kind: 5.5 as an integer is one clear error."""
    template = {"state": {"w": {"step": wanted}}}
    with pytest.raises(CheckpointError, match=r"state\.w\.step: 5\.5 can't be kept exactly as"):
        round_trip({"state": {"w": {"step": torch.tensor(5.5)}}}, template)


def test_steps_that_stock_wrote():
    """Optimizer step changes kind: the same from a stock checkpoint."""
    saved = {"state": {"w": {"step": torch.tensor(5.0), "n": 7}}}
    checkpoint = memory.save([saved], [DefaultSavePlanner()])
    template = {"state": {"w": {"step": 0, "n": torch.tensor(0.0)}}}
    memory.load(checkpoint, [template], [LayoutAwareLoadPlanner()])
    assert (5, int) == (template["state"]["w"]["step"], type(template["state"]["w"]["step"]))
    assert 7.0 == float(template["state"]["w"]["n"])


# Ranks with different keys ------------------------------------------------------------------------


def uneven_states(names, values):
    """Two ranks that share w (6,) as [0, 6) and nothing: only rank 0 has state for it."""
    planners = [
        LayoutAwareSavePlanner(
            {"a": (4,), "b": (6,)},
            grid=Grids.from_sizes(rank, dp_shard=2),
            layouts=[FSDPFlatBuffer({"a": ((0, 2), (2, 4)), "b": values})],
        )
        for rank in range(2)
    ]
    tensors = {
        0: {"a": torch.arange(2.0), "b": torch.arange(6.0)[slice(*values[0])]},
        1: {"a": torch.arange(2.0, 4.0), "b": torch.arange(6.0)[slice(*values[1])]},
    }
    states = [
        {"state": {name: {"exp_avg": tensors[rank][name].clone()} for name in names[rank]}}
        for rank in range(2)
    ]
    return states, planners


def test_ranks_with_different_optimizer_keys():
    """Collective inside save preprocessing hangs when ranks hold different state keys."""
    states, planners = uneven_states((["a", "b"], ["a"]), ((0, 6), (6, 6)))
    checkpoint = memory.save(states, planners)
    assert [0, 1, 2, 3] == checkpoint.tensor("state.a.exp_avg").tolist()
    assert [0, 1, 2, 3, 4, 5] == checkpoint.tensor("state.b.exp_avg").tolist()
    assert {
        ("state.a.exp_avg", (0,)): 0,
        ("state.a.exp_avg", (2,)): 1,
        ("state.b.exp_avg", (0,)): 0,
    } == (checkpoint.written_by)
    whole = {"state": {"a": {"exp_avg": torch.zeros(4)}, "b": {"exp_avg": torch.zeros(6)}}}
    memory.load(checkpoint, [whole], [DefaultLoadPlanner()])
    assert [0, 1, 2, 3, 4, 5] == whole["state"]["b"]["exp_avg"].tolist()


def test_rank_that_lacks_a_value_which_it_stores():
    """Collective inside save preprocessing: a missing part is named, not left out."""
    states, planners = uneven_states((["a", "b"], ["a"]), ((0, 5), (5, 6)))
    text = r"state\.b\.exp_avg: rank 1 lacks it but stores 1 elements .*dp_shard 1/2"
    with pytest.raises(CheckpointError, match=text):
        memory.save(states, planners)
