"""The storage writer: one safetensors file for each rank, and no message between them.

| name | is |
|---|---|
| `SafetensorsWriter` | a `StorageWriter` for `dcp.save` and `dcp.async_save` |
"""

import dataclasses
import os
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from shardplan.layouts import CheckpointError, Grids
from shardplan.layouts.layout import digest

from ..saving.messages import PlanMessage, WriterMeta
from ..without_gc import without_gc
from .buffers import DEFAULT_NBYTES, Buffers
from .places.files import files_at
from .writing.join import PlansDiffer, commit_of
from .writing.rankfile import RankFile, Vouched
from .writing.session import Marker, Session


class SafetensorsWriter(StorageWriter):
    """Writes a checkpoint as one safetensors file for each rank, and a manifest of the layouts.

    With `use_collectives=False` no rank sends anything: the layouts say where every rank's chunks
    are, and the ranks end the save together by files that they look for. DCP's barrier follows.

    | call | ranks | does here |
    |---|---|---|
    | `prepare_local_plan` | all | refuses a complete checkpoint; place 0 opens the save |
    | `write_data` | all | streams the rank's chunks into a file under a temporary name |
    | `finish` | all (with collectives: the coordinator) | the file gets its name; when all have, place 0 completes the save |

    It needs `LayoutAwareSavePlanner`. Python values are stored as plain data, never pickled.

    Args:
        path: A folder, or a URL that fsspec knows.
        overwrite: Whether a complete checkpoint in `path` is replaced, once the new one is complete.
        threads: How many threads compute checksums and write.
        buffer_bytes: Host memory for what can't be written from where it lies, in bytes.
        sync: Whether files are on the disk before the save counts as complete.
        timeout: Seconds without a sign of life from another rank before the save fails.
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
    ) -> None:
        self.path = path
        self._overwrite = overwrite
        self._threads = threads
        self._buffer_bytes = buffer_bytes
        self._sync = sync
        self._timeout = timeout
        self._stock = stock
        self._rank = 0
        self._coordinates = True
        self.collective = False
        self._message: PlanMessage | None = None
        self._session: Session | None = None
        self._file: RankFile | None = None
        self._vouched = Vouched()
        self._buffers: Buffers | None = None

    def __getstate__(self) -> dict[str, Any]:
        # An async save in another process takes the writer along before it has begun.
        return {**self.__dict__, "_session": None, "_file": None, "_buffers": None}

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
        """Returns what DCP passes on to the planner: the checkpoint's id, and this writer."""
        return WriterMeta(checkpoint_id=self.path, writer=self)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new save, at another path if one is given."""
        if checkpoint_id is not None:
            self.path = checkpoint_id
        self._session = self._file = self._message = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Takes this process's rank, and whether ranks exchange plans."""
        self._coordinates = is_coordinator
        self._rank = int(kwargs.get("rank", 0) or 0)
        self.collective = bool(kwargs.get("use_collectives", False))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Opens the save.

        Raises:
            CheckpointError: If the planner knows no layouts, or a complete checkpoint is there.
        """
        message = plan.planner_data
        if not isinstance(message, PlanMessage):
            raise CheckpointError(
                "SafetensorsWriter stores layouts, and this planner knows none. Pass a "
                "LayoutAwareSavePlanner as planner=."
            )
        self._message = message
        dense = message.grids[0].dense
        self.collective = self.collective and dense.world_size > 1
        place = dense.linear(dense.axes)
        leads = self._coordinates if self.collective else place == 0
        self._session = Session(
            files_at(self.path), place, leads, dense.world_size, self._timeout, self._overwrite
        )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tells all ranks the save's id, where DCP carries plans back to them."""
        if not self.collective or self._session is None:
            return plans
        return [dataclasses.replace(p, storage_data=self._session.save) for p in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the rank's chunks.

        Raises:
            CheckpointError: If a value can't be stored, or the plan does not fit its tensors.
            OSError: If the file can't be written.
        """
        session, message = self._session, self._message
        assert session is not None and message is not None  # prepare_local_plan came before
        try:
            manifest = planner.manifest  # type: ignore[attr-defined]
            if not self.collective:  # nobody joins what single ranks hold
                strict = digest((message.digest, message.told.extras.hex()))
                message = dataclasses.replace(message, digest=strict)
            groups = self._vouched.of(message.digest, manifest)
            file = RankFile(session.files, message, manifest, groups, self._rank)
            self._file = file
            if self._buffers is None:
                self._buffers = Buffers(self._buffer_bytes, torch.cuda.is_available())
            if self.collective:
                save = plan.storage_data
            else:  # where the header is written first, the id must be known by then
                save = session.awaited() if file.out.in_order else session.current()
            with without_gc():
                buffers, threads = self._buffers, self._threads
                file.write(plan.items, planner, buffers, threads, save or "", self._stock)
            if not self.collective:
                planner.spare_items(())  # type: ignore[attr-defined]  # lets its values go
            if self.collective:
                file.announce(str(save), self._sync)
                file.out.discard()  # DCP calls finish on the coordinator only
        except BaseException as error:
            self._fail(error)
            raise
        future: Future[list[WriteResult]] = Future()
        marker = file.marker
        future.set_result([WriteResult(MetadataIndex("file"), marker.nbytes, marker.encode())])
        return future

    def _fail(self, error: BaseException) -> None:
        """Cleans up after a failure and tells the other ranks of it."""
        self._buffers = None  # some may be missing
        file, self._file = self._file, None
        if file is not None:
            file.out.discard()
        if self._session is not None and not self.collective:
            self._session.fail(error)

    def plan_failed(
        self, error: BaseException, grids: Grids, ranks: tuple[int, ...] | None
    ) -> None:
        """Tells the other ranks that this one could not plan, so that they do not wait for it.

        Args:
            error: Why.
            grids: The grids of the ranks that save, at this rank's place.
            ranks: Global ranks that save; None for all.
        """
        count = grids.world_size
        if not self.collective and count > 1:
            place = grids.dense.linear(grids.dense.axes)
            files = files_at(self.path)
            Session(files, place, place == 0, count, self._timeout, True).fail(error)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Ends the save on this rank: it is complete, and there was no error on any rank.

        Raises:
            CheckpointError: If another rank failed, gave no sign of life, or planned another
                checkpoint.
        """
        session, file = self._session, self._file
        assert session is not None and file is not None  # write_data came before
        try:
            if self.collective:
                markers = [Marker.decode("a result", r[0].storage_data) for r in results]
                commit = commit_of(session.files, str(session.save), markers, metadata)
                session.complete(commit)
            elif session.leads:
                self._lead(session, file)
            else:
                self._follow(session, file)
        except BaseException as error:
            if session.leads:
                session.give_up(error, keep=isinstance(error, PlansDiffer))
            raise
        finally:
            file.out.discard()
            self._file = self._session = self._message = None

    def _lead(self, session: Session, file: RankFile) -> None:
        save = str(session.save)
        file.announce(save, self._sync)
        session.mark(save, file.marker)
        session.complete(commit_of(session.files, save, session.gather()))

    def _follow(self, session: Session, file: RankFile) -> None:
        def announce(save: str) -> None:
            file.announce(save, self._sync)
            session.mark(save, file.marker)

        try:
            session.join(announce)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{file.difference(session)}") from None
