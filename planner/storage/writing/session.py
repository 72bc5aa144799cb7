"""One rank's part in a save without messages: small files in the save's own folder.

| file | written by | says |
|---|---|---|
| `<save>/<place>.beat` | every rank, first once and then again and again | this place is taken; this rank is alive |
| `<save>/<place>.ready` | every rank | its data file is complete, and what it planned |
| `<save>/<place>.failed` | a rank that failed | its error |
| `<save>/ask.json` | the leader, seldom | what it asks of which rank, when it has compared all reports |
| `<save>/<place>.answer` | such a rank | its answer |

The leader (place 0) claims the folder, waits for all ranks, compares what they planned, and publishes;
see `claim`. A rank that fails leaves its error and waits for nobody.
"""

import contextlib
import json
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from shardplan.layouts import CheckpointError, SaveConflictError
from shardplan.layouts.errors import summary

from ..folder import look
from ..format.commit import Commit, parse
from ..places.files import Files
from . import claim as claims
from .claim import Claim, beat_name
from .identity import Identity
from .process import this_process
from .watch import WALL, Clock, Watch

_ASK = "ask.json"


class Session:
    """One rank's part in a save without messages.

    Args:
        files: Where the checkpoint lies.
        identity: The save's identity.
        place: This rank's place.
        ranks: How many ranks save.
        timeout: Seconds without a sign of life from those who are waited for, before giving up.
        overwrite: Whether a complete checkpoint may be replaced.
        leads: Whether this rank claims and completes the save; by default place 0 does.
        clock: What time it is.

    Attributes:
        save: Id of the save; a follower without a process group learns it in `begin`.
    """

    def __init__(
        self,
        files: Files,
        identity: Identity,
        place: int,
        ranks: int,
        timeout: float,
        overwrite: bool,
        leads: bool | None = None,
        clock: Clock = WALL,
    ) -> None:
        self.files = files
        self.save = identity.save or ""
        self.place = place
        self.ranks = ranks
        self.timeout = timeout
        self.leads = place == 0 if leads is None else leads
        self._identity = identity
        self._overwrite = overwrite
        self._clock = clock
        self._claim: Claim | None = None
        self._replaced: Commit | None = None
        self._generation = 0  # of the claim, where another rank leads
        self._beats = 0
        self._inside = False  # whether this rank has taken its place in the save's folder
        # The leader shows more often that it lives: savers of other launches wait for it.
        self._every = min(timeout / 8, 2.0) if self.leads else timeout / 8
        self._over = threading.Event()

    def __del__(self) -> None:
        # A save that nobody ended, such as one whose plan was refused, must not look alive.
        if not self._over.is_set():
            with contextlib.suppress(Exception):
                self.fail(CheckpointError("it was given up before it was written"))

    def look(self) -> None:
        """Refuses a folder whose checkpoint may not be replaced, before anything is written."""
        look(self.files, self._overwrite)

    def begin(self, alive: bool = True) -> None:
        """Takes this rank's place in the save; the leader claims the folder first.

        Args:
            alive: Whether a thread gives signs of life until the session is over.

        Raises:
            CheckpointExistsError: If a complete checkpoint is there and may not be replaced.
            SaveConflictError: If another save is under way, or another rank has this place.
        """
        self.look()
        if not self.save:
            self.save = self._adopt().save
        if not self.leads and self._leader_error() is not None:
            raise self._given_up()
        self.files.make_folder(self.save)
        if claims.is_published(self.files, self.save):
            raise SaveConflictError(
                f"{self.files.root}: the complete checkpoint has the id {self.save} that this save "
                "was given. Give every save an id of its own, also after a restart."
            )
        self._inside = self.files.create_new(beat_name(self.save, self.place), self._sign())
        if not self._inside:
            raise SaveConflictError(
                f"{self.files.root}: place {self.place} of save {self.save} is taken. Are two ranks "
                "at one place of the grid, or was save_id= given to an earlier save too? Give every "
                "planner the pg_collection or grid of its own rank, and every save an id of its own."
            )
        if alive:
            life = (weakref.ref(self), self._over, self._every)
            threading.Thread(target=_live, args=life, name="shardplan-alive", daemon=True).start()
        if self.leads:  # while this waits for another save, its followers see that it lives
            self._claim, self._replaced = claims.take(
                self.files,
                self._identity,
                self.place,
                self._overwrite,
                self.timeout,
                self._every,
                self._clock,
            )

    def beat(self) -> None:
        """Gives a sign of life."""
        self._beats += 1
        self.files.put(beat_name(self.save, self.place), self._sign())

    def _sign(self) -> bytes:
        """Returns a sign of life, which also tells a later save whose it is."""
        return json.dumps({"beat": self._beats, **this_process()}).encode()

    def _adopt(self) -> Claim:
        """Waits for the claim of this launch's leader, where there is no process group to ask."""
        watch = self._watch("place 0 to begin the save")
        while True:
            for number in reversed(claims.claims(self.files)[-2:]):
                found = claims.read_claim(self.files, number)
                taken = found.save and self.files.read(beat_name(found.save, self.place))
                if (
                    found.launch == self._identity.launch
                    and found.state == claims.OPEN
                    and not taken
                ):
                    return found
            if not watch.pause(None):
                raise self._no_leader()

    def fail(self, error: BaseException) -> None:
        """Ends this rank's part after an error, and lets the other ranks know; waits for nobody.

        A folder of the id may be another save's, which was given the same: nothing of it is touched.
        """
        self._over.set()
        with contextlib.suppress(OSError):
            if self._claim is not None:
                if claims.is_published(self.files, self.save):
                    return  # what failed came after the one step that counts
                claims.end(
                    self.files, self._claim, f"rank {self.place} failed with {described(error)}"
                )
                self.files.delete_folder(self.save)
            elif self.ranks == 1:
                if self._inside:
                    self.files.delete_folder(self.save)
            elif self.save and self._may_tell() and not self._leader_failed():
                self.files.make_folder(self.save)
                raw = json.dumps({"error": described(error)}).encode()
                self.files.put(f"{self.save}/{self.place:05d}.failed", raw)

    def _may_tell(self) -> bool:
        """Whether the folder is this save's: its place there is this rank's, or nobody's yet."""
        taken = self.files.read(beat_name(self.save, self.place)) is not None
        return self._inside or not (taken or claims.is_published(self.files, self.save))

    def _leader_failed(self) -> bool:
        return not self.leads and self._leader_error() is not None

    def _leader_error(self) -> str | None:
        """Returns why the leader gave up, None if it has not."""
        raw = self.files.read(f"{self.save}/{0:05d}.failed")
        if raw is not None:
            return f"rank 0 failed with {parse('00000.failed', raw).get('error')}"
        own = self._own_claim()
        if own is not None and own.state == claims.ENDED:
            return own.error
        return None

    def _own_claim(self) -> Claim | None:
        """Returns this save's claim, None if the leader has not made it yet."""
        known = self._claim
        if known is not None:
            return claims.read_claim(self.files, known.generation)
        if self._generation:
            return claims.read_claim(self.files, self._generation)
        for number in reversed(claims.claims(self.files)):
            found = claims.read_claim(self.files, number)
            if found.save == self.save:
                self._generation = number
                return found
            self._check_count(found)
        return None

    def _check_count(self, found: Claim) -> None:
        """Notices that the leader is at a later save than this rank, which has missed one."""
        own = self._identity
        same = found.launch == own.launch and found.state == claims.OPEN
        if same and own.counter and found.count > own.count:
            own.catch_up(found.count)
            error = SaveConflictError(
                f"{self.files.root}: rank 0 is at save {found.count} of this folder, and place "
                f"{self.place} at save {own.count}, so it has missed one. Nothing was saved. Save "
                "again, on all ranks: they agree from now on."
            )
            with contextlib.suppress(OSError):
                raw = json.dumps({"error": described(error)}).encode()
                self.files.put(f"{found.save}/{self.place:05d}.failed", raw)
            raise error

    def ready(self, report: bytes) -> None:
        """Says that this rank's data file is complete.

        Args:
            report: What the rank planned.
        """
        self.files.put(f"{self.save}/{self.place:05d}.ready", report)

    def explained(self, error: BaseException) -> BaseException:
        """Returns why the save's own folder is gone, if that is what an error is about."""
        if not isinstance(error, FileNotFoundError) or self.files.names(self.save):
            return error
        if self._claim is not None:
            return claims.taken_over(self.files, self._claim)
        return error if self._leader_error() is None else self._given_up()

    def _given_up(self) -> CheckpointError:
        error = self._leader_error() or "the leader gave it up"
        return CheckpointError(
            f"{self.files.root}: the save failed, and what was there before is as it was: {error}"
        )

    def gather(self) -> list[bytes]:
        """Waits for all ranks and returns their reports by place; called by the leader.

        Raises:
            CheckpointError: If a rank failed, or gave no sign of life.
        """
        return self._collect("ready", range(self.ranks))

    def _collect(self, kind: str, places: Any) -> list[bytes]:
        waited: list[int] = list(places)
        watch = self._watch(f"ranks {_some(waited)} to write")
        while True:
            names = self.files.names(self.save)
            failed = sorted(name for name in names if name.endswith(".failed"))
            if failed:
                raise CheckpointError(summary(self._failure(name) for name in failed))
            there = {name for name in names if name.endswith(f".{kind}")}
            missing = [p for p in waited if f"{p:05d}.{kind}" not in there]
            if not missing:
                found = [self.files.read(f"{self.save}/{p:05d}.{kind}") for p in waited]
                if all(raw is not None for raw in found):
                    return [raw for raw in found if raw is not None]
            alive = [self.files.read(beat_name(self.save, place)) for place in missing[:16]]
            watch.awaited = f"ranks {_some(missing)} to write, of {self.ranks}"
            if not watch.pause((len(missing), *alive)):
                raise CheckpointError(
                    f"{self.files.root}: {len(missing)} of {self.ranks} ranks gave no sign of life "
                    f"for {self.timeout} s: {_some(missing)}. Look for their own errors, or raise "
                    "timeout=."
                )

    def _failure(self, name: str) -> str:
        raw = self.files.read(f"{self.save}/{name}") or b"{}"
        return f"rank {int(name[:-7])} failed with {parse(name, raw).get('error')}"

    def ask(self, requests: Mapping[int, Any]) -> list[bytes]:
        """Asks ranks for something more, and returns their answers; called by the leader, once.

        Args:
            requests: What is asked of the rank at each place, as plain data.
        """
        self.files.put(f"{self.save}/{_ASK}", json.dumps(requests).encode())
        return self._collect("answer", sorted(requests))

    def publish(self, commit: Commit, sync: bool) -> None:
        """Makes the save the checkpoint, and deletes the one before; called by the leader.

        Raises:
            CheckpointExistsError: If a checkpoint became complete that may not be replaced.
            SaveConflictError: If another save has taken the folder over.
        """
        assert self._claim is not None  # begin came before
        claims.publish(self.files, self._claim, commit, self._overwrite, sync)
        self._over.set()
        # The save is complete. What is left to clear the next save clears too, if it fails here.
        with contextlib.suppress(OSError):
            for name in self.files.names(self.save):
                if not name.endswith(".safetensors"):
                    self.files.delete(f"{self.save}/{name}")
            claims.clear(self.files, self._claim, self._replaced)

    def follow(self, answer: Callable[[Any], bytes]) -> None:
        """Waits until the save is complete; called on all ranks but the leader.

        Args:
            answer: Does what the leader asks of this rank, and returns the answer.

        Raises:
            CheckpointError: If the save failed, or the leader gave no sign of life.
        """
        watch = self._watch("rank 0 to complete the save")
        asked = False
        while True:
            own = self._own_claim()
            if own is not None and own.state == claims.PUBLISHED:
                break
            if self._leader_error() is not None:
                raise self._given_up()
            raw = None if asked else self.files.read(f"{self.save}/{_ASK}")
            if raw is not None:
                asked = True
                request = parse(_ASK, raw).get(str(self.place))
                if request is not None:
                    self.files.put(f"{self.save}/{self.place:05d}.answer", answer(request))
            beat = self.files.read(beat_name(self.save, 0))
            if not watch.pause((own is None, beat, asked)):
                if claims.is_published(self.files, self.save):
                    break
                raise self._no_leader()
        self._over.set()

    def _no_leader(self) -> CheckpointError:
        return CheckpointError(
            f"{self.files.root}: rank 0 gave no sign of life for {self.timeout} s while place "
            f"{self.place} waited for it to complete the save. What was there before is as it was. "
            "Look for rank 0's own error, or raise timeout=."
        )

    def _watch(self, awaited: str) -> Watch:
        return Watch(self.timeout, self._clock, f"{awaited} ({self.files.root})")


def _live(ref: "weakref.ref[Session]", over: threading.Event, every: float) -> None:
    """Gives signs of life until a session is over, or nobody holds it any more."""
    while not over.wait(every):
        session = ref()
        if session is None:
            return
        with contextlib.suppress(OSError):
            session.beat()
        del session


def described(error: BaseException) -> str:
    """Returns an error as the other ranks see it."""
    return f"{type(error).__name__}: {error}"


def _some(places: list[int]) -> str:
    return ", ".join(map(str, places[:8])) + (", …" if len(places) > 8 else "")
