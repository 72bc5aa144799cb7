"""The files of an open checkpoint by their names in it: read exactly, none outside of it."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import PurePosixPath

import numpy as np
import numpy.typing as npt

from shardplan.layouts import CheckpointError, DamagedCheckpointError, IncompleteCheckpointError

from ..storage.places.files import InFile, files_at

_OPEN = 256


class Files:
    """Files below one folder, local or behind a URL.

    Args:
        root: The folder or its URL; no name that leads out of it is opened.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        try:
            self._place = files_at(root)
        except ImportError as error:  # fsspec knows the URL, but its driver is not installed
            raise CheckpointError(f"{root}: {error}") from None
        self.root = self._place.root
        self._open: dict[str, InFile] = {}
        self._sizes: dict[str, int | None] = {}
        self._lock = threading.Lock()

    def path(self, name: str) -> str:
        """Returns a file's path or URL, for errors.

        Raises:
            DamagedCheckpointError: If the name leads out of the folder.
        """
        where = PurePosixPath(name)
        if not where.parts or where.is_absolute() or ".." in where.parts or "\0" in name:
            raise DamagedCheckpointError(
                f"{self.root}: it names the file {name!r}, which lies outside of it. Do not trust "
                "this checkpoint."
            )
        return f"{self.root}/{name}"

    def names(self) -> list[str]:
        """Returns the names in the folder, sorted."""
        return sorted(self._place.names(""))

    def size(self, name: str) -> int | None:
        """Returns the length of a file in bytes, None if it is missing."""
        if name not in self._sizes:
            try:
                with self._file(name) as file:
                    self._sizes[name] = file.nbytes
            except IncompleteCheckpointError:
                self._sizes[name] = None
        return self._sizes[name]

    def read(self, name: str, start: int, out: npt.NDArray[np.uint8]) -> None:
        """Fills a buffer with a file's bytes from `start` on.

        Raises:
            IncompleteCheckpointError: If the file is missing.
            DamagedCheckpointError: If it is too short.
        """
        if not out.nbytes:
            return
        with self._file(name) as file:
            if start < 0 or start + out.nbytes > file.nbytes:
                raise DamagedCheckpointError(
                    f"{self.path(name)}: has {file.nbytes} bytes, but {out.nbytes} bytes from "
                    f"{start} on belong to it. The file is truncated; restore it."
                )
            try:
                count = file.read_into(out.data.cast("B"), start)
            except Exception as error:  # what drivers of object stores raise has no common class
                raise CheckpointError(
                    f"{self.path(name)}: can't be read: {error}. Restore the file."
                ) from error
        if count != out.nbytes:
            raise DamagedCheckpointError(
                f"{self.path(name)}: ends at byte {start + count}, but {out.nbytes} bytes from "
                f"{start} on belong to it. The file is truncated; restore it."
            )

    def take(self, name: str, start: int, length: int) -> bytes:
        """Returns `length` bytes of a file from `start` on."""
        size = self.size(name)
        if size is not None and (start < 0 or length < 0 or start + length > size):
            raise DamagedCheckpointError(
                f"{self.path(name)}: has {size} bytes, but {length} bytes from {start} on belong "
                "to it. The file is truncated; restore it."
            )
        out = np.empty(length, dtype=np.uint8)
        self.read(name, start, out)
        return out.tobytes()

    def whole(self, name: str) -> bytes:
        """Returns all bytes of a file.

        Raises:
            IncompleteCheckpointError: If the file is missing.
        """
        with self._file(name) as file:
            length = file.nbytes
        return self.take(name, 0, length)

    def close(self) -> None:
        """Closes all files."""
        while self._open:
            self._open.popitem()[1].close()

    @contextlib.contextmanager
    def _file(self, name: str) -> Iterator[InFile]:
        """Opens a file, once for all threads; of very many files some are opened for each read."""
        with self._lock:
            file = self._open.get(name)
            kept = file is not None or len(self._open) < _OPEN
            if file is None:
                file = self._opened(name)
                if kept:
                    self._open[name] = file
        try:
            yield file
        finally:
            if not kept:
                file.close()

    def _opened(self, name: str) -> InFile:
        path = self.path(name)
        try:
            return self._place.open(name)
        except (CheckpointError, FileNotFoundError, NotADirectoryError):
            raise IncompleteCheckpointError(
                f"{path}: No such file or directory. The checkpoint is incomplete; restore the file."
            ) from None
        except Exception as error:  # what drivers of object stores raise has no common class
            raise CheckpointError(f"{path}: can't be opened: {error}.") from error
