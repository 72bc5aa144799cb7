"""Closed forms against real plans, rank by rank."""

import pytest
import torch

from shardplan.layouts import LayoutError, LayoutRegistry, model_layouts
from shardplan.planner import LayoutAwareSavePlanner
from shardplan.planner.tools.recipes.forecast import forecast, place
from shardplan.planner.tools.recipes.numbers import Delta, Latent, Numbers
from shardplan.planner.tools.recipes.parallel import Parallel, describe

HYBRID = Numbers(
    "qwen3_next", 4, 32, 1000, 4, 2, 8, 48, False, True, True, 8, 12, 16, True, False, 0, 4,
    Delta(2, 4, 8, 8),
)  # fmt: skip
LATENT = Numbers(
    "deepseek_v3", 3, 128, 640, 4, 4, 24, 256, experts=4, expert_ffn=64, shared_ffn=64,
    expert_bias=True, dense_layers=1, latent=Latent(32, 16, 16, 8, 16),
)  # fmt: skip
DENSE = Numbers("llama", 4, 256, 2000, 8, 4, 32, 512)
STATE = {"model": torch.bfloat16, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}

CASES = [
    (HYBRID, Parallel(tp=2, ep=2, dp_shard=4)),
    (HYBRID, Parallel(ep=4, dp_shard=8, fsdp="dim0")),
    (HYBRID, Parallel(tp=2, pp=2, ep=2, dp_shard=2, dp_replicate=2)),
    (HYBRID, Parallel(tp=2, ep=2, etp=2, dp_shard=4, fsdp="none")),
    (LATENT, Parallel(tp=2, ep=4, dp_shard=4)),
    (LATENT, Parallel(pp=3, ep=2, dp_shard=4, fsdp="dim0")),
    (DENSE, Parallel(tp=4, dp_shard=4)),
    (DENSE, Parallel(tp=2, pp=2, dp_shard=3, dp_replicate=2, fsdp="dim0")),
    (DENSE, Parallel(tp=2, dp_replicate=4, fsdp="none")),
]


def planned(numbers, parallel, rank):
    """Bytes and items of a rank's real plan."""
    d = describe(numbers, parallel, rank)
    layouts = model_layouts(d.shapes, d.grids, LayoutRegistry(d.providers))
    state = {"model": {}, "optimizer": {"state": {}}}
    for fqn, layout in layouts.items():
        numel = layout.storage.numel(d.grids.of(layout.family))
        state["model"][fqn] = torch.zeros(numel, dtype=torch.bfloat16)
        slots = ("exp_avg", "exp_avg_sq")
        state["optimizer"]["state"][fqn] = {slot: torch.zeros(numel) for slot in slots}
    planner = LayoutAwareSavePlanner(d.shapes, grid=d.grids, layouts=d.providers)
    planner.set_up_planner(state)
    items = planner.create_local_plan().items
    nbytes = [
        item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        for item in items
    ]
    return sum(nbytes), len(items), {item.index.fqn for item in items}


@pytest.mark.parametrize(("numbers", "parallel"), CASES)
def test_every_rank_as_planned(numbers, parallel):
    found = forecast(place(numbers, parallel), STATE)
    expected = [planned(numbers, parallel, rank) for rank in range(parallel.world_size)]
    assert [nbytes for nbytes, _, _ in expected] == found.rank_bytes.tolist()
    assert [count for _, count, _ in expected] == found.rank_chunks.tolist()
    assert len(set().union(*(keys for _, _, keys in expected))) == found.keys


def test_all_bytes_once():
    """671,026,404,352 parameters would take hours of plans; a small one is counted by hand."""
    found = forecast(place(DENSE, Parallel(tp=2, dp_shard=2)), {"model": torch.bfloat16})
    attention = 256 + 512 * 256 + 256 * 256
    mlp = 256 + 2 * 512 * 256 + 256 * 512
    elements = 2 * 2000 * 256 + 256 + 4 * (attention + mlp)
    assert 2 * elements == found.bytes


def test_dims_that_do_not_divide_are_named():
    with pytest.raises(LayoutError) as caught:
        place(HYBRID, Parallel(tp=8, ep=1, etp=8, dp_shard=1))
    text = str(caught.value)
    assert "decoder.layers.*.self_attention.in_proj.weight: the 4 rows of its component 'beta'" in (
        text
    )
    assert "decoder.layers.*.mlp.experts.linear_fc1.weight*: the 12 rows" in text
    assert "can't be divided by 8 ranks (tp)" in text
    with pytest.raises(LayoutError, match=r"8 experts can't be divided by 3 expert-parallel ranks"):
        place(HYBRID, Parallel(ep=3, dp_shard=3))
    with pytest.raises(LayoutError, match="4 layers can't fill 5 pipeline stages"):
        place(HYBRID, Parallel(pp=5))
