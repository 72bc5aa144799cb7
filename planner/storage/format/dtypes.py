"""Names of dtypes: in a manifest those of torch, in a data file those of safetensors."""

import torch

_NAMES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float4_e2m1fn_x2: "F4",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
# An F4 is half a byte in safetensors, while torch has no element smaller than two of them.
BITS = {code: 4 if code == "F4" else 8 * dtype.itemsize for code, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype as text: `'bfloat16'`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype that `dtype_name` named.

    Raises:
        ValueError: If this torch has no such dtype.
    """
    dtype = _NAMES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"{name!r} is no dtype of torch {torch.__version__}")
    return dtype


def stored_form(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Returns the code and shape under which a chunk stands in a data file.

    A dtype that safetensors does not know stands there as bytes, in one more dim.
    """
    code = CODES.get(dtype)
    if code == "F4":
        if sizes:
            return code, (*sizes[:-1], 2 * sizes[-1])
        code = None  # one element of torch is two of safetensors, and here is no dim to count them
    return (code, sizes) if code is not None else ("U8", (*sizes, dtype.itemsize))


def torch_form(code: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Returns the dtype and shape that torch has for an entry of a data file.

    Raises:
        ValueError: If torch can't hold it: an odd number of half bytes in a row.
    """
    if code == "F4":
        if not shape or shape[-1] % 2:
            raise ValueError(f"shape {list(shape)} of F4, and torch holds F4 in pairs only")
        shape = (*shape[:-1], shape[-1] // 2)
    return DTYPES[code], shape
