"""Text that every machine has: the sources of Python's standard library, one byte a token."""

import random
import sysconfig
from pathlib import Path

SEPARATOR = 256
DOCUMENTS_PER_STEP = (14, 9, 3, 12, 1, 16, 7, 2)
SHORTEST, LONGEST = 8, 56


class Corpus:
    """Documents of each step; the same for every rank and every configuration.

    Some steps have fewer documents than there are ranks, so that ranks with none occur.
    """

    def __init__(self, folder: Path | None = None, files: int = 60) -> None:
        """Reads the first modules of a folder, by name.

        Raises:
            FileNotFoundError: The folder holds no Python source.
        """
        folder = folder or Path(sysconfig.get_paths()["stdlib"])
        paths = sorted(path for path in folder.glob("*.py") if path.stat().st_size > LONGEST)
        if not paths:
            raise FileNotFoundError(f"{folder} holds no Python source to train on")
        self._texts = [path.read_bytes() for path in paths[:files]]

    def documents(self, step: int) -> list[bytes]:
        """The documents of a step, a pure function of its number."""
        draw = random.Random(step)
        return [
            self._snippet(draw) for _ in range(DOCUMENTS_PER_STEP[step % len(DOCUMENTS_PER_STEP)])
        ]

    def _snippet(self, draw: random.Random) -> bytes:
        text = draw.choice(self._texts)
        length = draw.randint(SHORTEST, LONGEST)
        start = draw.randrange(len(text) - length)
        return text[start : start + length]


def deal(documents: list[bytes], index: int, count: int) -> list[bytes]:
    """The documents of data-parallel rank `index` of `count`."""
    return documents[index::count]
