"""Saves and loads the job's state with the layout-aware planners."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from model import HybridModel
from shardplan.planner import LayoutAwareLoadPlanner, LayoutAwareSavePlanner, LoadReport


def save(
    path: Path, model: HybridModel, optimizer: torch.optim.Optimizer, progress: dict[str, Any]
) -> None:
    """Writes model, optimizer and progress; called by all ranks together."""
    dcp.save(
        capture(model, optimizer, progress),
        checkpoint_id=path,
        planner=LayoutAwareSavePlanner(model, pg_collection=model.pg_collection),
    )


def load(
    path: Path, model: HybridModel, optimizer: torch.optim.Optimizer, progress: dict[str, Any]
) -> tuple[dict[str, Any], LoadReport]:
    """Fills model and optimizer in place from a checkpoint of any configuration.

    Returns:
        The saved progress, under the keys of `progress`, and what the planner did on this rank.
    """
    state = capture(model, optimizer, progress)
    planner = LayoutAwareLoadPlanner(model, pg_collection=model.pg_collection)
    dcp.load(state, checkpoint_id=path, planner=planner)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return state["train"], planner.report


def capture(
    model: HybridModel, optimizer: torch.optim.Optimizer, progress: dict[str, Any]
) -> dict[str, Any]:
    """The state dict; its tensors are those of the model and the optimizer, not copies."""
    return {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "train": dict(progress),
    }
