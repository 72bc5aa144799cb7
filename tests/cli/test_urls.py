"""The verbs on URLs: a local server of S3's API, and `file://`."""

import json
import logging
import uuid

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli.command import shardplan
from moto.server import ThreadedMotoServer
from safetensors.torch import load_file, save_file

from shardplan.layouts import Grids
from shardplan.planner import LayoutAwareLoadPlanner, LayoutAwareSavePlanner, SafetensorsWriter
from shardplan.planner.checkpoints.opening import open_checkpoint
from shardplan.planner.checkpoints.reader import CheckpointReader

STATE = {"w": torch.arange(24.0).reshape(6, 4), "b": torch.ones(3), "step": 7}


@pytest.fixture(scope="module")
def s3():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it reports every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fs = fsspec.filesystem("s3")
        fs.mkdir("checkpoints")
        yield "s3://checkpoints"
        fs.clear_instance_cache()
    server.stop()


@pytest.fixture(params=["s3", "file", "memory"])
def root(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}"
    url = request.getfixturevalue("s3") if request.param == "s3" else "memory://run"
    return f"{url}/{uuid.uuid4().hex}"


def own(url):
    planner = LayoutAwareSavePlanner(grid=Grids.from_sizes(0))
    dcp.save(dict(STATE), storage_writer=SafetensorsWriter(url), planner=planner, no_dist=True)
    return url


def put(folder, url):
    """Copies a local file or folder to a URL."""
    fs, path = fsspec.core.url_to_fs(url)
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.put(str(folder), path, recursive=True)
    return url


def stock(url, tmp_path):
    dcp.save(dict(STATE), checkpoint_id=tmp_path / "local")
    return put(tmp_path / "local", url)


def pickled(url, tmp_path):
    torch.save(STATE, tmp_path / "local.pt")
    return put(tmp_path / "local.pt", url + ".pt")


def tensors(url, tmp_path):
    save_file({k: v for k, v in STATE.items() if k != "step"}, tmp_path / "x")
    return put(tmp_path / "x", url + "/model")


def hugging_face(url, tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    for i, key in enumerate("wb"):
        save_file({key: STATE[key]}, folder / f"{i}.safetensors")
    index = {"weight_map": {"w": "0.safetensors", "b": "1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return put(folder, url)


MAKERS = {
    "own": lambda url, tmp_path: own(url),
    "stock": stock,
    "torch": pickled,
    "safetensors": tensors,
    "folder": hugging_face,
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_format_opens(root, name, tmp_path):
    url = MAKERS[name](f"{root}/step", tmp_path)
    for verb in (("inspect", url), ("verify", url), ("verify", url + "/"), ("diff", url, url)):
        if name in ("torch", "safetensors") and verb[-1].endswith("/"):
            continue
        answer = shardplan(*verb)
        assert (0, "") == (answer.status, answer.err)
    with open_checkpoint(url) as checkpoint:
        assert [[9, 10], [13, 14]] == checkpoint.read("w", (2, 1), (2, 2)).tolist()
    out = tmp_path / "out.safetensors"
    assert 0 == shardplan("convert", url, out, "--tensors-only").status
    found = load_file(out)
    assert {"w": STATE["w"].tolist(), "b": [1, 1, 1]} == {k: v.tolist() for k, v in found.items()}
    state = {"w": torch.zeros(6, 4)}
    dcp.load(
        state,
        storage_reader=CheckpointReader(url),
        planner=LayoutAwareLoadPlanner(grid=Grids.from_sizes(0)),
        no_dist=True,
    )
    assert STATE["w"].tolist() == state["w"].tolist()


@pytest.mark.parametrize("name", ["own", "stock"])
def test_missing_and_damaged_data_is_found(root, name, tmp_path):
    url = MAKERS[name](f"{root}/step", tmp_path)
    fs, path = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    (file,) = (f for f in fs.find(path) if f.endswith((".distcp", ".safetensors")))
    data = bytearray(fs.cat_file(file))
    at = data.find(STATE["w"].numpy().tobytes())
    data[at + 9] ^= 1
    fs.pipe_file(file, bytes(data))
    answer = shardplan("verify", url)
    assert 1 == answer.status
    assert "w: " in answer.out and "1 fault" in answer.out
    fs.rm_file(file)
    answer = shardplan("verify", url, "--json")
    assert 1 == answer.status
    assert 1 == len(answer.json["faults"])


def test_nothing_there(root):
    answer = shardplan("verify", f"{root}/nothing")
    assert 2 == answer.status
    assert "nothing: no such file or folder" in answer.err.replace("\n", "")


def test_unknown_kind_of_url():
    for url in ("nosuchkind://x/y", "gs://no-driver/x"):
        answer = shardplan("verify", url)
        assert (2, "") == (answer.status, answer.out)
        assert answer.err.startswith("shardplan: ")
