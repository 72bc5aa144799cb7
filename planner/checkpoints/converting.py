"""Writes an open checkpoint in another format, in bounded memory.

| format | is |
|---|---|
| `dcp` | a folder that stock `dcp.load` opens |
| `shardplan` | a folder in the library's own format |
| `torch` | one file that `torch.load` opens |
| `safetensors` | one file, tensors only |
"""

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardplan.layouts import CheckpointError
from shardplan.layouts.errors import summary

from ..state.entries import Index, stock_path
from .opened import Checkpoint
from .own_writing import write_own
from .stock_writing import OneFileWriter
from .streamed import StreamedSavePlanner, save_alone
from .streams import Source, write_safetensors
from .torch_archive import write_archive

Advance = Callable[[int], None]
FORMATS = ("dcp", "shardplan", "torch", "safetensors")


def sources(checkpoint: Checkpoint) -> dict[str, Source]:
    """Returns a checkpoint's tensors as sources that are read box by box."""

    def reader(key: str) -> Any:
        return lambda offsets, sizes: checkpoint.read(key, offsets, sizes)

    return {
        key: Source(checkpoint.dtype(key), checkpoint.shape(key), reader(key))
        for key in checkpoint.tensors
    }


def convert(
    checkpoint: Checkpoint,
    out: Path,
    to: str,
    *,
    tensors_only: bool = False,
    trust_pickle: bool = False,
    advance: Advance = lambda n: None,
) -> None:
    """Writes a checkpoint in another format.

    Args:
        checkpoint: The open checkpoint; its tensors must be complete.
        out: The folder or file to make.
        to: One of `FORMATS`.
        tensors_only: Whether values that are no tensors are left out.
        trust_pickle: Whether those that are no plain data may be unpickled.
        advance: Told the bytes of each block that is written.

    Raises:
        CheckpointError: If the checkpoint is incomplete or the format can't hold it.
    """
    objects = [] if tensors_only else checkpoint.objects
    if to == "safetensors":
        if objects:
            raise CheckpointError(
                f"{checkpoint.path}: {len(objects)} values are no tensors, and safetensors files "
                f"hold tensors only ({', '.join(objects[:3])}{', …' if len(objects) > 3 else ''}). "
                "Pass --tensors-only to leave them out, or convert to dcp or torch."
            )
        write_safetensors(out, sources(checkpoint), {"format": "pt"}, advance)
    elif to == "torch":
        loaded = {key: checkpoint.load_object(key, trust_pickle) for key in objects}
        write_archive(out, nested(checkpoint, {**sources(checkpoint), **loaded}), advance)
    elif to == "shardplan":
        loaded = {key: checkpoint.load_object(key, trust_pickle) for key in objects}
        write_own(out, sources(checkpoint), loaded, advance, overwrite=True)
    elif to == "dcp":
        paths = {
            key: stock_path(checkpoint.state_path(key)) for key in (*checkpoint.tensors, *objects)
        }
        data = {key: io.BytesIO(checkpoint.object_bytes(key)) for key in objects}
        planner = StreamedSavePlanner(sources(checkpoint), data, paths, advance)
        save_alone(planner, OneFileWriter(out))
    else:
        raise CheckpointError(f"{to}: no such format. Choose one of {', '.join(FORMATS)}.")


def nested(checkpoint: Checkpoint, values: Mapping[str, Any]) -> dict[Any, Any]:
    """Returns the nested state dict that a checkpoint was made of.

    Raises:
        CheckpointError: If two values have one place.
    """
    root: dict[Any, Any] = {}
    clashes = []
    lists: list[tuple[Any, Any]] = []
    for key, value in values.items():
        path = checkpoint.state_path(key)
        at: Any = root
        for element in path[:-1]:
            below = at.setdefault(element, {})
            if not isinstance(below, dict):
                clashes.append(f"{key}: its place {path} is taken by another value")
                break
            at = below
        else:
            if path[-1] in at:
                clashes.append(f"{key}: its place {path} is taken by another value")
            at[path[-1]] = value
    if clashes:
        raise CheckpointError(summary(clashes))
    _find_lists(root, lists)
    for holder, element in reversed(lists):
        found = holder[element]
        holder[element] = [found[i] for i in sorted(found)]
    return root


def _find_lists(holder: Any, lists: list[tuple[Any, Any]]) -> None:
    """Notes the mappings whose keys are positions in a list, outer ones first."""
    for element, value in holder.items():
        if isinstance(value, dict):
            if value and all(isinstance(k, Index) for k in value):
                lists.append((holder, element))
            _find_lists(value, lists)
