"""Finds out what format a checkpoint has and opens it."""

import os
from pathlib import Path

from shardplan.layouts import CheckpointError, IncompleteCheckpointError

from ..storage.format.commit import CHECKPOINT
from ..storage.places.files import files_at
from ..storage.unfinished import unfinished
from .files import Files
from .opened import Checkpoint
from .own import OwnCheckpoint
from .safetensors_files import INDEX, SafetensorsFiles
from .stock import METADATA, StockCheckpoint
from .torch_file import SUFFIXES, TorchFiles

_MARKS = (CHECKPOINT, METADATA)
_ARCHIVE = b"PK\x03\x04"


def open_checkpoint(path: str | os.PathLike[str], *, trust_pickle: bool = False) -> Checkpoint:
    """Opens a checkpoint of any known format.

    | path | format |
    |---|---|
    | folder with `checkpoint.json`, or that file | the library's own |
    | folder with `.metadata`, or that file | stock DCP |
    | folder with `*.safetensors` | safetensors, Hugging Face |
    | folder with `*.pt`, `*.pth`, `*.bin` or `*.ckpt` | files that ranks wrote with `torch.save` |
    | another file | safetensors or a state dict by `torch.save`, whatever its name |

    Args:
        path: The folder or file, or its URL.
        trust_pickle: Whether objects that are not plain data may be unpickled.

    Raises:
        IncompleteCheckpointError: If the folder holds only a save that did not end.
        CheckpointError: If there is no checkpoint, or it is damaged.
    """
    text = os.fspath(path)
    if "://" in text:
        text = text.rstrip("/")
    files = Files(text)
    if not _is_folder(files):
        folder, _, name = files.root.rpartition("/")
        # A path without a slash lies in the working folder, one right below the root in `/`.
        return _open_file(folder or ("/" if "/" in files.root else "."), name, trust_pickle)
    if files.size(CHECKPOINT) is not None:
        return OwnCheckpoint(files.root)
    if files.size(METADATA) is not None:
        return StockCheckpoint(files, trust_pickle=trust_pickle)
    names = files.names()
    if INDEX in names or any(name.endswith(".safetensors") for name in names):
        return SafetensorsFiles(files)
    saved = [name for name in names if name.endswith(SUFFIXES)]
    if saved:
        return TorchFiles(files, saved, trust_pickle=trust_pickle)
    if begun := _begun(files, names):
        raise IncompleteCheckpointError(f"{files.root}: no complete checkpoint: {begun}.")
    inner = [n for n in names[:1000] if any(files.size(f"{n}/{m}") is not None for m in _MARKS)]
    hint = f" Did you mean {files.root}/{inner[0]}?" if inner else ""
    kinds = f"{', '.join(_MARKS)}, *.safetensors, {', '.join('*' + s for s in SUFFIXES)}"
    raise CheckpointError(f"{files.root}: no checkpoint in this folder (looked for {kinds}).{hint}")


def _begun(files: Files, names: list[str]) -> str:
    """Says what is left of saves that did not end in a folder without a checkpoint."""
    if left := unfinished(files_at(files.root)):
        return "; ".join(left)
    written = sum(name.endswith(".distcp") for name in names)
    return (
        f"unfinished save of torch's writer: {written} *.distcp, no {METADATA}" if written else ""
    )


def _is_folder(files: Files) -> bool:
    """Returns whether a path is a folder; where it is a URL, one with something in it."""
    if "://" not in files.root:
        return Path(files.root).is_dir()
    names = files.names()
    # A store lists an object as the only name below itself.
    alone = names == [files.root.rpartition("/")[2]]
    return bool(names) and not (alone and files.size(names[0]) is None)


def _open_file(folder: str, name: str, trust_pickle: bool) -> Checkpoint:
    if name == CHECKPOINT:
        return OwnCheckpoint(folder)
    files = Files(folder)
    size = files.size(name)
    if size is None:
        raise CheckpointError(f"{files.path(name)}: no such file or folder.")
    if name == METADATA:
        return StockCheckpoint(files, trust_pickle=trust_pickle)
    above = folder.rpartition("/")[0]
    for where, mark in ((above, CHECKPOINT), (folder, METADATA)):
        if where and Files(where).size(mark) is not None:
            raise CheckpointError(
                f"{files.path(name)}: a part of the checkpoint {where}. Give that folder."
            )
    head = files.take(name, 0, min(size, 9))
    fits = int.from_bytes(head[:8], "little") + 8 <= size
    if head[:4] != _ARCHIVE and ((head[8:] == b"{" and fits) or name.endswith(".safetensors")):
        return SafetensorsFiles(files, name)
    return TorchFiles(files, [name], trust_pickle=trust_pickle, folder=False)
