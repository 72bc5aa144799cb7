"""A save that fails ends on all ranks, soon, and leaves what was there; nothing half is ever loaded."""

import json
import shutil
import threading
import time

import alone
import pytest
import torch

from shardplan.layouts import Cut, DTensorStorage, Grids, LayoutError
from shardplan.planner import (
    CheckpointError,
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    RanksDisagreeError,
    SaveConflictError,
)
from shardplan.planner.storage import SafetensorsReader, SafetensorsWriter
from shardplan.planner.storage.places.files import LocalFiles
from shardplan.planner.storage.writing.claim import Claim
from shardplan.planner.storage.writing.process import this_process

SHAPES = {"w": (8, 4), "b": (8,)}


def planner(kind, rank, ranks, **options):
    rules = {name: (Cut(0, "dp_shard"),) for name in SHAPES}
    grid = Grids.from_sizes(rank, dp_shard=ranks)
    return kind(SHAPES, grid=grid, layouts=[DTensorStorage(rules)], **options)


def state(value, ranks, **extras):
    tensors = {n: torch.full((s[0] // ranks, *s[1:]), float(value)) for n, s in SHAPES.items()}
    return {"model": tensors, **extras}


def save(path, value, ranks=2, states=None, **options):
    states = states or [state(value, ranks) for _ in range(ranks)]
    planners = [planner(LayoutAwareSavePlanner, rank, ranks) for rank in range(len(states))]
    return alone.save(path, states, planners, **options)


def loaded(path, **options):
    values = state(-1, 1)
    alone.load(path, [values], [planner(LayoutAwareLoadPlanner, 0, 1)], **options)
    (found,) = {float(x) for tensor in values["model"].values() for x in tensor.unique()}
    return found


def test_complete_checkpoint_is_refused_unless_told(tmp_path):
    assert save(tmp_path, 1) == [None, None]
    for error in save(tmp_path, 2):
        assert "holds a complete checkpoint" in str(error)
    assert loaded(tmp_path) == 1
    assert save(tmp_path, 2, overwrite=True) == [None, None]
    assert loaded(tmp_path) == 2
    seen = [p for p in tmp_path.iterdir() if not p.name.startswith(".")]
    assert 2 == len(seen)  # checkpoint.json and one folder


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_one_failing_rank_ends_the_save_on_all(tmp_path, failing):
    assert save(tmp_path, 1, 4) == [None] * 4
    states = [state(2, 4) for _ in range(4)]
    begun = threading.Barrier(4)

    class Writer(SafetensorsWriter):
        def prepare_local_plan(self, plan):
            plan = super().prepare_local_plan(plan)
            begun.wait(10)
            return plan

        def write_data(self, plan, planner):
            if self._rank == failing:
                planner.resolve_data = self.broken
            return super().write_data(plan, planner)

        def broken(self, item):
            raise OSError(28, "No space left on device")

    began = time.monotonic()
    errors = save(tmp_path, 2, 4, states, overwrite=True, make_writer=Writer)
    assert time.monotonic() - began < 15
    assert isinstance(errors[failing], OSError)
    for rank, error in enumerate(errors):
        if rank != failing:
            assert isinstance(error, CheckpointError)
            assert f"rank {failing} failed with OSError: [Errno 28]" in str(error)
    assert loaded(tmp_path) == 1
    assert [] == [p.name for p in tmp_path.glob(".*.tmp")]
    assert save(tmp_path, 3, 4, overwrite=True) == [None] * 4
    assert loaded(tmp_path) == 3


def test_rank_that_cannot_plan_ends_the_save_on_all(tmp_path):
    states = [state(1, 2), state(1, 2)]
    states[1]["model"]["w"] = torch.zeros(3, 3)  # not what its layout stores
    began = time.monotonic()
    errors = save(tmp_path, 1, states=states)
    assert time.monotonic() - began < 15
    assert isinstance(errors[1], LayoutError)
    assert "rank 1 failed with LayoutError: w: the tensor has 9 elements" in str(errors[0])


def test_rank_that_never_comes_is_named(tmp_path):
    states = [state(1, 4) for _ in range(3)]
    planners = [planner(LayoutAwareSavePlanner, rank, 4) for rank in range(3)]
    began = time.monotonic()
    errors = alone.save(tmp_path, states, planners, timeout=1.0)
    assert time.monotonic() - began < 15
    assert "1 of 4 ranks gave no sign of life for 1.0 s: 3" in str(errors[0])
    assert all(isinstance(error, CheckpointError) for error in errors)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        len(SafetensorsReader(tmp_path).read_metadata().state_dict_metadata)


def test_leader_that_never_comes_is_named(tmp_path):
    writer = SafetensorsWriter(tmp_path, sync=False, timeout=0.5)
    own = planner(LayoutAwareSavePlanner, 1, 2)
    with pytest.raises(CheckpointError, match=r"rank 0 gave no sign of life for 0\.5 s"):
        alone.drive(1, state(1, 2), writer, own)


def test_leftovers_of_a_killed_attempt_are_no_part_of_the_next(tmp_path):
    assert save(tmp_path, 1) == [None, None]
    (old,) = [p for p in tmp_path.iterdir() if p.is_dir()]
    # An attempt in which rank 1 was done and rank 0 was killed: claimed, with files and a marker.
    stale = tmp_path / "0123456789abcdef"
    shutil.copytree(old, stale)
    (stale / "00001.ready").write_text("{}")
    (stale / "checkpoint.json").touch()
    gone = {**this_process(), "pid": 2**22 + 1}  # more than any process has
    claim = Claim(2, stale.name, 0, "a launch", process=gone)
    (tmp_path / ".save-2.json").write_bytes(claim.encode())
    nobody = tmp_path / "fedcba9876543210"
    nobody.mkdir()
    assert loaded(tmp_path) == 1
    assert save(tmp_path, 2, overwrite=True) == [None, None]
    assert loaded(tmp_path) == 2
    assert not stale.exists() and not old.exists()
    assert nobody.exists(), "a folder that no claim names is somebody else's"


GONE = json.dumps({"beat": 3, **this_process(), "pid": 2**22 + 1})  # more than any process has


@pytest.mark.parametrize(
    ("files", "kept"),
    [
        ({"00001.failed": "{}", "00001-of-00002.safetensors": "x"}, False),
        ({"00000.beat": GONE, "00001-of-00002.safetensors": "x"}, False),
        ({"00000.failed": "{}"}, False),
        ({"00001-of-00002.safetensors": "x", "00001.beat": "1"}, True),
        ({"00000.beat": json.dumps(this_process()), "00001.failed": "{}"}, True),
    ],
    ids=["others waited in vain", "leader killed", "leader failed", "no leader yet", "alive"],
)
def test_saves_that_made_no_claim_are_cleared_if_they_never_can(tmp_path, files, kept):
    orphan = tmp_path / "0123456789abcdef"
    orphan.mkdir()
    for name, text in files.items():
        (orphan / name).write_text(text)
    assert save(tmp_path, 1) == [None, None]
    assert loaded(tmp_path) == 1
    assert kept == orphan.exists()


def test_claim_of_a_live_process_is_not_taken_over_before_it_falls_silent(tmp_path):
    assert save(tmp_path, 1) == [None, None]
    claim = Claim(2, "0123456789abcdef", 0, "a launch", beat=0.01, process=this_process())
    (tmp_path / ".save-2.json").write_bytes(claim.encode())
    (tmp_path / claim.save).mkdir()
    over = threading.Event()

    def live():
        beats = 0
        while not over.wait(0.01):
            beats += 1
            LocalFiles(tmp_path).put(f"{claim.save}/00000.beat", str(beats).encode())

    alive = threading.Thread(target=live)
    alive.start()
    try:
        errors = save(tmp_path, 2, overwrite=True)
    finally:
        over.set()
        alive.join()
    assert isinstance(errors[0], SaveConflictError)
    assert f"another save is writing here (save {claim.save} by process" in str(errors[0])
    assert "another save is writing here" in str(errors[1])
    assert loaded(tmp_path) == 1
    assert save(tmp_path, 2, overwrite=True, timeout=0.5) == [None, None]
    assert loaded(tmp_path) == 2


def test_values_that_differ_are_named_with_both_ranks(tmp_path):
    states = [state(1, 2, lr=0.1), state(1, 2, lr=0.2)]
    errors = save(tmp_path, 1, states=states)
    assert isinstance(errors[0], RanksDisagreeError)
    for error in errors:
        assert "lr: ranks 0 and 1 hold different values" in str(error)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        len(SafetensorsReader(tmp_path).read_metadata().state_dict_metadata)


def test_two_ranks_at_one_place_do_not_overwrite_each_other(tmp_path):
    states = [state(1, 2), state(1, 2)]
    planners = [planner(LayoutAwareSavePlanner, 0, 2) for _ in range(2)]
    errors = alone.save(tmp_path, states, planners, timeout=1.0)
    assert any(isinstance(error, Exception) for error in errors)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        len(SafetensorsReader(tmp_path).read_metadata().state_dict_metadata)


def test_planner_without_layouts_is_refused(tmp_path):
    from torch.distributed.checkpoint import DefaultSavePlanner

    own = DefaultSavePlanner()
    own.set_up_planner({"w": torch.ones(2)}, None, True)
    writer = SafetensorsWriter(tmp_path)
    writer.set_up_storage_writer(True, rank=0, use_collectives=False)
    with pytest.raises(CheckpointError, match="stores layouts, and this planner knows none"):
        writer.prepare_local_plan(own.create_local_plan())
