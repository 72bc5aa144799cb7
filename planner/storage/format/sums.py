"""Checksums: one for each block of a chunk, and one over them for the chunk.

A chunk of one block has that block's checksum. So a reader of whole chunks needs nothing but the
header, and a reader of a part can check the blocks that it has read.
"""

from collections.abc import Sequence
from typing import Any

import xxhash

ALGORITHM = "xxh3_64"
# Small enough that a part of a chunk is mostly whole blocks, and for a processor's cache.
BLOCK = 256 << 10


def block_sum(data: Any) -> bytes:
    """Returns the checksum of one block, 8 bytes, big-endian as xxHash writes it."""
    return xxhash.xxh3_64_digest(data)


def chunk_sum(blocks: Sequence[bytes]) -> bytes:
    """Returns the checksum of a chunk, 8 bytes, from the checksums of its blocks in order."""
    return blocks[0] if len(blocks) == 1 else xxhash.xxh3_64_digest(b"".join(blocks))


def block_count(nbytes: int) -> int:
    """Returns how many blocks a chunk of `nbytes` has; an empty chunk has one."""
    return max(1, -(-nbytes // BLOCK))
