"""Cases from practice: where shards lie, who writes them, what covers a tensor."""

import contextlib
from collections.abc import Iterator

import memory
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardplan.layouts import (
    GDN,
    Cut,
    DTensorStorage,
    FSDPFlatBuffer,
    Grids,
    SwiGLU,
    TensorParallel,
)
from shardplan.planner import (
    CheckpointError,
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    LayoutError,
)


def rows(planner, state):
    """The rows that one rank plans to write: `(first, count)` of dim 0."""
    return [(offsets[0], sizes[0]) for _, offsets, sizes in memory.boxes(planner, state)]


def sharded_rows(shape, row_ranges, layouts, tp=1):
    """Rows that each rank writes of one tensor `w` whose local rows are cut by `dp_shard`."""
    width = shape[1]
    ranges = [(a * width, b * width) for a, b in row_ranges]
    found = {}
    for rank in range(tp * len(ranges)):
        dp, t = divmod(rank, tp)
        planner = LayoutAwareSavePlanner(
            {"w": shape},
            grid=Grids.from_sizes(rank, dp_shard=len(ranges), tp=tp),
            layouts=[FSDPFlatBuffer({"w": ranges}), *layouts],
        )
        start, stop = ranges[dp]
        found[t, dp] = rows(planner, {"w": torch.zeros(stop - start)})
    return found


GDN_ROWS = {"query": 4, "key": 4, "value": 8, "z": 8, "beta": 2, "alpha": 2}


def test_gdn_component_offsets_under_tp_and_fsdp():
    """GDN fused projection: component shard offsets under TP and FSDP."""
    layouts = [GDN({"w": GDN_ROWS}, components="fused"), TensorParallel({"w": 0})]
    assert {
        (0, 0): [(0, 2), (4, 2)],
        (0, 1): [(8, 4)],
        (0, 2): [(16, 4)],
        (0, 3): [(24, 1), (26, 1)],
        (1, 0): [(2, 2), (6, 2)],
        (1, 1): [(12, 4)],
        (1, 2): [(20, 4)],
        (1, 3): [(25, 1), (27, 1)],
    } == sharded_rows((14, 3), [(0, 4), (4, 8), (8, 12), (12, 14)], layouts, tp=2)
    found = sharded_rows((14, 3), [(0, 5), (5, 10), (10, 14)], layouts, tp=2)
    assert [(0, 2), (4, 2), (8, 1)] == found[0, 0]
    assert [(9, 3), (16, 2)] == found[0, 1]
    assert [(18, 2), (24, 1), (26, 1)] == found[0, 2]


def test_gdn_components_split_on_disk():
    """GDN fused projection: per-component keys have each component's start subtracted."""
    planner = LayoutAwareSavePlanner(
        {"w": (14, 3)},
        grid=Grids.from_sizes(3, dp_shard=2, tp=2),
        layouts=[
            FSDPFlatBuffer({"w": ((0, 15), (15, 42))}),
            GDN({"w": GDN_ROWS}),
            TensorParallel({"w": 0}),
        ],
    )
    assert [
        ("w.value", (5, 0), (3, 3)),
        ("w.z", (4, 0), (4, 3)),
        ("w.beta", (1, 0), (1, 3)),
        ("w.alpha", (1, 0), (1, 3)),
    ] == memory.boxes(planner, {"w": torch.zeros(27)})


def test_gdn_component_that_tp_does_not_divide():
    """GDN at TP=4: b and a (2 rows) are not divisible, and the error names the component."""
    with pytest.raises(LayoutError, match=r"w: the 2 rows of its GDN component 'beta' .* 4 tensor"):
        LayoutAwareSavePlanner(
            {"w": (7, 3)},
            grid=Grids.from_sizes(0, tp=4),
            layouts=[GDN({"w": GDN_ROWS}), TensorParallel({"w": 0})],
        )


