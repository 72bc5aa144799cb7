"""Writes an open checkpoint in another format, in bounded memory.

| format | is |
|---|---|
| `dcp` | a folder that stock `dcp.load` opens |
| `shardplan` | a folder in the library's own format |
| `torch` | one file that `torch.load` opens |
| `safetensors` | one file, tensors only |
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardplan.layouts import CheckpointError, UnstorableValueError
from shardplan.layouts.errors import summary
from shardplan.layouts.slab import Shape

from ..planning.metadata import UNPADDED
from ..state.entries import Index, stock_path
from .opened import Checkpoint
from .own_writing import write_own
from .replacing import replacement
from .stock_writing import OneFileWriter
from .streamed import StreamedSavePlanner, drive_save
from .streams import Advance, Source, write_safetensors
from .torch_archive import write_archive

FORMATS = ("dcp", "shardplan", "torch", "safetensors")


def sources(checkpoint: Checkpoint) -> dict[str, Source]:
    """Returns a checkpoint's tensors as sources that are read box by box.

    What is damaged is not read: under new checksums nobody would know.

    Raises:
        DamagedCheckpointError: If files are missing or short; for a tensor, when it is first read.
    """
    checkpoint.check_files()

    def reader(key: str) -> Any:
        def read(offsets: Shape, sizes: Shape) -> Any:
            checkpoint.check(key)
            return checkpoint.read(key, offsets, sizes)

        return read

    return {
        key: Source(checkpoint.dtype(key), checkpoint.shape(key), reader(key))
        for key in checkpoint.tensors
    }


def convert(
    checkpoint: Checkpoint,
    out: Path,
    to: str,
    *,
    overwrite: bool = False,
    tensors_only: bool = False,
    trust_pickle: bool = False,
    advance: Advance = lambda n: None,
) -> None:
    """Writes a checkpoint in another format; if that fails, `out` is as it was.

    Args:
        checkpoint: The open checkpoint; its tensors must be complete.
        out: The folder or file to make.
        to: One of `FORMATS`.
        overwrite: Whether a checkpoint in `out` is replaced, as a whole.
        tensors_only: Whether values that are no tensors are left out.
        trust_pickle: Whether those that are no plain data may be unpickled.
        advance: Told the bytes of each block that is written.

    Raises:
        CheckpointExistsError: If something is in `out` that may not be replaced.
        UnstorableValueError: If the format can't hold a value or a key.
        CheckpointError: If the checkpoint is incomplete, or `out` can't be written.
    """
    if to not in FORMATS:
        raise CheckpointError(f"{to}: not a format. Choose one of {', '.join(FORMATS)}.")
    folder = to in ("dcp", "shardplan")
    with replacement(out, folder=folder, overwrite=overwrite, source=checkpoint) as new:
        _write(checkpoint, new, to, tensors_only, trust_pickle, advance)


def _write(
    checkpoint: Checkpoint,
    out: Path,
    to: str,
    tensors_only: bool,
    trust_pickle: bool,
    advance: Advance,
) -> None:
    objects = [] if tensors_only else checkpoint.objects
    tensors = sources(checkpoint)
    for key in objects:
        checkpoint.check(key)
    if to == "safetensors":
        if objects:
            raise UnstorableValueError(
                f"{checkpoint.path}: {_count(objects)} no tensors, and safetensors files hold tensors "
                f"only ({', '.join(objects[:3])}{', …' if len(objects) > 3 else ''}). "
                "Pass tensors_only=True to leave them out, or convert to dcp or torch."
            )
        write_safetensors(out, tensors, {"format": "pt"}, advance)
    elif to == "dcp":
        keys = (*tensors, *objects)
        paths = {key: stock_path(checkpoint.state_path(key)) for key in keys}
        planned = checkpoint.metadata.planner_data
        if isinstance(planned, Mapping) and UNPADDED in planned:
            paths[UNPADDED] = planned[UNPADDED]
        data = {key: io.BytesIO(checkpoint.object_bytes(key)) for key in objects}
        drive_save(StreamedSavePlanner(tensors, data, paths, advance), OneFileWriter(out))
    else:
        loaded = {key: checkpoint.load_object(key, trust_pickle) for key in objects}
        if to == "torch":
            write_archive(out, nested(checkpoint, {**tensors, **loaded}), advance)
        else:
            write_own(out, tensors, loaded, advance)


def nested(checkpoint: Checkpoint, values: Mapping[str, Any]) -> dict[Any, Any]:
    """Returns the nested state dict that a checkpoint was made of.

    Raises:
        CheckpointError: If two values have one place.
    """
    root = _Node()
    clashes = []
    for key, value in values.items():
        path = checkpoint.state_path(key)
        at: Any = root
        for element in path[:-1]:
            at = at.setdefault(element, _Node())
            if not isinstance(at, _Node):
                break
        if not isinstance(at, _Node) or path[-1] in at:
            clashes.append(f"{key}: its place {path} is taken by another value")
            continue
        at[path[-1]] = value
    if clashes:
        raise CheckpointError(summary(clashes))
    return {element: _plain(value) for element, value in root.items()}


def _count(values: Sequence[str]) -> str:
    return "1 value is" if len(values) == 1 else f"{len(values)} values are"


class _Node(dict[Any, Any]):
    """A container of the state dict, as values that are dicts are not."""


def _plain(value: Any) -> Any:
    """Returns a container as a list if its keys are all the positions in one, else as a dict."""
    if not isinstance(value, _Node):
        return value
    below = {element: _plain(child) for element, child in value.items()}
    positions = all(isinstance(element, Index) for element in below)
    if positions and set(below) == set(range(len(below))):
        return [below[position] for position in range(len(below))]
    # With --tensors-only a list may have gaps: its positions stay, as the keys of a dict.
    return {int(e) if isinstance(e, Index) else e: child for e, child in below.items()}
