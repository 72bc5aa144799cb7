"""inspect, verify, diff and convert on stock checkpoints, files of torch.save and safetensors."""

import itertools
import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli.command import shardplan
from safetensors.torch import load_file

from shardplan.planner import LayoutAwareSavePlanner, SafetensorsWriter

VERBS = ("inspect", "verify", "diff", "convert")


def state(seed=0):
    torch.manual_seed(seed)
    layers = {f"layers.{i}.w": torch.randn(6, 4) for i in range(3)}
    return {
        "model": {**layers, "norm": torch.ones(4, dtype=torch.bfloat16), "z": torch.tensor(2.5)},
        "optimizer": {"state": [torch.randn(3), {"step": 7}], "lr": 0.1},
        "step": 40,
    }


def same(a, b):
    if isinstance(a, dict):
        assert list(map(str, a)) == list(map(str, b))
        return all(same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b


@pytest.fixture
def stock(tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path / "stock")
    return tmp_path / "stock"


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example(verb):
    answer = shardplan(verb, "--help")
    assert 0 == answer.status
    assert f"Example: shardplan {verb}" in " ".join(answer.out.split())


def test_inspect_groups_keys_by_number(stock):
    answer = shardplan("inspect", stock, "--table")
    assert 0 == answer.status
    assert "6 tensors, 3 other values, 80 elements (float32 76, bfloat16 4), 312 B" in answer.out
    assert "6 chunks in 1 file " in answer.out
    assert "step: 40" in answer.out
    line = next(line for line in answer.out.splitlines() if "model.layers" in line)
    assert ["model.layers.{0..2}.w", "float32", "[6,", "4]", "3", "3", "288", "B"] == line.split()


def test_inspect_tree_has_bytes_of_branches(stock):
    answer = shardplan("inspect", stock)
    assert "model  300 B" in answer.out
    assert "layers.{0..2}.w  float32 [6, 4] × 3  288 B" in answer.out


def test_inspect_json(stock):
    answer = shardplan("inspect", stock, "--json", "--all", "-f", "layers.1")
    assert 0 == answer.status
    assert ("dcp", 40, 6, 1) == tuple(
        answer.json[k] for k in ("format", "step", "tensors", "files")
    )
    assert [
        {
            "key": "model.layers.1.w",
            "kind": "tensor",
            "dtype": "float32",
            "shape": [6, 4],
            "bytes": 96,
            "chunks": 1,
            "boxes": [[[0, 0], [6, 4]]],
        }
    ] == answer.json["keys"]


def test_inspect_filter_without_a_match(stock):
    answer = shardplan("inspect", stock, "-f", "*nothing*")
    assert 1 == answer.status
    assert "no key matches '*nothing*'; there are 6 tensors" in answer.err


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: None, "no such file or folder"),
        (lambda p: p.mkdir(), "no checkpoint in this folder"),
    ],
)
def test_no_checkpoint_is_status_2(tmp_path, make, words):
    path = tmp_path / "x"
    make(path)
    for verb in ("inspect", "verify"):
        answer = shardplan(verb, path)
        assert 2 == answer.status
        assert words in answer.err
        assert str(path) in answer.err
        assert words in shardplan(verb, path, "--json").json["error"]


def test_a_folder_above_the_checkpoint_is_pointed_out(stock):
    answer = shardplan("inspect", stock.parent)
    assert f"Did you mean {stock}?" in answer.err


def test_verify_sound(stock):
    answer = shardplan("verify", stock)
    assert 0 == answer.status
    assert f"sound: 9 keys, 312 B in {stock}: every element once, files whole, checksums right" in (
        answer.out
    )


def test_verify_names_the_key_of_a_flipped_bit(stock):
    file = stock / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    at = data.find(state()["model"]["layers.1.w"].numpy().tobytes())
    data[at + 5] ^= 1
    file.write_bytes(data)
    answer = shardplan("verify", stock, "--json")
    assert 1 == answer.status
    assert ["model.layers.1.w"] == [fault["where"] for fault in answer.json["faults"]]
    assert "the checksum of its record archive/data/0 differs" in answer.json["faults"][0]["what"]
    assert 0 == shardplan("verify", stock, "--no-checksums").status


