"""Checkpoints that earlier versions wrote open for ever, and give the values that they gave then."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from shardplan.planner import LayoutAwareLoadPlanner, SafetensorsReader
from shardplan.planner.checkpoints.opening import open_checkpoint
from shardplan.planner.command import main
from shardplan.planner.storage.format.header import FORMAT_VERSION

FOLDERS = sorted(path.parent for path in Path(__file__).parent.glob("v*/*/checkpoint"))


def expected(folder):
    return load_file(folder / "expected.safetensors"), json.loads(
        (folder / "expected.json").read_text()
    )


def test_this_format_version_has_its_golden_checkpoints():
    assert 8 == sum(folder.parent.name == f"v{FORMAT_VERSION}" for folder in FOLDERS)


@pytest.mark.parametrize("planner", [LayoutAwareLoadPlanner, DefaultLoadPlanner])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f"{f.parent.name}-{f.name}")
def test_golden_checkpoint_gives_its_values(folder, planner):
    tensors, values = expected(folder)
    state = {key: torch.full_like(tensor, -1) for key, tensor in tensors.items()}
    state |= dict.fromkeys(values)
    load(
        state,
        storage_reader=SafetensorsReader(folder / "checkpoint"),
        planner=planner(),
        no_dist=True,
    )
    for key, tensor in tensors.items():
        assert tensor.dtype == state[key].dtype and torch.equal(tensor, state[key])
    assert values == {key: state[key] for key in values}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f"{f.parent.name}-{f.name}")
def test_golden_checkpoint_is_sound(folder, capsys, monkeypatch):
    tensors, values = expected(folder)
    with open_checkpoint(folder / "checkpoint") as opened:
        assert tensors.keys() == set(opened.tensors)
        assert values.keys() <= set(opened.objects)
    monkeypatch.setattr("sys.argv", ["shardplan", "verify", str(folder / "checkpoint")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0, capsys.readouterr()
