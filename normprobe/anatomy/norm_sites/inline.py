"""Norms that are written out in a forward, or called as functions: found in the flow, identified like modules."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from normprobe.anatomy.flow.ops import CAPS, Role, base
from normprobe.anatomy.flow.sites import op_site
from normprobe.anatomy.flow.steps import Flow, Group
from normprobe.anatomy.norm_sites.graph_subject import GraphSubject, static_nodes, without_casts
from normprobe.anatomy.norm_sites.modules import NOT_NORMS, Found
from normprobe.anatomy.norm_sites.regions import Region, find_regions
from normprobe.capture.trace import SOURCES, Node, Ref
from normprobe.errors import UnreadableAnatomyError
from normprobe.norms.identify import identify
from normprobe.records import NormSite, NormSpec, OpSite


def find_inline_norms(model: nn.Module, flow: Flow, found: Found) -> bool:
    """Add to `found` every norm of the flow that is no module, with path `module.path#op:k`; whether there is one."""
    finder = _Finder(model, flow)
    index = {site.path: i for i, site in enumerate(found.sites)}
    covered: set[int] = set()
    for regions in find_regions(flow):
        if regions[0].core.id in covered:
            continue
        region, spec = finder.best(regions)
        if spec is None or region.steps & covered:
            continue
        covered |= region.steps
        path = f"{flow.path(region.core)}#{base(region.core.node.op).partition('.')[2]}:{region.core.node.ordinal}"
        if path not in index:
            index[path] = len(found.sites)
            bend = op_site(flow, region.core) if spec.kind == "dyt" and base(region.core.node.op) in CAPS else None
            found.sites.append(_site(path, spec, finder.dtype(region), bend))
        else:
            site = found.sites[index[path]]
            found.sites[index[path]] = site.model_copy(update={"executions": site.executions + 1})
        nodes = frozenset(flow.steps[i].node.id for i in region.steps)
        found.groups.append(Group(Role.NORM, nodes, region.origin, region.core.call, index[path]))
    return bool(covered)


class _Finder:
    def __init__(self, model: nn.Module, flow: Flow) -> None:
        self.model, self.flow = model, flow
        self.cache: dict[Any, NormSpec | None] = {}
        self.names: dict[Any, list[str]] = {}  # parameters of the region that was identified, by signature

    def dtype(self, region: Region) -> str:
        """Dtype of what the region norms, as in "float32"."""
        return str(self.flow.trace.values[region.origin].dtype).removeprefix("torch.")

    def best(self, regions: list[Region]) -> tuple[Region, NormSpec | None]:
        """The first region that is a norm with a gain of a known form, else the last that is a norm at all; of those
        that give the same norm the one that begins last: factors on the way in are no part of it."""
        chosen: tuple[Region, NormSpec | None] = (regions[0], None)
        for region in regions:
            best, known = chosen
            settled = known is not None and known.kind != "unknown" and known.affine != "other"
            if settled and not self._begins_later(region, best):
                continue
            spec = self.identify(region)
            if spec is None or spec.kind in NOT_NORMS:
                continue
            if not settled or (known is not None and _form(spec) == _form(known)):
                chosen = region, spec
        return chosen

    def _begins_later(self, region: Region, best: Region) -> bool:
        """Whether a region ends where `best` does and leaves out more than views and casts at its beginning."""
        left = best.steps - region.steps
        return region.end == best.end and any(self.flow.steps[i].role is not Role.MOVE for i in left)

    def identify(self, region: Region) -> NormSpec | None:
        nodes = [self.flow.steps[i].node for i in sorted(region.steps)]
        try:
            statics = static_nodes(self.flow.trace, self.flow.levels, nodes, parts=True)
        except UnreadableAnatomyError:
            return None
        key = self._signature(region, statics, nodes)
        if key not in self.cache:
            self.names[key] = _parameters(statics)
            try:
                subject = GraphSubject(self.model, self.flow.trace, self.flow.levels, nodes, region.origin, region.end)
                self.cache[key] = identify(subject)
            except UnreadableAnatomyError:
                self.cache[key] = None
        return self._placed(self.cache[key], region, self.names[key], _parameters(statics))

    def _signature(self, region: Region, statics: list[Node], nodes: list[Node]) -> Any:
        """What a region computes: two of one signature do the same to their parameters, taken in order."""
        numbers = {region.origin: 0}

        def number(ref: Ref) -> str:
            return f"%{numbers.setdefault(ref.value, len(numbers))}:{self.flow.trace.values[ref.value].shape}"

        rows = []
        for node in (*statics, *nodes):
            made = [number(Ref(value)) for value in node.outputs if node.op in SOURCES]
            rows.append((node.op, repr(pytree.tree_map_only(Ref, number, (node.args, node.kwargs))), *made))
            for value in node.outputs:
                numbers.setdefault(value, len(numbers))
        return tuple(rows)

    def _placed(self, spec: NormSpec | None, region: Region, known: list[str], own: list[str]) -> NormSpec | None:
        """The spec with this region's own parameters, and without claims that a recording in one dtype cannot carry."""
        if spec is None:
            return None
        of = dict(zip(known, own, strict=True))
        names = {"weight": of.get(spec.weight or ""), "bias": of.get(spec.bias or "")}
        return without_casts(spec, self.dtype(region)).model_copy(update=names)


def _form(spec: NormSpec) -> tuple[object, ...]:
    return spec.kind, spec.subtracts_mean, spec.affine, spec.groups


def _parameters(statics: list[Node]) -> list[str]:
    """The parameters and buffers among the static nodes of a region, or parts of them, in order."""
    return [node.name for node in statics if node.op in ("parameter", "buffer")]


def _site(path: str, spec: NormSpec, dtype: str, bend: OpSite | None) -> NormSite:
    return NormSite(**spec.model_dump(), path=path, dtype=dtype, executions=1, module=False, bend=bend)
