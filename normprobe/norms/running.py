"""Where a batch norm keeps its running statistics and how it moves them, found by what copies of it do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normprobe.capture.calls import CallSpec, TensorSpec
from normprobe.errors import UnreadableAnatomyError
from normprobe.norms import stored
from normprobe.norms.module_subject import ModuleSubject
from normprobe.norms.rebuild import rebuild
from normprobe.norms.subject import NotComparableError

_SHORT = 4  # elements to which the axes that share a statistic are shortened
_MATCH = 1e-4  # relative; copies run in float64, but a module may compute in float32 inside
_LATER = 9  # count of batches at which a cumulative average takes a tenth of the new one


@dataclass(frozen=True)
class Running:
    """The statistics that a module keeps; names are relative to it.

    Attributes:
        mean, variance: its buffers; None where it keeps no such one.
        counter: the buffer that counts batches.
        momentum: share of the new batch in the moved statistic; None where it is not constant or nothing moves.
        moves: whether train mode moves them.
    """

    mean: str | None = None
    variance: str | None = None
    counter: str | None = None
    momentum: float | None = None
    moves: bool = False


def running(module: nn.Module, call: CallSpec, axes: tuple[int, ...]) -> Running:
    """Find the running statistics of `module`; it is left as it is.

    Copies in train mode, their buffers set to 0 and to 1, show which buffers move towards the mean and the
    variance of a batch, and by which share. Where none moves, setting buffers in eval mode shows which act as such.

    Args:
        module: a module that was identified as a batch norm.
        call: how it was called.
        axes: the axes that share a statistic.
    """
    try:
        return _moving(module, call, axes) or _fixed(module, call)
    except (NotComparableError, UnreadableAnatomyError):
        return Running()


def _moving(module: nn.Module, call: CallSpec, axes: tuple[int, ...]) -> Running | None:
    specs = call.tensors()
    if len(specs) != 1:
        return None
    x = _batch(specs[0], axes)
    try:
        zeros, ones, later = (_moved(module, call, x, *start) for start in ((0.0, 0), (1.0, 0), (0.0, _LATER)))
    except Exception:  # a foreign forward may raise anything in train mode, on a device of its own
        return None
    taken = {n: _share(zeros[n], ones[n]) for n in zeros if zeros[n].is_floating_point()}
    variances, means = torch.var_mean(x, tuple(axes), correction=1)
    mean = next((n for n, m in taken.items() if m and _close(zeros[n], m * means)), None)
    count = x.numel() // max(1, means.numel())
    spread = (variances, variances * (count - 1) / count)
    variance = next((n for n, m in taken.items() if m and any(_close(zeros[n], m * v) for v in spread)), None)
    if mean is None and variance is None:
        return None
    counter = next((n for n, t in later.items() if t.numel() == 1 and float(t) == _LATER + 1), None)
    named = mean or variance or ""
    steady = _close(zeros[named], later[named])
    return Running(mean, variance, counter, taken[named] if steady else None, True)


def _batch(spec: TensorSpec, axes: tuple[int, ...]) -> Tensor:
    """Normal values in float64 with a mean and a standard deviation of their own in every channel."""
    shared = {axis % len(spec.shape) for axis in axes}
    shape = [max(2, min(n, _SHORT)) if axis in shared else n for axis, n in enumerate(spec.shape)]
    kept = [1 if axis in shared else n for axis, n in enumerate(shape)]
    generator = torch.Generator().manual_seed(1)
    x, mean, std = (
        torch.randn(size, generator=generator, dtype=torch.float64, device="cpu") for size in (shape, kept, kept)
    )
    return ((1 + std.abs()) * x + mean).to(spec.device)


def _moved(module: nn.Module, call: CallSpec, x: Tensor, value: float, count: int) -> dict[str, Tensor]:
    """The buffers of a copy after one batch in train mode, floating ones set to `value` and others to `count`."""
    start = {
        name: torch.full_like(buffer, value if buffer.is_floating_point() else count)
        for name, buffer in module.named_buffers()
    }
    twin = rebuild(module, torch.float64, x.device, start)
    args, kwargs = pytree.tree_map_only(TensorSpec, lambda spec: x.clone(), (call.args, call.kwargs))
    twin.train()(*args, **kwargs)
    return dict(twin.named_buffers())


def _share(zeros: Tensor, ones: Tensor) -> float | None:
    """What share of the new batch a buffer took, from where it went from 0 and from 1; None: it did not move."""
    taken = 1 - (ones - zeros).double()
    if not taken.numel() or float(taken.amax() - taken.amin()) > _MATCH or float(taken.mean()) <= _MATCH:
        return None
    return round(float(taken.mean()), 9)


def _close(a: Tensor, b: Tensor) -> bool:
    if a.numel() != b.numel():
        return False
    a, b = a.double().flatten(), b.double().flatten()
    return float((a - b).abs().amax()) <= _MATCH * float(b.abs().amax())


def _fixed(module: nn.Module, call: CallSpec) -> Running:
    found = stored.statistics(ModuleSubject(module, call))
    return Running() if found is None else Running(found[0], found[1])