def test_verify_truncated_and_missing_file(stock):
    file = stock / "__0_0.distcp"
    whole = file.stat().st_size
    os.truncate(file, whole // 2)
    answer = shardplan("verify", stock, "--no-checksums")
    assert 1 == answer.status
    assert (
        f"__0_0.distcp: the file has {whole // 2} bytes and needs {whole}: truncated" in answer.out
    )
    file.unlink()
    answer = shardplan("verify", stock)
    assert 1 == answer.status
    assert "__0_0.distcp: the file is missing; needed by 9 keys" in answer.out
    assert "not sound: 1 fault in" in answer.out


def test_verify_finds_a_hole(stock):
    import pickle

    metadata = pickle.loads((stock / ".metadata").read_bytes())
    chunk = metadata.state_dict_metadata["model.layers.0.w"].chunks[0]
    metadata.state_dict_metadata["model.layers.0.w"].chunks[0] = type(chunk)(
        chunk.offsets, torch.Size([4, 4])
    )
    (stock / ".metadata").write_bytes(pickle.dumps(metadata))
    answer = shardplan("verify", stock)
    assert 1 == answer.status
    assert "model.layers.0.w: [4, 6) is covered by no chunk of shape (6, 4)" in answer.out


def cut_off(path):
    """A folder as a save of two ranks leaves it that was killed before its end."""
    writer = SafetensorsWriter(path, sync=False)
    dcp.save({"w": torch.ones(4)}, storage_writer=writer, planner=LayoutAwareSavePlanner())
    (path / "checkpoint.json").unlink()


def cut_off_by_torch(path):
    dcp.save({"w": torch.ones(4)}, checkpoint_id=path)
    (path / ".metadata").unlink()


def damaged(path):
    cut_off(path)
    (path / "checkpoint.json").write_text("{")


def garbage(path):
    path.rmdir()
    path.write_bytes(b"hello")


def two_formats(path):
    writer = SafetensorsWriter(path, sync=False)
    dcp.save({"w": torch.ones(4)}, storage_writer=writer, planner=LayoutAwareSavePlanner())
    dcp.save({"w": torch.zeros(4)}, checkpoint_id=path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (cut_off, "no complete checkpoint: save "),
        (cut_off_by_torch, "unfinished save of torch's writer: 1 *.distcp, no .metadata"),
        (damaged, "checkpoint.json"),
        (garbage, "neither a safetensors file nor one that torch.save wrote"),
        (two_formats, "holds two checkpoints"),
    ],
)
def test_verify_of_a_save_that_is_not_sound_at_all(tmp_path, make, words):
    path = tmp_path / "c"
    path.mkdir()
    make(path)
    answer = shardplan("verify", path)
    assert 1 == answer.status
    assert words in answer.out and f"not sound: {path}" in answer.out
    found = shardplan("verify", path, "--json")
    assert (1, False) == (found.status, found.json["sound"])
    assert words in found.json["faults"][0]["what"]


def test_verify_names_an_unfinished_save_beside_the_checkpoint(tmp_path):
    path = tmp_path / "c"
    for value in (1.0, 2.0):
        writer = SafetensorsWriter(path, sync=False, overwrite=True)
        state = {"w": torch.full((4,), value)}
        dcp.save(state, storage_writer=writer, planner=LayoutAwareSavePlanner())
    (path / "0123456789abcdef").mkdir()
    (path / "0123456789abcdef" / "00000-of-00002.safetensors").write_bytes(b"")
    answer = shardplan("verify", path)
    assert 0 == answer.status
    text = "beside it: unfinished save 0123456789abcdef, which no claim names; 1 of 2 data files"
    assert text in " ".join(answer.out.split())
    (note,) = shardplan("verify", path, "--json").json["beside"]
    assert text.removeprefix("beside it: ") in note


def test_diff_of_equals(stock, tmp_path):
    shutil.copytree(stock, tmp_path / "copy")
    answer = shardplan("diff", stock, tmp_path / "copy")
    assert (0, True) == (answer.status, "(values not compared: --values)" in answer.out)
    answer = shardplan("diff", stock, tmp_path / "copy", "--values")
    assert "equal: 9 keys, every value of 312 B bit by bit" in answer.out
    assert 0 == answer.status


