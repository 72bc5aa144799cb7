"""The identity of a save: one id that all of its ranks know before they write.

Files of another id are never taken for this save's. The ranks have to come to the id without a
message, so it is made of what only this launch and this save share:

| ranks | the id is |
|---|---|
| one rank | drawn |
| ranks that exchange plans | drawn by the coordinator, sent along with the plans |
| `SafetensorsWriter(save_id=…)` | what the caller gives |
| ranks of a process group | made of a token in the group's store, the folder, the ranks that save, and how many saves there each of them has begun |
| others, such as threads | that of the next save which the leader of the same launch begins |
"""

import hashlib
import os
import secrets
import socket
from dataclasses import dataclass

import torch.distributed as dist

from shardplan.layouts import CheckpointError

from ...compat import default_store

_DIGITS = 16
# What tells launches apart where there is no process group, set by torchrun, Slurm and mpirun.
_LAUNCHERS = (
    ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ("PMIX_NAMESPACE",),
)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a rank knows of its save before it writes.

    Attributes:
        save: Id of the save, 16 hexadecimal digits; None if the leader's claim will tell.
        launch: What all processes of this launch share and no others.
        count: How many saves these ranks have begun here; 0 where nobody counts.
        counter: The store's key of this rank's count.
    """

    save: str | None
    launch: str
    count: int = 0
    counter: str = ""

    def catch_up(self, count: int) -> None:
        """Sets this rank's count to that of the leader, after one of them has missed a save."""
        if self.counter:
            default_store().add(self.counter, count - self.count)


def drawn() -> str:
    """Returns a new id."""
    return secrets.token_hex(_DIGITS // 2)


def identify(
    root: str, place: int, ranks: int, members: tuple[int, ...] | None, given: str | None
) -> Identity:
    """Returns the identity of the save that this rank begins.

    Args:
        root: The checkpoint's place, the same text on all ranks.
        place: This rank's place; place 0 leads.
        ranks: How many ranks save.
        members: Their global ranks; None for all ranks of the default process group.
        given: The id that the caller gave, if any.

    Raises:
        CheckpointError: If other ranks save than the process group has, and nobody says which.
    """
    store = default_store() if dist.is_available() and dist.is_initialized() else None
    launch = _launch()
    if given is not None:
        return Identity(_digest("given", given), launch)
    if ranks == 1:
        return Identity(drawn(), launch)
    if store is None:
        return Identity(None if place else drawn(), launch)
    world = dist.get_world_size()
    if ranks != (world if members is None else len(members)):
        raise CheckpointError(
            f"{root}: {ranks} ranks save by their grid, but the process group has "
            f"{world if members is None else len(members)}, and nobody says which of them save. Pass "
            "process_group= to LayoutAwareSavePlanner, or save_id= to SafetensorsWriter, another "
            "for each save and the same on its ranks."
        )
    token = store.compare_set("shardplan/launch", "", secrets.token_hex(16)).decode()
    folder = _digest(root, repr(members))
    counter = f"shardplan/saves/{folder}/{dist.get_rank()}"
    count = store.add(counter, 1)
    return Identity(_digest(token, folder, str(count)), token, count, counter)


def _digest(*texts: str) -> str:
    joined = "\0".join(texts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(joined, digest_size=_DIGITS // 2).hexdigest()


def _launch() -> str:
    for names in _LAUNCHERS:
        if os.environ.get(names[0]):
            return " ".join(f"{name}={os.environ.get(name, '')}" for name in names)
    # Processes that one program starts, and its threads.
    return f"{socket.gethostname()} {os.getppid()}"
