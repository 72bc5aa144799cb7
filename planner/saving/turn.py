"""One save at a time: a planner holds the values of one save only."""

import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any, NamedTuple

_PAUSE = 0.01  # seconds between two looks


class _Owner(NamedTuple):
    """The call that a save runs in: its thread, and the frame that ends with it."""

    thread: int
    frame: int
    code: CodeType

    def is_running(self) -> bool:
        frame = sys._current_frames().get(self.thread)
        while frame is not None:
            if id(frame) == self.frame and frame.f_code is self.code:
                return True
            frame = frame.f_back
        return False


class Turn:
    """Whose turn it is to use a planner, where saves in several threads may overlap.

    Nothing tells a planner that a save is over: one that fails in the storage writer, or on another
    rank, never calls it again. But each save is one call of DCP in one thread, and whether that
    call still runs can be seen. So a save that failed blocks nobody.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: _Owner | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Turn, ()

    def take(self) -> None:
        """Waits until the save of another thread that has the planner has returned."""
        frame = _outermost(sys._getframe(2))
        own = _Owner(threading.get_ident(), id(frame), frame.f_code)
        del frame
        while True:
            with self._lock:
                owner = self._owner
                if owner is None or owner.thread == own.thread or not owner.is_running():
                    self._owner = own
                    return
            time.sleep(_PAUSE)


def _outermost(frame: FrameType) -> FrameType:
    """Returns the frame of DCP's own entry, or of the function that drives the planner by hand."""
    while frame.f_back is not None and _of_torch(frame.f_back):
        frame = frame.f_back
    return frame


def _of_torch(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name == "torch" or name.startswith("torch.")
