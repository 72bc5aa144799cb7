"""Finds out what format a checkpoint has and opens it."""

from pathlib import Path

from shardplan.layouts import CheckpointError

from ..storage.format.commit import CHECKPOINT
from .opened import Checkpoint
from .own import OwnCheckpoint
from .safetensors_files import INDEX, SafetensorsFiles
from .stock import StockCheckpoint
from .torch_file import TorchFile


def open_checkpoint(path: str | Path, *, trust_pickle: bool = False) -> Checkpoint:
    """Opens a checkpoint of any known format.

    | path | format |
    |---|---|
    | folder with `checkpoint.json`, or that file | the library's own |
    | folder with `.metadata`, or that file | stock DCP |
    | folder with `*.safetensors`, or one such file | safetensors, Hugging Face |
    | another file | a state dict by `torch.save` |

    Args:
        path: The folder or file.
        trust_pickle: Whether objects that are no plain data may be unpickled.

    Raises:
        CheckpointError: If there is no checkpoint, or it is damaged.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder.")
    if path.is_dir():
        if (path / CHECKPOINT).is_file():
            return OwnCheckpoint(path)
        if (path / ".metadata").is_file():
            return StockCheckpoint(path, trust_pickle=trust_pickle)
        if (path / INDEX).is_file() or any(path.glob("*.safetensors")):
            return SafetensorsFiles(path)
        kinds = f"{CHECKPOINT}, .metadata, *.safetensors"
        inner = [
            p.parent.name for mark in (CHECKPOINT, ".metadata") for p in path.glob("*/" + mark)
        ]
        hint = f" Did you mean {path / inner[0]}?" if inner else ""
        raise CheckpointError(f"{path}: no checkpoint in this folder (looked for {kinds}).{hint}")
    if path.name == CHECKPOINT:
        return OwnCheckpoint(path.parent)
    if path.name == ".metadata":
        return StockCheckpoint(path.parent, trust_pickle=trust_pickle)
    for folder, mark in ((path.parent.parent, CHECKPOINT), (path.parent, ".metadata")):
        if (folder / mark).is_file():
            raise CheckpointError(f"{path}: a part of the checkpoint {folder}. Give that folder.")
    if path.suffix == ".safetensors":
        return SafetensorsFiles(path)
    return TorchFile(path, trust_pickle=trust_pickle)
