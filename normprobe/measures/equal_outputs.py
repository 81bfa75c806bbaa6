"""Outputs of one weight, and weights of one branch, that hold the same numbers; they stay the same while they get the
same gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from normprobe.records import WeightSite

_FEWEST = 4  # numbers of an output, under which two may agree by chance
_SOME = 64  # numbers of each output that are looked at first
_SAME = 0.01  # of the larger of two gradients: rounding differs by less, other readers by about all
_ODD = 6364136223846793005  # factor of their marks, whose powers differ modulo 2⁶⁴


def same_outputs(parameter: Tensor, site: WeightSite) -> bool:
    """Whether all outputs of a trained product that read the same inputs are the same, with weights that are not 0."""
    if not parameter.requires_grad or site.kind not in ("linear", "conv") or site.shape[site.output_axis] < 2:
        return False
    if site.kind == "conv" and _groups(site) != 1:
        return False
    first = parameter.narrow(site.output_axis, 0, 1)
    some = parameter.narrow(site.output_axis, 1, 1)
    return bool((some == first).all()) and bool((parameter == first).all()) and bool(first.any())


def repeated(parameter: Tensor, site: WeightSite) -> int:
    """How many outputs of a trained product hold the same numbers, not all 0, as an earlier one that reads the same
    inputs.

    Outputs of fewer than four numbers are left out, which may agree by chance; so are kernels whose equal outputs
    follow one another, as many of each, which is how those before a pixel shuffle start (Aitken et al. 2017, ICNR).
    """
    rows = _matrices(parameter, site) if parameter.requires_grad else None
    if rows is None or rows.shape[1] < 2 or rows.shape[2] < _FEWEST:
        return 0
    found = sum(_equal(matrix) for matrix in rows)
    return 0 if found and site.kind == "conv" and _shuffled(rows[0]) else found


def copies(parameter: Tensor, site: WeightSite) -> int:
    """How many of the independent matrices in one trained parameter (`experts`) are the same as an earlier one."""
    rows = _matrices(parameter, site) if parameter.requires_grad and site.kind == "experts" else None
    return 0 if rows is None else _equal(rows.flatten(1))


def alike(parameter: Tensor, gradient: Tensor, site: WeightSite) -> int | None:
    """How many of the `repeated` outputs get the gradient that those get which they repeat. Two that both get nothing,
    as behind a ReLU that is shut, are not counted; None where there are no others."""
    rows, gradients = _matrices(parameter, site), _matrices(gradient, site)
    if rows is None or gradients is None:
        return None
    found: list[bool] = []
    for matrix, given in zip(rows, gradients, strict=True):
        later, earlier = _repeats(matrix)
        one, other = given[later].double(), given[earlier].double()
        size = torch.maximum(one.norm(dim=1), other.norm(dim=1))
        found += ((one - other).norm(dim=1) <= _SAME * size)[size > 0].tolist()
    return sum(found) if found else None


def copied(parameters: Mapping[str, Tensor], sites: Sequence[WeightSite]) -> dict[str, str]:
    """The weights that hold the same numbers, not all 0, as an earlier one of `sites`, and that one."""
    first: dict[tuple[object, ...], list[str]] = {}
    found = {}
    for site in sites:
        weight = parameters[site.parameter]
        if not weight.requires_grad or weight.numel() < _FEWEST:
            continue
        some = weight.detach().flatten()[:: max(1, weight.numel() // _SOME)][:_SOME]
        held = first.setdefault((tuple(weight.shape), weight.device, *some.tolist()), [])
        same = next((name for name in held if torch.equal(parameters[name], weight)), None)
        if same is not None and bool(weight.any()):
            found[site.parameter] = same
        elif same is None:
            held.append(site.parameter)
    return found


def _groups(site: WeightSite) -> float:
    """Of a convolution, how many groups of outputs read inputs of their own."""
    outputs = site.shape[site.output_axis] * math.prod(site.shape[2:])
    return outputs / site.fan_out if site.output_axis == 0 else 1.0


def _matrices(parameter: Tensor, site: WeightSite) -> Tensor | None:
    """[matrices, outputs, numbers of each], the outputs of one matrix reading the same inputs; None where the layout is
    not known."""
    if site.kind == "experts" and parameter.dim() == 3 and site.output_axis > 0:
        return parameter.movedim(site.output_axis, 1)
    if site.kind == "linear" and parameter.dim() == 2:
        return parameter.movedim(site.output_axis, 0)[None]
    groups = _groups(site) if site.kind == "conv" else 0.0
    if groups < 1 or groups != int(groups):
        return None
    whole = parameter.movedim(site.output_axis, 0).flatten(1)
    return whole.reshape(int(groups), -1, whole.shape[1])


def _equal(rows: Tensor) -> int:
    """How many rows are the same as an earlier one and not all 0."""
    some = rows[:, :: max(1, rows.shape[1] // _SOME)][:, :_SOME].detach().double().contiguous()
    bits = (some + 0.0).view(torch.int64)  # + 0.0 makes −0 a 0; sums of integers are the same in every order
    marks = (bits * _ODD ** torch.arange(1, bits.shape[1] + 1, device=bits.device)).sum(1)
    _, kinds, counts = torch.unique(marks, return_inverse=True, return_counts=True)
    likely = (counts[kinds] > 1).nonzero()[:, 0]
    if likely.numel() == 0:
        return 0
    held, counts = torch.unique(rows[likely].detach(), dim=0, return_counts=True)
    return int((counts[held.any(1)] - 1).sum())


def _repeats(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that are the same as an earlier one and not all 0, and the first of each kind, by index."""
    _, kinds = torch.unique(rows.detach(), dim=0, return_inverse=True)
    order = torch.arange(len(rows), device=rows.device)
    first = torch.full_like(order, len(rows)).scatter_reduce(0, kinds, order, "amin")[kinds]
    later = (first < order) & rows.detach().any(1)
    return order[later], first[later]


def _shuffled(rows: Tensor) -> bool:
    """Whether equal rows follow one another, as many of each kind, and of more than one kind."""
    _, counts = torch.unique_consecutive(rows.detach(), dim=0, return_counts=True)
    return counts.numel() > 1 and int(counts[0]) > 1 and bool((counts == counts[0]).all())
