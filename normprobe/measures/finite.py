"""Whether a forward's outputs are finite, and which module made the first value that is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normprobe.capture.guard import untouched
from normprobe.capture.invoke import Inputs, invoke
from normprobe.capture.outputs import named_tensors
from normprobe.capture.storage import widened
from normprobe.capture.wrappers import wrapped_forwards


def floats(tree: Any) -> list[Tensor]:
    """The floating point and complex tensors of `tree`."""
    return [t for _, t in named_tensors(tree) if t.is_floating_point() or t.is_complex()]


def all_finite(tree: Any) -> bool | None:
    """Whether every element of every floating point tensor is finite; None where there is no such tensor."""
    found = floats(tree)
    return all(map(_finite, found)) if found else None


def _finite(x: Tensor) -> bool:
    """Whether all elements are finite, without a copy of `x`.

    A finite sum has finite summands; where it is not, it may be the sum alone that overflows: the extremes decide, in
    both of which NaN wins.
    """
    if x.numel() == 0:
        return True
    values = x.detach().to_dense() if x.layout != torch.strided else x.detach()
    real = torch.view_as_real(values.resolve_conj()) if x.is_complex() else widened(values)
    if bool(torch.isfinite(real.sum())):
        return True
    low, high = real.aminmax()
    return bool(torch.isfinite(low) & torch.isfinite(high))


def first_broken_module(model: nn.Module, inputs: Inputs) -> str | None:
    """Path of the first module whose outputs are not finite though its inputs were.

    One more forward in eval mode, with a look at what goes into and comes out of every module. A −∞ that goes
    in is taken for a mask and counts as finite. The innermost such module is the first to end, so it is the
    one that is named; where none fits, the first module at all whose output is not finite.

    Returns:
        A path ("." for the root), or None where all modules gave finite outputs.
    """
    seen: list[tuple[bool, str]] = []

    def around(path: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        sound = not any(map(broken, floats((args, kwargs))))
        output = forward(*args, **kwargs)
        if all_finite(output) is False:
            seen.append((sound, path))
        return output

    with untouched(model) as keeper, torch.no_grad(), wrapped_forwards(model, around), keeper.mode():
        invoke(model, inputs)
    return next((path for sound, path in seen if sound), seen[0][1] if seen else None)


def broken(x: Tensor) -> bool:
    """Whether an element is NaN or +∞; −∞ stands for a mask."""
    if x.is_complex() or x.layout != torch.strided or x.numel() == 0:
        return not _finite(x)
    return not bool(widened(x).max() < torch.inf)  # NaN wins
