"""What stands at OUT is replaced as a whole, or refused and left byte for byte as it was."""

import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli.command import shardplan
from safetensors.torch import save_file

from shardplan.layouts import CheckpointError, CheckpointExistsError
from shardplan.planner import LayoutAwareSavePlanner, SafetensorsWriter
from shardplan.planner.checkpoints import replacing
from shardplan.planner.checkpoints.converting import convert
from shardplan.planner.checkpoints.opening import open_checkpoint
from shardplan.planner.storage import finalize

OLD, NEW = 1.0, 7.0
FOLDERS, FILES = ("dcp", "shardplan"), ("torch", "safetensors")


def own(path, value):
    dcp.save(
        {"w": torch.full((4, 3), value), "old": torch.ones(2)},
        storage_writer=SafetensorsWriter(path, sync=False),
        planner=LayoutAwareSavePlanner(),
        no_dist=True,
    )


def finalized(path, value):
    own(path, value)
    finalize(path)


def stock(path, value):
    dcp.save({"w": torch.full((4, 3), value)}, checkpoint_id=path)


def sharded(path, value):
    """A Hugging Face folder of two files and an index."""
    path.mkdir()
    keys = {"w": "model-00001-of-00002.safetensors", "old": "model-00002-of-00002.safetensors"}
    for key, name in keys.items():
        save_file({key: torch.full((4, 3), value)}, path / name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": keys}))


def single(path, value):
    path.mkdir()
    save_file({"w": torch.full((4, 3), value)}, path / "model.safetensors")


def saved_file(path, value):
    torch.save({"w": torch.full((4, 3), value)}, path)


def tensor_file(path, value):
    save_file({"w": torch.full((4, 3), value)}, path)


STANDING = {
    "own": own,
    "own, finalized": finalized,
    "stock": stock,
    "sharded": sharded,
    "single": single,
    "saved file": saved_file,
    "tensor file": tensor_file,
}


@pytest.fixture
def new(tmp_path):
    stock(tmp_path / "new", NEW)
    return tmp_path / "new"


def tree(path):
    """Every name below a path with its bytes, links not followed."""
    return {
        str(p.relative_to(path)): os.readlink(p)
        if p.is_symlink()
        else p.is_file() and p.read_bytes()
        for p in Path(path).rglob("*")
    }


def kinds(path):
    """The names that a writer makes, without the numbers that differ from save to save."""
    if path.is_file():
        return None
    names = {p.relative_to(path).as_posix() for p in path.rglob("*")}
    return {name if len(name.partition("/")[0]) != 16 else "save" + name[16:] for name in names}


@pytest.mark.parametrize("standing", STANDING)
@pytest.mark.parametrize("to", FOLDERS + FILES)
def test_out_is_replaced_as_a_whole_or_refused(tmp_path, new, to, standing):
    STANDING[standing](tmp_path / "out", OLD)
    assert 0 == shardplan("convert", new, tmp_path / "fresh", "--to", to).status
    before = tree(tmp_path)
    answer = shardplan("convert", new, tmp_path / "out", "--to", to)
    assert 2 == answer.status
    assert "exists already. Choose another place, or pass --overwrite." in answer.err
    assert before == tree(tmp_path)
    answer = shardplan("convert", new, tmp_path / "out", "--to", to, "--overwrite")
    if (to in FILES) != ("file" in standing):
        assert 2 == answer.status
        assert f"{tmp_path / 'out'}: {'a folder' if to in FILES else 'not a folder'}" in answer.err
        assert before == tree(tmp_path)
        return
    assert 0 == answer.status, answer.err
    assert ["fresh", "new", "out"] == sorted(os.listdir(tmp_path))
    assert kinds(tmp_path / "fresh") == kinds(tmp_path / "out")
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert ["w"] == list(checkpoint.tensors)
        assert torch.equal(torch.full((4, 3), NEW), checkpoint.read("w"))
    assert 0 == shardplan("verify", tmp_path / "out").status


def notes(path):
    (path / "notes.txt").write_text("mine")


def foreign_tensors(path):
    (path / "adapter.safetensors").write_text("mine")


def folder(path):
    (path / "logs").mkdir()
    (path / "logs" / "a").write_text("mine")


def in_a_save(path):
    for inner in path.iterdir():
        if len(inner.name) == 16:
            (inner / "todo.md").write_text("mine")


@pytest.mark.parametrize("to", FOLDERS)
@pytest.mark.parametrize(
    ("standing", "add", "named"),
    [
        (own, notes, "notes.txt"),
        (own, in_a_save, "todo.md"),
        (stock, folder, "logs"),
        (stock, foreign_tensors, "adapter.safetensors"),
        (sharded, foreign_tensors, "adapter.safetensors"),
        (single, lambda path: (path / "config.json").write_text("{}"), "config.json"),
        (lambda path, value: path.mkdir(), notes, "notes.txt"),
        (lambda path, value: path.mkdir(), lambda path: stock(path / "step-1", OLD), "step-1"),
    ],
)
def test_files_of_others_are_never_deleted(tmp_path, new, to, standing, add, named):
    out = tmp_path / "out"
    standing(out, OLD)
    add(out)
    before = tree(tmp_path)
    answer = shardplan("convert", new, out, "--to", to, "--overwrite")
    assert 2 == answer.status
    assert f"{out}: holds " in answer.err and named in answer.err
    assert before == tree(tmp_path)


def test_a_save_that_may_still_run_is_left_alone(tmp_path, new):
    out = tmp_path / "out"
    own(out, OLD)
    later = "0123456789abcdef"
    claim = json.loads((out / ".save-1.json").read_text())
    claim |= {"save": later, "state": "open"}
    (out / ".save-2.json").write_text(json.dumps(claim))
    (out / later).mkdir()
    (out / later / "00000-of-00001.safetensors").write_bytes(b"")
    before = tree(tmp_path)
    answer = shardplan("convert", new, out, "--to", "dcp", "--overwrite")
    assert 2 == answer.status
    assert "unfinished save" in answer.err and later in answer.err
    assert before == tree(tmp_path)


@pytest.mark.parametrize("to", FOLDERS + FILES)
@pytest.mark.parametrize(
    "path",
    ["c", "c/", "./c", "../{here}/c", "link", "c/inner", "link/inner", "hard", "up", "."],
)
def test_the_checkpoint_that_is_read_is_never_replaced(tmp_path, monkeypatch, to, path):
    """`up` is the folder around it; `hard` a second folder whose data files are links into it."""
    monkeypatch.chdir(tmp_path)
    stock(tmp_path / "up" / "c", NEW)
    monkeypatch.chdir("up")
    os.symlink("c", "link")
    os.makedirs("hard")
    for name in os.listdir("c"):
        os.symlink(f"../c/{name}", f"hard/{name}")
    source = "hard" if path == "hard" else "c"
    out = {"up": str(tmp_path / "up"), "hard": "c"}.get(path, path.format(here="up"))
    before = tree(tmp_path)
    for overwrite in ([], ["--overwrite"]):
        answer = shardplan("convert", source, out, "--to", to, *overwrite)
        assert 2 == answer.status
        assert "which is read" in answer.err or "lies in the checkpoint" in answer.err
        assert "pass --overwrite" not in answer.err
        assert before == tree(tmp_path)


def test_a_file_that_is_read_is_never_replaced(tmp_path):
    saved_file(tmp_path / "a.pt", NEW)
    os.symlink("a.pt", tmp_path / "b.pt")
    before = tree(tmp_path)
    for out in ("a.pt", "b.pt", "./a.pt"):
        answer = shardplan("convert", tmp_path / "a.pt", tmp_path / out, "--overwrite")
        assert 2 == answer.status
        assert "which is read, lies there" in answer.err
    assert before == tree(tmp_path)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "model.pt", "inner"])
