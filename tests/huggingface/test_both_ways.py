"""A real client: weights of transformers through parallel configurations and back, bit for bit."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface.clients import CLASSES, logits, make, reopen
from safetensors.torch import load_file, save_file
from world import load, save

from shardplan.layouts import CheckpointError, LayoutRegistry, model_layouts
from shardplan.planner import LayoutAwareLoadPlanner, LayoutAwareSavePlanner
from shardplan.planner.checkpoints.opening import open_checkpoint
from shardplan.planner.checkpoints.reader import CheckpointReader
from shardplan.planner.tools.huggingface import (
    HuggingFaceNames,
    export_checkpoint,
    import_checkpoint,
    rules_for,
)
from shardplan.planner.tools.recipes.numbers import read_config
from shardplan.planner.tools.recipes.parallel import Parallel, describe

# Megatron pads 50 rows to 52 for two tensor-parallel ranks, to 52 for one: 4 × 13.
FIRST = Parallel(tp=2, ep=2, dp_shard=2, pad_vocabulary=26)
SECOND = Parallel(tp=1, ep=4, dp_shard=4, fsdp="dim0", pad_vocabulary=4)
THIRD = Parallel(tp=2, pp=2, ep=2, etp=2, dp_shard=2, fsdp="dim0", pad_vocabulary=2)


def dense(parallel):
    """The same configuration without experts."""
    return Parallel(
        tp=parallel.tp,
        pp=parallel.pp,
        dp_shard=parallel.dp_shard,
        fsdp=parallel.fsdp,
        pad_vocabulary=parallel.pad_vocabulary,
    )


def ranks(numbers, parallel, extra=()):
    """Description and empty local tensors of every rank."""
    parallel = parallel if numbers.experts else dense(parallel)
    found = []
    for rank in range(parallel.world_size):
        d = describe(numbers, parallel, rank, extra=extra)
        layouts = model_layouts(d.shapes, d.grids, LayoutRegistry(d.providers))
        state = {
            fqn: torch.full((layout.storage.numel(d.grids.of(layout.family)),), float("nan"))
            for fqn, layout in layouts.items()
        }
        found.append((d, state))
    return found


def planners(cls, world):
    return [cls(d.shapes, grid=d.grids, layouts=d.providers) for d, _ in world]


def states(world):
    return [{"model": state} for _, state in world]


@pytest.mark.parametrize("kind", CLASSES)
def test_round_trip_through_three_configurations(tmp_path, kind):
    model = make(kind, tmp_path / "hf")
    numbers = read_config(tmp_path / "hf")

    # dcp.load straight from the safetensors into TP2 × EP2 × FSDP2.
    names = [HuggingFaceNames(rules_for(numbers))]
    first = ranks(numbers, FIRST, names)
    load(
        tmp_path / "hf",
        [state for _, state in first],
        planners(LayoutAwareLoadPlanner, first),
        CheckpointReader,
    )
    for _, state in first:
        assert [] == [fqn for fqn, tensor in state.items() if bool(tensor.isnan().any())]

    # Saved under our own names, loaded at two other configurations, saved from the last.
    own = ranks(numbers, FIRST)
    for (_, state), (_, filled) in zip(own, first, strict=True):
        state.update(filled)
    save(tmp_path / "one", states(own), planners(LayoutAwareSavePlanner, own))
    before = tmp_path / "one"
    for name, parallel in (("two", SECOND), ("three", THIRD)):
        world = ranks(numbers, parallel)
        load(before, states(world), planners(LayoutAwareLoadPlanner, world))
        before = tmp_path / name
        save(before, states(world), planners(LayoutAwareSavePlanner, world))

    with open_checkpoint(before) as checkpoint:
        plan = export_checkpoint(checkpoint, tmp_path / "out", numbers, config=tmp_path / "hf")
    assert [] == plan.left
    original = load_file(tmp_path / "hf" / "model.safetensors")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert set(original) == set(exported)
    assert [] == [key for key in original if not torch.equal(original[key], exported[key])]
    assert torch.equal(logits(model), logits(reopen(kind, tmp_path / "out")))


@pytest.mark.parametrize("kind", CLASSES)
def test_import_then_export_in_small_files(tmp_path, kind):
    model = make(kind, tmp_path / "hf")
    numbers = read_config(tmp_path / "hf" / "config.json")
    with open_checkpoint(tmp_path / "hf") as checkpoint:
        plan = import_checkpoint(checkpoint, tmp_path / "ours", numbers)
    assert [] == plan.left
    with open_checkpoint(tmp_path / "ours") as checkpoint:
        assert [] == list(checkpoint.faults())
        export_checkpoint(
            checkpoint, tmp_path / "out", numbers, config=tmp_path / "hf", shard_bytes=20_000
        )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert f"model-00001-of-{len(files):05}.safetensors" == files[0]
    sizes = [(tmp_path / "out" / name).stat().st_size for name in files]
    assert sum(sizes) > index["metadata"]["total_size"] > 0
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert [] == list(checkpoint.faults())
    assert torch.equal(logits(model), logits(reopen(kind, tmp_path / "out")))


def test_dcp_load_itself_reads_safetensors(tmp_path):
    make("llama", tmp_path / "hf")
    numbers = read_config(tmp_path / "hf")
    names = [HuggingFaceNames(rules_for(numbers))]
    d = describe(numbers, Parallel(fsdp="none", pad_vocabulary=0), extra=names)
    state = {fqn: torch.zeros(shape) for fqn, shape in d.shapes.items()}
    planner = LayoutAwareLoadPlanner(d.shapes, grid=d.grids, layouts=d.providers)
    dcp.load(state, storage_reader=CheckpointReader(tmp_path / "hf"), planner=planner)
    theirs = load_file(tmp_path / "hf" / "model.safetensors")
    gate, up = (theirs[f"model.layers.1.mlp.{n}_proj.weight"] for n in ("gate", "up"))
    assert torch.equal(torch.cat([gate, up]), state["decoder.layers.1.mlp.linear_fc1.weight"])
    assert sorted(theirs) == sorted(planner.report.loaded)
    assert [] == planner.report.unexpected


def test_stacked_experts_on_their_side(tmp_path):
    """Checkpoints that keep a layer's experts in one tensor are read, and may be written."""
    make("qwen3_moe", tmp_path / "hf")
    numbers = read_config(tmp_path / "hf")
    single = load_file(tmp_path / "hf" / "model.safetensors")
    stacked = {k: v for k, v in single.items() if ".experts." not in k}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts."
        rows = [
            torch.cat([single[f"{at}{e}.gate_proj.weight"], single[f"{at}{e}.up_proj.weight"]])
            for e in range(4)
        ]
        stacked[at + "gate_up_proj"] = torch.stack(rows)
        down = [single[f"{at}{e}.down_proj.weight"] for e in range(4)]
        stacked[at + "down_proj"] = torch.stack(down)
    (tmp_path / "stacked").mkdir()
    save_file(stacked, tmp_path / "stacked" / "model.safetensors")
    with open_checkpoint(tmp_path / "stacked") as checkpoint:
        import_checkpoint(checkpoint, tmp_path / "ours", numbers)
    with open_checkpoint(tmp_path / "ours") as checkpoint:
        export_checkpoint(checkpoint, tmp_path / "one", numbers)
        rules = rules_for(numbers, stacked_experts=True)
        export_checkpoint(checkpoint, tmp_path / "all", numbers, rules=rules)
    for expected, name in ((single, "one"), (stacked, "all")):
        found = load_file(tmp_path / name / "model.safetensors")
        assert set(expected) == set(found)
        assert [] == [key for key in expected if not torch.equal(expected[key], found[key])]


