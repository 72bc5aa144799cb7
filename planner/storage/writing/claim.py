"""Who may complete a save in a folder: at most one saver at a time, and the dead give way.

| file | written by | says |
|---|---|---|
| `.save-<n>.json` | the leader of a save, once | claim number `n`: who saves under which id |
| the save's token | the leader, before the claim | it can still be published; see `places.place.Files` |

Nobody can create a claim that is there, so savers come one after another. A claim is over when its
save is published, when its leader says so in the claim, or when somebody has withdrawn its token
because its leader gave no sign of life. A leader that wakes up after that finds its token gone and
publishes nothing. So of any number of savers each is told the truth, whatever caches, pauses and
kills come between.
"""

import contextlib
import datetime
import json
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardplan.layouts import CheckpointError, SaveConflictError

from ..folder import STOCK, has_stock, look
from ..format.commit import Commit, is_save, read_commit
from ..places.files import Files
from .identity import Identity
from .process import has_ended, this_process
from .watch import Clock, Watch

_NAME = re.compile(r"\.save-([1-9][0-9]*)\.json\Z")
# So many claims stay, so that a saver with an old listing can't take the number of one that is gone.
_KEPT = 8
OPEN, PUBLISHED, ENDED = "open", "published", "ended"


@dataclass(frozen=True, slots=True)
class Claim:
    """One save's claim of a folder.

    Attributes:
        generation: Its number; each claim of a folder has one more than the one before.
        save: Id of the save; empty while the claim is being written.
        place: Place of the rank that leads it.
        launch: The launch that saves.
        count: Its count of saves, see `Identity`.
        beat: Most seconds between two signs of life of its leader.
        since: When it was made, in the leader's time zone.
        process: The leader's process.
        state: `open`, `published` or `ended`.
        error: Why its leader gave up.
    """

    generation: int
    save: str = ""
    place: int = 0
    launch: str = ""
    count: int = 0
    beat: float = 0.0
    since: str = ""
    process: dict[str, Any] = field(default_factory=dict)
    state: str = OPEN
    error: str = ""

    def __str__(self) -> str:
        process = self.process
        return (
            f"save {self.save} by process {process.get('pid')} on {process.get('host')}, begun "
            f"{self.since}"
        )

    def encode(self) -> bytes:
        """Returns the claim as a file's contents."""
        return json.dumps(asdict(self)).encode()


def beat_name(save: str, place: int) -> str:
    """Returns the name of the file in which a rank leaves signs of life."""
    return f"{save}/{place:05d}.beat"


def claims(files: Files, known: int = 0) -> list[int]:
    """Returns the numbers of a folder's claims, ascending.

    Args:
        files: The folder.
        known: A number that is known to be taken, whatever a listing says.
    """
    numbers = {int(found[1]) for found in map(_NAME.match, files.names("")) if found}
    if known:
        numbers.add(known)
    highest = max(numbers, default=0)
    while files.read(_name(highest + 1)) is not None:  # a listing may be old, a name is not
        highest += 1
        numbers.add(highest)
    return sorted(numbers)


def read_claim(files: Files, generation: int) -> Claim:
    """Returns a claim by its number; without an id if it is being written."""
    raw = files.read(_name(generation))
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        claim = Claim(**json.loads(raw or b""))
        if claim.generation == generation and is_save(claim.save):
            return claim
    return Claim(generation)


def _name(generation: int) -> str:
    return f".save-{generation}.json"


def take(
    files: Files,
    identity: Identity,
    place: int,
    overwrite: bool,
    timeout: float,
    beat: float,
    clock: Clock,
) -> tuple[Claim, Commit | None]:
    """Claims a folder for a save; called by its leader.

    Args:
        files: The folder.
        identity: The save's.
        place: The leader's place.
        overwrite: Whether a complete checkpoint may be replaced.
        timeout: Seconds without a sign of life after which another save counts as dead.
        beat: Most seconds between two signs of life of this leader.
        clock: What time it is.

    Returns:
        The claim, and the checkpoint that the save replaces.

    Raises:
        CheckpointExistsError: If a complete checkpoint is there and may not be replaced.
        SaveConflictError: If another save is under way, and alive.
    """
    assert identity.save is not None  # only followers may learn it late
    own = Claim(
        1,
        identity.save,
        place,
        identity.launch,
        identity.count,
        beat,
        datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        this_process(),
    )
    files.make_folder(own.save)
    files.make_token(own.save)
    known, over = 0, 0
    try:
        while True:
            look(files, overwrite)
            known = max(claims(files, known), default=0)
            if known > over:
                _wait_until_over(files, read_claim(files, known), timeout, clock)
                over = known
                continue  # what it did until then is seen at the next look
            own = replace(own, generation=known + 1)
            if not files.create_new(_name(own.generation), own.encode()):
                known = own.generation
                continue
            try:
                return own, look(files, overwrite)
            except CheckpointError as error:
                end(files, own, str(error))
                raise
    except BaseException:
        files.drop_token(own.save)
        raise


