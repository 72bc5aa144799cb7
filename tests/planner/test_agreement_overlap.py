"""Saves that overlap: one planner or one stager in two threads; each checkpoint has its own values."""

import threading
import warnings
from types import SimpleNamespace

import memory
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import StorageMeta

from shardplan.layouts import FSDPFlatBuffer, Grids
from shardplan.planner import (
    LayoutAwareSavePlanner,
    PinnedStager,
    SafetensorsReader,
    SafetensorsWriter,
)
from shardplan.planner.compat import SaveCall
from shardplan.planner.saving.messages import WriterMeta


def gated(kind):
    """A storage writer that waits, before it writes, until it may."""

    class Gated(kind):
        def __init__(self, *args, **given):
            super().__init__(*args, **given)
            self.begun, self.gate = threading.Event(), threading.Event()

        def write_data(self, plan, planner):
            self.begun.set()
            assert self.gate.wait(60)
            return super().write_data(plan, planner)

    return Gated


WRITERS = {
    "stock": (gated(dcp.FileSystemWriter), {"sync_files": False}, dcp.FileSystemReader),
    "own": (gated(SafetensorsWriter), {"sync": False}, SafetensorsReader),
}


def states():
    return [{"w": torch.full((4,), float(n)), "n": n} for n in (1, 2)]


def check(tmp_path, reader):
    for n in (1, 2):
        state = {"w": torch.zeros(4), "n": 0}
        dcp.load(state, storage_reader=reader(tmp_path / str(n)), no_dist=True)
        assert ([float(n)] * 4, n) == (state["w"].tolist(), state["n"])


@pytest.mark.parametrize("storage", WRITERS)
@pytest.mark.parametrize("shared", ["planner", "stager", "both"])
def test_each_of_two_saves_that_overlap_has_its_own_values(tmp_path, storage, shared):
    kind, options, reader = WRITERS[storage]
    planner = LayoutAwareSavePlanner({"w": (4,)}, grid=Grids.from_sizes(0))
    stager = PinnedStager()
    futures, writers, callers = [None, None], [], []
    for n, state in enumerate(states()):
        writer = kind(tmp_path / str(n + 1), **options)
        writers.append(writer)
        own = LayoutAwareSavePlanner({"w": (4,)}, grid=Grids.from_sizes(0))
        given = {"planner": own if shared == "stager" else planner}
        if shared != "planner":
            given["async_stager"] = stager

        def run(n=n, state=state, writer=writer, given=given):
            futures[n] = dcp.async_save(state, storage_writer=writer, no_dist=True, **given)

        callers.append(threading.Thread(target=run))
        callers[n].start()
        if n == 0:
            callers[0].join(60)
            assert writer.begun.wait(60)
    assert not writers[1].begun.wait(0.3) or shared == "stager"
    for writer in writers:
        writer.gate.set()
    for n in range(2):
        callers[n].join(60)
        futures[n].result(timeout=60)
    check(tmp_path, reader)


