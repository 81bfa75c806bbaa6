"""What one output feature of each parameter sums over: the units that adaptive clipping clips one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from normprobe.anatomy.weights.added import added_parameters
from normprobe.records import WeightSite
from normprobe.records.parts import cuts_of
from normprobe.rewrites.base import Survey
from normprobe.rewrites.biases import find_biases
from normprobe.rewrites.unrun import unrun


def unit_axes(survey: Survey, head: bool) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """The axes of a unit for every parameter that is clipped; with `head` the readout and its bias are too."""
    sites = _sites(survey)
    several = _stacks(survey)
    biases = set() if head else _head_biases(survey)
    for name, parameter in survey.model.named_parameters():
        site = sites.get(name)
        if name in biases or (site is not None and "head" in site.roles and not head):
            continue
        kept = several.get(name, frozenset())
        if site is not None and parameter.dim() > 1:
            kept = frozenset({site.output_axis % parameter.dim()} | ({0} if site.kind == "experts" else set()))
            kept = frozenset({0}) if site.kind == "embedding" else kept  # a row of a table is a unit
        yield parameter, tuple(axis for axis in range(parameter.dim()) if axis not in kept)


def _head_biases(survey: Survey) -> set[str]:
    biases = find_biases(survey, dict(survey.model.named_parameters()))
    heads = (site.parameter for site in survey.anatomy.weights if "head" in site.roles)
    return {bias.parameter for name in heads for bias in biases.get(name, ())}


def _sites(survey: Survey) -> dict[str, WeightSite]:
    """The site of every weight; one that did not run has that of a weight that did: of the same name in a module of the
    same class, if there is one of the same shape, since modules of one class store their weights alike."""
    sites = {site.parameter: site for site in survey.anatomy.weights}
    owners = {
        f"{path}.{name}" if path else name: type(module)
        for path, module in survey.model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    }
    shapes = {name: tuple(p.shape) for name, p in survey.model.named_parameters()}
    alike: dict[tuple[type[nn.Module], str, int], list[WeightSite]] = {}
    for name in sites.keys() & owners.keys() & shapes.keys():
        alike.setdefault(_form(owners, shapes, name), []).append(sites[name])
    for name in unrun(survey.model, survey.trace):
        like = alike.get(_form(owners, shapes, name), []) if name not in sites and name in owners else []
        if like:
            sites[name] = next((site for site in like if tuple(site.shape) == shapes[name]), like[0])
    return sites


def _form(
    owners: Mapping[str, type[nn.Module]], shapes: Mapping[str, tuple[int, ...]], name: str
) -> tuple[type[nn.Module], str, int]:
    return owners[name], name.rpartition(".")[2], len(shapes[name])


def _stacks(survey: Survey) -> dict[str, frozenset[int]]:
    """The axes along which parameters hold the gains, offsets or biases of several layers."""
    names = {name for name, _ in survey.model.named_parameters()}
    found = dict(added_parameters(survey.trace))
    for norm in survey.anatomy.norms:
        for part in (norm.weight, norm.bias):
            name, cuts = cuts_of(part or "", names)
            layers = frozenset(axis for axis, cut in enumerate(cuts) if isinstance(cut, int))
            found[name] = found.get(name, layers) & layers
    return found
