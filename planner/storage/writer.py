"""The storage writer: one safetensors file for each rank, and no message between them."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from shardplan.layouts import CheckpointError, CheckpointExistsError, Grids, RanksDisagreeError

from ..saving.agreement import first_difference
from ..saving.messages import PlanMessage, WriterMeta, unpack
from ..saving.turn import Turn
from ..without_gc import without_gc
from .buffers import DEFAULT_NBYTES, Buffers
from .folder import look
from .format.messages import decode_message, encode_message
from .places.files import Files, files_at
from .writing.identity import Identity, identify
from .writing.join import PlansDiffer, join
from .writing.rankfile import Writer, check_key, write_rank_file
from .writing.session import Session


class SafetensorsWriter(StorageWriter):
    """Writes a checkpoint as one safetensors file for each rank, and a manifest of the layouts.

    With `use_collectives=False` no rank sends anything: the layouts say where every rank's chunks
    are, and the ranks end the save together by files that they look for. DCP's barrier follows.

    | call | ranks | does here |
    |---|---|---|
    | `prepare_local_plan` | all | refuses a complete checkpoint, and keys that can't be stored |
    | `write_data` | all | place 0 claims the folder; each rank streams its chunks into a file |
    | `finish` | all (with collectives: the coordinator) | when all have written, place 0 compares what they planned and completes the save |

    It needs `LayoutAwareSavePlanner`. Python values are stored as plain data, never pickled.

    Args:
        path: A folder, or a URL that fsspec knows.
        overwrite: Whether a complete checkpoint in `path` is replaced, once the new one is complete.
        threads: How many threads compute checksums and write.
        buffer_bytes: Host memory for what can't be written from where it lies, in bytes.
        sync: Whether files are on the disk before the save counts as complete.
        timeout: Seconds without a sign of life from another rank before the save fails, and from
            another save before it counts as dead.
        save_id: The save's identity: any text, the same on all of its ranks and another for every
            save. Needed only where several processes save without a process group; see
            `writing.identity`.
        stock: Whether `finalize` shall be able to let stock DCP read the data: each chunk is then
            some 400 bytes longer.
    """

    stores_layouts = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        threads: int = 2,
        buffer_bytes: int = DEFAULT_NBYTES,
        sync: bool = True,
        timeout: float = 300.0,
        stock: bool = False,
        save_id: str | None = None,
    ) -> None:
        self.path = path
        self._overwrite = overwrite
        self._threads = threads
        self._buffer_bytes = buffer_bytes
        self._sync = sync
        self._timeout = timeout
        self._stock = stock
        self._save_id = save_id
        self._rank = 0
        self._coordinates = True
        self.collective = False
        self._identity: Identity | None = None
        self._message: PlanMessage | None = None
        self._session: Session | None = None
        self._planner: Any = None
        self._buffers: Buffers | None = None
        self._turn = Turn()

    def __getstate__(self) -> dict[str, Any]:
        # An async save in another process takes the writer along before it has begun.
        return {**self.__dict__, "_session": None, "_planner": None, "_buffers": None}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The checkpoint's path or URL."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether a path or URL can be written to."""
        try:
            files_at(checkpoint_id)
        except (CheckpointError, ValueError, TypeError):
            return False
        return True

    def storage_meta(self) -> StorageMeta | None:
        """Returns the checkpoint's id for DCP's own records, and this writer for the planner."""
        return WriterMeta(checkpoint_id=self.path, writer=self)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new save, at another path if one is given.

        Waits if a save in another thread has the writer.
        """
        self._turn.take()
        if checkpoint_id is not None:
            self.path = checkpoint_id
        self._session = self._message = self._identity = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Takes this process's rank, and whether ranks exchange plans."""
        self._coordinates = is_coordinator
        self._rank = int(kwargs.get("rank", 0) or 0)
        self.collective = bool(kwargs.get("use_collectives", False))
        self._session = self._message = self._identity = None

    def _identify(self, place: int, ranks: int, members: tuple[int, ...] | None) -> Identity:
        """Returns the identity of this save, found once."""
        if self._identity is None:
            root = files_at(self.path).root
            self._identity = identify(root, place, ranks, members, self._save_id)
        return self._identity

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Takes what the rank plans; refuses what this format can't hold.

        Raises:
            CheckpointExistsError: If a complete checkpoint is there and may not be replaced.
            UnstorableValueError: If a key can't be stored.
            CheckpointError: If the planner knows no layouts.
        """
        message = plan.planner_data
        if not isinstance(message, PlanMessage):
            raise CheckpointError(
                "SafetensorsWriter stores layouts, and this planner knows none. Pass a "
                "LayoutAwareSavePlanner as planner=."
            )
        self._message = message
        world = message.grids[0].world_size
        self.collective = self.collective and world > 1
        try:
            for item in plan.items:
                check_key(item.index.fqn, item.type is not WriteItemType.BYTE_IO)
            for extra in unpack(message.told.extras):  # which the rank may write late
                check_key(extra.key, extra.dtype is not None)
            files = files_at(self.path)
            if self.collective:
                look(files, self._overwrite)
            else:
                identity = self._identify(message.place, world, message.ranks)
                self._session = Session(
                    files, identity, message.place, world, self._timeout, self._overwrite
                )
                self._session.look()
        except CheckpointExistsError:
            self._session = None
            raise  # every rank sees it
        except Exception as error:
            self.plan_failed(error, message.grids[0], message.ranks)
            raise
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Opens the save where ranks exchange plans, and tells all of them its id."""
        if not self.collective or self._message is None or any(map(_is_refused, plans)):
            return plans
        identity = self._identify(0, 1, None)
        self._session = Session(
            files_at(self.path),
            identity,
            self._message.place,
            1,
            self._timeout,
            self._overwrite,
            leads=True,
        )
        self._session.begin()
        return [dataclasses.replace(p, storage_data=identity.save) for p in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the rank's chunks.

        Raises:
            CheckpointError: If a value can't be stored, the plan does not fit its tensors, or
                another save is using the folder.
            OSError: If the file can't be written.
        """
        message = self._message
        assert message is not None  # prepare_local_plan came before
        try:
            files = files_at(self.path)
            session = self._session
            if self.collective:
                save = str(plan.storage_data)
                files.make_folder(save)
            else:
                assert session is not None  # prepare_local_plan made it
                session.begin()
                save = session.save
            self._write(files, save, plan.items, planner)
            report = encode_message(message, self._rank)
            if session is not None and not self.collective:
                self._planner = planner  # holds what this rank may have to write yet
                session.ready(report)
        except BaseException as error:
            if (reason := self._failed(error)) is not error:
                raise reason from error
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex("file"), len(report), report)])
        return future

    def _write(
        self,
        files: Files,
        save: str,
        items: Sequence[WriteItem],
        planner: Any,
        late: bool = False,
    ) -> None:
        message = self._message
        assert message is not None  # prepare_local_plan came before
        if self._buffers is None:
            self._buffers = Buffers(self._buffer_bytes, torch.cuda.is_available())
        grids = message.grids[0]
        writer = Writer(
            save, message.place, self._rank, grids.world_size, grids.stage, message.digest
        )
        with without_gc():
            write_rank_file(
                files,
                writer,
                items,
                planner,
                self._buffers,
                self._threads,
                stock=self._stock,
                sync=self._sync,
                late=late,
            )

    def _write_late(self, keys: Iterable[str]) -> None:
        """Writes what only this rank holds of some keys."""
        session, planner, self._planner = self._session, self._planner, None
        assert session is not None and planner is not None  # write_data came before
        items = planner.spare_items(set(keys))
        if items:
            self._write(session.files, session.save, items, planner, late=True)

    def _failed(self, error: BaseException) -> BaseException:
        """Lets the other ranks know of a failure, and returns what to raise."""
        self._buffers = None  # some may be missing
        session, self._session = self._session, None
        if session is None:
            return error
        error = session.explained(error)
        session.fail(error)
        return error

    def plan_failed(self, error: BaseException, grids: Grids, ranks: Any = None) -> None:
        """Lets the other ranks know that this one could not plan, so that they do not wait for it.

        Args:
            error: Why.
            grids: This rank's grids.
            ranks: Global ranks that save; None for all of the default process group.
        """
        if self.collective or grids.world_size == 1:
            return
        place = grids.dense.linear(grids.dense.axes)
        with contextlib.suppress(CheckpointError, OSError):
            identity = self._identify(place, grids.world_size, ranks)
            session = self._session or Session(
                files_at(self.path), identity, place, grids.world_size, self._timeout, True
            )
            session.fail(error)
        self._session = None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Ends the save on this rank: it is complete, and there was no error on any rank.

        Raises:
            RanksDisagreeError: If the ranks did not plan one checkpoint.
            CheckpointError: If another rank failed, gave no sign of life, or another save has
                taken the folder over.
        """
        session = self._session
        assert session is not None  # write_data, or prepare_global_plan, came before
        try:
            if self.collective:
                messages = [decode_message("a result", r[0].storage_data) for r in results]
                session.publish(join(session.save, messages, together=True).commit, self._sync)
            elif session.leads:
                self._lead(session)
            else:
                session.follow(self._answer)
        except BaseException as error:
            if (reason := self._failed(error)) is not error:
                raise reason from error
            raise
        finally:
            if self._planner is not None:
                self._planner.spare_items(())  # which lets go of the values
            self._session = self._message = self._identity = self._planner = None

    def _lead(self, session: Session) -> None:
        where = f"{session.files.root}/{session.save}"
        messages = [decode_message(where, report) for report in session.gather()]
        try:
            joined = join(session.save, messages, together=False)
        except PlansDiffer as fault:
            (answer,) = session.ask({fault.place: {"manifest": True}})
            theirs = decode_message(where, answer)[0].manifest
            assert theirs is not None and fault.other is not None  # asked for
            raise RanksDisagreeError(
                f"{first_difference(theirs, fault.other)} (here on rank "
                f"{messages[fault.place][1]}). Of all ranks: {fault}"
            ) from None
        requests = {place: {"keys": keys} for place, keys in joined.late.items()}
        own = requests.pop(session.place, None)
        if own is not None:
            self._answer(own)
        if requests:
            session.ask(requests)
        session.publish(joined.commit, self._sync)

    def _answer(self, request: Any) -> bytes:
        """Does what the leader asks of this rank when it has compared all reports."""
        if "keys" in request:
            self._write_late(request["keys"])
            return b""
        message, planner = self._message, self._planner
        assert message is not None and planner is not None  # write_data came before
        return encode_message(dataclasses.replace(message, manifest=planner.manifest), self._rank)


def _is_refused(plan: SavePlan) -> bool:
    """Whether the planner has found that ranks disagree; no rank will write anything then."""
    return bool(getattr(plan.planner_data, "fault", None))
