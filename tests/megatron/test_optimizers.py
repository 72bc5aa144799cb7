"""Optimizers of Megatron-Core: state on some ranks only, flat shards, offloaded, other expert grids."""

import pytest

pytestmark = pytest.mark.gloo


def right(results) -> None:
    for result in results:
        assert {} == result["wrong"]


def test_ranks_with_different_state_hang_megatrons_own_path_and_not_this_one(megatron, tmp_path):
    """torch's Adam makes no state for a parameter that a rank holds nothing of (issue 4910)."""
    results = megatron.run("bothways:hang_theirs", parallel={}, seconds=4)
    assert [8, 8, 14, 22] == [result["states"] for result in results]
    assert [False] * 4 == [result["ended"] for result in results]
    saved = megatron.run("bothways:save_ours", parallel={}, path=str(tmp_path))
    assert [8, 8, 14, 22] == [result["states"] for result in saved]
    loaded = megatron.run("bothways:load_ours", parallel={}, path=str(tmp_path), fresh=True)
    right(loaded)
    assert all([] == result["missing"] == result["unexpected"] for result in loaded)


def test_flat_state_on_the_cpu_goes_from_tp2_to_tp1(megatron, tmp_path):
    """Plain one-dimensional tensors, `master_param` too; row-parallel weights among them."""
    path = str(tmp_path)
    megatron.run("bothways:save_ours", parallel={"tp": 2}, path=path, flat=True)
    right(megatron.run("bothways:load_ours", parallel={"ep": 2}, path=path, flat=True))


def test_an_expert_grid_other_than_the_global_one_names_experts_by_itself(megatron, tmp_path):
    """Global ep 2, the model's own 4: each rank has one expert of four; then own 2, global 4."""
    path = str(tmp_path)
    megatron.run("bothways:save_ours", parallel={"ep": 4, "global_ep": 2}, path=path)
    right(megatron.run("bothways:load_ours", parallel={"ep": 2, "global_ep": 4}, path=path))


def test_megatrons_own_names_for_that_grid_collide(megatron):
    results = megatron.run("metadata:compare", parallel={"ep": 2, "global_ep": 1})
    # Each rank holds 2 of 4 experts in each of 2 layers, and 3 tensors of each: all misnamed 0 and 1
    # there, so that ranks of different ep rank write one key.
    layer = "decoder.layers.0.mlp.experts.local_experts"
    ranks = [{key for key in r["own_names"] if key.startswith(layer)} for r in results]
    assert {"0", "1"} == {key[len(layer) + 1] for key in ranks[0]}
    assert {"2", "3"} == {key[len(layer) + 1] for key in ranks[1]}
    theirs = {key for r in results for key in r["their_names"] if key.startswith(layer)}
    assert {"0", "1"} == {key[len(layer) + 1] for key in theirs}


@pytest.mark.parametrize(
    ("saved", "loaded", "cut"),
    [
        ({"tp": 2}, {}, "decoder.layers.0.mlp.shared_experts.linear_fc1.weight"),
        ({}, {"ep": 2, "tp": 2}, "decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight"),
    ],
    ids=["tp2 to tp1", "tp1 to tp2 ep2"],
)
def test_flat_shards_over_ddp_go_to_another_configuration(megatron, tmp_path, saved, loaded, cut):
    """Real DistributedOptimizer over real DDP: whole bf16 weights, fp32 shards cut in mid-row."""
    path = str(tmp_path)
    results = megatron.run("ddp:save", parallel=saved, path=path)
    assert cut in {name for result in results for name in result["cut in a row"]}
    for result in megatron.run("ddp:load", parallel=loaded, path=path):
        assert ({}, 3, []) == (result["wrong"], result["iteration"], result["missing"])


def test_an_offloaded_optimizer_goes_elsewhere_and_back_to_one_that_is_not(megatron, tmp_path):
    """Real HybridDeviceOptimizer, all of it on the CPU, saved at TP2 EP2."""
    path = str(tmp_path / "offloaded")
    saved = megatron.run("ddp:save", parallel={"tp": 2, "ep": 2}, path=path, offload=True)
    assert ["HybridDeviceOptimizer"] * 2 == saved[0]["offloaded"]
    right(megatron.run("ddp:load", parallel={}, path=path, offload=True))
    right(megatron.run("ddp:load", parallel={}, path=path))
    path = str(tmp_path / "not")
    megatron.run("ddp:save", parallel={}, path=path)
    (first, *_) = results = megatron.run("ddp:load", parallel={"tp": 2}, path=path, offload=True)
    right(results)
    assert "optimizer.state: master_param (the weights were taken)" in first["missing"]