def test_diff_of_keys_that_nobody_has_is_no_answer(tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path / "a")
    answer = shardplan("diff", tmp_path / "a", tmp_path / "a", "--filter", "nosuch", "--values")
    assert 2 == answer.status
    assert "no key of A or B matches 'nosuch'; nothing was compared" in answer.err


def test_diff_names_every_kind_of_difference(tmp_path):
    one, two = state(), state()
    two["model"]["layers.0.w"][3, 2] += 0.5
    two["model"]["norm"] = two["model"]["norm"].float()
    two["model"]["z"] = torch.zeros(2)
    two["model"]["new"] = two["model"].pop("layers.2.w")
    two["step"] = 41
    for name, values in (("a", one), ("b", two)):
        dcp.save(values, checkpoint_id=tmp_path / name)
    answer = shardplan("diff", tmp_path / "a", tmp_path / "b", "--values", "--json")
    assert 1 == answer.status
    kinds = {d["key"]: d["kind"] for d in answer.json["differences"]}
    assert {
        "model.layers.0.w": "values",
        "model.layers.2.w": "only in A",
        "model.new": "only in B",
        "model.norm": "dtype",
        "model.z": "shape",
        "step": "object",
    } == kinds
    values = next(d for d in answer.json["differences"] if d["kind"] == "values")
    left, right = one["model"]["layers.0.w"][3, 2], two["model"]["layers.0.w"][3, 2]
    assert 1 == values["elements"]
    assert abs(float(left) - float(right)) == pytest.approx(values["max_abs"], rel=1e-12)
    text = shardplan("diff", tmp_path / "a", tmp_path / "b")
    assert "different: only in A 1, dtype 1, shape 1, only in B 1; 8 keys in both" in text.out


def test_diff_of_special_values(tmp_path):
    nan = float("nan")
    torch.save({"a": torch.tensor([nan, 0.0]), "b": torch.tensor([1.0, nan])}, tmp_path / "1.pt")
    torch.save({"a": torch.tensor([nan, -0.0]), "b": torch.tensor([1.0, 2.0])}, tmp_path / "2.pt")
    answer = shardplan("diff", tmp_path / "1.pt", tmp_path / "2.pt", "--values", "--json")
    found = {d["key"]: (d["elements"], d["max_abs"]) for d in answer.json["differences"]}
    assert {"a": (1, 0.0), "b": (1, float("inf"))} == found


@pytest.mark.parametrize("suffix", ["", ".pt"])
def test_convert_keeps_everything(stock, tmp_path, suffix):
    out = tmp_path / f"out{suffix}"
    answer = shardplan("convert", stock, out)
    assert 0 == answer.status, answer.err
    assert 0 == shardplan("diff", stock, out, "--values").status
    assert 0 == shardplan("verify", out).status
    if suffix:
        assert same(state(), torch.load(out, weights_only=True, mmap=True))
        assert same(state(), torch.load(out, weights_only=True))
        loaded = state(1)
    else:
        loaded = state(1)
        dcp.load(loaded, checkpoint_id=out)
        assert same(state(), loaded)
    back = tmp_path / "back"
    shardplan("convert", out, back)
    dcp.load(loaded, checkpoint_id=back)
    assert same(state(), loaded)


def test_convert_to_our_own_format_and_back(stock, tmp_path):
    answer = shardplan("convert", stock, tmp_path / "own", "--to", "shardplan")
    assert 0 == answer.status, answer.err
    assert 0 == shardplan("verify", tmp_path / "own").status
    answer = shardplan("diff", stock, tmp_path / "own", "--values")
    assert 0 == answer.status, answer.out
    shardplan("convert", tmp_path / "own", tmp_path / "back")
    loaded = state(1)
    dcp.load(loaded, checkpoint_id=tmp_path / "back")
    assert same(state(), loaded)


