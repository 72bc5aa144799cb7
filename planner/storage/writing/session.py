"""How ranks end a save together without a message: small files that they look for.

| name | is |
|---|---|
| `Session` | one rank's view of one save |
| `Marker` | what a rank leaves to say that its data file is complete |

| file | written by | says |
|---|---|---|
| `.save.json` | the leader | the save's id, and whether it is open or was given up |
| `<save>/<place>.ready` | every rank | its data file and manifest part are complete and synced |
| `<save>/<place>.failed` | a rank that failed | its error |
| `checkpoint.json` | the leader, last | the save is complete |

The leader (place 0) draws the id anew for every attempt, and a rank counts only if its file stands in the folder
of that id. So what an earlier attempt left behind is never taken for a part of this one, even by a
rank that looked before the leader had begun: it sees the id change, and puts its file there again.

Only the leader deletes what has been put into a save's folder, and only when it gives the save up or
opens another: a rank that stopped waiting can't know whether its file is part of a checkpoint by now.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardplan.layouts import CheckpointError
from shardplan.layouts.errors import summary

from ..format.commit import CHECKPOINT, Commit, is_save, parse, read_commit
from ..places.files import Files, is_leftover

STATUS = ".save.json"
_OPEN, _FAILED = "open", "failed"
# Nobody waits longer than this between two looks, in seconds.
_LONGEST_PAUSE = 1.0


@dataclass(frozen=True, slots=True)
class Marker:
    """What a rank leaves to say that its data file is complete.

    Attributes:
        place: Its place.
        rank: Its rank.
        ranks: How many it thinks there are.
        stage: Its pipeline stage.
        digest: Digest of its stage's layouts and extras.
        positions: Its positions on the dense and the expert grid of each chunk of the model.
        groups: What it vouches for, as in `Commit.encode`; empty for a stage's first rank.
        nbytes: Size of its data file.
    """

    place: int
    rank: int
    ranks: int
    stage: int
    digest: str
    positions: tuple[tuple[int, int], ...]
    groups: tuple[Any, ...] = ()
    nbytes: int = 0

    def encode(self) -> bytes:
        """Returns the marker as a file's contents."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(values, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, where: str, raw: bytes) -> "Marker":
        """Returns the marker that `encode` wrote.

        Raises:
            CheckpointError: If it is none.
        """
        data = parse(where, raw)
        try:
            positions = tuple((int(d), int(e)) for d, e in data.pop("positions"))
            return cls(positions=positions, groups=tuple(data.pop("groups")), **data)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{where}: no marker of a rank: {error!r}") from None


