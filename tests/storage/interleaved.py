"""Savers and readers whose steps a seeded scheduler interleaves: no real time passes, no luck decides.

Each saver runs in a thread of its own, and every look at the storage and every pause is a point at
which the scheduler lets some thread go on. Time is a number that pauses move on. A saver can be
frozen at any such point for longer than any timeout, or killed there.
"""

import random
import threading


class Killed(BaseException):
    """Ends a saver as SIGKILL would: nothing of it runs any more."""


class Schedule:
    """Lets one thread at a time go on, chosen by a seeded draw."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.now = 0.0
        self._threads = {}
        self._wake = {}
        self._current = None
        self._errors = []
        self._control = threading.Semaphore(0)
        self.steps = 0

    def start(self, name, work):
        turn = threading.Semaphore(0)
        self._threads[name] = turn
        self._wake[name] = 0.0

        def run():
            turn.acquire()
            try:
                work()
            except Killed:
                pass
            except BaseException as error:
                self._errors.append(error)
            finally:
                del self._threads[name], self._wake[name]
                self._control.release()

        threading.Thread(target=run, daemon=True).start()

    def run(self, most=20_000):
        while self._threads:
            ready = [n for n in self._threads if self._wake[n] <= self.now]
            if not ready:
                self.now = min(self._wake.values())
                continue
            self._current = self.draw.choice(sorted(ready))
            self._threads[self._current].release()
            self._control.acquire()
            self.steps += 1
            assert self.steps < most, "the savers go on for ever"
        if self._errors:
            raise self._errors[0]

    def step(self, seconds=0.0, name=None):
        """Called by a thread: lets others go on, and comes back `seconds` later at the earliest."""
        name = name or self._current
        self._wake[name] = self.now + seconds
        turn = self._threads[name]
        self._control.release()
        turn.acquire()


class SimulatedClock:
    """The time of a schedule."""

    def __init__(self, schedule):
        self._schedule = schedule

    def monotonic(self):
        return self._schedule.now

    def sleep(self, seconds):
        self._schedule.step(seconds)


class Interleaved:
    """Files whose every call lets others go on before it, and sometimes freezes or kills its caller.

    Args:
        files: The real files.
        schedule: The schedule.
        freeze: Chance of a pause of `longest` seconds before a call.
        kill: Chance that the caller is killed before a call.
        stale: Chance that a look (`read`, `names`, `published`) shows what was there at the start.
    """

    def __init__(self, files, schedule, freeze=0.0, kill=0.0, stale=0.0, longest=100.0):
        self._files, self._schedule = files, schedule
        self._freeze, self._kill, self._stale, self._longest = freeze, kill, stale, longest
        self.root = files.root
        self._old = {"names": {"": files.names("")}, "read": {}}
        for name in self._old["names"][""]:
            try:
                self._old["read"][name] = files.read(name)
            except IsADirectoryError:
                continue

    def __getattr__(self, name):
        method = getattr(self._files, name)

        def call(*args, **options):
            draw = self._schedule.draw
            if draw.random() < self._kill:
                raise Killed
            self._schedule.step(self._longest if draw.random() < self._freeze else 0.0)
            if name in ("names", "read") and draw.random() < self._stale:
                return self._old[name].get(args[0], [] if name == "names" else None)
            return method(*args, **options)

        return call
