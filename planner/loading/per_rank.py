"""Which of the values that ranks saved for themselves a rank takes, by the load's policies."""

from typing import NamedTuple

from ..policies import LoadPolicies
from ..state.per_rank import PerRank, Seat


class Choice(NamedTuple):
    """Which of the saved values a rank takes.

    Attributes:
        taken: Its index; None for none.
        note: What the report says, if the numbers of ranks differ.
        fault: Why the load must not go on.
    """

    taken: int | None = None
    note: str | None = None
    fault: str | None = None


def choose(
    key: str,
    value: PerRank,
    seat: Seat,
    found: list[int],
    policies: LoadPolicies,
    facts: str,
) -> Choice:
    """Returns which of the saved values a rank takes.

    Args:
        key: The value's key.
        value: The value that is replaced.
        seat: The rank's place.
        found: The indices that were saved, at least one.
        policies: The policies `fewer_ranks` and `more_ranks`.
        facts: The rank's place on the grid, for errors.
    """
    count, index, note = len(found), seat.index, None
    if found != list(range(count)):
        return Choice(
            fault=f"{key}: the checkpoint has values of the ranks {found} only ({facts})."
        )
    if count > seat.count:
        gone = f"{seat.count} to {count - 1}" if count > seat.count + 1 else str(seat.count)
        if policies.fewer_ranks == "error":
            return Choice(
                fault=f"{key}: {count} ranks saved a value of their own and {seat.count} load, so "
                f"that of {value.label} {gone} would be lost ({facts}). Pass "
                "policies=LoadPolicies(fewer_ranks='drop') if that is meant."
            )
        note = f"dropped the value of {value.label} {gone}"
    if index < count:
        return Choice(index, note)
    if policies.more_ranks == "error":
        return Choice(
            fault=f"{key}: {count} ranks saved a value of their own and {seat.count} load, so there "
            f"is none for {value.label} {index} ({facts}). Pass "
            "policies=LoadPolicies(more_ranks='keep') or 'wrap'."
        )
    if policies.more_ranks == "keep":
        return Choice(note=f"kept the value of {value.label} {index}")
    return Choice(index % count, f"took the value of {value.label} {index % count}")
