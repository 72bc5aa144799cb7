"""A small hybrid model over every kind of parallelism, and what each rank of it must hold.

Nothing here comes from shardplan. Each global tensor is numbered by its key and index; a rank's
tensors are cut from it with torch the way the training frameworks do.

| name | is |
|---|---|
| `Config` | one parallel configuration, with the forms that it saves |
| `tensors_on_disk` | the checkpoint's tensors |
| `rank_chunks` | what one rank stores: for each of its model chunks, name → tensor |
| `state_dict` | model and Adam state of one rank, right or blank |
"""

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

HIDDEN, EXPERTS, LAYERS, VOCABULARY, ALIGNMENT = 6, 4, 4, 10, 5
GDN_ROWS = {"query": 4, "key": 4, "value": 8, "z": 8, "beta": 4, "alpha": 4}
SLOTS = ("exp_avg", "exp_avg_sq")
SAVED_PADDING, BLANK = -99.0, -7.0
EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm.weight"


@dataclass(frozen=True)
class Config:
    """A parallel configuration, the storage it uses and the forms that it has on disk."""

    name: str
    tp: int = 1
    etp: int = 1
    ep: int = 1
    dp: int = 1
    rep: int = 1
    pp: int = 1
    vpp: int = 1
    storage: str = "flat"
    components: str = "split"
    experts: str = "stacked"  # the third kind of experts as the model holds them
    stacked: str = "stacked"  # and as they are on disk; single ones stay single
    padding: str = "keep"

    @property
    def world(self) -> int:
        return self.pp * self.rep * self.dp * self.tp

    @property
    def edp(self) -> int:
        return self.rep * self.dp * self.tp // (self.rep * self.ep * self.etp)

    def place(self, rank: int) -> dict[str, int]:
        """The rank's coordinates: dense ranks count up along tp first, experts along etp."""
        dense = torch.arange(self.world).view(self.pp, self.rep, self.dp, self.tp)
        expert = torch.arange(self.world).view(self.pp, self.rep, self.edp, self.ep, self.etp)
        pp, rep, dp, tp = (dense == rank).nonzero()[0].tolist()
        _, _, edp, ep, etp = (expert == rank).nonzero()[0].tolist()
        return dict(pp=pp, rep=rep, dp=dp, tp=tp, edp=edp, ep=ep, etp=etp)


# The checkpoint -----------------------------------------------------------------------------------


def numbered(key: str, shape: Iterable[int], slot: str = "") -> torch.Tensor:
    """A tensor whose elements say which key, slot and index they belong to."""
    shape = tuple(shape)
    first = zlib.crc32(f"{key}/{slot}".encode()) % 16000 * 500
    return torch.arange(first, first + math.prod(shape), dtype=torch.float32).view(shape)


def step_of(name: str) -> float:
    """The step of a parameter, or of all experts that share a name."""
    return float(zlib.crc32(name.encode()) % 97)


def learning_rate(name: str) -> float:
    return 0.25 if "norm" in name else 0.125


def layer_shapes(layer: int) -> dict[str, tuple[int, ...]]:
    """Components and plain tensors of a layer by key, experts by their global index."""
    at = f"decoder.layers.{layer}."
    if layer % 2 == 0:
        shapes = {f"{at}input_layernorm.weight": (HIDDEN,)}
        for name, rows in GDN_ROWS.items():
            shapes[f"{at}mixer.in_proj.weight.{name}"] = (rows, HIDDEN)
        shapes[f"{at}mlp.linear_fc1.weight_w"] = (8, HIDDEN)
        shapes[f"{at}mlp.linear_fc1.weight_v"] = (8, HIDDEN)
        shapes[f"{at}mlp.linear_fc2.weight"] = (HIDDEN, 8)
        return shapes
    shapes = {
        f"{at}attention.linear_qkv.weight": (16, HIDDEN),
        f"{at}attention.linear_proj.weight": (HIDDEN, 8),
        f"{at}mlp.router.weight": (EXPERTS, HIDDEN),
    }
    for expert in range(EXPERTS):
        shapes[f"{at}mlp.experts.linear_fc1.weight{expert}_w"] = (4, HIDDEN)
        shapes[f"{at}mlp.experts.linear_fc1.weight{expert}_v"] = (4, HIDDEN)
        shapes[f"{at}mlp.experts.local_experts.{expert}.linear_fc2.weight"] = (HIDDEN, 4)
        shapes[f"{at}mlp.experts.{expert}.gate"] = (HIDDEN, 4)
    return shapes


def all_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= layer_shapes(layer)
    shapes[FINAL_NORM] = (HIDDEN,)
    return shapes


