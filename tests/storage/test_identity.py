"""The identity of a save: equal on its ranks, another for each save, launch, folder and group of ranks."""

import logging
import subprocess

import pytest
import torch.distributed as dist

from shardplan.planner import CheckpointError
from shardplan.planner.storage.writing import identity as identities
from shardplan.planner.storage.writing.identity import identify
from shardplan.planner.storage.writing.process import has_ended, this_process
from shardplan.planner.storage.writing.watch import Watch


@pytest.fixture
def launch(monkeypatch):
    """Returns a call that makes this process a rank of a launch: its store, rank and size."""

    def be(store, rank, size):
        monkeypatch.setattr(identities, "default_store", lambda: store)
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda group=None: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: size)

    return be


def ids(launch, store, ranks, root="/c", members=None):
    found = []
    for rank in range(ranks):
        launch(store, rank, 4)
        found.append(identify(root, rank, 4 if members is None else len(members), members, None))
    return found


def test_ranks_come_to_one_id_and_each_save_to_another(launch):
    store = dist.HashStore()
    seen = []
    for save in range(1, 4):
        found = ids(launch, store, 4)
        assert 1 == len({own.save for own in found})
        assert {save} == {own.count for own in found}
        seen.append(found[0].save)
    seen.append(ids(launch, store, 4, root="/elsewhere")[0].save)
    seen.append(ids(launch, store, 2, members=(0, 1))[0].save)
    seen.append(ids(launch, store, 2, members=(2, 3))[0].save)
    seen.append(ids(launch, dist.HashStore(), 4)[0].save)  # another launch
    assert len(seen) == len(set(seen))
    assert all(len(save) == 16 for save in seen)


def test_rank_that_missed_a_save_catches_up(launch):
    store = dist.HashStore()
    ids(launch, store, 4)
    launch(store, 0, 4)
    ahead = identify("/c", 0, 4, None, None)
    launch(store, 1, 4)
    identify("/c", 1, 4, None, None)
    launch(store, 0, 4)
    ahead = identify("/c", 0, 4, None, None)
    launch(store, 1, 4)
    behind = identify("/c", 1, 4, None, None)
    assert ahead.save == behind.save  # both have begun three
    launch(store, 0, 4)
    ahead = [identify("/c", 0, 4, None, None) for _ in range(2)][-1]
    launch(store, 1, 4)
    behind = identify("/c", 1, 4, None, None)
    assert (5, 4) == (ahead.count, behind.count)
    behind.catch_up(ahead.count)
    launch(store, 0, 4)
    ahead = identify("/c", 0, 4, None, None)
    launch(store, 1, 4)
    assert ahead.save == identify("/c", 1, 4, None, None).save


def test_group_that_nobody_names_is_refused(launch):
    launch(dist.HashStore(), 0, 4)
    with pytest.raises(CheckpointError, match=r"2 ranks save by their grid, .* has 4"):
        identify("/c", 0, 2, None, None)
    assert identify("/c", 0, 2, None, "by hand").save == identify("/c", 1, 2, None, "by hand").save
    assert identify("/c", 0, 1, None, None).save != identify("/c", 0, 1, None, None).save


def test_process_that_has_ended_is_known_and_one_that_runs_too():
    child = subprocess.Popen(["sleep", "60"])
    own = this_process()
    facts = {**own, "pid": child.pid, "start": this_start(child.pid)}
    assert not has_ended(own) and not has_ended(facts)
    child.kill()
    child.wait()
    assert has_ended(facts)
    assert not has_ended({**facts, "host": "elsewhere"}), "nobody here can tell"
    assert not has_ended({})


def this_start(pid):
    from shardplan.planner.storage.writing import process

    return process._start(pid)


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_rank_that_waits_says_after_ten_seconds_what_for(caplog):
    clock = Clock()
    waiting = Watch(300.0, clock, "rank 0 to complete the save")
    with caplog.at_level(logging.WARNING, logger="shardplan"):
        while clock.now < 9:
            assert waiting.pause(None)
        assert not caplog.records
        while waiting.pause(None):
            pass
    assert 300 < clock.now < 303
    (record,) = caplog.records
    assert "rank 0 to complete the save" in record.getMessage()


def test_what_was_seen_before_is_no_change():
    clock = Clock()
    waiting = Watch(10.0, clock, "nothing")
    turns = 0
    while waiting.pause(turns % 2):
        turns += 1
    assert 10 < clock.now < 13
