"""Waiting for others with growing pauses, until nothing has changed for too long."""

import logging
import time
from typing import Any, Protocol

_LOG = logging.getLogger("shardplan")
# Nobody waits longer than this between two looks, in seconds.
_LONGEST_PAUSE = 1.0
# After so many seconds of waiting a rank says what it waits for.
_PATIENCE = 10.0


class Clock(Protocol):
    """What time it is; the module `time` is one."""

    def monotonic(self) -> float:
        """Returns a time in seconds that only grows."""

    def sleep(self, seconds: float, /) -> None:
        """Returns after so many seconds."""


WALL: Clock = time


class Watch:
    """Waits with growing pauses, and notices when nothing changes for too long.

    Args:
        timeout: Seconds without a change before it gives up.
        clock: What time it is.
        awaited: What is waited for, for the log.

    Attributes:
        awaited: The same; may change while it waits.
    """

    def __init__(self, timeout: float, clock: Clock, awaited: str) -> None:
        self._timeout = timeout
        self._clock = clock
        self.awaited = awaited
        self._seen: set[Any] = set()
        self._began = self._since = clock.monotonic()
        self._told = False

    def pause(self, seen: Any) -> bool:
        """Pauses; returns whether there may still be something to wait for.

        Args:
            seen: What is there now. Only what was not there before is a change: a file system that
                shows the old and the new in turns must not keep anybody waiting.
        """
        now = self._clock.monotonic()
        if seen not in self._seen:
            self._seen.add(seen)
            self._since = now
        waited = now - self._since
        if waited > self._timeout:
            return False
        if not self._told and now - self._began > _PATIENCE:
            self._told = True
            _LOG.warning("waiting since %.0f s for %s", now - self._began, self.awaited)
        self._clock.sleep(min(max((now - self._began) / 8, 0.001), _LONGEST_PAUSE))
        return True
