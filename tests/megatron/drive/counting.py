"""Counts the collectives that this rank takes part in."""

import torch.distributed as dist

NAMES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "recv",
)


class Calls:
    """Counts calls while entered; a collective that is made of others counts once."""

    def __enter__(self):
        self.by_name = {}
        self._inside = False
        self._real = {name: getattr(dist, name) for name in NAMES}
        for name, real in self._real.items():
            setattr(dist, name, self._counted(name, real))
        return self

    def __exit__(self, *exc):
        for name, real in self._real.items():
            setattr(dist, name, real)

    def _counted(self, name, real):
        def call(*args, **kwargs):
            if self._inside:
                return real(*args, **kwargs)
            self._inside = True
            try:
                return real(*args, **kwargs)
            finally:
                self._inside = False
                self.by_name[name] = self.by_name.get(name, 0) + 1

        return call

    @property
    def count(self) -> int:
        return sum(self.by_name.values())
