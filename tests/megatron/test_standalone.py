"""megatron-fsdp without Megatron-Core: its layouts, and training that goes on elsewhere."""

import pytest

pytestmark = pytest.mark.gloo

FSDP = {"mesh": {"dp": 4, "tp": 1}}
HSDP = {"mesh": {"outer": 2, "dp": 2, "tp": 1}}
HYBRID = {**HSDP, "outer": "optim"}


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        (FSDP, 14),
        ({"mesh": {"dp": 2, "tp": 2}}, 14),
        (HSDP, 14),
        (HYBRID, 28),
        ({**FSDP, "zero": "optim"}, 14),
        ({**FSDP, "zero": "no_shard"}, 0),
    ],
    ids=str,
)
def test_version_1_lies_where_it_says(megatron_fsdp, options, messages):
    """Messages: one for each of 14 tensors and each axis that shards it."""
    for result in megatron_fsdp.run("standalone:compare_v1", **options):
        assert {"tensors": 14, "differences": [], "theirs": messages, "ours": 0} == result


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"dp": 4}, "optimizer_axes": [True]},
        {"mesh": {"outer": 2, "dp": 2}, "optimizer_axes": [False, True]},
    ],
    ids=str,
)
def test_version_2_lies_where_it_says(megatron_fsdp, options):
    for result in megatron_fsdp.run("standalone:compare_v2", **options):
        assert {"tensors": 14, "differences": [], "theirs": 14, "ours": 0} == result


def test_version_1_trains_on_under_hybrid_sharding_as_if_it_had_not_stopped(
    megatron_fsdp, tmp_path
):
    """Weights in bfloat16 with main weights in float32."""
    half = True
    train = "standalone:train_v1"
    whole = megatron_fsdp.run(train, path=str(tmp_path / "whole"), steps=4, half=half, **FSDP)
    first = megatron_fsdp.run(train, path=str(tmp_path / "first"), steps=2, half=half, **FSDP)
    rest = megatron_fsdp.run(
        train,
        path=str(tmp_path / "rest"),
        load_from=str(tmp_path / "first"),
        steps=2,
        half=half,
        **HYBRID,
    )
    assert whole[0]["losses"][:2] == first[0]["losses"]
    assert whole[0]["losses"][2:] == rest[0]["losses"]
    # dcp.save's own; none for a tensor.
    assert {"gather_object": 2, "scatter_object_list": 1, "broadcast_object_list": 1} == first[0][
        "collectives"
    ]


def test_version_2_goes_to_half_as_many_ranks(megatron_fsdp, tmp_path):
    """Weights in bfloat16 with main weights in float32."""
    half = True
    four = {"mesh": {"dp": 4}, "optimizer_axes": [True], "half": half}
    two = {"mesh": {"dp": 2}, "optimizer_axes": [True], "half": half}
    megatron_fsdp.run("standalone:roundtrip_v2", path=str(tmp_path), save=True, **four)
    for result in megatron_fsdp.run(
        "standalone:roundtrip_v2", ranks=2, path=str(tmp_path), save=False, **two
    ):
        assert {"wrong": {}, "iteration": 5} == result