@pytest.mark.parametrize("where", ["this thread", "another thread"])
def test_a_save_that_failed_keeps_nobody_waiting(tmp_path, where):
    """It failed in the storage writer, so that the planner never learned of its end."""

    class Broken(dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            raise OSError("no space left on device")

    planner, stager = LayoutAwareSavePlanner(), PinnedStager()
    first, second = states()
    with pytest.raises(BaseException, match="no space left") as failure:
        if where == "this thread":
            dcp.save(first, storage_writer=Broken(tmp_path / "1"), planner=planner, no_dist=True)
        else:
            failed = dcp.async_save(
                first,
                storage_writer=Broken(tmp_path / "1"),
                planner=planner,
                async_stager=stager,
                no_dist=True,
            )
            failed.result(timeout=60)
    # The error is still held, and with it what was staged.
    dcp.async_save(
        second,
        storage_writer=dcp.FileSystemWriter(tmp_path / "2", sync_files=False),
        planner=planner,
        async_stager=stager,
        no_dist=True,
    ).result(timeout=60)
    assert failure.value is not None
    state = {"w": torch.zeros(4), "n": 0}
    dcp.load(state, checkpoint_id=tmp_path / "2", no_dist=True)
    assert [2.0] * 4 == state["w"].tolist()


def test_staged_values_that_somebody_keeps_stay_as_they_are():
    stager = PinnedStager()
    kept = stager.stage({"w": torch.ones(4), "n": [torch.ones(2)]})
    later = stager.stage({"w": torch.zeros(4), "n": [torch.zeros(2)]})
    assert [1.0] * 4 == kept["w"].tolist() and [0.0] * 4 == later["w"].tolist()
    place = later["w"].data_ptr()
    del later
    again = stager.stage({"w": torch.full((4,), 2.0), "n": [torch.ones(2)]})
    assert place == again["w"].data_ptr() and [1.0] * 4 == kept["w"].tolist()


def test_one_thread_may_drive_save_after_save(tmp_path):
    """Also where one was left in the middle."""
    grids = [Grids.from_sizes(r, dp_shard=2) for r in range(2)]
    layouts = [FSDPFlatBuffer({"w": ((0, 4), (4, 8))})]
    planners = [LayoutAwareSavePlanner({"w": (8,)}, grid=g, layouts=layouts) for g in grids]
    planners[1].set_up_planner({"w": torch.zeros(4)})
    planners[1].create_local_plan()
    saved = memory.save([{"w": torch.full((4,), float(r))} for r in range(2)], planners)
    assert [0.0] * 4 + [1.0] * 4 == saved.tensor("w").tolist()


@pytest.mark.parametrize(
    ("group", "collectives", "count"), [(None, True, 1), ("its own", True, 0), (None, False, 0)]
)
def test_async_saves_in_the_default_process_group_are_warned_of_once(
    monkeypatch, group, collectives, count
):
    call = SaveCall(object(), collectives, no_dist=False, process_group=group)
    monkeypatch.setattr("shardplan.planner.save.calling_save", lambda: call)
    monkeypatch.setattr("shardplan.planner.save.ranks_of", lambda group: None)
    planner = LayoutAwareSavePlanner(grid=Grids.from_sizes(0, dp_replicate=2))
    meta = StorageMeta()
    if not collectives:  # torch's own writers would be refused
        meta = WriterMeta(writer=SimpleNamespace(collective=False, plan_failed=None))

    def plan():
        planner.set_up_planner({"w": torch.ones(2)}, meta)
        planner.create_local_plan()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan()  # in the main thread: a save that training waits for
        assert [] == caught
        for _ in range(2):
            thread = threading.Thread(target=plan)
            thread.start()
            thread.join()
    assert count == len(caught)
    assert all("Pass a process group of its own" in str(w.message) for w in caught)


def test_one_writer_of_overlapping_saves_takes_one_at_a_time(tmp_path):
    """The second save names another folder while the first has not begun to write."""
    begun, gate = threading.Event(), threading.Event()

    class Slow(SafetensorsWriter):
        def prepare_local_plan(self, plan):
            if not begun.is_set():
                begun.set()
                assert gate.wait(60)
            return super().prepare_local_plan(plan)

    writer = Slow(tmp_path / "0", sync=False)

    def save(value):
        return dcp.async_save(
            {"w": torch.full((4,), value)},
            checkpoint_id=tmp_path / str(int(value)),
            storage_writer=writer,
            planner=LayoutAwareSavePlanner(),
            no_dist=True,
        )

    first = save(1.0)
    assert begun.wait(60)
    second = save(2.0)
    gate.set()
    first.result(60), second.result(60)
    for value in (1.0, 2.0):
        found = {"w": torch.zeros(4)}
        dcp.load(found, storage_reader=SafetensorsReader(tmp_path / str(int(value))), no_dist=True)
        assert [value] * 4 == found["w"].tolist()
