"""Planners for `torch.distributed.checkpoint` in which every rank plans alone."""

if __name__ != "shardplan.planner":
    raise ImportError(
        f"{__name__}: this folder is installed as shardplan.planner, and under another name its "
        "modules would be loaded twice. Run scripts/setup_venv and import shardplan.planner."
    )

from shardplan.layouts import CheckpointError, Grids, LayoutError

from .load import LayoutAwareLoadPlanner
from .policies import LoadPolicies
from .report import LoadReport
from .save import LayoutAwareSavePlanner
from .state.per_rank import PerRank
from .storage import PinnedStager, SafetensorsReader, SafetensorsWriter

__all__ = [
    "CheckpointError",
    "Grids",
    "LayoutAwareLoadPlanner",
    "LayoutAwareSavePlanner",
    "LayoutError",
    "LoadPolicies",
    "LoadReport",
    "PerRank",
    "PinnedStager",
    "SafetensorsReader",
    "SafetensorsWriter",
]
