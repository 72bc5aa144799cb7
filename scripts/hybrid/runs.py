"""The sequence of runs: one that is never interrupted, and those that resume it elsewhere.

Each axis is seen growing, shrinking and off:

| axis | larger | smaller | off |
|---|---|---|---|
| TP | 2 → 4 | 4 → 2 | 2 → off |
| FSDP | 2 → 4 | 4 → 2 | 2 → off |
| EP | 2 → 4 | 4 → 2 | 2 → off |
"""

from dataclasses import dataclass

from config import Parallelism


@dataclass(frozen=True, slots=True)
class Run:
    """One start of the job.

    Attributes:
        name: Shown in the table; also the name of the checkpoint that the run writes.
        parallelism: Its configuration.
        until: The last step that it takes.
        source: Name of the run whose checkpoint it resumes; None starts from scratch.
        save_step: Steps taken when it saves; None never saves.
    """

    name: str
    parallelism: Parallelism
    until: int
    source: str | None = None
    save_step: int | None = None

    def steps(self, start: int) -> int:
        """Number of steps from `start` to the end."""
        return self.until - start


RUNS = (
    Run("A", Parallelism(tp_size=2, dp_size=2, ep_size=2), until=28, save_step=16),
    Run("B", Parallelism(tp_size=4, ep_size=4), until=24, source="A", save_step=20),
    Run("C", Parallelism(dp_size=4, ep_size=4), until=24, source="A", save_step=20),
    Run("D", Parallelism(dp_size=4), until=24, source="A"),
    Run("E", Parallelism(tp_size=2, dp_size=2, etp_size=2), until=24, source="A"),
    Run("F", Parallelism(tp_size=2, ep_size=2), until=28, source="B"),
    Run("G", Parallelism(dp_size=2, ep_size=2), until=28, source="C"),
    Run("H", Parallelism(dp_size=3), until=24, source="A"),
    Run("I", Parallelism(), until=24, source="A"),
)
"""A run resumes only from one that stands before it; the first is the uninterrupted one."""
