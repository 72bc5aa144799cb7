"""Where a checkpoint's files lie: a folder of a POSIX file system, or what a URL names."""

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardplan.layouts import CheckpointError

from .place import CHECKPOINT, SMALL_FILE, Files, InFile, OutFile

__all__ = ["Files", "InFile", "LocalFiles", "OutFile", "files_at", "opened"]


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

    def create_new(self, name: str, data: bytes) -> bool:
        path = self.folder / name
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        temporary.write_bytes(data)
        try:
            _move_new(temporary, path)
        except FileExistsError:
            return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        return True

    def create(self, name: str) -> OutFile:
        return _LocalOut(self.folder / name)

    def open(self, name: str) -> InFile:
        return _LocalIn(self.folder / name)

    def _token(self, save: str) -> Path:
        return self.folder / save / CHECKPOINT

    def make_token(self, save: str) -> None:
        self._token(save).touch()

    def drop_token(self, save: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._token(save))

    def publish(self, save: str, generation: int, data: bytes, replace: bool, sync: bool) -> bool:
        token, target = self._token(save), self.folder / CHECKPOINT
        try:
            # Not created: if it is gone, somebody has withdrawn it.
            with open(os.open(token, os.O_WRONLY | os.O_TRUNC), "wb") as file:
                file.write(data)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            if replace:
                os.rename(token, target)
            else:
                _move_new(token, target)
        except (FileNotFoundError, FileExistsError):
            return False
        if sync:
            self._sync(self.folder)
        return True

    def withdraw(self, save: str, generation: int) -> bool:
        try:
            os.unlink(self._token(save))
        except FileNotFoundError:
            return False
        return True

    def published(self) -> list[str]:
        return [CHECKPOINT]

    def forget_published(self, generation: int, kept: int) -> None:
        """Has nothing to do: publishing has replaced the file."""


def _move_new(path: Path, target: Path) -> None:
    """Renames a file to a name that must not be there yet."""
    try:
        os.link(path, target)  # unlike a rename it fails if the name is there
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # No links here: an empty file takes the name first, and nobody else can.
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        os.rename(path, target)
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


class _LocalOut:
    """A data file that only its save knows of until that is complete."""

    in_order = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def write(self, data: Any, position: int) -> None:
        view = memoryview(data)
        with self._named():
            while view.nbytes:
                count = os.pwrite(self._fd, view, position)
                view, position = view[count:], position + count

    def finish(self, sync: bool) -> None:
        with self._named():
            if sync:
                os.fsync(self._fd)
            number, self._fd = self._fd, -1
            os.close(number)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Names the file in errors of calls that know its descriptor only."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
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