def test_convert_to_safetensors_needs_leave_to_drop_objects(stock, tmp_path):
    out = tmp_path / "out.safetensors"
    answer = shardplan("convert", stock, out)
    assert 2 == answer.status
    assert "3 values are no tensors" in answer.err
    assert "Pass --tensors-only" in answer.err
    assert 0 == shardplan("convert", stock, out, "--tensors-only").status
    assert torch.equal(state()["model"]["layers.2.w"], load_file(out)["model.layers.2.w"])
    assert ["out.safetensors", "stock"] == sorted(os.listdir(tmp_path))


def test_convert_does_not_make_a_folder_that_looks_like_an_archive(stock, tmp_path):
    answer = shardplan("convert", stock, tmp_path / "all.zip")
    assert 2 == answer.status and "Name the format with --to" in answer.err
    assert not (tmp_path / "all.zip").exists()
    assert 0 == shardplan("convert", stock, tmp_path / "all.zip", "--to", "torch").status


def test_a_part_of_a_checkpoint_is_no_checkpoint(stock, tmp_path):
    assert 0 == shardplan("convert", stock, tmp_path / "own", "--to", "shardplan").status
    parts = [*tmp_path.glob("own/*/*"), *stock.glob("*.distcp")]
    assert {".safetensors", ".distcp"} == {part.suffix for part in parts}
    for part in parts:
        answer = shardplan("verify", part)
        assert 2 == answer.status
        assert (
            f"a part of the checkpoint {tmp_path}" in answer.err
            and "Give that folder" in answer.err
        )
    assert 0 == shardplan("verify", tmp_path / "own" / "checkpoint.json").status
    assert 0 == shardplan("verify", stock / ".metadata").status


def test_explain_says_that_a_part_of_a_name_means_several_tensors(stock):
    answer = shardplan("explain", stock, "-p", "layers")
    assert 0 == answer.status
    assert "'layers' means 3 tensors; this is the first. Others: model.layers.1.w" in answer.err
    assert not shardplan("explain", stock, "-p", "layers.1").err


def test_convert_does_not_overwrite(stock, tmp_path):
    out = tmp_path / "out.pt"
    out.write_text("mine")
    answer = shardplan("convert", stock, out)
    assert 2 == answer.status
    assert f"{out}: exists already. Choose another place, or pass --overwrite." in answer.err
    assert "mine" == out.read_text()
    assert 0 == shardplan("convert", stock, out, "--overwrite").status


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint16],
)
def test_dtypes_survive_every_format(tmp_path, dtype):
    values = torch.arange(24).reshape(4, 6).to(torch.float32).to(dtype)
    dcp.save({"w": values, "t": values.t(), "e": values[:0]}, checkpoint_id=tmp_path / "a")
    names = ["a", "b.pt", "c.safetensors", "d"]
    for one, two in itertools.pairwise(names):
        assert 0 == shardplan("convert", tmp_path / one, tmp_path / two).status
        assert 0 == shardplan("diff", tmp_path / one, tmp_path / two, "--values").status
    assert 0 == shardplan("convert", tmp_path / "d", tmp_path / "e", "--to", "shardplan").status
    assert 0 == shardplan("diff", tmp_path / "a", tmp_path / "e", "--values").status


class Trap:
    def __reduce__(self):
        return os.mkdir, ("/nowhere/that/exists",)


def test_no_verb_unpickles_objects(tmp_path):
    dcp.save({"w": torch.ones(2), "trap": Trap()}, checkpoint_id=tmp_path / "a")
    torch.save({"w": torch.ones(2), "trap": Trap()}, tmp_path / "b.pt")
    assert 0 == shardplan("inspect", tmp_path / "a").status
    assert 0 == shardplan("verify", tmp_path / "a").status
    answer = shardplan("convert", tmp_path / "a", tmp_path / "c.pt")
    assert (2, False) == (answer.status, (tmp_path / "c.pt").exists())
    assert "trap: the stored value" in answer.err
    assert "pass trust_pickle=True (--trust-pickle)" in answer.err
    for verb in (["inspect"], ["verify"], ["convert", tmp_path / "c"]):
        answer = shardplan(verb[0], tmp_path / "b.pt", *verb[1:])
        assert 2 == answer.status
        assert "--trust-pickle" in answer.err
    with pytest.raises(FileNotFoundError, match="/nowhere/that/exists"):
        import pickle

        pickle.loads(pickle.dumps(Trap()))
