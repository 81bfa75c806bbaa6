"""Devices and dtypes by name, and moving things there."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normprobe.errors import SettingError

T = TypeVar("T")

DTYPES = {
    "float64": torch.float64,
    "fp64": torch.float64,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


def parse_dtype(name: str | None) -> torch.dtype | None:
    """The dtype called `name` (with or without `torch.`); None stays None.

    Raises:
        SettingError: no floating dtype of that name.
    """
    if name is None:
        return None
    dtype = DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise SettingError("unknown dtype", expected=", ".join(DTYPES), found=name)
    return dtype


def parse_device(name: str) -> torch.device:
    """The device called `name`, if tensors can be made there.

    Raises:
        SettingError: no such device, or this build of torch cannot use it.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        hint = "--device cpu, or a build of torch for that device"
        raise SettingError(f"cannot use device {name!r}", found=reason, hint=hint) from error
    return device


def to_device_dtype(value: T, device: torch.device | None, dtype: torch.dtype | None) -> T:
    """Move a module, a tensor or a nest of tensors; only floating-point tensors change their dtype.

    Modules are moved in place and keep their identity. None leaves device or dtype as they are.
    """
    if isinstance(value, nn.Module):
        return value.to(device=device, dtype=dtype)

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    moved: Any = pytree.tree_map_only(Tensor, move, value)
    return moved  # type: ignore[no-any-return]


def dtype_names(model: nn.Module) -> str:
    """Dtypes of the parameters, the one with the most elements first ("float32", "bfloat16, float32", "")."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    ordered = sorted(counts, key=lambda dtype: -counts[dtype])
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in ordered)