def test_swiglu_rows_when_tp_and_world_change():
    """SwiGLU fc1 with FSDP and changed TP or world size: gate/up rows interleaved wrongly."""
    layouts = [SwiGLU(["w"], components="fused"), TensorParallel({"w": 0})]
    assert {
        (0, 0): [(0, 2)],
        (0, 1): [(4, 2)],
        (1, 0): [(2, 2)],
        (1, 1): [(6, 2)],
    } == sharded_rows((4, 2), [(0, 2), (2, 4)], layouts, tp=2)
    gate, up = torch.arange(4.0).view(4, 1), torch.arange(10.0, 14.0).view(4, 1)
    states, planners = [], []
    for rank in range(4):
        dp, t = divmod(rank, 2)
        local = torch.cat([gate.chunk(2)[t], up.chunk(2)[t]])
        states.append({"w": local.flatten()[2 * dp : 2 * dp + 2].clone()})
        grid = Grids.from_sizes(rank, dp_shard=2, tp=2)
        storage = FSDPFlatBuffer({"w": ((0, 2), (2, 4))})
        planners.append(
            LayoutAwareSavePlanner({"w": (4, 1)}, grid=grid, layouts=[storage, *layouts])
        )
    checkpoint = memory.save(states, planners)
    states, planners = [], []
    for rank in range(8):
        states.append({"w": torch.tensor([-1.0])})
        grid = Grids.from_sizes(rank, dp_shard=8)
        storage = FSDPFlatBuffer({"w": [(i, i + 1) for i in range(8)]})
        planners.append(
            LayoutAwareLoadPlanner({"w": (8, 1)}, grid=grid, layouts=[storage, *layouts])
        )
    memory.load(checkpoint, states, planners)
    assert [0, 1, 2, 3, 10, 11, 12, 13] == [int(state["w"]) for state in states]


def test_packed_column_parallel_rows_are_two_pieces():
    """Packed column-parallel weight as one `_StridedShard`: local shard is two disjoint pieces."""
    layouts = [SwiGLU(["w"], components="fused"), TensorParallel({"w": 0})]
    found = sharded_rows((4, 1), [(0, 4)], layouts, tp=2)
    assert {(0, 0): [(0, 2), (4, 2)], (1, 0): [(2, 2), (6, 2)]} == found
    strided = DTensorStorage({"w": (Cut(0, "tp", split_factor=2),)})
    for rank, expected in enumerate([[(0, 2), (4, 2)], [(2, 2), (6, 2)]]):
        planner = LayoutAwareSavePlanner(
            {"w": (8, 1)}, grid=Grids.from_sizes(rank, tp=2), layouts=[strided]
        )
        assert expected == rows(planner, {"w": torch.zeros(4, 1)})
    with pytest.raises(LayoutError, match="w: two SwiGLU halves can't share 3 rows of dim 0"):
        LayoutAwareSavePlanner({"w": (3, 1)}, grid=Grids.from_sizes(0, tp=2), layouts=layouts)


def test_fused_qkv_concatenated_and_grouped():
    """Fused QKV: fewer KV groups than TP ranks; concatenated vs grouped order."""
    concatenated = GDN({"w": {"query": 8, "key": 4, "value": 4}}, components="fused")
    found = sharded_rows((8, 1), [(0, 8)], [concatenated, TensorParallel({"w": 0})], tp=2)
    assert {(0, 0): [(0, 4), (8, 2), (12, 2)], (1, 0): [(4, 4), (10, 2), (14, 2)]} == found
    grouped = sharded_rows((4, 1), [(0, 4)], [TensorParallel({"w": 0})], tp=4)
    assert {(t, 0): [(4 * t, 4)] for t in range(4)} == grouped


@contextlib.contextmanager
def one_of(rank: int, size: int) -> Iterator[None]:
    """A default process group in which nothing can be sent: this process is one of several."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def split_buffer(rank: int) -> tuple[DTensor, DTensor]:
    """w (5,) on two ranks as a flat buffer splits it, 4 and 1 elements, and where it is blank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    local = torch.arange(5.0)[:4] if rank == 0 else torch.arange(5.0)[4:]
    make = [
        DTensor.from_local(t, mesh, [Shard(0)], run_check=False, shape=(5,), stride=(1,))
        for t in (local, torch.full_like(local, -1))
    ]
    return make[0], make[1]


def test_dtensor_that_does_not_follow_the_placement_arithmetic():
    """DTensor whose local shard does not follow the placement arithmetic (flat buffer)."""
    states, planners = [], []
    for rank in range(2):
        with one_of(rank, 2):
            states.append({"w": split_buffer(rank)[0]})
        grid = Grids.from_sizes(rank, dp_shard=2)
        ranges = FSDPFlatBuffer({"w": ((0, 4), (4, 5))})
        planners.append(LayoutAwareSavePlanner({"w": (5,)}, grid=grid, layouts=[ranges]))
    checkpoint = memory.save(states, planners)
    assert checkpoint.metadata is not None
    chunks = checkpoint.metadata.state_dict_metadata["w"].chunks
    assert [((0,), (4,)), ((4,), (1,))] == [(tuple(c.offsets), tuple(c.sizes)) for c in chunks]
    assert [0, 1, 2, 3, 4] == checkpoint.tensor("w").tolist()
    blank = {"w": torch.full((5,), -1.0)}
    memory.load(checkpoint, [blank], [DefaultLoadPlanner()])
    assert [0, 1, 2, 3, 4] == blank["w"].tolist()