def test_nothing_is_written_into_another_checkpoint(tmp_path, new, name):
    stock(tmp_path / "other", OLD)
    before = tree(tmp_path)
    answer = shardplan("convert", new, tmp_path / "other" / name, "--to", "torch", "--overwrite")
    assert 2 == answer.status
    assert f"lies in the checkpoint {tmp_path / 'other'} (.metadata)" in answer.err
    assert before == tree(tmp_path)


def test_a_link_is_followed(tmp_path, new):
    stock(tmp_path / "step-1", OLD)
    os.symlink("step-1", tmp_path / "latest")
    answer = shardplan("convert", new, tmp_path / "latest", "--to", "shardplan", "--overwrite")
    assert 0 == answer.status, answer.err
    assert "step-1" == os.readlink(tmp_path / "latest")
    assert (tmp_path / "step-1" / "checkpoint.json").is_file()
    assert not (tmp_path / "step-1" / ".metadata").exists()


@pytest.mark.parametrize("out", ["s3://bucket/x", "memory://x", "loop", "none/x", "fifo"])
def test_impossible_places_are_named(tmp_path, new, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    os.symlink("loop", "loop")
    os.mkfifo("fifo")
    before = sorted(os.listdir())
    answer = shardplan("convert", new, out, "--to", "torch", "--overwrite")
    assert 2 == answer.status
    assert f"shardplan: {out.replace('//', '/')}: " in answer.err
    assert before == sorted(os.listdir())


def state():
    return {"a": torch.arange(3000.0), "b": torch.arange(200_000.0), "c": torch.ones(5)}


def make_old(path, to):
    convert_from(path.parent / "old", path, to)


def convert_from(source, out, to, **options):
    with open_checkpoint(source) as checkpoint:
        convert(checkpoint, out, to, **options)


def interrupted(source, out, to):
    def advance(count):
        if count > 100_000:
            raise KeyboardInterrupt

    convert_from(source, out, to, overwrite=True, advance=advance)


def damaged(source, out, to):
    file = source / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 100_000)
    convert_from(source, out, to, overwrite=True)