def tensors_on_disk(config: Config, slot: str = "") -> dict[str, torch.Tensor]:
    """The checkpoint's tensors by key without section and slot, in the forms that config saves."""
    found = {key: numbered(key, shape, slot) for key, shape in all_shapes().items()}

    def join(name: str, keys: list[str], stack: bool) -> None:
        parts = [found.pop(key) for key in keys]
        found[name] = torch.stack(parts) if stack else torch.cat(parts)

    for layer in range(LAYERS):
        at = f"decoder.layers.{layer}."
        fused = config.components == "fused"
        if layer % 2 == 0:
            if fused:
                name = f"{at}mixer.in_proj.weight"
                join(name, [f"{name}.{part}" for part in GDN_ROWS], False)
                name = f"{at}mlp.linear_fc1.weight"
                join(name, [f"{name}_w", f"{name}_v"], False)
            continue
        if fused:
            for expert in range(EXPERTS):
                name = f"{at}mlp.experts.linear_fc1.weight{expert}"
                join(name, [f"{name}_w", f"{name}_v"], False)
        if config.experts == config.stacked == "stacked":
            keys = [f"{at}mlp.experts.{e}.gate" for e in range(EXPERTS)]
            join(f"{at}mlp.experts.gate", keys, True)
    return found


# One rank -----------------------------------------------------------------------------------------


def layers_of(config: Config, stage: int, chunk: int) -> list[int]:
    """Global numbers of a chunk's layers: Megatron deals virtual chunks out in turn."""
    count = LAYERS // (config.pp * config.vpp)
    first = (chunk * config.pp + stage) * count
    return list(range(first, first + count))


