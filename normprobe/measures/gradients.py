"""Gradients of a loss by depth: of the parameters of every branch, and of the stream at every add."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from normprobe import stats, theory
from normprobe.capture.guard import untouched
from normprobe.capture.invoke import Inputs
from normprobe.capture.watch import Handler, Watched, watch
from normprobe.measures.chains import differentiable, rms
from normprobe.measures.loss import LossFunction, loss_of
from normprobe.measures.origin import first_broken_gradient
from normprobe.measures.padding import padding_masks
from normprobe.measures.stand_ins import UndifferentiableError, differentiated, stand_ins
from normprobe.measures.trunk import Trunk
from normprobe.records import (
    Anatomy,
    Basis,
    Branch,
    BranchGradient,
    GradientLaw,
    GradientMeasure,
    OpSite,
    Skipped,
    Stream,
    StreamMeasure,
)


def measure_gradients(
    model: nn.Module,
    inputs: Inputs,
    anatomy: Anatomy,
    loss: LossFunction | None = None,
    lr: float | None = None,
    residual: Sequence[StreamMeasure] = (),
) -> tuple[GradientMeasure | None, tuple[Skipped, ...]]:
    """Gradients of one loss by depth, from one forward and one backward in eval mode; one of each more where a gradient
    is not finite.

    While it runs the model computes with stand-ins that share the memory of its floating point parameters, so
    that frozen ones have a gradient too, and no `grad`, flag or hook of a parameter is touched. A parameter
    that several branches share counts with its whole gradient in each. Memory: all activations, and one
    gradient a parameter.

    Args:
        model: the model that `anatomy` was read from.
        inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        anatomy: its streams name the branches.
        loss: `loss(output, inputs)` gives a scalar; None: see `loss.loss_of`.
        lr: learning rate for the ratios of update to weight.
        residual: of the same forward; gives the closed form the size of the branches.

    Returns:
        The measure, and what was not measured with the reason. `last_to_first` and `slope` (a least-squares
        line through the logarithms of the parameter norms, a branch) are those of the stream with the most
        branches, among its branches with parameters. The measure is None where autograd cannot differentiate
        the model.

    Raises:
        InputError: if no loss can be made from the output.
    """
    why = differentiable(model)
    if why is not None:
        return None, (Skipped(what="gradients", why=why),)
    padding = padding_masks(inputs)
    sites = {branch.add: _Edge(branch, padding) for stream in anatomy.streams for branch in stream.branches}
    try:
        with untouched(model), stand_ins(model) as leaves:
            with differentiated("model"):
                watched = watch(model, inputs, sites, grad=True)
            with torch.enable_grad():
                value, name = loss_of(watched.output, inputs, anatomy, loss)
            with differentiated("loss"):
                gradients = _differentiate(value, anatomy, leaves, sites)
    except UndifferentiableError as reason:
        return None, (Skipped(what="gradients", why=str(reason)),)
    branches = tuple(_branches(anatomy.streams, gradients, lr))
    measure = _measure(value.detach(), name, branches, anatomy.streams)
    longest = max(anatomy.streams, key=lambda stream: stream.depth, default=None)
    more: dict[str, Any] = {"lr": lr, "expected": None if longest is None else _law(longest, residual)}
    if not all(math.isfinite(size) for size in (*gradients.norms.values(), *gradients.rms.values())):
        more["first_non_finite"] = first_broken_gradient(model, inputs, anatomy, loss)
    return measure.model_copy(update=more), tuple(_skips(sites, watched))


def _law(stream: Stream, residual: Sequence[StreamMeasure]) -> GradientLaw | None:
    """The closed form for the slope; None where none is known for the placement."""
    if stream.placement not in ("pre", "post") or stream.depth < 2:
        return None
    states = next((measure.states for measure in residual if measure.stream == stream.name), ())
    ratios = [state.write_ratio for state in states if math.isfinite(state.write_ratio)]
    size = statistics.median(ratios) if ratios else 1.0
    slope = theory.gradient_slope(stream.placement == "post", size)
    writes = len({branch.add for branch in stream.branches})
    return GradientLaw(
        slope=slope,
        last_to_first=math.exp(slope * (writes - 1)),
        branch_rms=size,
        source="Xiong et al. 2020, sec. 3",
    )


class _Edge(Handler):
    """Keeps the place of an add's output in autograd's graph, before an operation in place can move it on."""

    def __init__(self, branch: Branch, padding: Sequence[Tensor]) -> None:
        self.trunk = None if branch.feature_axis is None else Trunk(branch.feature_axis, padding)
        self.output: Tensor | None = None
        self.edge: GradientEdge | None = None

    def size(self, gradient: Tensor | None) -> float:
        """RMS of the gradient at the tokens that are no padding; 0 where the loss does not depend on the stream."""
        if gradient is None or self.trunk is None:
            return _rms(gradient)
        return rms(gradient, self.trunk)

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        """Hold the output until autograd has taken note of it."""
        self.output = output

    def settled(self) -> None:
        """Keep its place in the graph and let go of the tensor."""
        output, self.output = self.output, None
        if output is not None and output.requires_grad:
            self.edge = get_gradient_edge(output)


def _skips(sites: Mapping[OpSite, _Edge], watched: Watched) -> Iterator[Skipped]:
    for site, handler in sites.items():
        why = watched.reason(site)
        if why is None and handler.edge is None:
            why = "the stream does not depend on a parameter there"
        if why is not None:
            yield Skipped(what=f"gradient at {site.path}#{site.op}:{site.ordinal}", why=why)


@dataclass(frozen=True)
class _Gradients:
    """What is left of the gradients: norm and size by parameter, norm of the parameter itself, RMS by add."""

    norms: Mapping[str, float]
    sizes: Mapping[str, int]
    weights: Mapping[str, float]
    rms: Mapping[OpSite, float]
    dtype: str


def _differentiate(
    value: Tensor, anatomy: Anatomy, leaves: Mapping[str, Tensor], sites: Mapping[OpSite, _Edge]
) -> _Gradients:
    used = {p for s in anatomy.streams for b in s.branches for p in b.parameters}
    names = [n for n in leaves if n in used]
    edges = {site: handler.edge for site, handler in sites.items() if handler.edge is not None}
    targets: list[Any] = [*(leaves[n] for n in names), *edges.values()]
    found: Sequence[Tensor | None] = torch.autograd.grad(value, targets, allow_unused=True) if targets else ()
    parameters, states = found[: len(names)], found[len(names) :]
    return _Gradients(
        norms={n: _norm(g) for n, g in zip(names, parameters, strict=True)},
        sizes={n: leaves[n].numel() for n in names},
        weights={n: _norm(leaves[n].detach()) for n in names},
        rms={site: sites[site].size(g) for site, g in zip(edges, states, strict=True)},
        dtype=next((str(g.dtype).removeprefix("torch.") for g in parameters if g is not None), str(value.dtype)),
    )


def _norm(gradient: Tensor | None) -> float:
    """L2 norm; 0 where the loss does not depend on the tensor."""
    if gradient is None:
        return 0.0
    return _rms(gradient) * math.sqrt(gradient.numel())


def _rms(gradient: Tensor | None) -> float:
    if gradient is None or gradient.numel() == 0:
        return 0.0
    dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
    return float(stats.token_rms(dense.flatten()))


def _branches(streams: Sequence[Stream], gradients: _Gradients, lr: float | None) -> Iterator[BranchGradient]:
    for stream in streams:
        for index, branch in enumerate(stream.branches):
            names = [n for n in branch.parameters if n in gradients.norms]
            norm = math.hypot(*(gradients.norms[n] for n in names))
            weight = math.hypot(*(gradients.weights[n] for n in names))
            entries = sum(gradients.sizes[n] for n in names)
            yield BranchGradient(
                stream=stream.name,
                branch=index,
                path=branch.path,
                kind=branch.kind,
                parameter_norm=norm,
                activation_rms=gradients.rms.get(branch.add, math.nan),
                parameters=entries,
                weight_norm=weight,
                update_ratio=lr * norm / weight if lr is not None and weight else None,
                adam_ratio=lr * math.sqrt(entries) / weight if lr is not None and weight else None,
            )


def _measure(
    value: Tensor, name: str, branches: tuple[BranchGradient, ...], streams: Sequence[Stream]
) -> GradientMeasure:
    longest = max(streams, key=lambda stream: stream.depth).name if streams else None
    norms = [b.parameter_norm for b in branches if b.stream == longest and b.parameters]
    return GradientMeasure(
        loss=name,
        value=float(value),
        basis=Basis(unit="loss / parameter", dtype=str(value.dtype), count=sum(b.parameters for b in branches)),
        branches=branches,
        stream=longest,
        last_to_first=norms[-1] / norms[0] if norms and norms[0] else math.nan,
        slope=_slope(norms),
    )


def _slope(norms: Sequence[float]) -> float:
    """Slope of ln norm by index of the branch; NaN with fewer than two, or one that is 0 or not finite."""
    if len(norms) < 2 or not all(math.isfinite(norm) and norm > 0 for norm in norms):
        return math.nan
    logs = [math.log(norm) for norm in norms]
    middle, mean = (len(norms) - 1) / 2, math.fsum(logs) / len(logs)
    spread = math.fsum((i - middle) ** 2 for i in range(len(logs)))
    return math.fsum((i - middle) * (y - mean) for i, y in enumerate(logs)) / spread
