"""Every source of a state dict: saved, loaded, resharded, saved in the background.

Each test's id is a cell of the table in docs/sources.md.
"""

import pytest
import ranks
import torch
import torch.distributed.checkpoint as dcp
from sources import SOURCES, expected

from shardplan.planner import LoadPolicies

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def processes():
    with ranks.started(4) as started:
        yield started


@pytest.fixture(scope="module")
def saved(processes, tmp_path_factory):
    """Saves a source once in one way; returns the folder."""
    known = {}

    def save(name, how="own"):
        if (name, how) not in known:
            path = str(tmp_path_factory.mktemp("source") / "checkpoint")
            processes.run("source_jobs:save", SOURCES[name].world, name, path, how)
            known[name, how] = path
        return known[name, how]

    return save


def whole(path, source):
    """What stock reads of a checkpoint on one process."""
    tensors = {key: torch.full_like(t, -1) for key, t in expected(source).items()}
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


def check(source, tensors):
    wanted = expected(source)
    assert [] == [key for key, tensor in wanted.items() if not torch.equal(tensor, tensors[key])]


@pytest.mark.parametrize("name", SOURCES)
def test_save(name, saved):
    """What ours saves, stock opens on one process, every element right."""
    check(SOURCES[name], whole(saved(name), SOURCES[name]))


@pytest.mark.parametrize("name", SOURCES)
def test_load(name, saved, processes):
    """What ours saved, ours loads back into the same source."""
    for answer in processes.run("source_jobs:load", SOURCES[name].world, name, saved(name), "own"):
        assert ([], True) == (answer["wrong"], answer["objects"])
        assert [] == answer["report"].missing


# What async_save can't copy faithfully is refused: the copies are plain tensors, or point back.
REFUSED = {
    "FSDP1 (ShardedTensor)": "not supported for ShardedTensor",  # by torch's own stager
    "hooks on a tensor": "gives memory of another tensor",
}


@pytest.mark.parametrize("name", SOURCES)
def test_async(name, saved):
    """What async_save writes is what save writes, whatever happens to the tensors meanwhile."""
    if name in REFUSED:
        with pytest.raises(ranks.RankFailure, match=REFUSED[name]):
            saved(name, "async")
        return
    check(SOURCES[name], whole(saved(name, "async"), SOURCES[name]))


def resharded(processes, name, path, world):
    """Loads with another number of ranks; tensors must all be there."""
    policies = LoadPolicies(missing="report")
    answers = processes.run("source_jobs:load", world, name, path, "own", policies)
    tensors = {key for answer in answers for key in expected(SOURCES[name])}
    for answer in answers:
        assert [] == answer["wrong"]
        assert not tensors & set(answer["report"].missing)
    return answers


@pytest.mark.parametrize("name", SOURCES)
def test_reshard(name, saved, processes):
    """What a source saved loads into the same source on another number of ranks."""
    resharded(processes, name, saved(name), 2 if SOURCES[name].world == 4 else 4)


@pytest.mark.parametrize("name", SOURCES)
def test_reshard_to_one_process(name, saved, processes):
    """What a source saved loads into whole tensors on one process, by ours."""
    processes.run("source_jobs:load_tensors", 1, name, saved(name))


@pytest.mark.parametrize("name", SOURCES)
def test_reshard_from_one_process(name, processes, tmp_path):
    """What one process saved loads into any source."""
    path = str(tmp_path / "whole")
    processes.run("source_jobs:save_whole", 1, name, path)
    resharded(processes, name, path, SOURCES[name].world)


@pytest.mark.parametrize("name", [name for name, source in SOURCES.items() if source.stock])
def test_stock_loads_what_ours_saved(name, saved, processes):
    """The stock planner fills the source's own state dict from our checkpoint."""
    for answer in processes.run(
        "source_jobs:load", SOURCES[name].world, name, saved(name), "stock"
    ):
        assert [] == answer["wrong"]


@pytest.mark.parametrize("name", [name for name, source in SOURCES.items() if source.stock])
def test_ours_loads_what_stock_saved(name, saved, processes):
    """Ours fills the source's own state dict from a checkpoint of the stock planner."""
    path = saved(name, "stock")
    for answer in processes.run("source_jobs:load", SOURCES[name].world, name, path, "own"):
        assert ([], True) == (answer["wrong"], answer["objects"])
