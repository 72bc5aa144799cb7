"""Writes a checkpoint beside its place, and puts it there as a whole when it is complete."""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from shardplan.layouts import CheckpointError, CheckpointExistsError, SaveConflictError
from shardplan.layouts.errors import summary

from ..storage.format.commit import CHECKPOINT, is_save
from ..storage.places.files import files_at
from ..storage.unfinished import unfinished
from .opened import Checkpoint
from .safetensors_files import INDEX
from .stock import METADATA

_MARKS = (CHECKPOINT, METADATA)
# What the writers of torch, of Hugging Face's form and of this library put into a folder.
_FILES = re.compile(
    r"checkpoint\.json|\.save-\d+\.json|\.metadata|__\d+(_\d+)?\.(distcp|metadata|safetensors)|"
    r"(shard-\d+-)?model(-\d+-of-\d+)?\.safetensors|" + re.escape(INDEX)
)
_OLD = ".replaced"  # where the old folder waits until the new one is in its place
_SAVE_FILES = re.compile(
    r"\d{5}[.-].+|checkpoint\.json|ask\.json|(metadata|values)\.sum|values\.distcp"
)


@contextlib.contextmanager
def replacement(
    out: Path,
    *,
    folder: bool,
    overwrite: bool = False,
    source: Checkpoint | None = None,
    beside: Collection[str] = (),
) -> Iterator[Path]:
    """Gives a path to write to; what is there at the end takes the place of `out`, as a whole.

    If anything fails, `out` is as it was, and nothing else is left. A link is followed: what it
    points to is replaced.

    Args:
        out: The folder or file to make.
        folder: Whether a folder will be written.
        overwrite: Whether a checkpoint in `out` may be replaced.
        source: The open checkpoint that is being read, which must lie elsewhere.
        beside: Names of files other than a checkpoint's that the new folder will have too.

    Raises:
        CheckpointExistsError: If something is there that may not be replaced.
        SaveConflictError: If a save in `out` is unfinished.
        CheckpointError: If `out` can't be made, or is or contains the checkpoint that is read.
    """
    target = _target(out)
    if source is not None:
        _check_apart(out, target, source)
    before = _check_free(out, target, folder, overwrite, beside)
    try:
        room = Path(tempfile.mkdtemp(prefix=".shardplan-", dir=target.parent))
    except OSError as error:
        raise CheckpointError(
            f"{out}: {error.strerror}: can't write to {target.parent}."
        ) from error
    # The name stays: what is written may tell by its suffix what it is.
    new = room / target.name
    try:
        if folder:
            new.mkdir()
        yield new
        _sync(new)
        if _entries(target) != before:
            raise CheckpointExistsError(
                f"{out}: someone else has written there in the meantime, and it was left as it is. "
                "Choose another place."
            )
        _swap(new, target, room)
    except OSError as error:
        text = (error.strerror or str(error)).replace(str(new), str(out))
        raise CheckpointError(
            f"{out}: {text}. Free space, or choose another place; nothing was changed."
        ) from error
    except CheckpointError as error:
        raise type(error)(str(error).replace(str(new), str(out))) from error
    finally:
        if os.path.lexists(target) or not (room / _OLD).exists():
            shutil.rmtree(room, ignore_errors=True)