@pytest.mark.parametrize(("rank", "held", "due"), [(0, 4, 3), (1, 1, 2)])
def test_dtensor_that_contradicts_its_placement_is_refused(rank, held, due):
    """DTensor whose local shard does not follow the arithmetic: checked when it is planned."""
    with one_of(rank, 2):
        state = {"w": split_buffer(rank)[0]}
        planner = LayoutAwareSavePlanner()
        planner.set_up_planner(state)
        text = (
            rf"w: the DTensor's local part has {held} elements .* stores {due} .*dp_shard {rank}/2"
        )
        with pytest.raises(LayoutError, match=text):
            planner.create_local_plan()


def flat_planners(ranges, kind=LayoutAwareSavePlanner, shape=(4,)):
    return [
        kind(
            {"w": shape},
            grid=Grids.from_sizes(rank, dp_shard=len(ranges)),
            layouts=[FSDPFlatBuffer({"w": ranges})],
        )
        for rank in range(len(ranges))
    ]


@pytest.mark.parametrize("ranges", [((0, 0), (0, 4)), ((0, 4), (0, 0)), ((0, 4), (4, 4))])
def test_empty_shard_at_the_offset_of_a_real_one(ranges):
    """Empty shard with the same offset as a real shard: dedup may drop the real one."""
    full = torch.arange(4.0)
    states = [{"w": full[a:b]} for a, b in ranges]
    checkpoint = memory.save(states, flat_planners(ranges))
    assert checkpoint.metadata is not None
    chunks = checkpoint.metadata.state_dict_metadata["w"].chunks
    assert [((0,), (4,))] == [(tuple(c.offsets), tuple(c.sizes)) for c in chunks]
    assert {("w", (0,))} == set(checkpoint.data)
    assert torch.equal(full, checkpoint.tensor("w"))


@pytest.mark.parametrize(
    ("ranges", "fault"),
    [
        (((0, 4), (0, 8)), r"\[0, 4\) is covered 2 times"),
        (((0, 8), (0, 4)), r"\[0, 4\) is covered 2 times"),
        (((0, 4), (5, 8)), r"\[4, 5\) is covered by no rank"),
    ],
)
def test_shards_that_overlap_or_leave_holes(ranges, fault):
    """Dedup key is (fqn, offset) only: two chunks at one offset that differ in size."""
    states = [{"w": torch.zeros(b - a)} for a, b in ranges]
    with pytest.raises(CheckpointError, match=f"w: .*{fault}"):
        memory.save(states, flat_planners(ranges, shape=(8,)))


def test_ranks_that_disagree_about_the_ranges():
    """Dedup key is (fqn, offset) only: rank 0 says (0)+(4), rank 1 says (0)+(8)."""
    first = flat_planners(((0, 4), (4, 8)), shape=(8,))[0]
    second = flat_planners(((0, 0), (0, 8)), shape=(8,))[1]
    with pytest.raises(CheckpointError, match="ranks 0 and 1 of one pipeline stage"):
        memory.save([{"w": torch.zeros(4)}, {"w": torch.zeros(8)}], [first, second])


def test_hsdp_replicas_take_turns():
    """HSDP replicas: 2 replicas x 2 shards, 6 params, 50 elements a shard: 3 items a rank."""
    shapes = {f"p{i}": (100,) for i in range(6)}
    planners, states = [], []
    for rank in range(4):
        grid = Grids.from_sizes(rank, dp_replicate=2, dp_shard=2)
        cuts = DTensorStorage({"*": (Cut(0, "dp_shard"),)})
        planners.append(LayoutAwareSavePlanner(shapes, grid=grid, layouts=[cuts]))
        part = slice(50 * (rank % 2), 50 * (rank % 2) + 50)
        states.append({f"p{i}": torch.arange(100.0)[part] + 1000 * i for i in range(6)})
    checkpoint = memory.save(states, planners)
    assert [3, 3, 3, 3] == [list(checkpoint.written_by.values()).count(rank) for rank in range(4)]
    assert {(f"p{i}", (o,)) for i in range(6) for o in (0, 50)} == set(checkpoint.data)
    for i in range(6):
        assert torch.equal(torch.arange(100.0) + 1000 * i, checkpoint.tensor(f"p{i}"))