def test_components_that_were_saved_fused(tmp_path):
    """A model without tensor parallelism, saved by the stock planner, has no components."""
    model = make("qwen3_next", tmp_path / "hf")
    numbers = read_config(tmp_path / "hf")
    d = describe(numbers, Parallel(fsdp="none", pad_vocabulary=0))
    names = describe(
        numbers,
        Parallel(fsdp="none", pad_vocabulary=0),
        extra=[HuggingFaceNames(rules_for(numbers))],
    )
    state = {fqn: torch.zeros(shape) for fqn, shape in d.shapes.items()}
    planner = LayoutAwareLoadPlanner(names.shapes, grid=names.grids, layouts=names.providers)
    load(tmp_path / "hf", [state], [planner], CheckpointReader)
    # Padding rows of the vocabulary are dropped on the way out.
    table = state["embedding.word_embeddings.weight"]
    state["embedding.word_embeddings.weight"] = torch.cat([table, torch.zeros(6, 32)])
    torch.save({"model": state, "step": 3}, tmp_path / "fused.pt")
    with open_checkpoint(tmp_path / "fused.pt") as checkpoint:
        export_checkpoint(checkpoint, tmp_path / "out", numbers, config=tmp_path / "hf")
    assert torch.equal(logits(model), logits(reopen("qwen3_next", tmp_path / "out")))


def test_wrong_configuration_is_refused_before_anything_is_written(tmp_path):
    make("llama", tmp_path / "hf")
    numbers = read_config(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["num_hidden_layers"] = 3
    (tmp_path / "other.json").write_text(json.dumps(config))
    with open_checkpoint(tmp_path / "hf") as checkpoint:
        with pytest.raises(CheckpointError) as caught:
            import_checkpoint(checkpoint, tmp_path / "x", read_config(tmp_path / "other.json"))
        import_checkpoint(checkpoint, tmp_path / "ours", numbers)
    assert f"model.layers.2.input_layernorm.weight: not in {tmp_path / 'hf'}" in str(caught.value)
    assert not (tmp_path / "x").exists()
    config["num_hidden_layers"], config["head_dim"] = 2, 4
    (tmp_path / "other.json").write_text(json.dumps(config))
    with open_checkpoint(tmp_path / "ours") as checkpoint, pytest.raises(CheckpointError) as caught:
        export_checkpoint(checkpoint, tmp_path / "y", read_config(tmp_path / "other.json"))
    assert "linear_qkv.weight: shape (64, 32)" in str(caught.value)
    assert not (tmp_path / "y").exists()


def test_a_key_that_no_rule_takes_is_named(tmp_path):
    make("llama", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    file = tmp_path / "hf" / "model.safetensors"
    save_file({**tensors, "mtp.norm.weight": torch.ones(1)}, file)
    numbers = read_config(tmp_path / "hf")
    with open_checkpoint(tmp_path / "hf") as checkpoint:
        plan = import_checkpoint(checkpoint, tmp_path / "ours", numbers)
    assert ["mtp.norm.weight"] == plan.left
    save_file({**tensors, "model.extra": torch.ones(1)}, file)
    with (
        open_checkpoint(tmp_path / "hf") as checkpoint,
        pytest.raises(CheckpointError, match=r"model\.extra: no rule takes it"),
    ):
        import_checkpoint(checkpoint, tmp_path / "again", numbers)
