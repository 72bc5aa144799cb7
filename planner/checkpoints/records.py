"""Where the elements of a tensor lie inside the bytes that `torch.save` made of it.

| name | does |
|---|---|
| `find_array` | the place of a saved tensor's elements, read from the archive's directory |
| `damaged` | whether an archive's checksums agree with its bytes |
"""

import io
import struct
import zipfile
from collections.abc import Iterator

import torch

from shardplan.layouts import CheckpointError, DamagedCheckpointError
from shardplan.layouts.slab import contiguous_strides

from .arrays import Array
from .files import Files

_AHEAD = 16 << 10
_LOCAL = struct.Struct("<4s22xHH")  # signature, and the lengths of name and extra field


class Section(io.RawIOBase):
    """A part of a file as a stream of its own."""

    def __init__(self, files: Files, name: str, start: int, length: int) -> None:
        self._files, self._name, self._start, self._length = files, name, start, length
        self._at = 0

    def stream(self) -> io.BufferedReader:
        """Returns the section as a stream that reads ahead."""
        self.seek(0)
        return io.BufferedReader(self, _AHEAD)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(self._length - self._at, 0)
        count = left if size is None or size < 0 else min(size, left)
        data = self._files.take(self._name, self._start + self._at, count) if count else b""
        self._at += count
        return data

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        data = self.read(view.nbytes)
        view.cast("B")[: len(data)] = data
        return len(data)


def find_array(files: Files, name: str, start: int, length: int, what: str) -> Array | None:
    """Returns where the elements of a tensor lie that `torch.save` wrote.

    Args:
        files: The checkpoint's files.
        name: The file.
        start: First byte of the archive in it.
        length: Bytes of the archive.
        what: The tensor's key, for errors.

    Returns:
        The place; None if its elements do not lie row-major, one after another.

    Raises:
        DamagedCheckpointError: If the bytes are not an archive of one tensor.
    """
    section = Section(files, name, start, length)
    try:
        archive = zipfile.ZipFile(section.stream())
        record = next((i for i in archive.infolist() if i.filename.endswith("/data/0")), None)
        shown = torch.load(section.stream(), map_location="meta", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # zipfile and torch raise many kinds on damaged bytes
        raise DamagedCheckpointError(
            f"{what}: {files.path(name)}, bytes [{start}, {start + length}): no tensor that "
            f"torch.save wrote ({type(error).__name__}: {str(error)[:120]}). Restore the file."
        ) from error
    if not isinstance(shown, torch.Tensor):
        raise DamagedCheckpointError(
            f"{what}: {files.path(name)} holds a {type(shown).__name__}, not a tensor, at byte "
            f"{start}. Restore the file."
        )
    plain = shown.layout is torch.strided and not shown.is_quantized
    if not plain or record is None or record.compress_type != zipfile.ZIP_STORED:
        return None
    shape = tuple(shown.shape)
    steps = contiguous_strides(shape)
    if any(n > 1 and a != b for n, a, b in zip(shape, shown.stride(), steps, strict=True)):
        return None
    head = files.take(name, start + record.header_offset, _LOCAL.size)
    _, name_length, extra_length = _LOCAL.unpack(head)
    begin = start + record.header_offset + _LOCAL.size + name_length + extra_length
    begin += shown.storage_offset() * shown.element_size()
    if begin + shown.numel() * shown.element_size() > start + length:
        raise DamagedCheckpointError(
            f"{what}: {files.path(name)}: its {shown.numel()} elements end after byte "
            f"{start + length}, where its record does. Restore the file."
        )
    return Array(name, begin, shown.element_size(), shape)


def damaged(files: Files, name: str, start: int, length: int) -> Iterator[str]:
    """Yields what is wrong with an archive: its form, or a record whose checksum differs."""
    try:
        archive = zipfile.ZipFile(Section(files, name, start, length))
        bad = archive.testzip()
    except Exception as error:  # zipfile and zlib raise many kinds on damaged bytes
        yield f"{name}, bytes [{start}, {start + length}): {error}"
        return
    if bad is not None:
        yield f"{name}, bytes [{start}, {start + length}): the checksum of its record {bad} differs"
