"""Writes the files of stock DCP one chunk after another, with one chunk in memory at a time."""

import io
from pathlib import Path
from typing import BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..compat import storage_info
from .streams import atomic_file

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

    def storage_meta(self) -> StorageMeta:
        # Without the folder's name: the folder is written elsewhere and then moved to its place.
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        info = storage_info()
        results = []
        with atomic_file(self._file) as stream:
            for item in plan.items:
                start = stream.tell()
                data = planner.resolve_data(item)
                if isinstance(data, io.BytesIO):
                    stream.write(data.getbuffer())
                else:
                    _save(data, stream)
                del data
                length = stream.tell() - start
                place = info(_NAME, start, length)
                results.append(
                    WriteResult(index=item.index, size_in_bytes=length, storage_data=place)
                )
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _save(tensor: torch.Tensor, stream: BinaryIO) -> None:
    try:
        torch.save(tensor, stream)
    except RuntimeError as error:
        # Ending its archive, torch hides why the stream took no more: a full disk.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
