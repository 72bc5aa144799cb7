"""Megatron's random states: by pipeline and tensor rank in its own form, and of each rank beside it.

Megatron-LM's loop has `{"(pp, tp)": [state]}` on each rank. Ranks that differ in another way, such as by
expert-parallel rank, have other states under one such key. So both are saved:

| section | has | read by |
|---|---|---|
| `rng_state` | for each `(pp, tp)` the state of its first rank | Megatron-LM, and a load by other ranks |
| `rng_state_per_rank` | each rank's own state | a load by as many ranks, each with the same `(pp, tp)` |

A rank for whose `(pp, tp)` nothing was saved keeps its state, and the report says so.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

from shardplan.layouts import Grids

from ..state.per_rank import PerRank, indices_saved

_KEY = re.compile(r"\((\d+), (\d+)\)\Z")
_OWN = "_per_rank"


def is_rng_state(value: Any) -> bool:
    """Returns whether a value has the form of Megatron-LM's random states on one rank."""
    return (
        isinstance(value, Mapping) and len(value) == 1 and bool(_KEY.match(str(next(iter(value)))))
    )


def saved_forms(name: str, value: Mapping[str, Any], grids: Grids) -> dict[str, Any]:
    """Returns the sections that a rank saves of its random states.

    Args:
        name: The section's name.
        value: The rank's states in Megatron-LM's form.
        grids: The rank's grids.
    """
    forms: dict[str, Any] = {name + _OWN: PerRank(value)}
    found = _KEY.match(next(iter(value)))
    assert found is not None  # is_rng_state said so
    dense = grids.dense
    known = (int(found[1]), int(found[2])) == (dense.index("pp"), dense.index("tp"))
    if not known or not dense.linear([a for a in dense.axes if a not in ("pp", "tp")]):
        forms[name] = value
    return forms


class RngLoad:
    """The random states of one section on their way into a rank.

    Args:
        name: The section's name.
        value: The rank's states, which what was saved replaces.
        stored: The checkpoint's keys.
        ranks: How many ranks load.
    """

    def __init__(
        self, name: str, value: Mapping[str, Any], stored: Iterable[str], ranks: int
    ) -> None:
        self._name, self._value = name, value
        (self._key,) = value
        keys = list(stored)
        #: What the rank asks for.
        self.sections: dict[str, Any] = {}
        if ranks == len(indices_saved(keys, f"{name}{_OWN}.rank_")):
            self.sections[name + _OWN] = PerRank(copy.deepcopy(value))
        if any(key.startswith(f"{name}.{self._key}.") for key in keys):
            self.sections[name] = copy.deepcopy(dict(value))

    def chosen(self) -> tuple[Any, str | None]:
        """Returns the states that the rank takes, and what the report says if none were saved."""
        own = self.sections.get(self._name + _OWN)
        if own is not None and self._key in own.value:
            return own.value, None
        if self._name in self.sections:
            return self.sections[self._name], None
        return self._value, f"{self._name}.{self._key}: no random state was saved for this rank"
