"""A place that fsspec knows: an object store, or another file system behind a URL.

| name | is |
|---|---|
| `RemoteFiles` | the files of a checkpoint under a URL |

What an object store does is all that is asked for: an object appears whole when its upload ends,
objects are copied within the store, read by byte range, listed and deleted. There is no rename and
no sync. A data file is uploaded from its first byte to its last under a name of the rank's own, and
the store copies it into the folder of the save.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import fsspec  # type: ignore[import-untyped]

from shardplan.layouts import CheckpointError

from .place import SMALL_FILE, InFile, OutFile


class RemoteFiles:
    """The files of a checkpoint under a URL.

    Args:
        url: The checkpoint's URL.
    """

    def __init__(self, url: str) -> None:
        self.root = url.rstrip("/")
        self._fs, path = fsspec.core.url_to_fs(self.root)
        self._path = str(path).rstrip("/")

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path

    def _forget(self) -> None:
        """Forgets listings: other ranks write too."""
        self._fs.invalidate_cache()

    def read(self, name: str) -> bytes | None:
        self._forget()
        try:
            nbytes = int(self._fs.info(self._at(name))["size"] or 0)
            if nbytes > SMALL_FILE:
                raise CheckpointError(
                    f"{self.root}/{name}: {nbytes} bytes long, and no manifest is longer than "
                    f"{SMALL_FILE}. The file is damaged, or hostile."
                )
            data: bytes = self._fs.cat_file(self._at(name))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        return data

    def put(self, name: str, data: bytes, sync: bool = False) -> None:
        self._fs.pipe_file(self._at(name), data)

    def names(self, folder: str) -> list[str]:
        self._forget()
        try:
            found = self._fs.ls(self._at(folder), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in found]

    def make_folder(self, folder: str) -> None:
        # Object stores have none; what is a file system behind a URL needs them.
        with contextlib.suppress(NotImplementedError, FileExistsError):
            self._fs.makedirs(self._at(folder), exist_ok=True)

    def sync_folder(self, folder: str) -> None:
        """Has nothing to do: an object that was uploaded is stored."""

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._at(name))

    def delete_folder(self, folder: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._at(folder), recursive=True)
        self._forget()

    def create(self, place: int, folder: str) -> OutFile:
        return _Upload(self._fs, self._path, place)

    def open(self, name: str) -> InFile:
        self._forget()
        return _Ranges(self._fs, self._at(name), f"{self.root}/{name}")

    def written_bytes(self, place: int) -> int:
        """Returns -1: nobody can see how far an upload has come."""
        return -1


class _Upload:
    """An object that is being uploaded under a name of the rank's own."""

    in_order = True

    def __init__(self, fs: Any, root: str, place: int) -> None:
        self._fs = fs
        self._root = root
        self._own = f"{root}/.{place:05d}.tmp"
        self._stream: Any = None
        self._position = 0

    def write(self, data: Any, position: int) -> None:
        if self._stream is None:
            self._stream = self._fs.open(self._own, "wb")
        if position != self._position:
            raise CheckpointError(
                f"{self._own}: byte {position} is written after byte {self._position}, and an "
                "object store takes bytes in order only"
            )
        self._stream.write(data)
        self._position += len(data)

    def sync(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def publish(self, name: str) -> None:
        self.sync()
        self._fs.cp_file(self._own, f"{self._root}/{name}")

    def discard(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(Exception):
                self._stream.discard()
            with contextlib.suppress(Exception):  # a memory file is only ever closed by itself
                self._stream.closed = True  # else it would be uploaded when it is collected
            self._stream = None
        with contextlib.suppress(Exception):
            self._fs.rm_file(self._own)


class _Ranges:
    """An object that is read by byte ranges."""

    least_read = 64 << 10
    piece = 64 << 20  # every read is a request
    gap = 1 << 20  # and takes as long as some megabytes of another

    def __init__(self, fs: Any, path: str, where: str) -> None:
        self._fs = fs
        self._path = path
        try:
            self.nbytes = int(fs.info(path)["size"])
        except FileNotFoundError:
            raise CheckpointError(
                f"{where}: missing, though the checkpoint was complete. Put the file back, or load "
                "another checkpoint."
            ) from None

    def read_into(self, memory: Any, position: int) -> int:
        view = memoryview(memory)
        data = self._fs.cat_file(self._path, start=position, end=position + view.nbytes)
        view[: len(data)] = data
        return len(data)

    def read_runs(self, memory: Any, nbytes: int, positions: Sequence[int]) -> int:
        stops = [position + nbytes for position in positions]
        runs = self._fs.cat_ranges(
            [self._path] * len(stops), list(positions), stops, on_error="raise"
        )
        data = b"".join(runs)
        memoryview(memory)[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Has nothing to do: every range is a request of its own."""
