"""Places that fsspec knows, with the semantics of object stores: no rename, no sync.

Each test runs on fsspec's own memory file system, and through s3fs on a local server of S3's API.
"""

import logging
import threading
import uuid

import alone
import fsspec
import pytest
import test_failures as small
import torch
from moto.server import ThreadedMotoServer

from shardplan.layouts import Cut, DTensorStorage, Grids
from shardplan.planner import (
    CheckpointError,
    LayoutAwareLoadPlanner,
    LayoutAwareSavePlanner,
    SafetensorsReader,
    SafetensorsWriter,
)
from shardplan.planner.storage.places.files import LocalFiles, files_at


@pytest.fixture(scope="module")
def s3():
    """Returns the URL of a bucket on a server that the tests start."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it tells of every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fs = fsspec.filesystem("s3")
        fs.mkdir("bucket")
        yield "s3://bucket"
        fs.clear_instance_cache()
    server.stop()


@pytest.fixture(params=["memory", "s3"])
def url(request):
    root = "memory:/" if request.param == "memory" else request.getfixturevalue("s3")
    url = f"{root}/{uuid.uuid4().hex}/run/checkpoint"
    yield url
    fs, path = fsspec.core.url_to_fs(url)
    if fs.exists(path):
        fs.rm(path, recursive=True)


def names(url):
    """Returns the file system of a URL and the names below it."""
    fs, path = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return fs, fs.find(path)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_saves_and_loads_at_any_number_of_ranks(url, ranks):
    assert small.save(url, 3, ranks) == [None] * ranks
    assert small.loaded(url) == 3
    found = names(url)[1]
    assert ranks == sum(name.endswith(".safetensors") for name in found)
    assert ranks + 2 == len(found)  # one part and checkpoint.json


def test_complete_one_is_refused_and_replaced_when_told(url):
    assert small.save(url, 1) == [None, None]
    assert all("holds a complete checkpoint" in str(e) for e in small.save(url, 2))
    assert small.save(url, 2, overwrite=True) == [None, None]
    assert small.loaded(url) == 2


def test_missing_rank_leaves_the_old_one(url):
    assert small.save(url, 1) == [None, None]
    errors = small.save(url, 2, 2, [small.state(2, 2)], overwrite=True, timeout=1.0)
    assert "gave no sign of life" in str(errors[0])
    assert small.loaded(url) == 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
def test_failed_save_leaves_the_old_one(url, failing, late):
    """Late: the rank that is well begins to write when the other has failed already."""
    assert small.save(url, 1) == [None, None]
    begun, over = threading.Barrier(2), threading.Event()

    class Writer(SafetensorsWriter):
        def write_data(self, plan, planner):
            begun.wait(10)
            if self._rank == failing:
                planner.resolve_data = self.broken
            elif late and failing == 0:  # only a leader that fails waits for nobody
                over.wait(10)
            try:
                return super().write_data(plan, planner)
            finally:
                over.set()

        def broken(self, item):
            raise OSError(28, "No space left on device")

    errors = small.save(url, 2, overwrite=True, make_writer=Writer)
    assert isinstance(errors[failing], OSError)
    assert f"rank {failing} failed with OSError: [Errno 28]" in str(errors[1 - failing])
    assert small.loaded(url) == 1
    assert not any(name.endswith(".tmp") for name in names(url)[1])
    assert small.save(url, 3, overwrite=True) == [None, None]
    assert small.loaded(url) == 3
    left = [name for name in names(url)[1] if "/.save-" not in name]
    assert 3 == len(left), "what the failed save left is gone"


def test_large_objects_go_up_in_parts_and_come_back_under_another_layout(url):
    shape = (4096, 4096)  # 64 MiB, and s3fs sends 50 MiB at a time
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).remainder(1e7).view(shape)

    def planners(kind, dim, ranks):
        rules = [DTensorStorage({"w": (Cut(dim, "dp_shard"),)})]
        grids = [Grids.from_sizes(rank, dp_shard=ranks) for rank in range(ranks)]
        return [kind({"w": shape}, grid=grid, layouts=rules) for grid in grids]

    alone.saved(url, [{"model": {"w": whole}}], planners(LayoutAwareSavePlanner, 0, 1))
    rows = [{"model": {"w": torch.zeros(2048, 4096)}} for _ in range(2)]
    readers = alone.load(url, rows, planners(LayoutAwareLoadPlanner, 0, 2))
    assert [2, 2] == [reader.stats.reads for reader in readers], "16 MiB with each request"
    assert torch.equal(whole, torch.cat([state["model"]["w"] for state in rows]))


@pytest.mark.parametrize(("gap", "reads", "nbytes"), [(0, 64, 4 * 64 * 16), (None, 1, 4 * 64 * 64)])
def test_columns_are_one_request_unless_told_otherwise(url, gap, reads, nbytes):
    whole = torch.arange(64 * 64, dtype=torch.float32).view(64, 64)
    rules = [DTensorStorage({"w": (Cut(1, "dp_shard"),)})]
    saver = LayoutAwareSavePlanner({"w": (64, 64)}, grid=Grids.from_sizes(0), layouts=[])
    alone.saved(url, [{"model": {"w": whole}}], [saver])
    loader = LayoutAwareLoadPlanner(
        {"w": (64, 64)}, grid=Grids.from_sizes(1, dp_shard=4), layouts=rules
    )
    state = {"model": {"w": torch.zeros(64, 16)}}
    (reader,) = alone.load(url, [state], [loader], gap_bytes=gap)
    assert torch.equal(whole[:, 16:32], state["model"]["w"])
    # The rest of the rows before the first column and after the last is no gap.
    assert (reads, nbytes - (0 if gap == 0 else 4 * 48)) == (reader.stats.reads, reader.stats.read)


def test_flipped_byte_and_missing_object_are_named(url):
    assert small.save(url, 1) == [None, None]
    fs, found = names(url)
    (name,) = [n for n in found if "00001-of" in n]
    raw = fs.cat_file(name)
    fs.pipe_file(name, raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"00001-of-00002.*rank 1.*checksum"):
        small.loaded(url)
    fs.rm_file(name)
    with pytest.raises(CheckpointError, match=r"00001-of-00002.safetensors: missing"):
        small.loaded(url)


def test_fsspec_of_the_local_file_system(tmp_path):
    url = f"local://{tmp_path}/checkpoint"
    assert small.save(url, 5, 1) == [None]
    assert small.loaded(url) == 5
    assert small.loaded(tmp_path / "checkpoint") == 5


def test_url_of_a_file_is_a_path(tmp_path):
    assert isinstance(files_at(f"file://{tmp_path}"), LocalFiles)


def test_nothing_there_is_said_so(url):
    small.save(url, 1, 1)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        len(SafetensorsReader(url + "/elsewhere").read_metadata().state_dict_metadata)
