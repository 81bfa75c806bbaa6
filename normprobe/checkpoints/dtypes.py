"""Dtypes of torch and their names in safetensors files."""

from __future__ import annotations

import torch

from normprobe.errors import CheckpointError

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # plain numbers, which a rewrite can change


def name_of(dtype: torch.dtype) -> str:
    """The name of `dtype` in the format.

    Raises:
        CheckpointError: the format has none.
    """
    if dtype not in NAMES:
        raise CheckpointError(f"no safetensors file holds {dtype}", expected=", ".join(NAMES.values()))
    return NAMES[dtype]
