"""The biases behind every weight, by data flow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from normprobe.anatomy.flow.ops import LIGHT, Role
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.weights.added import added_parameters
from normprobe.records import WeightSite
from normprobe.rewrites.base import Survey, full_name

Biases = Mapping[str, tuple["Bias", ...]]  # by the weight that they stand behind


@dataclass(frozen=True)
class Bias:
    """A parameter that is added to what a weight gives; `scaled`: to that times a gain or a constant."""

    parameter: str
    scaled: bool = False


def find_biases(survey: Survey, named: Mapping[str, Tensor]) -> Biases:
    """The parameters of its own module that are added to the product of each weight, past moves and factors, and are
    used for nothing else; they hold one number for each of its outputs (and expert) and belong to no norm.

    Args:
        survey: of the model.
        named: its parameters; others are left out.
    """
    anatomy, flow = survey.anatomy, survey.flow
    norms = {name for norm in anatomy.norms for name in (norm.weight, norm.bias)}
    free = added_parameters(survey.trace, picked=True).keys() & named.keys() - norms
    uses: dict[str, list[Step]] = {}
    for step in flow.steps:
        for name in step.parameters if step.role is Role.MATMUL else ():
            uses.setdefault(name, []).append(step)
    found: dict[str, tuple[Bias, ...]] = {}
    for site in anatomy.weights:
        behind = (bias for step in uses.get(site.parameter, ()) for bias in _behind(flow, step))
        biases = {b.parameter: b for b in behind if b.parameter in free}
        own = (bias for bias in biases.values() if _module(bias.parameter) == _module(site.parameter))
        found[site.parameter] = tuple(b for b in own if tuple(named[b.parameter].shape) == _outputs(site))
    return found | dict(_unreached(found, anatomy.weights, uses.keys(), named))


def _behind(flow: Flow, product: Step) -> Iterator[Bias]:
    """What may be added to a product: all parameters of the steps up to the first that is more than a shift."""
    yield from (Bias(name) for name in product.parameters)
    todo, seen = [(value, False) for value in product.outputs], set(product.outputs)
    while todo:
        value, scaled = todo.pop()
        for step in flow.readers(value):
            if step.role is Role.SHIFT or _picked(flow, step, value):
                yield from (Bias(name, scaled) for name in step.parameters)
            elif step.role not in LIGHT:
                continue
            fresh = [v for v in step.outputs if v not in seen]
            seen.update(fresh)
            todo += ((v, scaled or step.role is Role.SCALE) for v in fresh)


def _picked(flow: Flow, step: Step, value: int) -> bool:
    """Whether a step adds rows of parameters, which the signal picks, to `value`."""
    others = [flow.made_by(other) for other in step.inputs if other != value]
    return step.role is Role.ADD and all(made is not None and made.role is Role.SOURCE for made in others)


def _outputs(site: WeightSite) -> tuple[int, ...]:
    """Shape of a bias behind this weight."""
    outputs = site.shape[site.output_axis]
    return (site.shape[0], outputs) if site.kind == "experts" else (outputs,)


def _unreached(
    found: Biases, weights: Sequence[WeightSite], used: Collection[str], named: Mapping[str, Tensor]
) -> Iterator[tuple[str, tuple[Bias, ...]]]:
    """The biases of experts that no token reached, called in their module as those of the expert that they are like."""
    seen = {site.site: site.parameter for site in weights if site.parameter in used}
    for site in (site for site in weights if site.parameter not in used):
        like = seen.get(site.site)
        own = () if like is None else (b.parameter.rpartition(".")[2] for b in found[like])
        names = (full_name(_module(site.parameter), name) for name in own)
        yield site.parameter, tuple(Bias(name) for name in names if name in named)


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0] or "."
