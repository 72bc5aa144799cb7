"""What the writer and the reader need of the place where a checkpoint's files lie.

| name | is |
|---|---|
| `Files` | a place: small files, folders, data files |
| `OutFile`, `InFile` | a data file that is written, one that is read |

Names are relative to the checkpoint, with `/` between folders, and are made by this library:
nothing that a checkpoint's files say is used as one.
"""

from collections.abc import Sequence
from typing import Any, Protocol

SMALL_FILE = 64 << 20


class OutFile(Protocol):
    """A data file that is being written; nobody sees it before `publish`.

    Attributes:
        in_order: Whether bytes must come one after another, from the first on.
    """

    in_order: bool

    def write(self, data: Any, position: int) -> None:
        """Writes all of `data` at a position."""

    def sync(self) -> None:
        """Returns once all that was written is on the disk."""

    def publish(self, name: str) -> None:
        """Makes the file appear under its name; may be called again with another name."""

    def discard(self) -> None:
        """Removes what is left of the file apart from what was published."""


class InFile(Protocol):
    """A data file that is being read; threads may read at once.

    Attributes:
        nbytes: Its size.
        least_read: Bytes below which a read costs as much as one of so many.
        piece: Bytes that are best read at once where checksums are computed between reads.
        gap: Bytes between two wanted runs that are read along with them unless told otherwise.
    """

    nbytes: int
    least_read: int
    piece: int
    gap: int

    def read_into(self, memory: Any, position: int) -> int:
        """Fills `memory` from a position on; returns how many bytes there were."""

    def read_runs(self, memory: Any, nbytes: int, positions: Sequence[int]) -> int:
        """Fills `memory` with runs of equal length; returns how many bytes there were.

        Args:
            memory: Takes the runs one behind the other.
            nbytes: Length of each.
            positions: First byte of each.
        """

    def close(self) -> None:
        """Lets go of the file."""


class Files(Protocol):
    """What the writer and the reader need of a place.

    Attributes:
        root: The place, for errors.
    """

    root: str

    def read(self, name: str) -> bytes | None:
        """Returns a small file, None if there is none."""

    def put(self, name: str, data: bytes, sync: bool = False) -> None:
        """Writes a small file, whole or not at all."""

    def names(self, folder: str) -> list[str]:
        """Returns the names in a folder, none if there is no such folder."""

    def make_folder(self, folder: str) -> None:
        """Makes a folder if there is none."""

    def sync_folder(self, folder: str) -> None:
        """Makes sure that the names in a folder outlive a power cut."""

    def delete(self, name: str) -> None:
        """Deletes a file if there is one."""

    def delete_folder(self, folder: str) -> None:
        """Deletes a folder and all in it, if there is one."""

    def create(self, place: int, folder: str) -> OutFile:
        """Returns a new data file of the rank at a place; `folder` is where it will appear."""

    def open(self, name: str) -> InFile:
        """Opens a data file.

        Raises:
            CheckpointError: If there is none.
        """

    def written_bytes(self, place: int) -> int:
        """Returns how much of its data file a rank has written, to see that it is alive."""
