"""What a load does where checkpoint and state dict differ: every policy, with its default.

| policy | choices (default first) | decides |
|---|---|---|
| `missing` | `error`, `report` | a key that the checkpoint lacks |
| `unexpected` | `report`, `error` | a key of a loaded section that nothing asks for |
| `dtype` | `widen`, `exact`, `cast` | a tensor that was saved with another dtype |
| `padding` | `zero`, `keep` | the rows that padding leaves without a value on disk |
| `fewer_ranks` | `error`, `drop` | values of `PerRank` that a smaller world has no rank for |
| `more_ranks` | `error`, `keep`, `wrap` | ranks of a larger world that no value was saved for |
| `meta` | `error`, a device | a tensor without data that is to be filled |

No default loses anything that was saved: what can't be kept is an error, and what was left out or
changed is in the report.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch

from .state.conversion import DTypePolicy

MissingPolicy = Literal["error", "report"]
UnexpectedPolicy = Literal["report", "error"]
PaddingPolicy = Literal["zero", "keep"]
FewerRanksPolicy = Literal["error", "drop"]
MoreRanksPolicy = Literal["error", "keep", "wrap"]

_CHOICES = {
    "missing": get_args(MissingPolicy),
    "unexpected": get_args(UnexpectedPolicy),
    "dtype": get_args(DTypePolicy),
    "padding": get_args(PaddingPolicy),
    "fewer_ranks": get_args(FewerRanksPolicy),
    "more_ranks": get_args(MoreRanksPolicy),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPolicies:
    """The policies of one load.

    Attributes:
        missing: `error`, or `report` and leave the value as it is. Nothing found at all is always
            an error; `_extra_state` may always be missing.
        unexpected: `report`, or `error`. With pipeline stages every stage's report lists the
            layers of the others.
        dtype: `exact`; `widen`: conversions that keep every value; `cast`: floats may lose
            precision. Integers never become floats.
        padding: `zero` or `keep` the padding rows of a vocabulary.
        fewer_ranks: For `PerRank` values of more ranks than there are now: `error`, or `drop` those
            of the ranks that are gone.
        more_ranks: For ranks that no `PerRank` value was saved for: `error`, `keep` what the state
            dict has, or `wrap`: take that of rank modulo the number that was saved.
        meta: `error`, or the device (such as `'cpu'`) on which a meta tensor is replaced by an
            empty one, which is then in the state dict in its place.

    Raises:
        ValueError: If a policy has none of its choices.
    """

    missing: MissingPolicy = "error"
    unexpected: UnexpectedPolicy = "report"
    dtype: DTypePolicy = "widen"
    padding: PaddingPolicy = "zero"
    fewer_ranks: FewerRanksPolicy = "error"
    more_ranks: MoreRanksPolicy = "error"
    meta: str = "error"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            chosen = getattr(self, name)
            if chosen not in choices:
                raise ValueError(f"{name}={chosen!r} is not one of {', '.join(choices)}")
        if self.meta != "error":
            try:
                torch.device(self.meta)
            except RuntimeError as error:
                raise ValueError(
                    f"meta={self.meta!r} is neither 'error' nor a device: {error}"
                ) from None

    def changed(self, **given: Any) -> "LoadPolicies":
        """Returns the policies with those that were given (not None) in place of these."""
        names = {field.name for field in fields(self)}
        return replace(self, **{k: v for k, v in given.items() if k in names and v is not None})
