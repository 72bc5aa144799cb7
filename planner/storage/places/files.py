"""Where a checkpoint's files lie: a folder of a POSIX file system, or what a URL names.

| name | is |
|---|---|
| `files_at` | the place that a path or URL names |
| `LocalFiles` | a folder of a POSIX file system |
| `opened` | a data file for the time of a `with` block |
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardplan.layouts import CheckpointError

from .place import SMALL_FILE, Files, InFile, OutFile

__all__ = ["Files", "InFile", "LocalFiles", "OutFile", "files_at", "is_leftover", "opened"]


def files_at(path: Any) -> Files:
    """Returns the place that a path or URL names.

    Raises:
        CheckpointError: If it is a URL and fsspec, which knows them, is not installed.
    """
    text = os.fspath(path)
    if isinstance(text, str) and "://" in text and not text.startswith("file://"):
        try:
            from .remote import RemoteFiles
        except ImportError as error:
            raise CheckpointError(
                f"{text}: a URL needs fsspec ({error}). Install it, with its driver for this kind "
                "of storage."
            ) from None
        remote: Files = RemoteFiles(text)
        return remote
    return LocalFiles(Path(str(text).removeprefix("file://")))


class LocalFiles:
    """A folder of a POSIX file system.

    Args:
        folder: The checkpoint's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = str(folder)

    def read(self, name: str) -> bytes | None:
        try:
            number = os.open(self.folder / name, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            nbytes = os.fstat(number).st_size
            if nbytes > SMALL_FILE:
                raise CheckpointError(
                    f"{self.folder / name}: {nbytes} bytes long, and no manifest is longer than "
                    f"{SMALL_FILE}. The file is damaged, or hostile."
                )
            data = b""
            while len(data) < nbytes and (more := os.read(number, nbytes - len(data))):
                data += more
            return data
        finally:
            os.close(number)

    def put(self, name: str, data: bytes, sync: bool = False) -> None:
        path = self.folder / name
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if sync:
            self._sync(path.parent)

    def names(self, folder: str) -> list[str]:
        try:
            return os.listdir(self.folder / folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def make_folder(self, folder: str) -> None:
        (self.folder / folder).mkdir(parents=True, exist_ok=True)

    def sync_folder(self, folder: str) -> None:
        self._sync(self.folder / folder)

    @staticmethod
    def _sync(folder: Path) -> None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.folder / name)

    def delete_folder(self, folder: str) -> None:
        shutil.rmtree(self.folder / folder, ignore_errors=True)

    def create(self, place: int, folder: str) -> OutFile:
        return _LocalOut(self.folder, _temporary(place))

    def open(self, name: str) -> InFile:
        return _LocalIn(self.folder / name)

    def written_bytes(self, place: int) -> int:
        try:
            return os.stat(self.folder / _temporary(place)).st_size
        except FileNotFoundError:
            return -1


_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


def _temporary(place: int) -> str:
    return f".{place:05d}.tmp"


def is_leftover(name: str, ranks: int) -> bool:
    """Returns whether a file is what a save was writing when it was killed.

    Args:
        name: Its name.
        ranks: How many ranks save now; those begin their temporary files anew themselves.
    """
    if not (name.startswith(".") and name.endswith(".tmp")):
        return False
    place = name[1:-4]
    return not place.isdigit() or int(place) >= ranks


class _LocalOut:
    """A data file under a temporary name, which stays until the save is over.

    The file appears under its name by a hard link, so it can appear under another one when the
    first turns out to belong to a save that failed; where there are no links, it is renamed.
    """

    in_order = False

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._path = folder / name
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def write(self, data: Any, position: int) -> None:
        view = memoryview(data)
        try:
            while view.nbytes:
                count = os.pwrite(self._fd, view, position)
                view, position = view[count:], position + count
        except OSError as error:  # a call with a descriptor does not name the file
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def publish(self, name: str) -> None:
        target = self._folder / name
        if os.path.exists(self._path) and not os.path.samestat(
            os.stat(self._path), os.fstat(self._fd)
        ):
            raise CheckpointError(
                f"{self._path}: another process writes under this rank's place. Are two ranks at "
                "one place of the grid, or is an earlier job still saving here?"
            )
        try:
            os.link(self._path, target)
        except FileExistsError:
            if not os.path.samefile(self._path, target):
                raise
        except OSError as error:
            if error.errno not in _NO_LINKS or os.path.exists(target):
                raise
            os.rename(self._path, target)
            self._path = target

    def discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._path.name.endswith(".tmp"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)


class _LocalIn:
    """A data file that is read by position."""

    least_read = 1 << 10
    piece = 1 << 20  # is in the processor's cache when its checksums are computed
    gap = 0

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise CheckpointError(
                f"{path}: missing, though the checkpoint was complete. Put the file back, or load "
                "another checkpoint."
            ) from None
        self.nbytes = os.fstat(self._fd).st_size

    def read_into(self, memory: Any, position: int) -> int:
        view = memoryview(memory)
        total = 0
        while view.nbytes:
            count = os.preadv(self._fd, [view], position + total)
            if not count:
                break
            total += count
            view = view[count:]
        return total

    def read_runs(self, memory: Any, nbytes: int, positions: Sequence[int]) -> int:
        number, read, view = self._fd, os.preadv, memoryview(memory)
        at, total = 0, 0
        for position in positions:  # a call for each: as short as can be
            count = read(number, (view[at : at + nbytes],), position)
            if count != nbytes:
                count += self.read_into(view[at + count : at + nbytes], position + count)
                if count != nbytes:
                    return total + count
            at += nbytes
            total += nbytes
        return total

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextlib.contextmanager
def opened(files: Files, name: str) -> Iterator[InFile]:
    """Opens a data file for the time of a `with` block."""
    file = files.open(name)
    try:
        yield file
    finally:
        file.close()
