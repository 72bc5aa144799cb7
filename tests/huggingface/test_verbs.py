"""export and import as verbs, from a model of transformers and back to it."""

import json

import torch
from cli.command import shardplan
from huggingface.clients import logits, make, reopen
from safetensors.torch import load_file, save_file


def test_import_and_export(tmp_path):
    model = make("qwen3_next", tmp_path / "hf")
    answer = shardplan("import", tmp_path / "hf", tmp_path / "ours", "--from", "hf")
    assert 0 == answer.status, answer.err
    assert 0 == shardplan("verify", tmp_path / "ours").status
    answer = shardplan(
        "export", tmp_path / "ours", tmp_path / "out", "--config", tmp_path / "hf", "--json",
        "--shard-size", "30KB",
    )  # fmt: skip
    assert 0 == answer.status, answer.err
    assert [] == answer.json["left_over"]
    assert len(load_file(tmp_path / "hf" / "model.safetensors")) == answer.json["tensors"]
    assert len(answer.json["files"]) > 1
    assert 0 == shardplan("verify", tmp_path / "out").status
    answer = shardplan("diff", tmp_path / "hf", tmp_path / "out", "--values")
    assert 0 == answer.status, answer.out
    assert torch.equal(logits(model), logits(reopen("qwen3_next", tmp_path / "out")))


def test_mistakes_are_explained(tmp_path):
    make("llama", tmp_path / "hf")
    shardplan("import", tmp_path / "hf", tmp_path / "ours")
    out = tmp_path / "out"
    answer = shardplan("export", tmp_path / "ours", out)
    assert 2 == answer.status
    assert "the model's numbers are not known. Pass --config" in answer.err
    answer = shardplan("export", tmp_path / "ours", out, "--config", tmp_path)
    assert "no model configuration" in answer.err
    args = ("export", tmp_path / "ours", out, "--config", tmp_path / "hf")
    assert "no number of bytes" in shardplan(*args, "--shard-size", "lots").err
    answer = shardplan("export", tmp_path / "hf", out, "--config", tmp_path / "hf")
    assert "no key ends in embedding.word_embeddings.weight" in answer.err
    answer = shardplan("import", tmp_path / "hf", tmp_path / "ours")
    assert "exists already. Choose another place, or pass --overwrite." in answer.err
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    answer = shardplan(*args)
    assert "no mapping for the model type 'gpt2'; there are qwen3_next, qwen3_5_moe" in answer.err
    assert not out.exists()


def test_left_over_keys_are_told(tmp_path):
    make("llama", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    save_file({**tensors, "mtp.w": torch.ones(1)}, tmp_path / "hf" / "model.safetensors")
    answer = shardplan("import", tmp_path / "hf", tmp_path / "ours")
    assert 0 == answer.status
    assert "left over, not written: 1 key (mtp.w)" in answer.out
