"""What lies in a checkpoint's folder beside the checkpoint; the one place that decides.

Two formats can meet in one folder: the library's own, complete by `checkpoint.json`, and torch's,
complete by `.metadata`. `finalize` puts both there on purpose. Any other `.metadata` is another
checkpoint, and nobody can tell which of the two is meant.
"""

from typing import Any

from shardplan.layouts import CheckpointError, CheckpointExistsError, DamagedCheckpointError

from .format.commit import Commit, read_commit
from .format.sums import block_sum
from .places.files import Files, files_at

STOCK = ".metadata"
# Ends what `finalize` writes; whoever unpickles it stops before.
_MARK = b"\nshardplan finalize"


def look(files: Files, overwrite: bool) -> Commit | None:
    """Returns the complete checkpoint that a save would replace, None if there is none.

    Raises:
        CheckpointExistsError: If there is one that the save may not replace: without `overwrite`
            any, and in no case one in torch's format.
    """
    commit = read_commit(files)
    if has_stock(files, commit):
        raise CheckpointExistsError(
            f"{files.root}: already exists: a checkpoint in torch's format ({STOCK}), which a save "
            "in the library's own format does not replace. Save elsewhere, or delete it first."
        )
    if commit is not None and not overwrite:
        raise CheckpointExistsError(
            f"{files.root}: already exists: holds a complete checkpoint (save {commit.save}). Save "
            "elsewhere, or pass overwrite=True to SafetensorsWriter; then it is replaced once the "
            "new one is complete."
        )
    return commit


def check_alone(files: Files, commit: Commit | None) -> None:
    """Refuses a folder that holds two checkpoints of different formats.

    Raises:
        DamagedCheckpointError: If it does.
    """
    if commit is not None and has_stock(files, commit):
        old = is_finalized(files)
        raise DamagedCheckpointError(
            f"{files.root}: holds two checkpoints: one in the library's own format (save "
            f"{commit.save}), and one in torch's ({STOCK}), which "
            + ("shardplan finalize wrote for another save. " if old else "is another save's. ")
            + "Nobody can tell which is meant. Move or delete the files of one: checkpoint.json and "
            f"the folder {commit.save}, or {STOCK} and the *.distcp files"
            + ("; or run shardplan finalize again if the first is meant." if old else ".")
        )


def check_stock_save(path: Any) -> None:
    """Refuses a save in torch's format into a folder that holds a checkpoint of the library's own.

    Both would count as complete. A path that can't be looked into is left to the storage writer.

    Raises:
        CheckpointExistsError: If it does.
    """
    try:
        files = files_at(path)
        commit = read_commit(files)
    except (OSError, TypeError, ValueError, CheckpointError):
        return
    if commit is not None:
        raise CheckpointExistsError(
            f"{files.root}: already exists: a checkpoint in the library's own format (save "
            f"{commit.save}), beside which torch's writer would put a second one. Save elsewhere, "
            "delete it first, or replace it with SafetensorsWriter(path, overwrite=True)."
        )


def has_stock(files: Files, commit: Commit | None) -> bool:
    """Returns whether a folder has a `.metadata` other than the one `finalize` wrote for a save."""
    raw = files.read(STOCK)
    if raw is None:
        return False
    return commit is None or files.read(_note(commit)) != _sum(raw)


def is_finalized(files: Files) -> bool:
    """Returns whether `finalize` wrote the `.metadata` of a folder, for whatever save."""
    return (files.read(STOCK) or b"").endswith(_MARK)


def put_stock(files: Files, commit: Commit, metadata: bytes) -> None:
    """Writes the `.metadata` of a complete checkpoint, and a note that it belongs to it."""
    metadata += _MARK
    files.put(_note(commit), _sum(metadata), sync=True)
    files.put(STOCK, metadata, sync=True)


def put_values(files: Files, commit: Commit, values: bytes) -> str:
    """Writes the Python values as stock tools read them, with their checksum; returns the file's name."""
    name = f"{commit.save}/values.distcp"
    files.put(f"{commit.save}/values.sum", _sum(values), sync=True)
    files.put(name, values, sync=True)
    return name


def values_fault(files: Files, commit: Commit) -> str | None:
    """Returns what is wrong with the Python values that `finalize` wrote, if anything."""
    noted = files.read(f"{commit.save}/values.sum")
    if noted is None:
        return None
    raw = files.read(f"{commit.save}/values.distcp")
    if raw is None:
        return "missing, though shardplan finalize wrote it. Run shardplan finalize again"
    return None if _sum(raw) == noted else "its checksum differs. Run shardplan finalize again"


def _note(commit: Commit) -> str:
    return f"{commit.save}/metadata.sum"


def _sum(raw: bytes) -> bytes:
    return block_sum(raw).hex().encode()
