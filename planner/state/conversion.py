"""Which changes of dtype and kind a load makes: only those that keep the value."""

import math
from functools import lru_cache
from typing import Any, Literal

import torch

# Two values in a byte: torch makes no numbers of it.
PACKED = torch.float4_e2m1fn_x2

DTypePolicy = Literal["exact", "widen", "cast"]


def conversion_fault(saved: torch.dtype, wanted: torch.dtype, policy: DTypePolicy) -> str | None:
    """Returns why tensors of one dtype may not be loaded as another, None if they may.

    | policy | allows |
    |---|---|
    | `exact` | equal dtypes only |
    | `widen` | also a conversion that keeps every value, such as bf16 → fp32 |
    | `cast` | also floats of lower precision, such as fp32 → bf16 |

    Integers and floats, complex and real, never become each other.
    """
    if saved == wanted:
        return None
    if policy == "exact":
        return "dtype='exact' allows no conversion"
    if PACKED in (saved, wanted):
        return (
            "float4 packs two values into a byte, and torch converts it to no other dtype. Load it "
            "into a tensor of the dtype that was saved"
        )
    kinds = [_kind(dtype) for dtype in (saved, wanted)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} values can't become {kinds[1]} ones"
    if _keeps_values(saved, wanted) or (policy == "cast" and kinds[0] != "integer"):
        return None
    if kinds[0] == "integer":
        return "not every saved value fits"
    return "precision would be lost; pass dtype='cast' to the load planner if that is meant"


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "floating-point"
    return "boolean" if dtype == torch.bool else "integer"


@lru_cache
def _keeps_values(saved: torch.dtype, wanted: torch.dtype) -> bool:
    if saved.is_floating_point and saved.itemsize == 1:
        # torch.finfo does not tell which of these have infinities, and there are only 256 values.
        every = torch.arange(256, dtype=torch.uint8, device="cpu").view(saved)
        before, after = every.double(), every.to(wanted).double()
        return bool(((before == after) | (before.isnan() & after.isnan())).all())
    if saved.is_floating_point or saved.is_complex:
        a, b = torch.finfo(saved), torch.finfo(wanted)
        return b.eps <= a.eps and b.max >= a.max and b.tiny <= a.tiny
    if torch.bool in (saved, wanted):
        return False
    low, high = torch.iinfo(saved), torch.iinfo(wanted)
    return high.min <= low.min and high.max >= low.max


def exact_number(value: Any, kind: type | torch.dtype, rounds: bool = False) -> Any:
    """Returns a number as another kind.

    Args:
        value: An int, float or bool.
        kind: A Python type, or the dtype of the tensor that will hold it.
        rounds: Whether a floating-point dtype may round it, as `torch.tensor(value)` does, but
            not to zero or infinity.

    Raises:
        ValueError: If the value would not be the same, NaN being the same as NaN.
    """
    as_tensor = isinstance(kind, torch.dtype)
    held = torch.tensor(value, dtype=kind).item() if as_tensor else kind(value)  # type: ignore[arg-type, operator]
    same = held == value or (held != held and value != value)
    if isinstance(kind, torch.dtype) and kind.is_floating_point and rounds:
        same = same or (math.isfinite(held) and (held != 0 or value == 0))
    if not same or isinstance(held, bool) != isinstance(value, bool):
        raise ValueError(f"{value!r} can't be kept exactly as {kind}")
    return held
