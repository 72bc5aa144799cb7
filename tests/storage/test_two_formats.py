"""Two formats in one folder: whoever would read or write one of them notices the other."""

import alone
import pytest
import test_failures as small
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

from shardplan.planner import (
    CheckpointError,
    CheckpointExistsError,
    Grids,
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    SafetensorsReader,
    SafetensorsWriter,
    UnstorableValueError,
)
from shardplan.planner.checkpoints.opening import open_checkpoint
from shardplan.planner.storage import finalize


def errors_of(caught):
    return [failure[0] for failure in caught.value.failures.values()]


def stock_save(path, value, planner=None):
    dcp.save(
        {"w": torch.full((4,), value)},
        storage_writer=FileSystemWriter(path),
        planner=planner,
        no_dist=True,
    )


def own_save(path, value, **options):
    writer = SafetensorsWriter(path, sync=False, **options)
    dcp.save(
        {"w": torch.full((4,), value)},
        storage_writer=writer,
        planner=LayoutAwareSavePlanner(),
        no_dist=True,
    )


def own_load(path):
    state = {"w": torch.zeros(4)}
    dcp.load(
        state,
        storage_reader=SafetensorsReader(path),
        planner=LayoutAwareLoadPlanner(),
        no_dist=True,
    )
    return state["w"].tolist()


def test_our_planner_does_not_save_beside_our_own_format(tmp_path):
    own_save(tmp_path, 1.0)
    with pytest.raises(BaseException) as caught:
        stock_save(tmp_path, 2.0, LayoutAwareSavePlanner())
    (error,) = errors_of(caught)
    assert isinstance(error, CheckpointExistsError) and "already exists" in str(error)
    assert [1.0] * 4 == own_load(tmp_path)
    own_save(tmp_path, 2.0, overwrite=True)  # what the error advises
    assert [2.0] * 4 == own_load(tmp_path)


def test_stock_checkpoint_beside_our_own_is_two_checkpoints_for_everybody(tmp_path):
    own_save(tmp_path, 1.0)
    stock_save(tmp_path, 2.0)
    for read in (own_load, open_checkpoint):
        with pytest.raises(BaseException, match="holds two checkpoints") as caught:
            read(tmp_path)
        found = errors_of(caught)[0] if hasattr(caught.value, "failures") else caught.value
        assert isinstance(found, CheckpointError)
    with pytest.raises(BaseException) as caught:
        own_save(tmp_path, 3.0, overwrite=True)
    assert isinstance(errors_of(caught)[0], CheckpointExistsError)
    for file in (".metadata", *(p.name for p in tmp_path.glob("*.distcp"))):
        (tmp_path / file).unlink()  # what the error advises
    assert [1.0] * 4 == own_load(tmp_path)


def test_metadata_of_finalize_is_no_second_checkpoint_until_the_first_is_replaced(tmp_path):
    own_save(tmp_path, 1.0)
    finalize(tmp_path)
    assert [1.0] * 4 == own_load(tmp_path)
    own_save(tmp_path, 2.0, overwrite=True)
    assert [2.0] * 4 == own_load(tmp_path)
    assert not (tmp_path / ".metadata").exists()
    finalize(tmp_path)
    stale = (tmp_path / ".metadata").read_bytes()
    own_save(tmp_path, 3.0, overwrite=True)
    (tmp_path / ".metadata").write_bytes(stale)
    with pytest.raises(BaseException, match="holds two checkpoints"):
        own_load(tmp_path)
    finalize(tmp_path)  # what the error advises where it is an old one
    assert [3.0] * 4 == own_load(tmp_path)


def test_stock_checkpoint_is_not_replaced_by_our_own_format(tmp_path):
    stock_save(tmp_path, 1.0)
    for overwrite in (False, True):
        for error in small.save(tmp_path, 2, overwrite=overwrite):
            assert isinstance(error, CheckpointExistsError) and "torch's format" in str(error)
    state = {"w": torch.zeros(4)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert [1.0] * 4 == state["w"].tolist()


@pytest.mark.parametrize(
    "key", ["__metadata__", "__shardplan_sums__", "__shardplan_torch__w", "a\udc80"]
)
def test_reserved_keys_are_refused_before_a_byte_is_written(tmp_path, key):
    planner = LayoutAwareSavePlanner()
    with pytest.raises(CheckpointError, match="Rename it") as caught:
        alone.saved(tmp_path / "c", [{key: torch.ones(2)}], [planner])
    assert isinstance(caught.value, ValueError)
    assert not list(tmp_path.rglob("*.safetensors"))
    # A key that only a rank behind the first holds would be written last.
    grids = [Grids.from_sizes(rank, dp_replicate=2) for rank in range(2)]
    planners = [LayoutAwareSavePlanner(grid=grid) for grid in grids]
    states = [{"a": torch.ones(1)}, {"a": torch.ones(1), key: torch.ones(2)}]
    errors = alone.save(tmp_path / "d", states, planners)
    assert isinstance(errors[1], UnstorableValueError)
    assert isinstance(errors[0], CheckpointError) and "Rename it" in str(errors[0])
    assert not (tmp_path / "d" / "checkpoint.json").exists()
