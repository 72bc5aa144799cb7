"""What a load read.

| name | is |
|---|---|
| `Stats` | counts of bytes, files and calls |
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """What a load read.

    Attributes:
        needed: Bytes that the plan asked for.
        read: Bytes of chunks that were read; what is more than needed was read for checksums.
        headers: Bytes of headers, of tables of checksums and of Python values.
        manifest: Bytes of `checkpoint.json`.
        files: Data files that were opened.
        reads: Calls to the file system for chunks.
        unchecked: Bytes that were read without a checksum: parts of blocks.
    """

    needed: int = 0
    read: int = 0
    headers: int = 0
    manifest: int = 0
    files: int = 0
    reads: int = 0
    unchecked: int = 0
