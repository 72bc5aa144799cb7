"""A file of DTensors that each rank wrote with `torch.save`: one of them, and a folder of all."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cli.command import shardplan
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardplan.layouts import IncompleteCheckpointError, RanksDisagreeError
from shardplan.planner import LayoutAwareLoadPlanner
from shardplan.planner.checkpoints.opening import open_checkpoint
from shardplan.planner.checkpoints.reader import CheckpointReader

FULL = torch.arange(28.0).reshape(7, 4)
# Rows of 7 on each of 3 ranks, by torch.chunk.
ROWS = [(0, 3), (3, 6), (6, 7)]


def on_rank(rank, world, make):
    """Returns what `make(mesh)` returns on one rank of a process group without communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        return make()
    finally:
        dist.destroy_process_group()


def sharded(local, shape, mesh, placements):
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=(shape[1], 1)
    )


@pytest.fixture
def folder(tmp_path):
    """Returns a folder of three ranks' files, as verl names them."""
    for rank, (start, stop) in enumerate(ROWS):

        def save(rank=rank, start=start, stop=stop):
            mesh = DeviceMesh("cpu", torch.arange(3), mesh_dim_names=("fsdp",))
            state = {
                "w": sharded(FULL[start:stop].clone(), (7, 4), mesh, [Shard(0)]),
                "b": sharded(FULL.clone(), (7, 4), mesh, [Replicate()]),
                "bias": torch.ones(2),
                "rng": torch.tensor([rank]),
                "step": 5,
                "order": [rank, 9],
            }
            torch.save(state, tmp_path / f"model_world_size_3_rank_{rank}.pt")

        on_rank(rank, 3, save)
    return tmp_path


def test_folder_is_one_checkpoint(folder):
    assert 0 == shardplan("verify", folder).status
    with open_checkpoint(folder) as checkpoint:
        assert FULL.tolist() == checkpoint.read("w").tolist()
        assert FULL.tolist() == checkpoint.read("b").tolist()
        assert [[0, 0], [3, 0], [6, 0]] == [list(c.offsets) for c in checkpoint.tensor("w").chunks]
        assert 1 == len(checkpoint.tensor("b").chunks)
        assert {"w", "b", "bias", "rng.rank_0", "rng.rank_1", "rng.rank_2"} == set(
            checkpoint.tensors
        )
        assert {"step", "order.rank_0", "order.rank_1", "order.rank_2"} == set(checkpoint.objects)
        assert [2, 9] == checkpoint.load_object("order.rank_2")
        assert [1] == checkpoint.read("rng.rank_1").tolist()


@pytest.mark.parametrize("planner", [LayoutAwareLoadPlanner, dcp.DefaultLoadPlanner])
def test_folder_loads(folder, planner):
    state = {"w": torch.zeros(7, 4), "b": torch.zeros(7, 4), "bias": torch.zeros(2)}
    dcp.load(state, storage_reader=CheckpointReader(folder), planner=planner(), no_dist=True)
    assert [FULL.tolist(), FULL.tolist(), [1, 1]] == [value.tolist() for value in state.values()]


@pytest.mark.parametrize("to", ["dcp", "torch", "safetensors"])
def test_folder_is_converted(folder, tmp_path_factory, to):
    out = tmp_path_factory.mktemp("elsewhere") / "out.d"
    done = shardplan("convert", folder, out, "--to", to, "--tensors-only")
    assert 0 == done.status, done.err
    with open_checkpoint(out) as checkpoint:
        assert FULL.tolist() == checkpoint.read("w").tolist()


def test_one_file_is_incomplete(folder, tmp_path):
    file = folder / "model_world_size_3_rank_1.pt"
    torch.save({"w": FULL}, tmp_path / "full.bin.x")
    answer = shardplan("verify", file)
    assert 1 == answer.status
    assert "w: [0, 3) is covered by no chunk of shape (7, 4)" in answer.out
    assert "b: " not in answer.out
    for verb in (
        ("diff", file, tmp_path / "full.bin.x"),
        ("convert", file, tmp_path / "x.pt", "--tensors-only"),
    ):
        answer = shardplan(*verb)
        assert 2 == answer.status
        assert "w: [0, 3) is covered by no chunk" in answer.err
    assert not (tmp_path / "x.pt").exists()
    with (
        open_checkpoint(file) as checkpoint,
        pytest.raises(IncompleteCheckpointError, match=r"w: \[0, 3\) is covered by no chunk"),
    ):
        checkpoint.read("w")
    target = torch.full((7, 4), -1.0)
    with pytest.raises(CheckpointException, match=r"w: \[0, 3\) not covered by the checkpoint"):
        dcp.load(
            {"w": target},
            storage_reader=CheckpointReader(file),
            planner=LayoutAwareLoadPlanner(),
            no_dist=True,
        )
    assert (target == -1).all()


def test_a_missing_rank_is_named_by_its_rows(folder):
    (folder / "model_world_size_3_rank_2.pt").unlink()
    answer = shardplan("verify", folder)
    assert 1 == answer.status
    assert "w: [6, 7) is covered by no chunk of shape (7, 4)" in answer.out


def test_replicas_that_differ_are_named(folder):
    def save():
        mesh = DeviceMesh("cpu", torch.arange(3), mesh_dim_names=("fsdp",))
        b = FULL.clone()
        b[4, 2] = -1
        torch.save(
            {
                "w": sharded(FULL[6:].clone(), (7, 4), mesh, [Shard(0)]),
                "b": sharded(b, (7, 4), mesh, [Replicate()]),
            },
            folder / "model_world_size_3_rank_2.pt",
        )

    on_rank(2, 3, save)
    answer = shardplan("verify", folder)
    assert 1 == answer.status
    assert "b: the chunk at (0, 0) differs between model_world_size_3_rank_0.pt and" in answer.out


def test_other_shapes_are_refused(folder):
    def save():
        mesh = DeviceMesh("cpu", torch.arange(3), mesh_dim_names=("fsdp",))
        local = torch.zeros(1, 5)
        torch.save(
            {"w": sharded(local, (7, 5), mesh, [Shard(0)])}, folder / "model_world_size_3_rank_2.pt"
        )

    on_rank(2, 3, save)
    with pytest.raises(RanksDisagreeError, match=r"w: .*\(7, 5\) in model_world_size_3_rank_2.pt"):
        open_checkpoint(folder)


def test_two_dims_of_a_mesh(tmp_path):
    for rank in range(4):

        def save(rank=rank):
            mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("dp", "tp"))
            row, column = divmod(rank, 2)
            local = FULL[row * 4 : row * 4 + 4, column * 2 : column * 2 + 2].clone()
            state = {"m": {"w": sharded(local, (7, 4), mesh, [Shard(0), Shard(1)])}}
            torch.save(state, tmp_path / f"{rank}.pth")

        on_rank(rank, 4, save)
    assert 0 == shardplan("verify", tmp_path).status
    with open_checkpoint(tmp_path) as checkpoint:
        assert FULL.tolist() == checkpoint.read("m.w").tolist()
        assert [[17.0, 18.0]] == checkpoint.read("m.w", (4, 1), (1, 2)).tolist()
