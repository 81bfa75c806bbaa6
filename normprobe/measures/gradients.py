"""Gradients of a loss by depth: of the parameters of every branch, and of the stream at every add."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from normprobe import stats
from normprobe.capture.guard import untouched
from normprobe.capture.invoke import Inputs
from normprobe.capture.watch import Handler, Watched, watch
from normprobe.measures.ancestry import behind
from normprobe.measures.chains import differentiable, rms
from normprobe.measures.gradient_depth import by_depth
from normprobe.measures.loss import LossFunction, loss_of
from normprobe.measures.origin import first_broken_gradient
from normprobe.measures.padding import padding_masks
from normprobe.measures.stand_ins import UndifferentiableError, differentiated, stand_ins
from normprobe.measures.trunk import Trunk
from normprobe.measures.writes import operands
from normprobe.records import (
    Anatomy,
    Basis,
    Branch,
    BranchGradient,
    GradientMeasure,
    LayerGradient,
    OpSite,
    Skipped,
    StreamMeasure,
)
from normprobe.records.parts import whole

Seen = Callable[[str, Tensor], None]


def _unseen(name: str, gradient: Tensor) -> None:
    """Nobody asked for this gradient."""


def measure_gradients(
    model: nn.Module,
    inputs: Inputs,
    anatomy: Anatomy,
    loss: LossFunction | None = None,
    lr: float | None = None,
    residual: Sequence[StreamMeasure] = (),
    *,
    untrained: bool = False,
    seen: Seen = _unseen,
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
        untrained: whether the weights are those of an initialisation, the only ones that the closed form is for.
        seen: called with the name and the gradient of every parameter that has one.

    Returns:
        The measure, and what was not measured with the reason. The measure is None where autograd cannot
        differentiate the model.

    Raises:
        InputError: if no loss can be made from the output.
    """
    why = differentiable(model)
    if why is not None:
        return None, (Skipped(what="gradients", why=why),)
    sites, layers = _places(anatomy, padding_masks(inputs))
    try:
        with untouched(model), stand_ins(model) as leaves:
            with differentiated("model"):
                watched = watch(model, inputs, sites, grad=True)
            with torch.enable_grad():
                value, name = loss_of(watched.output, inputs, anatomy, loss)
            with differentiated("loss"):
                gradients = _differentiate(value, leaves, sites, seen)
    except UndifferentiableError as reason:
        return None, (Skipped(what="gradients", why=str(reason)),)
    measure = _measure(value, name, gradients, anatomy, lr, tuple(_layers(layers, sites, gradients)))
    more = by_depth(anatomy.streams, measure.branches, residual, untrained=untrained)
    if gradients.broken:
        more["first_non_finite"] = first_broken_gradient(model, inputs, anatomy, loss)
    return measure.model_copy(update=more), tuple(_skips(sites, watched))


def _places(anatomy: Anatomy, padding: Sequence[Tensor]) -> tuple[dict[OpSite, _Edge], dict[OpSite, str]]:
    """The adds of all streams, or the products of a model without a stream; and the weights of these."""
    sites = {
        branch.add: _Edge(branch.feature_axis, padding, branch.trunk) for s in anatomy.streams for branch in s.branches
    }
    layers = {} if anatomy.streams else {weight.site: weight.parameter for weight in anatomy.weights}
    return sites | {site: _Edge(None, padding) for site in layers}, layers


def _layers(
    layers: Mapping[OpSite, str], sites: Mapping[OpSite, _Edge], gradients: _Gradients
) -> Iterator[LayerGradient]:
    for site, name in layers.items():
        if site in gradients.rms:
            yield LayerGradient(parameter=name, output_norm=gradients.rms[site] * math.sqrt(sites[site].count))


def _measure(
    value: Tensor,
    name: str,
    gradients: _Gradients,
    anatomy: Anatomy,
    lr: float | None,
    layers: tuple[LayerGradient, ...],
) -> GradientMeasure:
    """Everything but what is told of the depth."""
    branches = tuple(_branches(anatomy, gradients, lr))
    return GradientMeasure(
        loss=name,
        value=float(value.detach()),
        basis=Basis(unit="loss / parameter", dtype=gradients.dtype, count=sum(b.parameters for b in branches)),
        branches=branches,
        last_to_first=math.nan,
        slope=math.nan,
        layers=layers,
        lr=lr,
        non_finite_parameters=tuple(n for n, norm in gradients.norms.items() if not math.isfinite(norm)),
    )


