"""A stage of a third party: one file with the class and its provider, and everything takes it."""

from dataclasses import dataclass

import memory
import pytest
import torch

from shardplan.layouts import DEFAULT_LAYOUTS, Grids, LayoutError, Level, ParamInfo, Stage
from shardplan.layouts.serial import stage_from_json
from shardplan.layouts.testing import LayoutProviderConformance, param_info
from shardplan.planner import LayoutAwareLoadPlanner, LayoutAwareSavePlanner
from shardplan.planner.tools.verbs.steps import steps


@dataclass(frozen=True, slots=True)
class RoundRobin(Stage):
    """Row `i` of a rank is row `i × n + rank` of the global tensor."""

    axis: str

    @property
    def axes(self):
        return (self.axis,)

    def apply(self, frames, grid):
        count, rank = grid.size(self.axis), grid.index(self.axis)
        made = []
        for frame in frames:
            boxes = []
            for box in frame.boxes:
                for row in range(box.offsets[0], box.offsets[0] + box.sizes[0]):
                    one = box.narrow(0, row, row + 1)
                    boxes.append(one.move(0, row * count + rank - row))
            shape = (frame.shape[0] * count, *frame.shape[1:])
            made.append(frame._replace(shape=shape, boxes=tuple(boxes)))
        return tuple(made)

    def describe(self, grid):
        return f"every {grid.size(self.axis)}th row from {grid.index(self.axis)} on"


class Robin:
    """Rows in turns over the tensor-parallel ranks."""

    name = "round-robin"
    level = Level.PARALLEL

    def claims(self, param: ParamInfo) -> bool:
        return param.fqn.endswith("robin")

    def stages(self, param: ParamInfo) -> tuple[Stage, ...]:
        return (RoundRobin("tp"),)


class TestRobin(LayoutProviderConformance):
    provider = Robin()

    def params(self, grids):
        return [param_info(grids, "layers.0.robin", (3, 2))]


def test_it_saves_and_loads_under_another_grid():
    full = torch.arange(16.0).reshape(8, 2)
    layouts = (*DEFAULT_LAYOUTS, Robin())

    def planners(kind, tp):
        shapes = {"robin": (8 // tp, 2)}
        return [kind(shapes, grid=Grids.from_sizes(r, tp=tp), layouts=layouts) for r in range(tp)]

    states = [{"robin": full[rank::2].clone()} for rank in range(2)]
    checkpoint = memory.save(states, planners(LayoutAwareSavePlanner, 2))
    assert torch.equal(full, checkpoint.tensor("robin"))
    found = [{"robin": torch.zeros(2, 2)} for _ in range(4)]
    memory.load(checkpoint, found, planners(LayoutAwareLoadPlanner, 4))
    assert [full[rank::4].tolist() for rank in range(4)] == [s["robin"].tolist() for s in found]


def test_explain_has_its_words():
    shapes = {"robin": (4, 2)}
    grid = Grids.from_sizes(1, tp=2)
    planner = LayoutAwareSavePlanner(shapes, grid=grid, layouts=(*DEFAULT_LAYOUTS, Robin()))
    layout = planner._table.chunks[0].layouts["robin"]
    assert "every 2th row from 1 on" == steps(layout, grid.dense)[-1].words


def test_a_checkpoint_with_a_stage_of_a_package_that_is_not_there():
    with pytest.raises(
        LayoutError, match=r"no stage 'Elsewhere' is known here\. Import the package"
    ):
        stage_from_json(["Elsewhere", {}])


def test_two_stages_of_one_name():
    with pytest.raises(LayoutError, match=r"shardplan\.layouts\.stages has a stage of this name"):

        class Shard(Stage):
            pass
