"""The files of a checkpoint, opened once each and read at given places."""

import os
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardplan.layouts import CheckpointError

_OPEN = 256


class Files:
    """Files below one folder, or the one file that a checkpoint is.

    Args:
        root: The folder; no name that leads out of it is opened.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()
        self.bytes_read = 0

    def path(self, name: str) -> Path:
        """Returns the path of a file by its name in the checkpoint.

        Raises:
            CheckpointError: If the name leads out of the folder.
        """
        parts = Path(name).parts
        if not parts or Path(name).is_absolute() or ".." in parts or "\0" in name:
            raise CheckpointError(
                f"{self.root}: it names the file {name!r}, which lies outside of it. Do not trust "
                "this checkpoint."
            )
        return self.root / name

    def size(self, name: str) -> int | None:
        """Returns the length of a file in bytes, None if it is missing."""
        try:
            return self.path(name).stat().st_size
        except OSError:
            return None

    def read(self, name: str, start: int, out: npt.NDArray[np.uint8]) -> None:
        """Fills a buffer with a file's bytes from `start` on.

        Raises:
            CheckpointError: If the file is missing or too short.
        """
        view = out.data.cast("B")
        done = 0
        try:
            descriptor, kept = self._descriptor(name)
            try:
                while done < len(view):
                    count = os.preadv(descriptor, [view[done:]], start + done)
                    if count == 0:
                        raise CheckpointError(
                            f"{self.path(name)}: ends at byte {start + done}, but {len(view)} "
                            f"bytes from {start} on belong to it. The file is truncated; restore "
                            "it."
                        )
                    done += count
            finally:
                if not kept:
                    os.close(descriptor)
        except OSError as error:
            raise CheckpointError(
                f"{self.path(name)}: {error.strerror or error}. The checkpoint is incomplete; "
                "restore the file."
            ) from error
        self.bytes_read += done

    def take(self, name: str, start: int, length: int) -> bytes:
        """Returns `length` bytes of a file from `start` on."""
        size = self.size(name)
        if size is not None and (start < 0 or length < 0 or start + length > size):
            raise CheckpointError(
                f"{self.path(name)}: has {size} bytes, but {length} bytes from {start} on belong "
                "to it. The file is truncated; restore it."
            )
        out = np.empty(length, dtype=np.uint8)
        self.read(name, start, out)
        return out.tobytes()

    def close(self) -> None:
        """Closes all files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, name: str) -> tuple[int, bool]:
        """Returns an open file and whether it stays open; several threads may read at a time."""
        with self._lock:
            found = self._open.get(name)
            if found is not None:
                return found, True
            opened = os.open(self.path(name), os.O_RDONLY)
            if len(self._open) >= _OPEN:
                return opened, False
            self._open[name] = opened
            return opened, True
