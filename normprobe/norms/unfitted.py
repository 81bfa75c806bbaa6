"""Norms that no closed form fits: what can be said of them is where their gain and offset are."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

import torch
from torch import Tensor

from normprobe.norms.affine import FORMS
from normprobe.norms.fit import rows
from normprobe.norms.layout import Layout
from normprobe.norms.specs import signed
from normprobe.norms.subject import Instance, Subject
from normprobe.records import NormSpec
from normprobe.records.norms import AffineForm

SEED = 1
_CLOSE = 1e-3  # of the largest output


def identify(subject: Subject, exact: Instance, layout: Layout | None) -> NormSpec | None:
    """`unknown` for what keeps its output when its input grows, element for element; None for the rest.

    It is odd in its input but for an offset, or has a gain (an activation may stand between the two).

    Args:
        subject: of which no closed form holds.
        exact: its instance.
        layout: what shares a statistic, None where elements differ in that.
    """
    x = (2.0**10 * rows(subject.shape, SEED + 3)[0]).to(device=subject.device, dtype=exact.dtype)
    y, doubled, negated = exact.call(x), exact.call(2 * x), exact.call(-x)
    largest = float((y - negated).abs().amax())
    if not (isfinite(largest) and largest > 0) or float((doubled - y).abs().amax()) > _CLOSE * largest:
        return None
    weight, bias, form = _gain_and_offset(subject, exact, x)
    odd = float((y + negated - (y + negated).mean(0, keepdim=True)).abs().amax()) <= _CLOSE * largest
    if not (odd or weight) or _own_share(exact, x) < 2.0:
        return None
    axes = () if layout is None else signed(layout)
    over = f", over axes {axes}," if axes else ""
    told = f"output does not grow with its input{over} but fits no closed form"
    return NormSpec(
        kind="unknown",
        affine=form,
        eps_placement="unknown",
        weight_multiply="none" if weight is None else "unknown",
        weight=weight,
        bias=bias,
        axes=axes,
        groups=None if layout is None else layout.groups,
        device=subject.device.type,
        evidence=(told,),
    )


def _gain_and_offset(subject: Subject, exact: Instance, x: Tensor) -> tuple[str | None, str | None, AffineForm]:
    """The parameter that multiplies the output, the one that is added to it, and their form."""
    if not exact.parameters:
        return None, None, "none"
    drawn = {name: exact.tensors[name] for name in sorted(exact.parameters)}
    y, one = exact.call(x), torch.ones_like(x)
    bias = next((n for n, t in drawn.items() if _same(_with(subject, exact, x, {n: t + 1}) - y, one)), None)
    none = {} if bias is None else {bias: torch.zeros_like(drawn.pop(bias))}
    plain = _with(subject, exact, x, none)
    for one_plus in (False, True):
        for name, value in drawn.items():
            if _same(_with(subject, exact, x, {**none, name: 2 * value + one_plus}), 2 * plain):
                return name, bias, FORMS[one_plus, bias is not None]
    return None, bias, "other"


def _with(subject: Subject, exact: Instance, x: Tensor, values: Mapping[str, Tensor]) -> Tensor:
    """The output of a fresh instance some of whose tensors hold other values."""
    instance = subject.instance(exact.dtype, SEED)
    for name, value in values.items():
        instance.tensors[name].copy_(value)
    return instance.call(x)


def _same(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().amax()) <= _CLOSE * float(b.abs().amax())


def _own_share(exact: Instance, x: Tensor) -> float:
    """How much more an output moves with its own input than the median of the others, the least of some that move with
    it (behind an activation some do not); 0 where none does, inf where alone."""
    ratios = []
    for part in (1 / 2, 1 / 3, 1 / 4, 2 / 3, 0.0):
        place = tuple(int(n * part) for n in x.shape)
        pushed = x.clone()
        pushed[place] += 0.05 * x.square().mean().sqrt()
        change = (exact.call(pushed) - exact.call(x)).abs()
        own = float(change[place])
        change[place] = 0
        others = change[change > 0]
        if own:
            ratios.append(own / float(others.median()) if len(others) else float("inf"))
    return min(ratios, default=0.0)
