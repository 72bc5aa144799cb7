"""The library's own format through the verbs: several ranks' files, layouts, checksums."""

import pytest
import torch
from alone import saved
from cli.command import shardplan

from shardplan.layouts import LayoutRegistry, model_layouts
from shardplan.planner import LayoutAwareSavePlanner
from shardplan.planner.checkpoints.opening import open_checkpoint
from shardplan.planner.tools.recipes.numbers import Delta, Numbers
from shardplan.planner.tools.recipes.parallel import Parallel, describe

HYBRID = Numbers(
    "qwen3_next", 4, 16, 40, 4, 2, 4, 24, False, True, True, 4, 8, 8, True, False, 0, 4,
    Delta(2, 4, 4, 4),
)  # fmt: skip
FIRST = Parallel(tp=2, ep=2, dp_shard=2, pad_vocabulary=0)
SECOND = Parallel(ep=4, dp_shard=4, fsdp="dim0", pad_vocabulary=0)


def write(path, parallel):
    """Saves a model whose every element tells its place in the global tensor."""
    states, planners, whole = [], [], {}
    for rank in range(parallel.world_size):
        d = describe(HYBRID, parallel, rank)
        layouts = model_layouts(d.shapes, d.grids, LayoutRegistry(d.providers))
        state = {}
        for fqn, layout in layouts.items():
            grid = d.grids.of(layout.family)
            local = state[fqn] = torch.zeros(layout.storage.numel(grid))
            for slab in layout.slabs(grid):
                torch.manual_seed(sum(map(ord, slab.key)))
                full = whole.setdefault(slab.key, torch.randn(slab.global_shape))
                box = tuple(slice(o, o + n) for o, n in zip(slab.offsets, slab.sizes, strict=True))
                local.as_strided(slab.sizes, slab.strides, slab.start).copy_(full[box])
        states.append({"model": state, "step": 12})
        planners.append(LayoutAwareSavePlanner(d.shapes, grid=d.grids, layouts=d.providers))
    saved(path, states, planners)
    return whole


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    return folder / "a", folder / "b", write(folder / "a", FIRST), write(folder / "b", SECOND)


def test_every_value_is_read_back(pair):
    path, _, whole, _ = pair
    with open_checkpoint(path) as checkpoint:
        assert "shardplan" == checkpoint.format
        assert {f"model.{key}" for key in whole} == set(checkpoint.tensors)
        for key, expected in whole.items():
            assert torch.equal(expected, checkpoint.read(f"model.{key}"))
        assert 12 == checkpoint.load_object("step")


def test_verbs(pair, tmp_path):
    a, b, _, _ = pair
    answer = shardplan("inspect", a)
    assert "dense grid: dp_shard 2, tp 2" in answer.out
    assert "expert grid: edp_shard 2, ep 2" in answer.out
    assert "step: 12" in answer.out
    assert "checksums right" in shardplan("verify", a).out
    assert 0 == shardplan("diff", a, b, "--values").status
    for out in ("stock", "file.pt"):
        assert 0 == shardplan("convert", a, tmp_path / out).status
        assert 0 == shardplan("diff", b, tmp_path / out, "--values").status
    answer = shardplan("explain", a, "-p", "layers.0.*in_proj.weight.query", "-r", "1", "--json")
    assert 0 == answer.status, answer.out
    assert "tp 1/2" in answer.json["grid"]
    assert "global" == answer.json["steps"][-1]["space"]
    answer = shardplan("show", a, "-p", "layers.0.*in_proj.weight.query", "--to", b)
    assert 0 == answer.status


def test_verify_names_the_key_of_a_flipped_bit(tmp_path):
    whole = write(tmp_path / "a", FIRST)
    key = "model.decoder.final_layernorm.weight"
    with open_checkpoint(tmp_path / "a") as checkpoint:
        chunk = checkpoint.tensor(key).chunks[0]
        name, start, _ = checkpoint.chunk_bytes(key, chunk)
    file = tmp_path / "a" / name
    data = bytearray(file.read_bytes())
    data[start] ^= 1
    file.write_bytes(data)
    answer = shardplan("verify", tmp_path / "a", "--json")
    assert 1 == answer.status
    assert [key] == [fault["where"] for fault in answer.json["faults"]]
    assert len(whole) > 1
    file.unlink()
    answer = shardplan("verify", tmp_path / "a")
    assert 1 == answer.status
    assert name in answer.out
