"""simulate, explain and show: what a stranger reads, and that the numbers are the layouts'."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli.command import shardplan

from shardplan.planner.tools.recipes.files import load_recipe, shipped
from shardplan.planner.tools.recipes.numbers import Numbers
from shardplan.planner.tools.recipes.parameters import parameters

# Parameters as the models' own pages count them, in billions; without multi-token prediction.
PUBLISHED = {
    "DeepSeek-V3": 671,
    "Llama-3.1-405B": 406,
    "Qwen3-235B-A22B": 235,
    "Qwen3-Next-80B-A3B": 80,
    "Qwen3.5-35B-A3B": 35,
}
TINY = """
name = "Tiny"
[model]
kind = "llama"
layers = 2
hidden = 8
vocabulary = 10
heads = 2
kv_heads = 1
head_dim = 4
ffn = 12
[[parallel]]
name = "two"
tp = 2
[[parallel]]
name = "four"
tp = 2
dp_shard = 2
pad_vocabulary = 3
"""


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.mark.parametrize("verb", ["simulate", "explain", "show", "export", "import"])
def test_help_has_an_example(verb):
    answer = shardplan(verb, "--help")
    assert 0 == answer.status
    assert f"Example: shardplan {verb}" in " ".join(answer.out.split())


def test_shipped_recipes_have_the_published_sizes():
    assert sorted(PUBLISHED) == shipped()
    for name, billions in PUBLISHED.items():
        recipe = load_recipe(name)
        total = sum(torch.Size(p.shape).numel() for p in parameters(recipe.numbers))
        assert billions == round(total / 1e9)
        assert recipe.source.startswith(("https://", "config.json of "))
        worlds = [p.world_size for p in recipe.parallel]
        assert len(worlds) >= 3
        assert 4096 == max(worlds)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_shipped_configuration_fits(name):
    answer = shardplan("simulate", name, "--all", "--no-time", "--json")
    assert 0 == answer.status, answer.out
    recipe = load_recipe(name)
    elements = sum(torch.Size(p.shape).numel() for p in parameters(recipe.numbers))
    for found in answer.json["configurations"]:
        assert 14 * elements == found["bytes"]
        assert found["ranks"] == found["files"]
        assert max(found["stage_balance"]) < 1.05


def test_qwen3_next_at_1024_ranks():
    answer = shardplan(
        "simulate", "Qwen3-Next-80B-A3B", "-c", "1024-ranks", "--to", "1024-ranks-fsdp2", "--json"
    )
    (found,) = answer.json["configurations"]
    assert found["seconds"] < 30 * 4  # 30 s is the aim on an idle machine
    assert (1024, 298332) == (found["ranks"], found["keys"])
    assert found["bytes"] == found["change"]["bytes_read"]


def test_without_a_recipe_the_shipped_ones_are_listed():
    answer = shardplan("simulate")
    assert 0 == answer.status
    for name in PUBLISHED:
        assert name in answer.out


def test_dims_that_do_not_divide_are_named_with_status_1(tiny):
    answer = shardplan("simulate", tiny, "-c", "tp=8,dp_shard=2")
    assert 1 == answer.status
    assert "does not fit" in answer.out
    text = "decoder.layers.*.mlp.linear_fc1.weight: the 12 rows of its component 'gate' can't be"
    assert f"{text} divided by 8 ranks (tp)" in " ".join(answer.out.split())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["simulate", "nonsense"], "neither a recipe file (.toml) nor one of the shipped recipes"),
        (["simulate", "Llama-3.1-405B", "-c", "77"], "no configuration '77'. It has 512-ranks"),
        (["simulate", "Llama-3.1-405B", "-c", "tq=2"], "no axis 'tq'. There are name, tp, pp"),
        (["simulate", "Llama-3.1-405B", "-c", "tp=x"], "tp is 'x', not a number"),
        (["explain", "nonsense", "-p", "w"], "neither a checkpoint that exists nor a recipe"),
        (
            ["explain", "Llama-3.1-405B", "-p", "decoder.layers.0.mlp.linear_fc3.weight"],
            "no parameter matches. Did you mean decoder.layers.0.mlp.linear_fc2.weight",
        ),
        (["explain", "Llama-3.1-405B", "-p", "fc1", "-r", "512"], "has the ranks 0 to 511"),
    ],
)
def test_mistakes_are_explained(args, words):
    answer = shardplan(*args)
    assert 2 == answer.status
    assert words in answer.err


def test_recipe_mistakes_name_the_table(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text(TINY.replace("hidden = 8", "hiden = 8"))
    answer = shardplan("simulate", path)
    assert f"{path}: [model]: " in answer.err
    assert "hiden" in answer.err
    path.write_text("[model]\nkind = 3")
    assert f"{path}: a recipe needs [parallel]." in shardplan("simulate", path).err


def test_explain_follows_the_elements(tiny):
    """fc1 (24, 8) over two ranks: rank 1 has rows 6:12 of gate and of up."""
    answer = shardplan("explain", tiny, "-p", "layers.0.mlp.linear_fc1.weight", "-r", "1", "--json")
    assert 0 == answer.status
    steps = answer.json["steps"]
    assert ["storage", "local", "component", "global"] == [s["space"] for s in steps]
    assert [
        ["_w", [12, 8], "[6:12, 0:8] ← storage 0, steps (8, 1)"],
        ["_v", [12, 8], "[6:12, 0:8] ← storage 48, steps (8, 1)"],
    ] == steps[-1]["boxes"]
    text = shardplan("explain", tiny, "-p", "layers.0.mlp.linear_fc1.weight", "-r", "1").out
    assert "→ component cut along dim 0 into SwiGLU halves: w 6, v 6" in text
    assert "→ global    shard 1 of 2 along tp" in text
    assert "no other rank holds these boxes" in text


def test_explain_names_the_rank_that_has_it():
    answer = shardplan(
        "explain", "Qwen3-Next-80B-A3B", "-c", "4096-ranks", "-p", "*.47.*router*", "-r", "0"
    )
    assert 1 == answer.status
    assert "rank 0 is pipeline stage 0" in answer.err
    assert "pipeline stage 3 does" in answer.err


def test_explain_a_stock_checkpoint(tmp_path):
    dcp.save({"model": {"w": torch.arange(12.0).reshape(3, 4)}}, checkpoint_id=tmp_path / "a")
    answer = shardplan("explain", tmp_path / "a", "-p", "model.w", "--json")
    (chunk,) = answer.json["chunks"]
    assert ("__0_0.distcp", 0, [0, 0], [3, 4]) == tuple(
        chunk[name] for name in ("file", "start", "offsets", "sizes")
    )
    answer = shardplan("explain", tmp_path / "a", "-p", "model.w", "-r", "3")
    assert 1 == answer.status
    assert "it wrote nothing of it; rank 0 did" in answer.out
    answer = shardplan("explain", tmp_path / "a", "-p", "model.x")
    assert "Did you mean model.w?" in answer.err


def test_show_blocks(tiny):
    answer = shardplan("show", tiny, "-p", "layers.0.mlp.linear_fc1.weight")
    assert 0 == answer.status
    lines = answer.out.splitlines()
    rows = [line for line in lines if line.endswith("0" * 8) or line.endswith("1" * 8)]
    assert 16 == len(rows)
    assert rows[0].split() == ["gate", "0" * 8]
    assert rows[8].split() == ["up", "0" * 8]
    assert ["1" * 8] == rows[15].split()
    assert "4 boxes of ranks 0, 1" in answer.out


def test_show_boxes_tile_the_tensor_before_and_after(tiny):
    answer = shardplan("show", tiny, "-p", "layers.1.*linear_qkv.weight", "--to", "four", "--json")
    assert ["two", "four"] == [panel["title"] for panel in answer.json["panels"]]
    for panel in answer.json["panels"]:
        seen = torch.zeros(panel["rows"], panel["columns"])
        for held in panel["held"]:
            seen[slice(*held["rows"]), slice(*held["columns"])] += 1
        assert bool((seen == 1).all())
    replicated = shardplan("show", tiny, "-p", "final_layernorm", "--json").json["panels"][0]
    assert [2] == [held["copies"] for held in replicated["held"]]


def test_pictures_are_written(tiny, tmp_path):
    stem = tmp_path / "pictures"
    answer = shardplan("show", tiny, "-p", "linear_fc1.weight", "--to", "four", "-o", stem)
    assert 0 == answer.status, answer.err
    for name in ("pictures.png", "pictures-bytes.png"):
        assert b"\x89PNG" == (tmp_path / name).read_bytes()[:4]
    for name in ("pictures.svg", "pictures-bytes.svg"):
        assert "<svg" in (tmp_path / name).read_text()


def test_show_a_checkpoint_beside_another(tmp_path):
    for name in ("a", "b"):
        dcp.save({"w": torch.ones(4, 2)}, checkpoint_id=tmp_path / name)
    answer = shardplan("show", tmp_path / "a", "-p", "w", "--to", tmp_path / "b")
    assert 0 == answer.status
    assert "a: 4 × 2" in answer.out
    assert "b: 4 × 2" in answer.out


def test_numbers_tell_layers_apart():
    n = Numbers("x", 8, 8, 8, 2, 2, 4, attention_every=4, experts=2, dense_layers=2)
    assert [3, 7] == [layer for layer in range(8) if n.has_attention(layer)]
    assert [2, 3, 4, 5, 6, 7] == [layer for layer in range(8) if n.has_experts(layer)]
