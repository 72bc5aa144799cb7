"""The real planner timed on one rank of a described model, with memory that is never touched."""

import pickle
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from ...checkpoints.unbacked import unbacked
from ...compat import storage_info
from ...save import LayoutAwareSavePlanner
from .files import WEIGHT
from .forecast import Placement


@dataclass(frozen=True, slots=True)
class Trial:
    """What planning one rank took.

    Attributes:
        first: Seconds of the first plan: the model's layouts and the rank's write items.
        again: Seconds of the next plan, for an unchanged state dict.
        items: Write items of the rank.
        message: Bytes that a rank sends while it plans, the first of a stage aside.
        layouts: Bytes that the first rank of each pipeline stage sends besides: all layouts.
    """

    first: float
    again: float
    items: int
    message: int
    layouts: int


def time_planning(placement: Placement, state: dict[str, torch.dtype]) -> Trial:
    """Plans a save on the first rank of the first pipeline stage, and times it.

    Args:
        placement: Where the parameters lie.
        state: Dtype of each saved tensor of a parameter.
    """
    description, _ = placement.stages[0]
    values = _blank(placement, state)
    begin = time.perf_counter()
    planner = LayoutAwareSavePlanner(
        description.shapes, grid=description.grids, layouts=description.providers
    )
    planner.set_up_planner(values)
    plan = planner.create_local_plan()
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    planner.set_up_planner(values)
    planner.create_local_plan()
    again = time.perf_counter() - begin
    leader = len(pickle.dumps(plan))
    data: Any = plan.planner_data
    layouts = len(pickle.dumps(getattr(data, "manifest", None)))
    return Trial(first, again, len(plan.items), max(leader - layouts, 0), layouts)


def _blank(placement: Placement, state: dict[str, torch.dtype]) -> dict[str, Any]:
    """Returns a state dict whose tensors have addresses but no memory behind them."""
    description, layouts = placement.stages[0]
    held = [
        (fqn, slot, dtype, layout.storage.numel(description.grids.of(layout.family)))
        for fqn, layout in layouts.items()
        for slot, dtype in state.items()
    ]
    tensors = unbacked((dtype, (numel,)) for _, _, dtype, numel in held)
    values: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}}
    for (fqn, slot, _, _), tensor in zip(held, tensors, strict=True):
        if slot == WEIGHT:
            values["model"][fqn] = tensor
        else:
            values["optimizer"]["state"].setdefault(fqn, {})[slot] = tensor
    return values


def stock_bytes_per_chunk(keys: int = 50, chunks: int = 100) -> float:
    """Returns how many bytes stock `.metadata` takes for a chunk, by pickling a sample.

    Args:
        keys: Tensors of the sample.
        chunks: Chunks of each.
    """
    info = storage_info()

    def sample(count: int) -> int:
        stored, places = {}, {}
        for k in range(keys):
            key = f"optimizer.state.decoder.layers.{k}.mlp.experts.linear_fc1.weight{k}_w.exp_avg"
            boxes = []
            for c in range(count):
                offsets = torch.Size((c * 16, 0))
                boxes.append(ChunkStorageMetadata(offsets, torch.Size((16, 2048))))
                places[MetadataIndex(key, offsets, c)] = info(f"__{c}_0.distcp", c << 17, 1 << 17)
            stored[key] = boxes
        return len(pickle.dumps((stored, places)))

    return (sample(chunks) - sample(1)) / (keys * (chunks - 1))
