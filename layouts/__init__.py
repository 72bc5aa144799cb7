"""Where each parameter lies in a checkpoint, as rank-free data that every rank can evaluate.

| module | holds |
|---|---|
| `slab`, `storage`, `stages`, `join`, `layout` | the algebra: boxes, the stages that move them, their chain |
| `coverage`, `serial` | the proof that every element is covered once; layouts as plain data |
| `grid` | mesh axes and a rank's coordinate, from groups, meshes or integers |
| `provider`, `registry`, `model` | who knows how a parameter is laid out, and how they are asked |
| `fsdp`, `tensor_parallel`, `swiglu`, `gdn`, `mamba`, `mla`, `experts`, `vocabulary`, `pipeline` | the built-in providers |
| `megatron_fsdp` | the flat buffers of live Megatron-FSDP parameters |
| `testing` | the conformance suite for a provider of your own |

Coordinate spaces, always in this order: storage → local → component → global. All numbers count
elements. Nothing here imports torch.
"""

if __name__ != "shardplan.layouts":
    raise ImportError(
        f"{__name__}: this folder is installed as shardplan.layouts, and its modules would be loaded "
        "a second time under another name. Run scripts/setup_venv and import shardplan.layouts."
    )

from .coverage import prove, tiling_faults
from .errors import (
    CheckpointError,
    CheckpointExistsError,
    DamagedCheckpointError,
    DtypeMismatchError,
    IncompleteCheckpointError,
    LayoutError,
    MissingKeyError,
    RanksDisagreeError,
    SaveConflictError,
    ShapeMismatchError,
    UnexpectedKeyError,
    UnstorableValueError,
)
from .experts import ExpertGrid, expert_name
from .fsdp import BufferDescription, DTensorStorage, FSDPFlatBuffer
from .gdn import GDN
from .grid import Grid, Grids, ep_rank_and_size
from .join import Join
from .layout import EXPERT, Layout, replicated
from .mamba import Mamba
from .mla import MLADownProjection
from .model import ModelLayouts, carried_pg_collection, clean_name, model_layouts
from .pipeline import PipelineLayers
from .provider import LayoutProvider, Level, ParamInfo
from .registry import LayoutRegistry, installed_layouts
from .slab import Slab
from .stages import (
    Concat,
    ExpertIndex,
    Fuse,
    Interleave,
    Permute,
    Shard,
    Stack,
    Stage,
    Unpad,
    Unstack,
)
from .storage import Cut, Cuts, FlatBuffer, FlatRanges, Whole
from .swiglu import SwiGLU
from .tensor_parallel import TensorParallel
from .vocabulary import VocabularyPadding

DEFAULT_LAYOUTS: tuple[LayoutProvider, ...] = (
    FSDPFlatBuffer(),
    DTensorStorage(),
    SwiGLU(),
    GDN(),
    Mamba(),
    MLADownProjection(),
    TensorParallel(),
    VocabularyPadding(),
    ExpertGrid(),
    PipelineLayers(),
)

__all__ = [
    "DEFAULT_LAYOUTS",
    "EXPERT",
    "GDN",
    "BufferDescription",
    "CheckpointError",
    "CheckpointExistsError",
    "Concat",
    "Cut",
    "Cuts",
    "DTensorStorage",
    "DamagedCheckpointError",
    "DtypeMismatchError",
    "ExpertGrid",
    "ExpertIndex",
    "FSDPFlatBuffer",
    "FlatBuffer",
    "FlatRanges",
    "Fuse",
    "Grid",
    "Grids",
    "IncompleteCheckpointError",
    "Interleave",
    "Join",
    "Layout",
    "LayoutError",
    "LayoutProvider",
    "LayoutRegistry",
    "Level",
    "MLADownProjection",
    "Mamba",
    "MissingKeyError",
    "ModelLayouts",
    "ParamInfo",
    "Permute",
    "PipelineLayers",
    "RanksDisagreeError",
    "SaveConflictError",
    "ShapeMismatchError",
    "Shard",
    "Slab",
    "Stack",
    "Stage",
    "SwiGLU",
    "TensorParallel",
    "UnexpectedKeyError",
    "Unpad",
    "Unstack",
    "UnstorableValueError",
    "VocabularyPadding",
    "Whole",
    "carried_pg_collection",
    "clean_name",
    "ep_rank_and_size",
    "expert_name",
    "installed_layouts",
    "model_layouts",
    "prove",
    "replicated",
    "tiling_faults",
]
