"""What the writer and the reader need of the place where a checkpoint's files lie.

Names are relative to the checkpoint, with `/` between folders, and are made by this library:
nothing that a checkpoint's files say is used as one.
"""

from collections.abc import Sequence
from typing import Any, Protocol

SMALL_FILE = 256 << 20  # a manifest of a million keys is shorter
CHECKPOINT = "checkpoint.json"
# Stands in an object store under the name of a save that cannot be published any more.
WITHDRAWN = b'{"format":"shardplan.withdrawn"}'


class OutFile(Protocol):
    """A data file that is being written; it means nothing before its save is complete.

    Attributes:
        in_order: Whether bytes must come one after another, from the first on.
    """

    in_order: bool

    def write(self, data: Any, position: int) -> None:
        """Writes all of `data` at a position."""

    def finish(self, sync: bool) -> None:
        """Ends the file; with `sync` it is on the disk then."""

    def discard(self) -> None:
        """Removes the file; does nothing if it was finished."""


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
        """Writes a small file, whole or not at all, in place of one that is there."""

    def create_new(self, name: str, data: bytes) -> bool:
        """Writes a small file that must not be there yet; returns whether it was not.

        Of several callers exactly one gets True, whatever their caches say.
        """

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

    def create(self, name: str) -> OutFile:
        """Returns a new data file.

        Raises:
            FileExistsError: If it is there already, where the storage can tell.
        """

    def open(self, name: str) -> InFile:
        """Opens a data file.

        Raises:
            CheckpointError: If there is none.
        """

    # What completes a save must happen at most once, even if its saver was taken for dead and wakes
    # up. So each save has one token, made before its claim is seen. Publishing uses the token up,
    # and so does withdrawing it; whoever comes second finds it gone.

    def make_token(self, save: str) -> None:
        """Makes the token without which a save can't be published."""

    def drop_token(self, save: str) -> None:
        """Lets go of the token of a save of the caller's own, which it will not publish."""

    def publish(self, save: str, generation: int, data: bytes, replace: bool, sync: bool) -> bool:
        """Makes `data` the checkpoint's `checkpoint.json`, and uses the save's token up.

        Args:
            save: Id of the save.
            generation: Number of its claim.
            data: The contents.
            replace: Whether a checkpoint that is there is replaced.
            sync: Whether the file is on the disk afterwards.

        Returns:
            Whether it is published; not if the token is gone, or a checkpoint is there.
        """

    def withdraw(self, save: str, generation: int) -> bool:
        """Uses up the token of somebody's save, so that it can't be published.

        Returns whether the token was there.
        """

    def published(self) -> list[str]:
        """Returns the names under which `publish` puts files, the newest first."""

    def forget_published(self, generation: int, kept: int) -> None:
        """Deletes what `publish` and `withdraw` put there before a generation.

        Args:
            generation: Number of the claim that is published now.
            kept: Withdrawn names of so many generations stay, for those that wake up late.
        """
