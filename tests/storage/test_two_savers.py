"""Several savers of one folder, in any order of their steps: each is told the truth, and nothing is lost."""

import contextlib
import itertools
import uuid

import fsspec
import pytest
from interleaved import Interleaved, Killed, Schedule, SimulatedClock

from shardplan.layouts import CheckpointError, Grid, Grids, ModelLayouts
from shardplan.planner.planning.manifest import StageManifest
from shardplan.planner.planning.table import Chunk
from shardplan.planner.storage.format.commit import Commit, data_name, read_commit
from shardplan.planner.storage.places.files import LocalFiles, files_at
from shardplan.planner.storage.writing.identity import Identity
from shardplan.planner.storage.writing.session import Session

EACH = 36  # trials of each of 32 cases: 1,152
TIMEOUT = 5.0


def commit_of(save):
    one = Grid(("dp_replicate",), (1,), (0,))
    chunk = Chunk(None, Grids(one, one), ModelLayouts(), {})
    return Commit(save, 1, (StageManifest((chunk,)),), ("0",))


def save_once(files, clock, save, overwrite, alive):
    """What a saver of one rank does, from its first look to the end."""
    identity = Identity(save, f"launch of {save}")
    session = Session(files, identity, 0, 1, TIMEOUT, overwrite, clock=clock)
    try:
        session.begin(alive=False)
        for _ in range(
            alive.draw.randrange(3)
        ):  # writing takes a while, and the leader shows that it lives
            clock.sleep(1.0)
            with contextlib.suppress(OSError):
                session.beat()
        data = data_name(save, 0, 1)
        files.put(data, save.encode())
        session.publish(commit_of(save), sync=False)
    except Killed:
        session._over.set()  # nothing of a killed process runs any more, finalizers neither
        raise
    except (CheckpointError, OSError) as error:
        error = session.explained(error)
        session.fail(error)
        raise error from None


@pytest.fixture
def folders(tmp_path):
    number = itertools.count()
    return lambda: LocalFiles(tmp_path / str(next(number)))


@pytest.fixture
def objects():
    root = f"memory://{uuid.uuid4().hex}"
    yield lambda: files_at(f"{root}/{uuid.uuid4().hex}")
    fs = fsspec.filesystem("memory")
    if fs.exists(root):
        fs.rm(root, recursive=True)


def trial(files, seed, savers, overwrite, older, **hazards):
    """Runs savers of one folder, and returns who was told what and what the folder holds then."""
    schedule = Schedule(seed)
    clock = SimulatedClock(schedule)
    if older:
        quiet = Schedule(seed)
        quiet.start("older", lambda: save_once(files, SimulatedClock(quiet), older, False, quiet))
        quiet.run()
        assert read_commit(files).save == older
    told = {}

    def work(save):
        def run():
            told[save] = "killed"
            own = Interleaved(files, schedule, **hazards)
            try:
                save_once(own, clock, save, overwrite, schedule)
                told[save] = "saved"
            except CheckpointError as error:
                told[save] = error

        return run

    for number in range(savers):
        save = f"{seed:08x}{number + 1:08x}"
        schedule.start(save, work(save))
    schedule.run()
    return told, read_commit(files)


def check(files, told, commit, overwrite, older):
    """What must be true, whatever happened."""
    saved = [save for save, answer in told.items() if answer == "saved"]
    if commit is not None:
        # Complete means whole: the data that the commit names is there, and is that save's.
        assert files.read(data_name(commit.save, 0, 1)) == commit.save.encode()
    if older and not overwrite:
        assert commit is not None and commit.save == older and not saved
        return
    if older:
        assert commit is not None
    if not overwrite:
        assert len(saved) <= 1
    if saved:
        # The one that is there is one that was told so, or one that was killed after it was published.
        assert commit is not None and told.get(commit.save) in ("saved", "killed")
        if not overwrite:
            assert commit.save in saved
    elif commit is not None:
        assert commit.save == older or told[commit.save] == "killed"


# A shared file system may show what was there a while ago; an object store shows what there is.
HAZARDS = {
    "quiet": ({}, ["folders", "objects"]),
    "frozen": ({"freeze": 0.03}, ["folders", "objects"]),
    "killed": ({"kill": 0.01, "freeze": 0.01}, ["folders", "objects"]),
    "stale looks": ({"stale": 0.2}, ["folders"]),
    "stale looks, frozen": ({"stale": 0.1, "freeze": 0.02}, ["folders"]),
}
CASES = [(hazard, place) for hazard, (_, places) in HAZARDS.items() for place in places]


@pytest.mark.parametrize(("hazard", "place"), CASES)
@pytest.mark.parametrize("older", ["", "0123456789abcdef"], ids=["empty", "older"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["keep", "overwrite"])
def test_no_interleaving_loses_or_mixes(request, place, overwrite, older, hazard):
    make = request.getfixturevalue(place)
    winners = 0
    for seed in range(EACH):
        files = make()
        told, commit = trial(files, seed, 2 + seed % 2, overwrite, older, **HAZARDS[hazard][0])
        check(files, told, commit, overwrite, older)
        winners += any(answer == "saved" for answer in told.values())
    if not older or overwrite:
        assert winners  # else nothing was tried
    assert len(CASES) * 4 * EACH >= 1_000


def save_with_ranks(files, clock, save, rank, ranks, overwrite, draw):
    """What one of several ranks does, from its first look to the end."""
    session = Session(files, Identity(save, "launch"), rank, ranks, TIMEOUT, overwrite, clock=clock)
    try:
        session.begin(alive=False)
        for _ in range(draw.randrange(3)):
            clock.sleep(1.0)
            with contextlib.suppress(OSError):
                session.beat()
        files.put(data_name(save, rank, ranks), f"{save} {rank}".encode())
        session.ready(b"planned")
        if rank:
            session.follow(lambda request: b"")
        else:
            session.gather()
            session.publish(commit_of(save), sync=False)
    except Killed:
        session._over.set()
        raise
    except (CheckpointError, OSError) as error:
        error = session.explained(error)
        session.fail(error)
        raise error from None


RANKS = 2


@pytest.mark.parametrize(("hazard", "place"), CASES)
@pytest.mark.parametrize("overwrite", [False, True], ids=["keep", "overwrite"])
def test_ranks_of_two_saves_never_mix(request, place, overwrite, hazard):
    make = request.getfixturevalue(place)
    whole = 0
    for seed in range(EACH // 2):
        files, schedule, told = make(), Schedule(seed), {}
        clock = SimulatedClock(schedule)

        def work(save, rank, files=files, schedule=schedule, clock=clock, told=told):
            def run():
                told[save, rank] = "killed"
                own = Interleaved(files, schedule, **HAZARDS[hazard][0])
                try:
                    save_with_ranks(own, clock, save, rank, RANKS, overwrite, schedule.draw)
                    told[save, rank] = "saved"
                except (CheckpointError, OSError) as error:
                    told[save, rank] = error

            return run

        saves = [f"{seed:08x}{number + 1:08x}" for number in range(2)]
        for save in saves:
            for rank in range(RANKS):
                schedule.start(f"{save} {rank}", work(save, rank))
        schedule.run(most=100_000)
        commit = read_commit(files)
        saved = {save for (save, _), answer in told.items() if answer == "saved"}
        if commit is None:
            assert not saved
            continue
        whole += 1
        for rank in range(RANKS):
            assert (
                files.read(data_name(commit.save, rank, RANKS)) == f"{commit.save} {rank}".encode()
            )
        assert overwrite or saved <= {commit.save}
        assert not saved or commit.save in saved or told[commit.save, 0] == "killed"
    assert whole
