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


@pytest.mark.parametrize("overwrite", [False, True])
def test_stock_save_that_completes_while_ours_writes_stays_whole(tmp_path, overwrite):
    if overwrite:
        own_save(tmp_path, 1.0)

    class Late(SafetensorsWriter):
        def write_data(self, plan, planner):
            done = super().write_data(plan, planner)
            stock_save(tmp_path, 2.0)
            return done

    with pytest.raises(BaseException, match="in torch's format"):
        dcp.save(
            {"w": torch.full((4,), 3.0)},
            storage_writer=Late(tmp_path, sync=False, overwrite=overwrite),
            planner=LayoutAwareSavePlanner(),
            no_dist=True,
        )
    state = {"w": torch.zeros(4)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert [2.0] * 4 == state["w"].tolist()


def test_finalize_does_not_overwrite_metadata_of_another_save(tmp_path):
    own_save(tmp_path, 1.0)
    stock_save(tmp_path, 2.0)
    with pytest.raises(
        CheckpointError, match=r"holds two checkpoints.* is another save's"
    ) as caught:
        finalize(tmp_path)
    assert "finalize again" not in str(caught.value)
    state = {"w": torch.zeros(4)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert [2.0] * 4 == state["w"].tolist()


def test_refused_save_touches_nothing_of_a_save_that_has_its_id(tmp_path):
    """A restarted job gives the id of its step again."""
    own_save(tmp_path, 1.0, save_id="step-100")
    for overwrite, text in ((False, "already exists"), (True, "Give every save an id of its own")):
        with pytest.raises(BaseException, match=text):
            own_save(tmp_path, 2.0, save_id="step-100", overwrite=overwrite)
        assert [1.0] * 4 == own_load(tmp_path)


def test_save_with_the_id_of_one_that_is_under_way_leaves_it_alone(tmp_path):
    class Slow(SafetensorsWriter):
        def write_data(self, plan, planner):
            done = super().write_data(plan, planner)
            with pytest.raises(BaseException, match=r"place 0 of save .* is taken"):
                own_save(tmp_path, 2.0, save_id="step-100")
            return done

    dcp.save(
        {"w": torch.full((4,), 1.0)},
        storage_writer=Slow(tmp_path, sync=False, save_id="step-100", timeout=20),
        planner=LayoutAwareSavePlanner(),
        no_dist=True,
    )
    assert [1.0] * 4 == own_load(tmp_path)


@pytest.mark.parametrize("late", [0, 1])
def test_rank_of_another_save_with_the_id_does_not_end_the_first(tmp_path, late):
    """Two ranks save; then one of another job comes, with the same id, and is refused."""
    for error in small.save(tmp_path, 1, save_id="step-7"):
        assert error is None
    state = {"model": {n: torch.zeros(s[0] // 2, *s[1:]) for n, s in small.SHAPES.items()}}
    planner = small.planner(LayoutAwareSavePlanner, late, 2)
    writer = SafetensorsWriter(tmp_path, sync=False, save_id="step-7", timeout=1)
    with pytest.raises(CheckpointExistsError):
        alone.drive(late, state, writer, planner)
    assert not list(tmp_path.rglob("*.failed"))
    assert 1 == small.loaded(tmp_path)
