"""Places that fsspec knows, with the semantics of object stores: no rename, no sync."""

import uuid

import fsspec
import pytest
import test_failures as small

from shardplan.planner import CheckpointError, SafetensorsReader
from shardplan.planner.storage.files import LocalFiles, files_at


@pytest.fixture
def url():
    url = f"memory://{uuid.uuid4().hex}/run/checkpoint"
    yield url
    fs = fsspec.filesystem("memory")
    fs.rm(url.removeprefix("memory:/").split("/run")[0], recursive=True)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_saves_and_loads_at_any_number_of_ranks(url, ranks):
    assert small.save(url, 3, ranks) == [None] * ranks
    assert small.loaded(url) == 3
    names = fsspec.filesystem("memory").find(url.removeprefix("memory:/"))
    assert ranks == sum(name.endswith(".safetensors") for name in names)
    assert ranks + 2 == len(names)  # one part and checkpoint.json


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


def test_flipped_byte_and_missing_object_are_named(url):
    assert small.save(url, 1) == [None, None]
    fs = fsspec.filesystem("memory")
    (name,) = [n for n in fs.find(url.removeprefix("memory:/")) if "00001-of" in n]
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
        SafetensorsReader(url + "/elsewhere").read_metadata()