def test_planner_made_chunks_of_a_plain_tensor():
    """Planner-made chunks of a plain tensor cannot be resolved by stock lookup."""
    full = torch.arange(40_000.0)
    planners = [
        LayoutAwareSavePlanner({"w": (40_000,)}, grid=Grids.from_sizes(r, dp_replicate=2))
        for r in range(2)
    ]
    checkpoint = memory.save([{"w": full.clone()} for _ in range(2)], planners)
    assert {("w", (0,)): 0, ("w", (20_000,)): 1} == checkpoint.written_by
    for planner in (DefaultLoadPlanner(), LayoutAwareLoadPlanner({"w": (40_000,)})):
        blank = {"w": torch.zeros(40_000)}
        memory.load(checkpoint, [blank], [planner])
        assert torch.equal(full, blank["w"])


def test_load_of_an_incomplete_tensor():
    """Load has no coverage check: one chunk (0)+(4) of w (8,)."""
    checkpoint = memory.stored(w=((8,), [((0,), torch.ones(4))]))
    state = {"w": torch.full((8,), -1.0)}
    with pytest.raises(CheckpointError, match=r"w: \[4, 8\) not covered by the checkpoint"):
        memory.load(checkpoint, [state], [LayoutAwareLoadPlanner({"w": (8,)})])
    assert [-1.0] * 8 == state["w"].tolist()


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning")
def test_rank_local_checkpoint_in_a_smaller_world(tmp_path):
    """Rank-local checkpoint (`use_collectives=False`) loads wrong in a smaller world, silently."""
    full = torch.arange(32.0).view(8, 4)
    for rank in range(2):
        with one_of(rank, 2):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
            part = full.chunk(2)[rank].clone()
            state = {"w": DTensor.from_local(part, mesh, [Shard(0)], run_check=False)}
            writer, planner = dcp.FileSystemWriter(tmp_path), DefaultSavePlanner()
            planner.set_up_planner(state, writer.storage_meta(), rank == 0)
            writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
            plan = writer.prepare_local_plan(planner.create_local_plan())
            plans, metadata = planner.create_global_plan([plan])
            plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
            writer.finish(metadata, [writer.write_data(plan, planner).wait()])
    assert {"__0.metadata", "__1.metadata"} <= {file.name for file in tmp_path.iterdir()}
    state = {"w": torch.full((8, 4), -1.0)}
    with pytest.raises(CheckpointException, match=r"w: \[4, 8\) not covered by the checkpoint"):
        dcp.load(state, checkpoint_id=tmp_path, planner=LayoutAwareLoadPlanner({"w": (8, 4)}))
    assert torch.equal(torch.full((8, 4), -1.0), state["w"])


def test_bucket_padding_past_the_parameters():
    """Bucket padding in optimizer shards goes past the parameter."""
    for shard_size, world_size in ((4, 2), (3, 4)):  # padded to 8 and to 12
        bounds = [(i * shard_size, (i + 1) * shard_size) for i in range(world_size)]
        buffer = torch.cat([torch.arange(7.0), torch.full((shard_size * world_size - 7,), -99.0)])
        clip = lambda a, b, start, stop: (min(max(a, start), stop), min(max(b, start), stop))  # noqa: E731
        ranges = {
            "p0": [clip(a, b, 0, 3) for a, b in bounds],
            "p1": [tuple(x - 3 for x in clip(a, b, 3, 7)) for a, b in bounds],
        }
        states, planners = [], []
        for rank in range(world_size):
            states.append(
                {
                    name: buffer[off + a : off + b]
                    for name, off in (("p0", 0), ("p1", 3))
                    for a, b in [ranges[name][rank]]
                }
            )
            grid = Grids.from_sizes(rank, dp_shard=world_size)
            planners.append(
                LayoutAwareSavePlanner(
                    {"p0": (3,), "p1": (4,)}, grid=grid, layouts=[FSDPFlatBuffer(ranges)]
                )
            )
        checkpoint = memory.save(states, planners)
        assert [0, 1, 2] == checkpoint.tensor("p0").tolist()
        assert [3, 4, 5, 6] == checkpoint.tensor("p1").tolist()
        if world_size == 2:
            assert {("p0", (0,)): 0, ("p1", (0,)): 0, ("p1", (1,)): 1} == checkpoint.written_by
        else:
            assert {("p0", (0,)): 0, ("p1", (0,)): 1, ("p1", (3,)): 2} == checkpoint.written_by