class Session:
    """One rank's view of one save.

    Args:
        files: Where the checkpoint lies.
        place: This rank's place.
        leads: Whether this rank opens and completes the save; all others follow it.
        ranks: How many ranks save.
        timeout: Seconds without any sign of life from those who are waited for, before giving up.
        overwrite: Whether a complete checkpoint may be replaced.
    """

    def __init__(
        self, files: Files, place: int, leads: bool, ranks: int, timeout: float, overwrite: bool
    ) -> None:
        self.files = files
        self.place = place
        self.leads = leads
        self.ranks = ranks
        self.timeout = timeout
        self.old: str | None = None
        self.save: str | None = None
        self._stale: set[str] = set()
        self._seen: set[str] = set()
        self._failed: list[str] = []
        self._beat = 0
        self._begin(overwrite)

    def _begin(self, overwrite: bool) -> None:
        commit = read_commit(self.files) if overwrite else self._refuse()
        self.old = None if commit is None else commit.save
        self.files.make_folder("")
        status = self._status()
        if status is not None and status["state"] == _OPEN:
            self._seen.add(status["save"])
        elif status is not None:
            self._stale.add(status["save"])
            self._failed = [*status["failed"], status["save"]][-8:]
        if self.leads:
            self.open(secrets.token_hex(8))

    def _refuse(self) -> Commit | None:
        if self.files.read(CHECKPOINT) is not None or self.files.read(".metadata") is not None:
            raise CheckpointError(
                f"{self.files.root}: holds a complete checkpoint. Save elsewhere, or pass "
                "overwrite=True to SafetensorsWriter; then it is replaced once the new one is "
                "complete."
            )
        return None

    def open(self, save: str) -> None:
        """Announces a save; called by the leader. What failed saves left behind is deleted."""
        self.save = save
        self.files.make_folder(save)
        self._tell(_OPEN)
        for name in self.files.names(""):
            if is_save(name) and name not in (save, self.old):
                self.files.delete_folder(name)
            elif is_leftover(name, self.ranks):
                self.files.delete(name)

    def _tell(self, state: str, error: str = "") -> None:
        self._beat += 1
        status = {
            "save": self.save,
            "state": state,
            "beat": self._beat,
            "error": error,
            "failed": self._failed,
        }
        self.files.put(STATUS, json.dumps(status).encode())

    def _status(self) -> dict[str, Any] | None:
        raw = self.files.read(STATUS)
        if not raw:
            return None
        try:
            status = parse(STATUS, raw)
        except CheckpointError:
            return None  # of an attempt that was cut off
        known = {"state": "", "error": "", "failed": [], **status}
        return known if is_save(str(known.get("save"))) else None

    def current(self) -> str | None:
        """Returns the id of the save that is open now, None if the leader has not begun yet."""
        if self.leads:
            return self.save
        status = self._status()
        if status is None or status["state"] != _OPEN or status["save"] in self._stale:
            return None
        save = str(status["save"])
        return None if save == self.old else save

    def awaited(self) -> str:
        """Returns the id of the save that is open, once the leader has begun.

        Raises:
            CheckpointError: If the save failed, or does not begin.
        """
        watch = _Watch(self.timeout)
        while (save := self.current()) is None:
            status = self._status()
            if status is not None:
                self._raise_if_failed(status)
            if not watch.pause(status):
                raise self._no_leader()
        return save

    def _raise_if_failed(self, status: dict[str, Any]) -> None:
        if status["save"] in self._stale:
            return
        if status["state"] == _FAILED or self._seen.intersection(status["failed"]):
            raise CheckpointError(
                f"{self.files.root}: the save failed, and what was there before is as it "
                f"was: {status['error']}"
            )

    def _no_leader(self) -> CheckpointError:
        return CheckpointError(
            f"{self.files.root}: rank 0 gave no sign of life for {self.timeout} s while place "
            f"{self.place} waited for it to complete the save. What was there before is as it was. "
            "Look for rank 0's own error, or raise timeout=."
        )

    def join(self, announce: Callable[[str], None]) -> None:
        """Waits until the save is complete; called on all ranks but the leader.

        Args:
            announce: Puts this rank's files into the folder of a save; called again if the save's
                id changes.

        Raises:
            CheckpointError: If the save failed, or the leader gave no sign of life.
        """
        announced: str | None = None
        watch = _Watch(self.timeout)
        while True:
            status = self._status()
            save = None if status is None else str(status["save"])
            if save != announced and self._is_complete(announced):
                return
            if status is not None and save is not None and save not in self._stale:
                self._raise_if_failed(status)
                if save not in (announced, self.old):
                    try:
                        announce(save)
                        announced = save
                        self._seen.add(save)
                    except FileNotFoundError:
                        pass  # that save's folder is gone: another one is about to begin
                    except FileExistsError:
                        self._stale.add(save)  # an earlier attempt, which had this rank's file
            if not watch.pause((status, self.files.written_bytes(0))):
                if self._is_complete(announced):
                    return
                raise self._no_leader()

    def _is_complete(self, save: str | None) -> bool:
        commit = None if save is None else read_commit(self.files)
        return commit is not None and commit.save == save

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks that this one has failed, and waits until they know."""
        if self.leads:
            self.give_up(CheckpointError(f"rank {self.place} failed with {told(error)}"))
            return
        raw = json.dumps({"place": self.place, "error": told(error)}).encode()
        try:
            self.join(lambda save: self.files.put(f"{save}/{self.place:05d}.failed", raw))
        except (CheckpointError, OSError):
            return

    def give_up(self, error: BaseException, keep: bool = False) -> None:
        """Ends the save on all ranks; called by the leader.

        Args:
            error: Why.
            keep: Whether the folder stays until the next save, so that others can look into it.
        """
        if self._is_complete(self.save):
            return  # what failed came after the one step that counts
        self._tell(_FAILED, str(error) if isinstance(error, CheckpointError) else told(error))
        if self.save is not None and not keep:
            self.files.delete_folder(self.save)

    def gather(self) -> list[Marker]:
        """Waits for all ranks' markers and returns them by place; called by the leader.

        Raises:
            CheckpointError: If a rank failed, or gave no sign of life.
        """
        assert self.save is not None  # place 0 has opened it
        watch = _Watch(self.timeout)
        beat = time.monotonic()
        while True:
            names = self.files.names(self.save)
            failed = sorted(name for name in names if name.endswith(".failed"))
            if failed:
                raise CheckpointError(summary(self._failure(name) for name in failed))
            ready = {int(name[:-6]) for name in names if name.endswith(".ready")}
            missing = [place for place in range(self.ranks) if place not in ready]
            if not missing:
                return [self._marker(place) for place in range(self.ranks)]
            if time.monotonic() - beat > self.timeout / 8:
                beat = time.monotonic()
                self._tell(_OPEN)
            alive = [self.files.written_bytes(place) for place in missing[:16]]
            if not watch.pause((len(ready), alive)):
                shown = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
                raise CheckpointError(
                    f"{self.files.root}: {len(missing)} of {self.ranks} ranks gave no sign of life "
                    f"for {self.timeout} s: {shown}. Look for their own errors, or raise timeout=."
                )

    def _failure(self, name: str) -> str:
        raw = self.files.read(f"{self.save}/{name}") or b"{}"
        return f"rank {int(name[:-7])} failed with {parse(name, raw).get('error')}"

    def _marker(self, place: int) -> Marker:
        name = f"{self.save}/{place:05d}.ready"
        return Marker.decode(f"{self.files.root}/{name}", self.files.read(name) or b"")

    def mark(self, save: str, marker: Marker) -> None:
        """Leaves this rank's marker in the folder of a save."""
        self.files.put(f"{save}/{self.place:05d}.ready", marker.encode())

    def complete(self, commit: Commit) -> None:
        """Makes the save the checkpoint, and deletes the one before; called by the leader."""
        self.files.sync_folder(commit.save)
        self.files.put(CHECKPOINT, commit.encode(), sync=True)
        # The save is complete. What is left to do the next save does too, if it fails here.
        with contextlib.suppress(OSError):
            self.files.delete(STATUS)
            self.files.delete(".metadata")
            for name in self.files.names(commit.save):
                if name.endswith(".ready"):
                    self.files.delete(f"{commit.save}/{name}")
            for name in self.files.names(""):
                if is_save(name) and name != commit.save:
                    self.files.delete_folder(name)


def told(error: BaseException) -> str:
    """Returns an error as the other ranks are told of it."""
    return f"{type(error).__name__}: {error}"


class _Watch:
    """Waits with growing pauses, and notices when nothing changes for too long."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._seen: Any = None
        self._since = time.monotonic()

    def pause(self, seen: Any) -> bool:
        """Pauses; returns whether there may still be something to wait for."""
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        waited = now - self._since
        if waited > self._timeout:
            return False
        time.sleep(min(max(waited / 8, 0.001), _LONGEST_PAUSE))
        return True
