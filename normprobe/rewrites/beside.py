"""What is set beside drawn weights: their biases, gains and offsets of norms; and rows that stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from normprobe.capture.trace import Trace
from normprobe.records import Anatomy, WeightSite


@dataclass(frozen=True)
class Beside:
    """A parameter that gets one value."""

    parameter: str
    value: float


@dataclass(frozen=True)
class Around:
    """Biases by the weight that they are added behind, and the parameters of norms."""

    biases: Mapping[str, tuple[Beside, ...]] = field(default_factory=dict)
    norms: tuple[Beside, ...] = ()


def beside(anatomy: Anatomy, named: Mapping[str, Tensor]) -> Around:
    """Biases and norms of a model.

    A bias is a parameter of the same module as a weight, with one number for each of its outputs (and expert), that
    belongs to no norm, is no weight and scales no branch.
    """
    norms = [
        Beside(name, value)
        for norm in anatomy.norms
        for name, value in ((norm.weight, 0.0 if norm.affine.startswith("one_plus") else 1.0), (norm.bias, 0.0))
        if name is not None and name in named
    ]
    scales = {branch.branch_scale.parameter for stream in anatomy.streams for branch in stream.branches}
    other = {w.parameter for w in anatomy.weights} | {each.parameter for each in norms} | scales
    free: dict[str, list[str]] = {}
    for name in named:
        if name not in other:
            free.setdefault(name.rpartition(".")[0], []).append(name)
    biases = {
        site.parameter: tuple(
            Beside(name, 0.0)
            for name in free.get(site.parameter.rpartition(".")[0], ())
            if tuple(named[name].shape) == _outputs(site)
        )
        for site in anatomy.weights
        if site.kind != "embedding"
    }
    return Around(biases, tuple({each.parameter: each for each in norms}.values()))


def _outputs(site: WeightSite) -> tuple[int, ...]:
    """Shape of a bias behind this weight."""
    outputs = site.shape[site.output_axis]
    return (site.shape[0], outputs) if site.kind == "experts" else (outputs,)


def padding_rows(trace: Trace, site: WeightSite) -> tuple[int, ...]:
    """The row of a table that its lookup names as padding, counted from the start."""
    if site.kind != "embedding":
        return ()
    for node in trace.nodes:
        if node.op.startswith("aten.embedding") and trace.producer(node.inputs[0]).name == site.parameter:
            row = node.args[2] if len(node.args) > 2 else node.kwargs.get("padding_idx", -1)
            return (int(row),) if isinstance(row, int) and row >= 0 else ()
    return ()