class _Edge(Handler):
    """Keeps the place of an add's output in autograd's graph, before an operation in place can move it on, and that of
    what is written where autograd does not know its operand `skip`, the trunk."""

    def __init__(self, feature_axis: int | None, padding: Sequence[Tensor], skip: int = 0) -> None:
        self.trunk, self.skip = None if feature_axis is None else Trunk(feature_axis, padding), skip
        self.written: GradientEdge | None = None
        self.count = 0
        self.output: Tensor | None = None
        self.edge: GradientEdge | None = None

    def size(self, gradient: Tensor | None) -> float:
        """RMS of the gradient at the tokens that are no padding; 0 where the loss does not depend on the stream."""
        if gradient is None or self.trunk is None:
            return _rms(gradient)
        return rms(gradient, self.trunk)

    def before(self, arguments: Mapping[str, Any]) -> None:
        """Ask autograd for the operands."""
        given = operands(arguments)
        cut = len(given) == 2 and not given[self.skip].requires_grad and given[1 - self.skip].requires_grad
        self.written = get_gradient_edge(given[1 - self.skip]) if cut else None

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        """Hold the output until autograd has taken note of it."""
        self.output = output

    def settled(self) -> None:
        """Keep its place in the graph and let go of the tensor."""
        output, self.output = self.output, None
        if output is not None and output.requires_grad:
            self.edge, self.count = get_gradient_edge(output), output.numel()


def _skips(sites: Mapping[OpSite, _Edge], watched: Watched) -> Iterator[Skipped]:
    for site, handler in sites.items():
        why = watched.reason(site)
        if why is None and handler.edge is None:
            why = "the stream does not depend on a parameter there"
        if why is not None:
            yield Skipped(what=f"gradient at {site.path}#{site.op}:{site.ordinal}", why=why)


@dataclass(frozen=True)
class _Gradients:
    """What is left of the gradients: norm and size by parameter, norm of the parameter itself, RMS by add; `dtype` has
    the dtypes of the parameters' gradients. `cut` are the adds whose trunk autograd does not know, each with the adds
    and parameters that what is written there was made of, `unreached` the parameters that no gradient comes to."""

    norms: Mapping[str, float]
    sizes: Mapping[str, int]
    weights: Mapping[str, float]
    rms: Mapping[OpSite, float]
    dtype: str
    cut: Mapping[OpSite, frozenset[OpSite | str]]
    unreached: frozenset[str]

    @property
    def broken(self) -> bool:
        """Whether one is not finite."""
        return not all(map(math.isfinite, (*self.norms.values(), *self.rms.values())))


def _differentiate(
    value: Tensor,
    leaves: Mapping[str, Tensor],
    sites: Mapping[OpSite, _Edge],
    seen: Seen,
) -> _Gradients:
    names = list(leaves)
    edges = {site: handler.edge for site, handler in sites.items() if handler.edge is not None}
    targets: list[Any] = [*(leaves[n] for n in names), *edges.values()]
    found: Sequence[Tensor | None] = torch.autograd.grad(value, targets, allow_unused=True) if targets else ()
    parameters, states = found[: len(names)], found[len(names) :]
    for name, gradient in zip(names, parameters, strict=True):
        if gradient is not None:
            seen(name, gradient)
    return _Gradients(
        norms={n: _norm(g) for n, g in zip(names, parameters, strict=True)},
        sizes={n: leaves[n].numel() for n in names},
        weights={n: _norm(leaves[n].detach()) for n in names},
        rms={site: sites[site].size(g) for site, g in zip(edges, states, strict=True)},
        dtype=", ".join(sorted({str(g.dtype).removeprefix("torch.") for g in parameters if g is not None})),
        cut={site: behind(edge, edges, leaves) for site in edges if (edge := sites[site].written) is not None},
        unreached=frozenset(n for n, g in zip(names, parameters, strict=True) if g is None),
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


def _branches(anatomy: Anatomy, gradients: _Gradients, lr: float | None) -> Iterator[BranchGradient]:
    for stream in anatomy.streams:
        known = stream.source in gradients.norms  # whether autograd knows the trunk before the add
        earlier: set[OpSite | str | None] = {stream.source}
        for index, branch in enumerate(stream.branches):
            names = [n for n in branch.parameters if n in gradients.norms]
            norm = math.hypot(*(gradients.norms[n] for n in names))
            weight = math.hypot(*(gradients.weights[n] for n in names))
            entries = sum(gradients.sizes[n] for n in names)
            yield BranchGradient(
                stream=stream.name,
                branch=index,
                path=branch.place,
                kind=branch.kind,
                parameter_norm=norm,
                activation_rms=gradients.rms.get(branch.add, math.nan),
                traced=branch.add in gradients.rms,
                parameters=entries,
                weight_norm=weight,
                update_ratio=lr * norm / weight if lr is not None and weight else None,
                adam_ratio=lr * math.sqrt(entries) / weight if lr is not None and weight else None,
                cut=known and branch.apart and branch.add in gradients.cut,
                cut_whole=not earlier & gradients.cut.get(branch.add, earlier),
                cut_norms=tuple(_cut_norms(branch, anatomy, gradients)) if norm > 0 else (),
            )
            known = branch.add in gradients.rms
            earlier.add(branch.add)


def _cut_norms(branch: Branch, anatomy: Anatomy, gradients: _Gradients) -> Iterator[str]:
    """The norms at the ends of a branch that ran and whose gain no gradient comes to; those inside may stand before a
    choice, which passes none."""
    for path in dict.fromkeys((branch.pre_norm, branch.output_norm)):
        norm = None if path is None else anatomy.norm(path)
        if norm is not None and norm.executed and whole(norm.weight or "", gradients.unreached) in gradients.unreached:
            yield norm.path