def _target(out: Path) -> Path:
    """Returns the path that links lead to.

    Raises:
        CheckpointError: If nothing can be made there.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", str(out)):
        raise CheckpointError(
            f"{out}: a URL, and this writes to local folders only. Write to a local folder, and "
            "copy that."
        )
    try:
        target = out.resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise CheckpointError(f"{out}: {error}. Choose another place.") from error
    if not target.parent.is_dir():
        raise CheckpointError(f"{out}: the folder {out.parent} does not exist. Make it first.")
    return target


def _check_apart(out: Path, target: Path, source: Checkpoint) -> None:
    """Checks that what is written is not what is read, nor lies in it or around it."""
    if "://" in source.path and not source.path.startswith("file://"):
        return
    path = Path(source.path.removeprefix("file://")).resolve()
    root = Path(str(source.files.root).removeprefix("file://"))
    files = [(root / name).resolve() for name in source.file_bytes()]  # may be links
    same = target.exists() and path.exists() and target.samefile(path)
    if same or any(file.is_relative_to(target) for file in (path, *files)):
        raise CheckpointError(
            f"{out}: the checkpoint {source.path}, which is read, lies there. Choose another place."
        )
    if path.is_dir() and target.is_relative_to(path):
        raise CheckpointError(
            f"{out}: lies in the checkpoint {source.path}, which is read. Choose another place."
        )


def _check_free(
    out: Path, target: Path, folder: bool, overwrite: bool, beside: Collection[str]
) -> dict[str, tuple[int, int]] | None:
    """Returns what is in the place of a checkpoint that may be replaced, None if nothing is."""
    for parent in list(target.parents)[:2]:
        mark = next((mark for mark in _MARKS if (parent / mark).is_file()), None)
        if mark is not None:
            raise CheckpointError(
                f"{out}: lies in the checkpoint {parent} ({mark}). Choose another place."
            )
    before = _entries(target)
    if before is None:
        return None
    if target.is_dir():
        held = "a mount point" if os.path.ismount(target) else ""
        held = "the working folder" if Path.cwd().is_relative_to(target) else held
        if held:
            raise CheckpointError(f"{out}: {held}, which can't be replaced. Choose another place.")
    if folder and target.is_dir() and not before:
        return before
    if not overwrite:
        raise CheckpointExistsError(
            f"{out}: exists already. Choose another place, or pass overwrite=True."
        )
    if target.is_dir() != folder or not (target.is_dir() or target.is_file()):
        is_a = "a folder" if target.is_dir() else "not a folder" if folder else "not a file"
        raise CheckpointExistsError(
            f"{out}: {is_a}, and what is written is a {'folder' if folder else 'file'}. Delete it "
            "first, or choose another place."
        )
    if folder:
        _check_checkpoint(out, target, before, beside)
    return before


def _check_checkpoint(
    out: Path, target: Path, before: Collection[str], beside: Collection[str]
) -> None:
    """Checks that a folder holds a checkpoint that nobody writes, and nothing else."""
    tops = {name.partition("/")[0] for name in before}
    marked = any(mark in tops for mark in (*_MARKS, INDEX))
    tensors = {name for name in tops if name.endswith(".safetensors")}
    # Without a mark all of these are the checkpoint, whatever their names.
    ours = {*beside, *(() if marked else tensors)}
    foreign = sorted(name for name in before if not _is_ours(target, name, ours))
    if foreign or not (marked or tensors):
        what = f"holds {summary(foreign)}" if foreign else "holds no complete checkpoint"
        raise CheckpointExistsError(
            f"{out}: {what}{', not of a checkpoint' if foreign else ''}. A folder is replaced as a "
            "whole: move its files elsewhere, or choose another place."
        )
    for text in unfinished(files_at(target)):
        raise SaveConflictError(
            f"{out}: {text}. Choose another place, or delete the folder if nobody needs it."
        )


def _is_ours(target: Path, name: str, others: Collection[str]) -> bool:
    """Whether an entry of a folder is one that writers of checkpoints make."""
    top, _, below = name.partition("/")
    if is_save(top):
        return not below or _SAVE_FILES.fullmatch(below) is not None
    is_file = not below and not (target / top).is_dir()
    return is_file and (top in others or _FILES.fullmatch(top) is not None)


def _entries(target: Path) -> dict[str, tuple[int, int]] | None:
    """Returns size and time of all that is at a path, None if nothing is."""
    if not os.path.lexists(target):
        return None
    if not target.is_dir():
        stat = target.stat()
        return {"": (stat.st_size, stat.st_mtime_ns)}
    found = {}
    for path in target.rglob("*"):
        stat = path.lstat()
        found[path.relative_to(target).as_posix()] = (stat.st_size, stat.st_mtime_ns)
    return found


def _sync(new: Path) -> None:
    """Waits until all that was written is on the disk, so that the old one may go."""
    for path in [*new.rglob("*"), new]:
        _fsync(path)


def _fsync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _swap(new: Path, target: Path, room: Path) -> None:
    """Puts a folder or file into its place; on failure the old one is back there."""
    if not target.is_dir():
        os.replace(new, target)
    else:
        shutil.copymode(target, new)
        old = room / _OLD
        try:
            os.rename(target, old)
            os.rename(new, target)
        except BaseException as error:  # a Ctrl-C between the two, too
            if old.exists() and not target.exists():
                try:
                    os.rename(old, target)
                except OSError:
                    raise CheckpointError(
                        f"{target}: {error}. The old checkpoint is in {old}: move it back."
                    ) from error
            raise
    _fsync(target.parent)