def local_tensors(config: Config, rank: int, chunk: int, slot: str = "") -> dict[str, torch.Tensor]:
    """A chunk's parameters by local name, before any FSDP cut."""
    at = config.place(rank)
    tp, etp, ep = at["tp"], at["etp"], at["ep"]
    each = EXPERTS // config.ep
    found: dict[str, torch.Tensor] = {}

    def get(key: str) -> torch.Tensor:
        return numbered(key, all_shapes()[key], slot)

    if at["pp"] == 0 and chunk == 0:
        multiple = 2 * config.tp
        rows = -(-VOCABULARY // multiple) * multiple
        padding = torch.full((rows - VOCABULARY, HIDDEN), SAVED_PADDING)
        found[EMBEDDING] = torch.cat([get(EMBEDDING), padding]).chunk(config.tp)[tp]
    for local, layer in enumerate(layers_of(config, at["pp"], chunk)):
        here, there = f"decoder.layers.{local}.", f"decoder.layers.{layer}."
        if layer % 2 == 0:
            found[f"{here}input_layernorm.weight"] = get(f"{there}input_layernorm.weight")
            parts = [get(f"{there}mixer.in_proj.weight.{name}") for name in GDN_ROWS]
            rows_of = [part.chunk(config.tp)[tp] for part in parts]
            found[f"{here}mixer.in_proj.weight"] = torch.cat(rows_of)
            halves = [get(f"{there}mlp.linear_fc1.weight{half}") for half in ("_w", "_v")]
            rows_of = [half.chunk(config.tp)[tp] for half in halves]
            found[f"{here}mlp.linear_fc1.weight"] = torch.cat(rows_of)
            down = get(f"{there}mlp.linear_fc2.weight")
            found[f"{here}mlp.linear_fc2.weight"] = down.chunk(config.tp, 1)[tp]
            continue
        qkv = get(f"{there}attention.linear_qkv.weight")
        found[f"{here}attention.linear_qkv.weight"] = qkv.chunk(config.tp)[tp]
        out = get(f"{there}attention.linear_proj.weight")
        found[f"{here}attention.linear_proj.weight"] = out.chunk(config.tp, 1)[tp]
        found[f"{here}mlp.router.weight"] = get(f"{there}mlp.router.weight")
        mine = range(ep * each, ep * each + each)
        for i, expert in enumerate(mine):
            name = f"mlp.experts.linear_fc1.weight{expert}"
            halves = [get(f"{there}{name}{half}").chunk(config.etp)[etp] for half in ("_w", "_v")]
            found[f"{here}mlp.experts.linear_fc1.weight{i}"] = torch.cat(halves)
        for i, expert in enumerate(mine):
            down = get(f"{there}mlp.experts.local_experts.{expert}.linear_fc2.weight")
            name = f"{here}mlp.experts.local_experts.{i}.linear_fc2.weight"
            found[name] = down.chunk(config.etp, 1)[etp]
        gates = [get(f"{there}mlp.experts.{e}.gate").chunk(config.etp, 1)[etp] for e in mine]
        if config.experts == "stacked":
            found[f"{here}mlp.experts.gate"] = torch.stack(gates)
        else:
            found |= {f"{here}mlp.experts.{i}.gate": gate for i, gate in enumerate(gates)}
    if at["pp"] == config.pp - 1 and chunk == config.vpp - 1:
        found[FINAL_NORM] = get(FINAL_NORM)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def groups_of(names: Iterable[str]) -> list[list[str]]:
    """The flat buffers of a chunk: what is outside the layers, dense layers, experts."""
    groups: list[list[str]] = [[], [], []]
    for name in names:
        outside = name in (EMBEDDING, FINAL_NORM)
        groups[0 if outside else 2 if "experts" in name else 1].append(name)
    return groups


def shard(
    config: Config, rank: int, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What FSDP leaves of a chunk's parameters to a rank."""
    at = config.place(rank)
    if config.storage == "whole":
        return {name: tensor.clone() for name, tensor in tensors.items()}
    found = {}
    for number, group in enumerate(groups_of(tensors)):
        count, index = (config.edp, at["edp"]) if number == 2 else (config.dp, at["dp"])
        if config.storage == "cuts":
            for name in group:
                pieces = tensors[name].chunk(count)
                empty = tensors[name][:0]
                found[name] = (pieces[index] if index < len(pieces) else empty).clone()
            continue
        buffer: list[torch.Tensor] = []
        owners: list[torch.Tensor] = []
        for i, name in enumerate(group):  # one after another, each at a multiple of ALIGNMENT
            numel = tensors[name].numel()
            tail = -numel % ALIGNMENT if i + 1 < len(group) else 0
            buffer += [tensors[name].reshape(-1), torch.full((tail,), SAVED_PADDING)]
            owners += [torch.full((numel,), i), torch.full((tail,), -1)]
        if not group:
            continue
        values, owner = torch.cat(buffer), torch.cat(owners)
        each = -(-len(values) // count)
        each = -(-each // ALIGNMENT) * ALIGNMENT
        mine = slice(index * each, index * each + each)
        for i, name in enumerate(group):
            found[name] = values[mine][owner[mine] == i].clone()
    return {name: found[name] for name in tensors}


def rank_chunks(config: Config, rank: int, slot: str = "") -> list[dict[str, torch.Tensor]]:
    """What a rank stores of the model (or of an optimizer slot): one mapping a chunk."""
    return [
        shard(config, rank, local_tensors(config, rank, chunk, slot)) for chunk in range(config.vpp)
    ]


def step_name(config: Config, rank: int, chunk: int, name: str) -> str:
    """A parameter's global name without an expert's index."""
    parts = name.split(".")
    if parts[1] == "layers":
        parts[2] = str(layers_of(config, config.place(rank)["pp"], chunk)[int(parts[2])])
    if "experts" in parts:
        parts = [part.rstrip("0123456789") for part in parts if not part.isdigit()]
    return ".".join(parts)


def state_dict(config: Config, rank: int, blank: bool = False) -> dict[str, Any]:
    """Model, Adam state and an iteration, as a rank holds them; `blank` before a load."""

    def value(tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor, BLANK) if blank else tensor

    state: dict[str, Any] = {"iteration": -1 if blank else 70}
    slots = {slot: rank_chunks(config, rank, slot) for slot in SLOTS}
    for chunk, tensors in enumerate(rank_chunks(config, rank)):
        tail = "" if config.vpp == 1 else str(chunk)
        state["model" + tail] = {name: value(tensor) for name, tensor in tensors.items()}
        per_parameter: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if tensor.numel() == 0:
                continue  # an empty shard has no gradient, so Adam makes no state for it
            step = step_of(step_name(config, rank, chunk, name))
            per_parameter[name] = {"step": torch.tensor(BLANK if blank else step)}
            for slot in SLOTS:
                per_parameter[name][slot] = value(slots[slot][chunk][name])
        rates = sorted({learning_rate(name) for name in tensors})
        groups = [
            {
                "lr": BLANK if blank else rate,
                "betas": (0.0, 0.0) if blank else (0.9, 0.95),
                "params": [name for name in tensors if learning_rate(name) == rate],
            }
            for rate in rates
        ]
        state["optimizer" + tail] = {"state": per_parameter, "param_groups": groups}
    return state


def after_load(config: Config, rank: int) -> dict[str, Any]:
    """What a blank state dict must be after a load; padding follows `config.padding`."""
    state = state_dict(config, rank)
    filler = 0.0 if config.padding == "zero" else BLANK
    tensors = list(state.values())
    while tensors:
        value = tensors.pop()
        if isinstance(value, dict):
            tensors += value.values()
        elif isinstance(value, torch.Tensor):
            value[value == SAVED_PADDING] = filler
    return state
