"""Live modules of Megatron-Core: latent attention, Mamba, routers with a bias, padded vocabularies,
pipelines with virtual chunks, multi-token prediction, tied embeddings; every element checked.

Transformer Engine's modules need CUDA: the norm in a fused down-projection is a subclass here.
"""

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader

pytestmark = pytest.mark.gloo

LATENT = {"kinds": ["mla", "mla"]}
FUSED = {"kinds": ["mla fused", "mla absorbed"]}
MAMBA = {
    "pattern": "M*EM-",
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
}
# Four layers, of which each pipeline stage or chunk has one of a kind or two.
LAYERS = {"kinds": ["gdn", "attention"] * 2}
MTP = {**LAYERS, "mtp_num_layers": 1}
TIED = {**LAYERS, "tied": True}


def stored(path):
    return FileSystemReader(path).read_metadata().state_dict_metadata


def right(results) -> None:
    for result in results:
        assert {} == result["wrong"]
        assert [] == result["missing"]


@pytest.mark.parametrize(
    ("parallel", "tensors", "model"),
    [
        ({"tp": 2}, 55, LATENT),
        ({"tp": 2}, 53, {**FUSED, "fused": 2}),
        ({}, 53, {**FUSED, "fused": 1}),
        ({"tp": 2}, 48, {**MAMBA, "fused": 2}),
        ({"ep": 2}, 42, {**MAMBA, "fused": 1}),
    ],
    ids=["mla tp2", "fused mla tp2", "fused mla tp1", "mamba tp2", "mamba ep2"],
)
def test_layouts_equal_what_megatron_gathers(megatron, parallel, tensors, model):
    """Megatron writes projections in one piece, in the order of its tensor-parallel ranks."""
    results = megatron.run("metadata:compare", parallel=parallel, **model)
    for result in results:
        assert [] == result["differences"] == result["unproved"]
        assert tensors == result["tensors"]
        assert 0 == result["ours"]["collectives"] < result["theirs"]["collectives"]
        # A router's buffers are plain tensors; Megatron gathers nothing for them.
        assert all(".mlp.router." in name for name in result["only_planned"])
    print(
        f"{parallel}: {tensors} tensors; theirs {results[0]['theirs']}, ours {results[0]['ours']}"
    )


@pytest.mark.parametrize(
    ("keys", "saved", "first", "loaded", "second"),
    [
        ("fsdp_dtensor", LATENT, {"tp": 2}, FUSED, {}),
        ("plain", LATENT, {}, FUSED, {"ep": 2}),
        ("plain", FUSED, {}, LATENT, {"tp": 2}),
        ("fsdp_dtensor", FUSED, {"tp": 2}, FUSED, {}),
    ],
    ids=["to fused", "to fused, plain", "from fused, plain", "both fused"],
)
def test_latent_attention_with_and_without_the_fusion_at_other_sizes(
    megatron, tmp_path, keys, saved, first, loaded, second
):
    """Weights, moments, steps and options of groups; the norm that the fusion takes in too."""
    path = str(tmp_path)
    megatron.run("bothways:save_ours", parallel=first, path=path, keys=keys, **saved)
    assert not [key for key in stored(path) if "linear_qkv_down_proj" in key]
    right(megatron.run("bothways:load_ours", parallel=second, path=path, **loaded))


def test_fused_latent_attention_as_megatron_lm_writes_it(megatron, tmp_path):
    """0.19 keeps the fused tensor and the norm in it; whole at TP1, in the ranks' order at TP2."""
    for tp in (1, 2):
        path = str(tmp_path / f"theirs {tp}")
        megatron.run("bothways:save_theirs", parallel={"tp": tp}, path=path, gdn=False, **FUSED)
        assert any(key.endswith("linear_qkv_down_proj.layer_norm_weight") for key in stored(path))
        other = {"tp": 3 - tp}
        form = {"fused": 2} if tp == 2 else {}  # a whole tensor is found without being told
        right(megatron.run("bothways:load_ours", parallel=other, path=path, **form, **FUSED))
    path = str(tmp_path / "ours")
    megatron.run("bothways:save_ours", parallel={}, path=path, fused=2, everywhere=True, **FUSED)
    for result in megatron.run(
        "bothways:load_theirs", parallel={"tp": 2}, path=path, gdn=False, **FUSED
    ):
        assert {} == result["wrong"]


def test_mamba_and_a_routers_bias_from_tp2_to_tp1_and_back(megatron, tmp_path):
    path = str(tmp_path / "two")
    megatron.run("bothways:save_ours", parallel={"tp": 2}, path=path, **MAMBA)
    found = stored(path)
    layer = "model.module.decoder.layers"
    assert {f"{layer}.0.mixer.in_proj.weight.{part}" for part in ("z", "x", "B", "C", "dt")} == {
        key for key in found if key.startswith(f"{layer}.0.mixer.in_proj.weight")
    }
    assert (32,) == tuple(found[f"{layer}.0.mixer.norm.weight"].size)
    assert (4,) == tuple(found[f"{layer}.2.mlp.router.expert_bias"].size)
    assert not [key for key in found if "local_tokens_per_expert" in key]  # a count of one step
    right(megatron.run("bothways:load_ours", parallel={}, path=path, **MAMBA))
    path = str(tmp_path / "one")
    megatron.run("bothways:save_ours", parallel={"ep": 2}, path=path, **MAMBA)
    right(megatron.run("bothways:load_ours", parallel={"tp": 2}, path=path, **MAMBA))


