"""Every configuration's checkpoint loads under every other one, all ranks in one process.

`hybrid` says what every rank must hold and shares no code with the library.
"""

import functools
from pathlib import Path
from typing import Any

import hybrid
import pytest
import torch
import torch.distributed.checkpoint as dcp
import world
from hybrid import Config
from memory import Memory, MemoryReader, MemoryWriter

from shardplan.layouts import (
    GDN,
    BufferDescription,
    Cut,
    DTensorStorage,
    ExpertGrid,
    FSDPFlatBuffer,
    Grids,
    PipelineLayers,
    SwiGLU,
    TensorParallel,
    VocabularyPadding,
)
from shardplan.planner import LayoutAwareLoadPlanner, LayoutAwareSavePlanner

CONFIGS = [
    Config("one", storage="whole"),
    Config("ddp", rep=2, storage="whole", components="fused"),
    Config("fsdp3", dp=3, padding="zero"),
    Config("fsdp8", dp=8),
    Config("cuts3", dp=3, storage="cuts", stacked="single"),
    Config("hsdp", dp=2, rep=2, ep=2, components="fused", padding="zero"),
    Config("tp4", tp=4, etp=2, storage="whole", padding="zero"),
    Config("tp2-fsdp2", tp=2, etp=1, dp=2, experts="single"),
    Config("ep4", dp=4, ep=4, stacked="single", components="fused"),
    Config("tp2-ep2-cuts", tp=2, etp=2, ep=2, dp=2, storage="cuts", padding="zero"),
    Config("pp2", pp=2, dp=2, ep=2),
    Config("pp2-tp2-ep4", pp=2, tp=2, dp=2, ep=4, storage="cuts", experts="single"),
    Config("pp2-hsdp", pp=2, rep=2, dp=2, etp=2, components="fused", padding="zero"),
    Config("virtual", pp=2, vpp=2, tp=2, etp=2, dp=2, ep=2),
    Config("pp4-ep2", pp=4, dp=2, ep=2, storage="cuts", stacked="single"),
]
BY_NAME = {config.name: config for config in CONFIGS}


def providers(config: Config, rank: int) -> list[Any]:
    stage = config.place(rank)["pp"]
    chunks = [hybrid.local_tensors(config, rank, chunk) for chunk in range(config.vpp)]
    shapes = [{k: tuple(v.shape) for k, v in tensors.items()} for tensors in chunks]
    storage: list[Any] = []
    if config.storage == "flat":
        buffers: dict[tuple[str, ...], BufferDescription] = {}  # equal ones of chunks once
        for chunk in shapes:
            for number, group in enumerate(hybrid.groups_of(chunk)):
                count = config.edp if number == 2 else config.dp
                if group:
                    described = {name: chunk[name] for name in group}
                    buffer = BufferDescription(described, count, hybrid.ALIGNMENT)
                    assert buffers.setdefault(tuple(group), buffer) == buffer
        storage = [FSDPFlatBuffer(buffers=list(buffers.values()))]
    elif config.storage == "cuts":
        rules = {"*experts*": (Cut(0, "edp_shard"),)}
        names = {n for chunk in shapes for n in chunk if "experts" not in n}
        rules |= dict.fromkeys(sorted(names), (Cut(0, "dp_shard"),))
        storage = [DTensorStorage(rules)]
    fused = config.components
    naming = PipelineLayers(offset=hybrid.layers_of(config, stage, 0)[0])
    return [
        *storage,
        SwiGLU(["*linear_fc1.weight", "*linear_fc1.weight[0-9]"], components=fused),
        GDN({"*.in_proj.weight": hybrid.GDN_ROWS}, components=fused),
        TensorParallel(
            {
                hybrid.EMBEDDING: 0,
                "*.in_proj.weight": 0,
                "*.linear_qkv.weight": 0,
                "*.linear_fc1.weight*": 0,
                "*.linear_proj.weight": 1,
                "*.linear_fc2.weight": 1,
                "*.experts.gate": 2,
                "*.experts.[0-9].gate": 1,
            }
        ),
        VocabularyPadding({hybrid.EMBEDDING: hybrid.VOCABULARY}),
        ExpertGrid(hybrid.EXPERTS, stacked=config.stacked),
        PipelineLayers() if config.vpp > 1 else naming,
    ]


def live_chunk(config: Config, rank: int, chunk: int) -> torch.nn.Module:
    """A module with the chunk's parameters, whose layers know their global number."""
    root = torch.nn.Module()
    layers = hybrid.layers_of(config, config.place(rank)["pp"], chunk)
    for name, tensor in hybrid.local_tensors(config, rank, chunk).items():
        *path, last = name.split(".")
        module = root
        for i, part in enumerate(path):
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
            if i and path[i - 1] == "layers":
                module.layer_number = layers[int(part)] + 1
        module.register_parameter(last, torch.nn.Parameter(tensor.to("meta")))
    return root


def model_of(config: Config, rank: int) -> Any:
    if config.vpp > 1:
        return [live_chunk(config, rank, chunk) for chunk in range(config.vpp)]
    return {k: tuple(v.shape) for k, v in hybrid.local_tensors(config, rank, 0).items()}


