"""Writes the files of stock DCP one chunk after another, with one chunk in memory at a time."""

import io
import os
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardplan.layouts import CheckpointError

from ..compat import storage_info

_NAME = "__0_0.distcp"


class OneFileWriter(FileSystemWriter):
    """Torch's file system writer for one process, but it lets go of each tensor once written.

    Torch's own keeps all tensors of a file until the file ends.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = Path(path) / _NAME

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        info = storage_info()
        results = []
        try:
            with self._file.open("wb") as stream:
                for item in plan.items:
                    start = stream.tell()
                    data = planner.resolve_data(item)
                    if isinstance(data, io.BytesIO):
                        stream.write(data.getbuffer())
                    else:
                        torch.save(data, stream)
                    del data
                    length = stream.tell() - start
                    place = info(_NAME, start, length)
                    results.append(
                        WriteResult(index=item.index, size_in_bytes=length, storage_data=place)
                    )
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            self._file.unlink(missing_ok=True)
            raise CheckpointError(
                f"{self._file}: {error.strerror or error}. Free space, or choose another place."
            ) from error
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done
