"""Tensors that describe themselves: what does not fit together is refused before a byte is written."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
import world
from memory import Memory, MemoryReader, MemoryWriter

from shardplan.layouts import CheckpointError, Grids, LayoutError
from shardplan.planner import (
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    SafetensorsReader,
    SafetensorsWriter,
)


def described(data, shape, parts):
    """A tensor of rows with CheckpointableTensor's attributes; parts are (global, local, rows)."""
    tensor = torch.tensor(data, dtype=torch.float32)
    tensor.global_shape = (shape,)
    tensor.global_offsets = tuple((start,) for start, _, _ in parts)
    tensor.local_offsets = tuple((at,) for _, at, _ in parts)
    tensor.local_sizes = tuple((rows,) for _, _, rows in parts)
    return tensor


def save(*tensors):
    memory = Memory()
    places = [Grids.from_sizes(rank, dp_shard=len(tensors)) for rank in range(len(tensors))]
    planners = [LayoutAwareSavePlanner(grid=grid) for grid in places]
    world.save("", [{"w": t} for t in tensors], planners, lambda _: MemoryWriter(memory))
    return memory


def test_several_boxes_of_one_local_tensor():
    memory = save(
        described([0, 1, 4, 5], 8, [(0, 0, 2), (4, 2, 2)]),
        described([6, 7, 2, 3, -1], 8, [(6, 0, 2), (2, 2, 2)]),  # the last element is padding
    )
    assert list(range(8)) == memory.tensor("w").tolist()
    target = described([-1] * 3, 8, [(3, 0, 3)])
    planner = LayoutAwareLoadPlanner(grid=Grids.from_sizes())
    world.load("", [{"w": target}], [planner], lambda _: MemoryReader(memory))
    assert [3, 4, 5] == target.tolist()


def test_equal_boxes_are_written_once_and_dealt_out():
    memory = Memory()
    pieces = [(0, 0, 2), (2, 2, 2)]
    states = [{"w": described([0, 1, 2, 3], 4, pieces)} for _ in range(2)]
    planners = [LayoutAwareSavePlanner(grid=Grids.from_sizes(r, dp_replicate=2)) for r in range(2)]
    world.save("", states, planners, lambda _: MemoryWriter(memory))
    assert {("w", (0,)): 0, ("w", (2,)): 1} == memory.written_by


def test_an_empty_box_beside_a_real_one():
    for order in (1, -1):
        tensors = [described([], 4, [(0, 0, 0)]), described([0, 1, 2, 3], 4, [(0, 0, 4)])]
        memory = save(*tensors[::order])
        assert [("w", (0,))] == list(memory.data)
        assert [0, 1, 2, 3] == memory.tensor("w").tolist()


FAULTS = [
    (
        [described([0] * 3, 8, [(0, 0, 3)]), described([0] * 4, 8, [(4, 0, 4)])],
        CheckpointError,
        r"^w: \[3, 4\) is covered by no rank of shape \(8,\)",
    ),
    (
        [described([0] * 4, 8, [(0, 0, 4)]), described([0] * 8, 8, [(0, 0, 8)])],
        CheckpointError,
        r"two boxes at \(0,\) differ in size, \(4,\) on rank 0 and \(8,\) on rank 1",
    ),
    (
        [described([0] * 4, 8, [(0, 0, 4)]), described([0] * 4, 9, [(4, 0, 4)])],
        CheckpointError,
        r"^w: rank 0 says that it has shape \(8,\) .* rank 1 says \(9,\)",
    ),
    (
        [described([0] * 4, 8, [(6, 0, 4)])],
        LayoutError,
        r"^w: it says that it holds the box at \(6,\) of sizes \(4,\), which is not inside .*\(8,\)",
    ),
    (
        [described([0] * 4, 4, [(0, 2, 4)])],
        LayoutError,
        r"^w: .* box at \(0,\) has sizes \(4,\), but gives a tensor of shape \(2,\)",
    ),
    (
        [described([0] * 4, 4, [(0, 0, 2), (0, 2, 2)])],
        LayoutError,
        r"^w: it names two boxes at \(0,\)",
    ),
]


@pytest.mark.parametrize(("tensors", "error", "text"), FAULTS, ids=lambda v: str(v)[:30])
def test_what_does_not_fit_together(tensors, error, text):
    with pytest.raises(error, match=text):
        save(*tensors)


def test_a_box_of_more_dimensions_than_its_tensor():
    tensor = torch.zeros(2, 3)
    tensor.global_shape = (4, 3, 1)
    tensor.global_offsets = ((0, 0, 0),)
    tensor.local_offsets = ((0, 0, 0),)
    tensor.local_sizes = ((2, 3, 1),)
    text = r"w: it describes a box at \(0, 0, 0\) of sizes \(2, 3, 1\), .* shape \(2, 3\)"
    with pytest.raises(LayoutError, match=text):
        save(tensor)


def test_attributes_of_unequal_length():
    tensor = described([0, 1], 2, [(0, 0, 2)])
    tensor.local_sizes = ((1,), (1,))
    with pytest.raises(LayoutError, match=r"^w: global_offsets, .* have \[1, 2\] entries"):
        save(tensor)


def test_a_tensor_that_begins_to_describe_itself_is_noticed():
    planner, plain = LayoutAwareSavePlanner(grid=Grids.from_sizes()), torch.zeros(2)
    for state, shape in [({"w": plain}, (2,)), ({"w": described([5, 6], 2, [(0, 0, 2)])}, (2,))]:
        memory = Memory()
        world.save("", [state], [planner], lambda _, m=memory: MemoryWriter(m))
        assert shape == tuple(memory.metadata.state_dict_metadata["w"].size)
    moved = described([5, 6], 2, [(0, 1, 1), (1, 0, 1)])
    memory = Memory()
    world.save("", [{"w": moved}], [planner], lambda _: MemoryWriter(memory))
    assert [6, 5] == memory.tensor("w").tolist()


def test_a_writer_that_stores_layouts_stores_what_tensors_say_too(tmp_path):
    boxes = [
        described([0, 1, 4, 5], 8, [(0, 0, 2), (4, 2, 2)]),
        described([6, 7, 2, 3], 8, [(6, 0, 2), (2, 2, 2)]),
    ]
    planners = [LayoutAwareSavePlanner(grid=Grids.from_sizes(r, dp_shard=2)) for r in range(2)]
    states = [{"w": tensor} for tensor in boxes]
    world.save(tmp_path, states, planners, lambda path: SafetensorsWriter(path, sync=False))
    state = {"w": torch.full((8,), -1.0)}
    planner = LayoutAwareLoadPlanner(grid=Grids.from_sizes())
    world.load(tmp_path, [state], [planner], SafetensorsReader)
    assert list(range(8)) == state["w"].tolist()


def test_one_rank_alone_can_not_save_them(tmp_path):
    planner = LayoutAwareSavePlanner(grid=Grids.from_sizes(0, dp_shard=2))
    state = {"w": described([0, 1], 4, [(0, 0, 2)])}
    with pytest.raises(BaseException, match=r"other 1 ranks"):
        dcp.save(state, checkpoint_id=str(tmp_path), planner=planner, no_dist=True)


def test_a_copy_that_lost_its_class_is_refused():
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.zeros(2))
    module.w.__create_chunk_list__ = list
    planner = LayoutAwareSavePlanner(module, grid=Grids.from_sizes())
    with pytest.raises(LayoutError, match=r"^m\.w: the parameter describes its own boxes, but the"):
        world.save("", [{"m": {"w": torch.zeros(2)}}], [planner], lambda _: MemoryWriter(Memory()))