def test_mamba_as_megatron_lm_writes_it(megatron, tmp_path):
    """One tensor in the order of the ranks, which only the same size reads rightly there."""
    path = str(tmp_path / "theirs")
    megatron.run("bothways:save_theirs", parallel={"tp": 2}, path=path, gdn=False, **MAMBA)
    wrong: dict[str, int] = {}
    for result in megatron.run("bothways:load_theirs", parallel={}, path=path, gdn=False, **MAMBA):
        for name, count in result["wrong"].items():
            wrong[name] = wrong.get(name, 0) + count
    # z, x, B, C, dt of 32, 32, 6, 6 and 8 rows; x, B, C in the convolution. With one rank's halves
    # before the other's, only the first 16 rows and the last 4 (3) are where they belong. A row has
    # 16 elements, 4 or 1.
    mixer = "decoder.layers.0.mixer"
    rows = {"in_proj.weight": (64, 16), "conv1d_weight": (25, 4), "conv1d_bias": (25, 1)}
    assert {
        f"{mixer}.{name} {slot}": count * width
        for name, (count, width) in rows.items()
        for slot in ("", "exp_avg", "exp_avg_sq")
    } == {name: count for name, count in wrong.items() if name.startswith(mixer)}
    right(megatron.run("bothways:load_ours", parallel={}, path=path, fused=2, **MAMBA))
    path = str(tmp_path / "ours")
    megatron.run("bothways:save_ours", parallel={"ep": 2}, path=path, fused=2, **MAMBA)
    for result in megatron.run(
        "bothways:load_theirs", parallel={"tp": 2}, path=path, gdn=False, **MAMBA
    ):
        assert {} == result["wrong"]


def test_a_vocabulary_of_33_words_padded_to_40_at_tp2_and_to_36_at_tp1(megatron, tmp_path):
    """Embeddings, output layer and their moments; padding is left out, and zero after a load."""
    two, one = {"parallel": {"tp": 2}, "vocabulary": 40}, {"parallel": {}, "vocabulary": 36}
    for number, (saved, loaded) in enumerate([(two, one), (one, two)]):
        path = str(tmp_path / str(number))
        megatron.run("bothways:save_ours", path=path, words=33, **saved)
        sizes = {
            tuple(value.size)
            for key, value in stored(path).items()
            if ("word_embeddings.weight" in key or "output_layer.weight" in key)
            and getattr(value, "size", None)
        }
        assert {(33, 16)} == sizes
        right(megatron.run("bothways:load_ours", path=path, words=33, **loaded))


def test_a_padded_vocabulary_as_megatron_lm_writes_it(megatron, tmp_path):
    """Its own load refuses another padding; this one is told the true size, and only then."""
    path = str(tmp_path)
    megatron.run("bothways:save_theirs", parallel={}, path=path, vocabulary=36, words=33)
    two = {"parallel": {"tp": 2}, "path": path, "vocabulary": 40}
    refused = megatron.outcome("bothways:load_theirs", words=33, **two)
    assert "Size mismatch between saved torch.Size([36, 16])" in refused["errors"][0]
    refused = megatron.outcome("bothways:load_ours", **two)
    assert "For a padded vocabulary" in refused["errors"][0]
    right(megatron.run("bothways:load_ours", words=33, **two))


@pytest.mark.parametrize(
    ("saved", "loaded", "model"),
    [
        ({"pp": 2, "chunks": 2}, {"ep": 2}, LAYERS),
        ({"ep": 2}, {"pp": 2, "chunks": 2}, MTP),
        ({"pp": 2, "tp": 2}, {}, MTP),
        ({"pp": 2, "chunks": 2}, {"pp": 2, "tp": 2}, TIED),
        ({"pp": 2, "tp": 2}, {}, TIED),
    ],
    ids=["chunks", "mtp to chunks", "mtp", "tied chunks", "tied"],
)
def test_pipelines(megatron, tmp_path, saved, loaded, model):
    """Real stages over DDP: layers by their own numbers; an embedding's copy on the last stage."""
    path = str(tmp_path)
    megatron.run("ddp:save", parallel=saved, path=path, **model)
    results = megatron.run("ddp:load", parallel=loaded, path=path, **model)
    right(results)
    names = {name for result in results for name in result["names"]}
    layers = {int(name.split(".")[2]) for name in names if name.startswith("decoder.layers.")}
    assert {0, 1, 2, 3} == layers
    inner = {key.split(".")[4] for key in stored(path) if key.startswith("model.mtp.layers.0.t")}
    assert ({"transformer_layer"} if model is MTP else set()) == inner


def test_extra_states_go_with_their_modules(megatron, tmp_path):
    """What fp8 keeps beside the weights: by layer, expert and inner layer of MTP, if asked for."""
    path, options = str(tmp_path), {**MTP, "extra_state": True}
    megatron.run("ddp:save", parallel={"pp": 2, "chunks": 2}, path=path, **options)
    results = megatron.run("ddp:load", parallel={"pp": 2, "ep": 2}, path=path, **options)
    right(results)
    histories = {name: good for result in results for name, good in result["histories"].items()}
    assert all(histories.values())
    # Each of 4 layers and MTP's inner one has a projection of its attention, 4 experts and shared
    # ones; besides, there are MTP's own projection and the output layer.
    assert {"decoder.layers.3.mlp.experts.local_experts.3.linear_fc1", "output_layer"} < set(
        histories
    )
    assert 5 * (1 + 4 + 1) + 2 == len(histories)
    megatron.run("ddp:save", parallel={}, path=path + "/without", **MTP)
    assert not [key for key in stored(path + "/without") if "extra_state" in key]
