"""A place that fsspec knows: an object store, or another file system behind a URL.

What an object store does is all that is asked for: an object appears whole when its upload ends,
objects are created unless they are there, read by byte range, listed and deleted. There is no
rename and no sync. A data file is uploaded from its first byte to its last.
"""

import contextlib
import inspect
import re
from collections.abc import Sequence
from typing import Any

import fsspec  # type: ignore[import-untyped]

from shardplan.layouts import CheckpointError

from .place import CHECKPOINT, SMALL_FILE, WITHDRAWN, InFile, OutFile


class RemoteFiles:
    """The files of a checkpoint under a URL.

    Args:
        url: The checkpoint's URL.
    """

    def __init__(self, url: str) -> None:
        self.root = url.rstrip("/")
        self._fs, path = fsspec.core.url_to_fs(self.root)
        self._path = str(path).rstrip("/")
        put = getattr(self._fs, "_pipe_file", None) or self._fs.pipe_file
        self._creates = "mode" in inspect.signature(put).parameters

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

    def create_new(self, name: str, data: bytes) -> bool:
        if not self._creates:
            # Such a store can't tell two savers apart; who saves there has to see to that.
            if self.read(name) is not None:
                return False
            self._fs.pipe_file(self._at(name), data)
            return True
        try:
            self._fs.pipe_file(self._at(name), data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            if _is_conflict(error):
                return False
            raise
        finally:
            self._forget()
        return True

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

    def create(self, name: str) -> OutFile:
        return _Upload(self._fs, self._at(name))

    def open(self, name: str) -> InFile:
        self._forget()
        return _Ranges(self._fs, self._at(name), f"{self.root}/{name}")

    # There is no rename that could use a token up. Here the name that a save is published under is
    # the token: it has the number of the save's claim, and only one caller can create it.

    def make_token(self, save: str) -> None:
        """Has nothing to do: the name is free until somebody takes it."""

    def drop_token(self, save: str) -> None:
        """Has nothing to do: who will not publish leaves the name free."""

    def publish(self, save: str, generation: int, data: bytes, replace: bool, sync: bool) -> bool:
        return self.create_new(_published(generation), data)

    def withdraw(self, save: str, generation: int) -> bool:
        return self.create_new(_published(generation), WITHDRAWN)

    def published(self) -> list[str]:
        return [name for _, name in self._generations()]

    def _generations(self) -> list[tuple[int, str]]:
        found = [(int(m[1] or 1), m[0]) for m in map(_PUBLISHED.match, self.names("")) if m]
        return sorted(found, reverse=True)

    def forget_published(self, generation: int, kept: int) -> None:
        for number, name in self._generations():
            if number <= generation - kept or (
                number < generation and self.read(name) != WITHDRAWN
            ):
                self.delete(name)


_PUBLISHED = re.compile(r"checkpoint(?:-([1-9][0-9]*))?\.json\Z")


def _published(generation: int) -> str:
    return CHECKPOINT if generation == 1 else f"checkpoint-{generation}.json"


def _is_conflict(error: BaseException | None) -> bool:
    """Whether a store refused to create an object because there is one: S3's 412 and 409."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status in (409, 412)
        error = error.__cause__
    return False


class _Upload:
    """An object that is being uploaded; it appears when it is finished."""

    in_order = True

    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path
        self._stream: Any = fs.open(path, "wb")
        self._position = 0

    def write(self, data: Any, position: int) -> None:
        if position != self._position:
            raise CheckpointError(
                f"{self._path}: byte {position} is written after byte {self._position}, and an "
                "object store takes bytes in order only"
            )
        self._stream.write(data)
        self._position += len(data)

    def finish(self, sync: bool) -> None:
        stream, self._stream = self._stream, None
        stream.close()

    def discard(self) -> None:
        if self._stream is None:
            return
        with contextlib.suppress(Exception):
            self._stream.discard()
        with contextlib.suppress(Exception):  # a memory file is only ever closed by itself
            self._stream.closed = True  # else it would be uploaded when it is collected
        self._stream = None
        with contextlib.suppress(Exception):
            self._fs.rm_file(self._path)


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