def grids_of(config: Config, rank: int) -> Grids:
    return Grids.from_sizes(
        rank,
        pp=config.pp,
        dp_replicate=config.rep,
        dp_shard=config.dp,
        tp=config.tp,
        ep=config.ep,
        etp=config.etp,
    )


def planner(kind: Any, config: Config, rank: int, **options: Any) -> Any:
    grid, layouts = grids_of(config, rank), providers(config, rank)
    return kind(model_of(config, rank), grid=grid, layouts=layouts, **options)


@functools.cache
def load_planners(name: str) -> list[LayoutAwareLoadPlanner]:
    config = BY_NAME[name]
    return [
        planner(LayoutAwareLoadPlanner, config, rank, padding=config.padding)
        for rank in range(config.world)
    ]


@functools.cache
def saved(name: str) -> Memory:
    config, memory = BY_NAME[name], Memory()
    states = [hybrid.state_dict(config, rank) for rank in range(config.world)]
    planners = [planner(LayoutAwareSavePlanner, config, rank) for rank in range(config.world)]
    world.save(Path(), states, planners, lambda path: MemoryWriter(memory))
    return memory


def differences(expected: Any, actual: Any, path: str = "") -> list[str]:
    """Where two nested state dicts differ, bit for bit."""
    if isinstance(expected, dict):
        if list(expected) != list(actual):
            return [f"{path}: keys {list(actual)}, not {list(expected)}"]
        return [f for k in expected for f in differences(expected[k], actual[k], f"{path}.{k}")]
    if isinstance(expected, list) and expected and isinstance(expected[0], dict):
        pairs = zip(expected, actual, strict=True)
        return [f for i, (e, a) in enumerate(pairs) for f in differences(e, a, f"{path}.{i}")]
    if isinstance(expected, torch.Tensor):
        same = expected.dtype == actual.dtype and torch.equal(expected, actual)
    else:
        same = type(expected) is type(actual) and expected == actual
    return [] if same else [f"{path}: {actual}, not {expected}"]


def test_configurations_differ_in_every_axis():
    assert 15 == len(CONFIGS) == len(BY_NAME)
    for axis in ("tp", "etp", "ep", "dp", "rep", "pp", "vpp", "storage", "components"):
        assert len({getattr(config, axis) for config in CONFIGS}) > 1, axis


@pytest.mark.parametrize("name", BY_NAME)
def test_checkpoint_holds_the_global_tensors(name):
    config, memory = BY_NAME[name], saved(name)
    expected = {f"model.{k}": v for k, v in hybrid.tensors_on_disk(config).items()}
    for slot in hybrid.SLOTS:
        for key, tensor in hybrid.tensors_on_disk(config, slot).items():
            expected[f"optimizer.state.{key}.{slot}"] = tensor
    assert memory.metadata is not None
    stored = memory.metadata.state_dict_metadata
    plain = {k for k in stored if k.split(".")[-1] not in ("step", "lr", "betas", "params")}
    assert expected.keys() | {"iteration"} == plain
    for key, tensor in expected.items():
        assert torch.equal(tensor, memory.tensor(key)), key


@pytest.mark.parametrize("target", BY_NAME)
@pytest.mark.parametrize("source", BY_NAME)
def test_every_ordered_pair(source, target):
    memory, config = saved(source), BY_NAME[target]
    states = [hybrid.state_dict(config, rank, blank=True) for rank in range(config.world)]
    planners = load_planners(target)
    world.load(Path(), states, planners, lambda path: MemoryReader(memory))
    for rank, state in enumerate(states):
        assert [] == differences(hybrid.after_load(config, rank), state), f"rank {rank}"
        report = planners[rank].report
        assert [] == report.missing
        if config.pp == 1:
            assert [] == report.unexpected


@pytest.mark.parametrize(
    ("source", "target"), [("tp2-fsdp2", "pp2-hsdp"), ("virtual", "cuts3"), ("pp4-ep2", "tp4")]
)
def test_pairs_through_files(source, target, tmp_path):
    """The same with torch's own file system writer and reader; stock opens the files too."""
    config = BY_NAME[source]
    states = [hybrid.state_dict(config, rank) for rank in range(config.world)]
    planners = [planner(LayoutAwareSavePlanner, config, rank) for rank in range(config.world)]
    world.save(tmp_path, states, planners)
    wanted = BY_NAME[target]
    found = [hybrid.state_dict(wanted, rank, blank=True) for rank in range(wanted.world)]
    world.load(tmp_path, found, load_planners(target))
    for rank, state in enumerate(found):
        assert [] == differences(hybrid.after_load(wanted, rank), state), f"rank {rank}"
    expected = {f"model.{k}": v for k, v in hybrid.tensors_on_disk(config).items()}
    whole = {key: torch.full_like(tensor, -1) for key, tensor in expected.items()}
    dcp.load(
        whole, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(flatten_state_dict=False)
    )
    assert [] == differences(expected, whole)
