"""The reads of a change of layout against those of real load plans, rank by rank."""

import pytest
import torch
from cli.test_forecast import DENSE, HYBRID, LATENT
from world import save

from shardplan.layouts import LayoutRegistry, model_layouts
from shardplan.planner import LayoutAwareLoadPlanner, LayoutAwareSavePlanner
from shardplan.planner.tools.recipes.change import change
from shardplan.planner.tools.recipes.forecast import place
from shardplan.planner.tools.recipes.parallel import Parallel, describe

STATE = {"model": torch.bfloat16}
CASES = [
    (HYBRID, Parallel(tp=2, ep=2, dp_shard=2), Parallel(ep=4, dp_shard=4, fsdp="dim0")),
    (HYBRID, Parallel(ep=4, dp_shard=4, fsdp="dim0"), Parallel(tp=2, pp=2, ep=2, dp_shard=2)),
    (LATENT, Parallel(tp=2, ep=4, dp_shard=2), Parallel(tp=4, etp=2, ep=2, dp_shard=1)),
    (DENSE, Parallel(tp=4, dp_shard=2), Parallel(tp=2, dp_shard=2, dp_replicate=2, fsdp="dim0")),
]


def world(numbers, parallel):
    found = []
    for rank in range(parallel.world_size):
        d = describe(numbers, parallel, rank)
        layouts = model_layouts(d.shapes, d.grids, LayoutRegistry(d.providers))
        state = {
            fqn: torch.zeros(layout.storage.numel(d.grids.of(layout.family)), dtype=torch.bfloat16)
            for fqn, layout in layouts.items()
        }
        found.append((d, {"model": state}))
    return found


@pytest.mark.parametrize(("numbers", "before", "after"), CASES)
def test_every_rank_as_planned(tmp_path, numbers, before, after):
    old, new = world(numbers, before), world(numbers, after)
    metadata = save(
        tmp_path,
        [state for _, state in old],
        [LayoutAwareSavePlanner(d.shapes, grid=d.grids, layouts=d.providers) for d, _ in old],
    )
    nbytes, reads, whole = [], [], 0
    for d, state in new:
        planner = LayoutAwareLoadPlanner(d.shapes, grid=d.grids, layouts=d.providers)
        planner.set_up_planner(state, metadata)
        items = (
            planner.create_local_plan().items
            or planner.finish_plan(planner.create_local_plan()).items
        )
        nbytes.append(2 * sum(item.lengths.numel() for item in items))
        reads.append(len(items))
        for item in items:
            chunks = metadata.state_dict_metadata[item.storage_index.fqn].chunks
            whole += 2 * next(
                c.sizes.numel() for c in chunks if c.offsets == item.storage_index.offset
            )
    found = change(place(numbers, before), place(numbers, after), STATE)
    assert nbytes == found.rank_bytes.tolist()
    assert reads == found.rank_reads.tolist()
    assert whole == found.whole_bytes