def _wait_until_over(files: Files, claim: Claim, timeout: float, clock: Clock) -> None:
    """Returns when a save can't be published any more, or has been."""
    watch = Watch(max(timeout, 4 * claim.beat), clock, f"another save in {files.root}: {claim}")
    first: bytes | None = None
    while claim.state == OPEN:
        beat = files.read(beat_name(claim.save, claim.place)) if claim.save else None
        if beat is not None:
            if first not in (beat, None):
                raise SaveConflictError(
                    f"{files.root}: another save is writing here ({claim}). Nothing of it was "
                    "touched. Save elsewhere, or wait until it has ended; if it belongs to a job "
                    "that should not run any more, end that job."
                )
            first = beat
        if claim.save and is_published(files, claim.save):
            return
        if has_ended(claim.process) or not watch.pause((claim.save, beat)):
            if claim.save:
                files.withdraw(claim.save, claim.generation)
            return
        again = read_claim(files, claim.generation)
        if again.save:  # else it is still being written, or this look is an old one
            claim = again


def is_published(files: Files, save: str) -> bool:
    """Returns whether a save is the folder's complete checkpoint."""
    commit = read_commit(files)
    return commit is not None and commit.save == save


def end(files: Files, claim: Claim, error: str) -> None:
    """Says in a claim that its save was given up; called by its leader."""
    files.drop_token(claim.save)
    files.put(_name(claim.generation), replace(claim, state=ENDED, error=error).encode())


def publish(files: Files, claim: Claim, commit: Commit, replaces: bool, sync: bool) -> None:
    """Makes a save the folder's checkpoint; called by its leader.

    Raises:
        SaveConflictError: If it was taken for dead, and another save has the folder now.
        CheckpointExistsError: If another checkpoint is complete that may not be replaced.
    """
    look(files, replaces)  # a save in torch's format may have become complete meanwhile
    files.sync_folder(claim.save)
    done = files.publish(claim.save, claim.generation, commit.encode(), replaces, sync)
    # An answer of the storage may be lost, and the call made again.
    if not done and not is_published(files, claim.save):
        look(files, replaces)
        raise taken_over(files, claim)
    # Complete. The other ranks would find out more slowly without this.
    with contextlib.suppress(OSError):
        files.put(_name(claim.generation), replace(claim, state=PUBLISHED).encode())


def taken_over(files: Files, claim: Claim) -> SaveConflictError:
    """Returns the error of a leader that was taken for dead."""
    return SaveConflictError(
        f"{files.root}: {claim} gave no sign of life for so long that another save has taken the "
        "folder over. Nothing of it was published. Save again, or raise timeout=."
    )


def clear(files: Files, claim: Claim, replaced: Commit | None) -> None:
    """Deletes what a save that is published now leaves behind; called by its leader.

    That is the checkpoint it replaces, and what saves left that can never be published: those of
    earlier claims, and those whose leader failed or was killed before it made one. What belongs to
    nobody known stays.
    """
    if replaced is not None and not has_stock(files, replaced):
        files.delete(STOCK)  # what finalize wrote for it
    earlier = [number for number in claims(files) if number < claim.generation]
    dead = {read_claim(files, number).save for number in earlier}
    if replaced is not None:
        dead.add(replaced.save)
    for name in files.names(""):
        if not is_save(name) or name == claim.save:
            continue
        if name in dead or _never_begins(files, name):
            files.delete_folder(name)
    files.forget_published(claim.generation, _KEPT)
    for number in earlier:
        if number <= claim.generation - _KEPT:
            files.delete(_name(number))


def _never_begins(files: Files, save: str) -> bool:
    """Whether a save without a claim has a leader that can make none any more."""
    names = files.names(save)
    if f"{0:05d}.failed" in names:
        return True
    raw = files.read(beat_name(save, 0))
    if raw is None:  # killed before its first sign of life, if others have waited in vain for one
        return any(name.endswith(".failed") for name in names)
    try:
        return has_ended(json.loads(raw))
    except (ValueError, AttributeError):
        return False