def full(source, out, to):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))  # bytes of one file
    try:
        convert_from(source, out, to, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("fail", [interrupted, damaged, full])
@pytest.mark.parametrize("to", FOLDERS + FILES)
def test_a_failure_leaves_out_as_it_was(tmp_path, to, fail, there):
    dcp.save(state(), checkpoint_id=tmp_path / "new")
    stock(tmp_path / "old", OLD)
    if there:
        make_old(tmp_path / "out", to)
    shutil.copytree(tmp_path / "new", tmp_path / "copy")
    before = {name: data for name, data in tree(tmp_path).items() if not name.startswith("new")}
    error = KeyboardInterrupt if fail is interrupted else CheckpointError
    with pytest.raises(error) as caught:
        fail(tmp_path / "new", tmp_path / "out", to)
    if fail is full:
        assert str(tmp_path / "out") in str(caught.value)
        assert ".shardplan-" not in str(caught.value)
    after = {name: data for name, data in tree(tmp_path).items() if not name.startswith("new")}
    assert before == after


def test_the_old_folder_comes_back_if_the_new_one_can_not_take_its_place(
    tmp_path, new, monkeypatch
):
    stock(tmp_path / "out", OLD)
    before = tree(tmp_path)
    real = os.rename

    def rename(a, b):
        if Path(b) == tmp_path / "out" and Path(a).name == "out":
            raise OSError(16, "Device or resource busy")
        real(a, b)

    monkeypatch.setattr(replacing.os, "rename", rename)
    answer = shardplan("convert", new, tmp_path / "out", "--to", "dcp", "--overwrite")
    assert 2 == answer.status
    assert f"{tmp_path / 'out'}: Device or resource busy" in answer.err
    assert before == tree(tmp_path)


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_who_writes_to_out_in_the_meantime_wins(tmp_path, new, to):
    make = stock if to == "dcp" else saved_file

    def advance(count):
        make(tmp_path / "out", OLD)

    with pytest.raises(CheckpointExistsError, match="someone else has written there"):
        convert_from(new, tmp_path / "out", to, overwrite=True, advance=advance)
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert torch.equal(torch.full((4, 3), OLD), checkpoint.read("w"))
    assert ["new", "out"] == sorted(os.listdir(tmp_path))


def test_an_empty_folder_needs_no_leave(tmp_path, new):
    (tmp_path / "out").mkdir(mode=0o750)
    os.chmod(tmp_path / "out", 0o770)
    assert 0 == shardplan("convert", new, tmp_path / "out", "--to", "dcp").status
    assert 0o770 == (tmp_path / "out").stat().st_mode & 0o777
    assert 0 == shardplan("diff", new, tmp_path / "out", "--values").status


def test_stock_metadata_does_not_name_the_place_where_it_was_written(tmp_path, new):
    shardplan("convert", new, tmp_path / "out", "--to", "dcp")
    assert b".shardplan-" not in (tmp_path / "out" / ".metadata").read_bytes()


def test_a_folder_that_can_not_move_is_refused_before_the_work(tmp_path, new, monkeypatch):
    for name in ("here", "mounted"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    real = os.path.ismount
    monkeypatch.setattr(os.path, "ismount", lambda p: Path(p).name == "mounted" or real(p))
    for out, words in ((".", "the working folder"), (tmp_path / "mounted", "a mount point")):
        answer = shardplan("convert", new, out, "--to", "dcp")
        assert 2 == answer.status
        assert f"{out}: {words}, which can't be replaced. Choose another place." in answer.err
    assert ["here", "mounted", "new"] == sorted(os.listdir(tmp_path))
