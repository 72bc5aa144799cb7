"""The writer with DCP's collectives: ranks that hold different values, all in one process."""

import functools

import alone
import hybrid
import pytest
import test_matrix as matrix
import world

from shardplan.planner import LayoutAwareSavePlanner, SafetensorsWriter


@pytest.mark.parametrize("name", ["fsdp3", "pp2-hsdp"])
def test_saved_with_plans_exchanged(tmp_path, name):
    config = matrix.BY_NAME[name]
    states = [hybrid.state_dict(config, rank) for rank in range(config.world)]
    planners = [matrix.planner(LayoutAwareSavePlanner, config, r) for r in range(config.world)]
    writer = functools.partial(SafetensorsWriter, sync=False)
    world.save(tmp_path / "checkpoint", states, planners, writer)
    target = matrix.BY_NAME["one"]
    blank = [hybrid.state_dict(target, 0, blank=True)]
    alone.load(tmp_path / "checkpoint", blank, matrix.load_planners("one"))
    assert [] == matrix.differences(hybrid.after_load(target, 0), blank[0])
