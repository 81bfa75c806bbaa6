"""A few optimiser steps on one batch, and what they do to the output of every module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normprobe import stats
from normprobe.capture.invoke import Inputs, invoke
from normprobe.measures.loss import LossFunction as Loss
from normprobe.records.sweep import Optimizer
from normprobe.rewrites.mup import without_factor


class Scale(NamedTuple):
    """RMS of a module's output after the steps, and of its change since before them."""

    activation: float
    update: float


OPTIMIZERS: Mapping[Optimizer, type[torch.optim.Adam] | type[torch.optim.SGD]] = {
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


def scales(
    model: nn.Module, inputs: Inputs, groups: list[dict[str, Any]], steps: int, loss: Loss, optimizer: Optimizer
) -> dict[str, Scale]:
    """Train `model` in place for some steps; the scale of every module's output."""
    before = outputs(model, inputs)
    train(model, inputs, groups, steps, loss, optimizer)
    after = outputs(model, inputs)
    return {
        path: Scale(_rms(now), _rms(now - before[path]))
        for path, now in after.items()
        if path in before and before[path].shape == now.shape
    }


def train(
    model: nn.Module, inputs: Inputs, groups: list[dict[str, Any]], steps: int, loss: Loss, optimizer: Optimizer
) -> float:
    """The loss after some steps; infinite where it is not finite."""
    stepping = OPTIMIZERS[optimizer](groups)
    for _ in range(steps):
        stepping.zero_grad(set_to_none=True)
        with torch.enable_grad():
            value = loss(invoke(model, inputs), inputs)
            value.backward()  # type: ignore[no-untyped-call]
        stepping.step()
    with torch.enable_grad():
        value = loss(invoke(model, inputs), inputs)
    final = float(value.detach())
    return final if math.isfinite(final) else math.inf


def outputs(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """The first floating point tensor that each module gave at its last call, in float32 or wider.

    Without the factor that `MuP` puts on queries: it is the attention's 1 / d, and shrinks with the width by design.
    """
    found: dict[str, Tensor] = {}
    with torch.no_grad(), _hooks(model, found):
        invoke(model, inputs)
    return found


@contextmanager
def _hooks(model: nn.Module, found: dict[str, Tensor]) -> Iterator[None]:
    def seen(module: nn.Module, path: str, output: Any) -> None:
        floats = (t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point())
        first = next(floats, None)
        if first is not None and first.numel():
            found[path] = without_factor(module, stats.widen(first.detach())).clone()

    handles = [
        module.register_forward_hook(lambda m, args, output, path=path or ".": seen(m, path, output))
        for path, module in model.named_modules()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def slope(sizes: Mapping[int, float]) -> float:
    """Least-squares slope of ln value against ln size; NaN where a value is 0 or not finite, or there is one size."""
    if len(sizes) < 2 or not all(math.isfinite(value) and value > 0 for value in sizes.values()):
        return math.nan
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in sizes.values()]
    middle, mean = math.fsum(x) / len(x), math.fsum(y) / len(y)
    spread = math.fsum((a - middle) ** 2 for a in x)
    return math.fsum((a - middle) * (b - mean) for a, b in zip(x, y, strict=True)) / spread


def _rms(tensor: Tensor) -> float:
    return float(stats.token_rms(tensor.flatten()))
