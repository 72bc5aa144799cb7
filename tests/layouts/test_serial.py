"""Layouts as plain data: what is written, that it comes back, and hostile input."""

import json
from dataclasses import is_dataclass

import pytest

from shardplan.layouts import (
    Concat,
    Cut,
    Cuts,
    ExpertIndex,
    FlatBuffer,
    FlatRanges,
    Fuse,
    Interleave,
    Join,
    Layout,
    LayoutError,
    Permute,
    Shard,
    Stack,
    Unpad,
    Unstack,
    Whole,
)
from shardplan.layouts.serial import stage_from_json, stage_to_json
from shardplan.layouts.stages import STAGES

# Every stage with what is on disk for it: this is a format, so it is written out.
WRITTEN = [
    (Whole((2, 3)), ["Whole", {"shape": [2, 3]}]),
    (Whole(()), ["Whole", {"shape": []}]),
    (
        FlatBuffer((4, 2), ("dp_shard", "dp_replicate"), 3, 5),
        [
            "FlatBuffer",
            {
                "shape": [4, 2],
                "shard_axes": ["dp_shard", "dp_replicate"],
                "offset": 3,
                "shard_size": 5,
            },
        ],
    ),
    (
        FlatRanges((4,), ("dp",), ((0, 1), (1, 4))),
        ["FlatRanges", {"shape": [4], "shard_axes": ["dp"], "ranges": [[0, 1], [1, 4]]}],
    ),
    (
        Cuts((7, 2), (Cut(0, "dp", 2), Cut(1, "tp", sizes=(1, 1)))),
        [
            "Cuts",
            {
                "shape": [7, 2],
                "cuts": [
                    {"dim": 0, "axis": "dp", "split_factor": 2, "sizes": None},
                    {"dim": 1, "axis": "tp", "split_factor": 1, "sizes": [1, 1]},
                ],
            },
        ],
    ),
    (
        Concat(0, (("_w", 2), ("_v", 2)), "SwiGLU halves"),
        [
            "Concat",
            {
                "dim": 0,
                "parts": [["_w", 2], ["_v", 2]],
                "what": "SwiGLU halves",
                "whole": None,
            },
        ],
    ),
    (
        Concat(0, ((".q", 2),), whole=".qkv"),
        [
            "Concat",
            {"dim": 0, "parts": [[".q", 2]], "what": "components", "whole": ".qkv"},
        ],
    ),
    (
        Interleave(1, 2, ((".q", 2),)),
        ["Interleave", {"dim": 1, "groups": 2, "parts": [[".q", 2]], "what": "components"}],
    ),
    (Shard(0, "tp"), ["Shard", {"dim": 0, "axis": "tp"}]),
    (Fuse(1), ["Fuse", {"dim": 1}]),
    (
        Join(0, (("_qk", (".q", ".k"), 2), ("_v", (".v",), 1))),
        ["Join", {"dim": 0, "tensors": [["_qk", [".q", ".k"], 2], ["_v", [".v"], 1]]}],
    ),
    (Unpad(0, 10), ["Unpad", {"dim": 0, "size": 10}]),
    (Permute((1, 0)), ["Permute", {"dims": [1, 0]}]),
    (
        ExpertIndex(1, 2, "ep", ((0, 2), (1, 3))),
        [
            "ExpertIndex",
            {
                "local_expert_index": 1,
                "num_local_experts": 2,
                "axis": "ep",
                "table": [[0, 2], [1, 3]],
            },
        ],
    ),
    (Unstack(), ["Unstack", {}]),
    (Stack(8), ["Stack", {"num_experts": 8}]),
]


@pytest.mark.parametrize(("stage", "data"), WRITTEN)
def test_what_is_written_and_comes_back(stage, data):
    assert data == stage_to_json(stage)
    back = stage_from_json(json.loads(json.dumps(data)))
    assert stage == back
    assert hash(stage) == hash(back)


def test_every_stage_is_written_out_above():
    own = {
        n for n, c in STAGES.items() if c.__module__.startswith("shardplan.") and is_dataclass(c)
    }
    assert own == {data[0] for _, data in WRITTEN}


LAYOUT = Layout("fc1", "fc{expert}", (Whole((4,)), ExpertIndex(0, 2)), "expert")


def test_a_layout_comes_back():
    data = ["fc1", "fc{expert}", "expert", [stage_to_json(s) for s in LAYOUT.stages]]
    assert data == LAYOUT.to_json()
    assert LAYOUT == Layout.from_json(json.loads(json.dumps(data)))


@pytest.mark.parametrize(
    "other",
    [
        Layout("fc2", "fc{expert}", LAYOUT.stages, "expert"),
        Layout("fc1", "fd{expert}", LAYOUT.stages, "expert"),
        Layout("fc1", "fc{expert}", LAYOUT.stages, "dense"),
        Layout("fc1", "fc{expert}", (Whole((5,)), ExpertIndex(0, 2)), "expert"),
        Layout("fc1", "fc{expert}", (Whole((4,)), ExpertIndex(1, 2)), "expert"),
        Layout("fc1", "fc{expert}", (Whole((4,)), ExpertIndex(0, 3)), "expert"),
        Layout("fc1", "fc{expert}", (Whole((4,)), ExpertIndex(0, 2, "etp")), "expert"),
        Layout("fc1", "fc{expert}", (Whole((4,)),), "expert"),
    ],
)
def test_any_difference_changes_the_digest(other):
    assert 16 == len(other.digest)
    assert LAYOUT.digest != other.digest


@pytest.mark.parametrize(
    "data",
    [
        None,
        3,
        [],
        "Whole",
        ["Whole"],
        ["Whole", 3],
        ["Whole", None],
        ["Whole", []],
        ["Whole", {}],
        ["Whole", {"shape": 5}],
        ["Whole", {"shape": ["a"]}],
        ["Whole", {"shape": [-1]}],
        ["Whole", {"shape": [1], "more": 1}],
        ["NoStage", {}],
        [["Whole"], {"shape": [1]}],
        ["Cuts", {"shape": [1]}],
        ["Cuts", {"shape": [1], "cuts": 3}],
        ["Cuts", {"shape": [1], "cuts": [3]}],
        ["Cuts", {"shape": [1], "cuts": [{"dim": 0}]}],
        ["Cuts", {"shape": [1], "cuts": [{"dim": 1, "axis": "dp"}]}],
        ["Cuts", {"shape": [1], "cuts": [{"dim": 0, "axis": "dp", "split_factor": 0}]}],
        ["FlatRanges", {"shape": [2], "shard_axes": ["dp"], "ranges": [[0]]}],
        ["FlatBuffer", {"shape": [2], "shard_axes": ["dp"], "offset": None, "shard_size": 1}],
        ["ExpertIndex", {"local_expert_index": 2, "num_local_experts": 2}],
        ["os.system", {"command": "true"}],
    ],
)
def test_what_is_no_stage_is_refused_and_shown(data):
    with pytest.raises(LayoutError) as error:
        stage_from_json(data)
    assert f"{data!r} is no stage of a layout: " in str(error.value)


@pytest.mark.parametrize("data", [None, 3, [], ["a", "a", "dense"], ["a", "a", "dense", 5], "fc1"])
def test_what_is_no_layout_is_refused_and_shown(data):
    with pytest.raises(LayoutError) as error:
        Layout.from_json(data)
    assert f"{data!r} is no layout: " in str(error.value)


def test_a_layout_without_stages_is_refused():
    with pytest.raises(LayoutError, match="a layout starts with a storage stage"):
        Layout.from_json(["a", "a", "dense", []])
