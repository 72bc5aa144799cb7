"""export and import as verbs, from a model of transformers and back to it."""

import json
import os

import pytest
import torch
from cli.command import shardplan
from huggingface.clients import logits, make, reopen
from safetensors.torch import load_file, save_file

from shardplan.layouts import CheckpointError
from shardplan.planner.checkpoints.opening import open_checkpoint
from shardplan.planner.tools.huggingface.transfer import export_checkpoint, plan_export
from shardplan.planner.tools.recipes.numbers import read_config


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


def _tree(path):
    return {p.relative_to(path).as_posix(): p.is_file() and p.read_bytes() for p in path.rglob("*")}


@pytest.mark.parametrize(("first", "second"), [("30KB", "1GB"), ("1GB", "30KB"), ("30KB", "60KB")])
def test_export_again_with_another_number_of_files(tmp_path, first, second):
    for name in ("old", "new"):
        make("llama", tmp_path / f"hf-{name}")
        tensors = load_file(tmp_path / f"hf-{name}" / "model.safetensors")
        value = {"old": 4.0, "new": 2.0}[name]
        made = {key: torch.full_like(tensor, value) for key, tensor in tensors.items()}
        save_file(made, tmp_path / f"hf-{name}" / "model.safetensors")
        shardplan("import", tmp_path / f"hf-{name}", tmp_path / name)
    out = tmp_path / "out"
    config = ("--config", tmp_path / "hf-old", "--shard-size")
    assert 0 == shardplan("export", tmp_path / "old", out, *config, first).status
    assert 0 == shardplan("export", tmp_path / "new", tmp_path / "fresh", *config, second).status
    before = _tree(out)
    answer = shardplan("export", tmp_path / "new", out, *config, second)
    assert (2, before) == (answer.status, _tree(out))
    assert "exists already. Choose another place, or pass --overwrite." in answer.err
    assert 0 == shardplan("export", tmp_path / "new", out, *config, second, "--overwrite").status
    assert _tree(tmp_path / "fresh") == _tree(out)
    assert 0 == shardplan("diff", tmp_path / "hf-new", out, "--values").status
    assert ["fresh", "hf-new", "hf-old", "new", "old", "out"] == sorted(os.listdir(tmp_path))


def test_export_deletes_no_file_that_it_does_not_replace(tmp_path):
    make("llama", tmp_path / "hf")
    shardplan("import", tmp_path / "hf", tmp_path / "ours")
    out, config = tmp_path / "out", ("--config", tmp_path / "hf")
    assert 0 == shardplan("export", tmp_path / "ours", out, *config).status
    (out / "README.md").write_text("mine")
    before = _tree(out)
    for args in (("export", tmp_path / "ours", out, *config), ("import", tmp_path / "hf", out)):
        answer = shardplan(*args, "--overwrite")
        assert 2 == answer.status
        assert "README.md" in answer.err and "not of a checkpoint" in answer.err
        assert before == _tree(out)
    (out / "README.md").unlink()
    (out / "tokenizer.json").write_text("{}")
    answer = shardplan("export", tmp_path / "ours", out, *config, "--overwrite")
    assert 2 == answer.status and "holds tokenizer.json" in answer.err
    (tmp_path / "hf" / "tokenizer.json").write_text("[]")
    assert 0 == shardplan("export", tmp_path / "ours", out, *config, "--overwrite").status
    assert "[]" == (out / "tokenizer.json").read_text()


def test_import_replaces_a_checkpoint_of_any_form(tmp_path):
    make("llama", tmp_path / "hf")
    shardplan("import", tmp_path / "hf", tmp_path / "fresh")
    shardplan("convert", tmp_path / "fresh", tmp_path / "out", "--to", "shardplan")
    assert 0 == shardplan("import", tmp_path / "hf", tmp_path / "out", "--overwrite").status
    assert sorted(_tree(tmp_path / "fresh")) == sorted(_tree(tmp_path / "out"))
    assert 0 == shardplan("diff", tmp_path / "fresh", tmp_path / "out", "--values").status
    before = _tree(tmp_path / "hf")
    for verb in ("import", "export"):
        source = tmp_path / ("hf" if verb == "import" else "fresh")
        answer = shardplan(verb, source, source, "--config", tmp_path / "hf", "--overwrite")
        assert 2 == answer.status
        assert "which is read, lies there" in answer.err
    assert before == _tree(tmp_path / "hf")


def test_an_export_that_fails_leaves_out_as_it_was(tmp_path):
    """One of its files can't be written: the others stop, and all of them go."""
    make("llama", tmp_path / "hf")
    shardplan("import", tmp_path / "hf", tmp_path / "ours")
    numbers = read_config(tmp_path / "hf")
    out = tmp_path / "out"
    shardplan("export", tmp_path / "ours", out, "--config", tmp_path / "hf")
    before = _tree(tmp_path)
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt()):
        with open_checkpoint(tmp_path / "ours") as checkpoint:
            plan = plan_export(checkpoint, numbers)
            source = plan.tensors["lm_head.weight"]

            def read(offsets, sizes, error=error):
                raise error

            plan.tensors["lm_head.weight"] = source._replace(read=read)
            kind = CheckpointError if isinstance(error, OSError) else KeyboardInterrupt
            with pytest.raises(kind) as caught:
                export_checkpoint(
                    checkpoint, out, numbers, plan=plan, overwrite=True, shard_bytes=9000,
                    config=tmp_path / "hf",
                )  # fmt: skip
        if kind is CheckpointError:
            assert f"{out}/model-" in str(caught.value)
            assert "No space left on device" in str(caught.value)
        assert before == _tree(tmp_path)
