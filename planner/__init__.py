"""Planners for `torch.distributed.checkpoint` in which every rank plans alone."""

if __name__ != "shardplan.planner":
    raise ImportError(
        f"{__name__}: this folder is installed as shardplan.planner, and under another name its "
        "modules would be loaded twice. Run scripts/setup_venv and import shardplan.planner."
    )

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from .load import LayoutAwareLoadPlanner
    from .planning.table import LayoutOptions, LayoutTable
    from .policies import LoadPolicies
    from .report import LoadReport
    from .save import LayoutAwareSavePlanner
    from .state.per_rank import PerRank
    from .storage import PinnedStager, SafetensorsReader, SafetensorsWriter

# What imports torch is imported when it is asked for: `shardplan --help` does without.
_HOMES = {
    "LayoutAwareLoadPlanner": "load",
    "LayoutAwareSavePlanner": "save",
    "LayoutOptions": "planning.table",
    "LayoutTable": "planning.table",
    "LoadPolicies": "policies",
    "LoadReport": "report",
    "PerRank": "state.per_rank",
    "PinnedStager": "storage",
    "SafetensorsReader": "storage",
    "SafetensorsWriter": "storage",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return found


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
    "LayoutOptions",
    "LayoutTable",
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
