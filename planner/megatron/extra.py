"""What modules keep beside parameters and buffers (`_extra_state`), such as histories of fp8 scales.

They are a section of their own, `extra_state`. A module is named by its parameters: with the
layer's global number, and the expert's. Megatron-LM leaves all of it out of its checkpoints.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from shardplan.layouts import Grid, Layout
from shardplan.layouts.model import own_paths

from ..planning.table import Chunk
from .names import global_name

SECTION = "extra_state"
_LEAF = "_extra_state"


def extra_states(modules: Iterable[Any], chunks: Iterable[Chunk]) -> Iterator[tuple[str, Any, Any]]:
    """Yields the name, the module and the value of every extra state that is not None.

    Args:
        modules: The chunks of the model.
        chunks: Their layouts.
    """
    for root, chunk in zip(modules, chunks, strict=True):
        paths = own_paths(root)
        for path, module in root.named_modules():
            if type(module).get_extra_state is torch.nn.Module.get_extra_state:
                continue
            value = module.get_extra_state()
            if value is not None:
                yield f"{_name(paths[path], module, chunk)}.{_LEAF}", module, value


def _name(path: str, module: Any, chunk: Chunk) -> str:
    """Returns a module's global name: that of its first parameter without the parameter's own."""
    for own, _ in module.named_parameters(recurse=False):
        layout: Layout | None = chunk.layouts.get(f"{path}.{own}")
        if layout is not None:
            grid: Grid = chunk.grids.of(layout.family)
            return global_name(layout, grid).rpartition(".")[0]
    return path
