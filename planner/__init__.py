"""Planners for `torch.distributed.checkpoint` in which every rank plans alone."""

if __name__ != "shardplan.planner":
    raise ImportError(
        f"{__name__}: this folder is installed as shardplan.planner, and under another name its "
        "modules would be loaded twice. Run scripts/setup_venv and import shardplan.planner."
    )

from shardplan.layouts import (
    CheckpointError,
    CheckpointExistsError,
    DamagedCheckpointError,
    DtypeMismatchError,
    Grids,
    IncompleteCheckpointError,
    LayoutError,
    MissingKeyError,
    RanksDisagreeError,
    SaveConflictError,
    ShapeMismatchError,
    UnexpectedKeyError,
    UnstorableValueError,
)

from .load import LayoutAwareLoadPlanner
from .policies import LoadPolicies
from .report import LoadReport
from .save import LayoutAwareSavePlanner
from .state.per_rank import PerRank
from .storage import PinnedStager, SafetensorsReader, SafetensorsWriter

__all__ = [
    "CheckpointError",
    "CheckpointExistsError",
    "DamagedCheckpointError",
    "DtypeMismatchError",
    "Grids",
    "IncompleteCheckpointError",
    "LayoutAwareLoadPlanner",
    "LayoutAwareSavePlanner",
    "LayoutError",
    "LoadPolicies",
    "LoadReport",
    "MissingKeyError",
    "PerRank",
    "PinnedStager",
    "RanksDisagreeError",
    "SafetensorsReader",
    "SafetensorsWriter",
    "SaveConflictError",
    "ShapeMismatchError",
    "UnexpectedKeyError",
    "UnstorableValueError",
]
