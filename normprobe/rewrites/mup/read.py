"""The place of every parameter in muP, by the Anatomy of one model and its width at the base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from normprobe.capture.trace import Node, Trace
from normprobe.records import Anatomy, Stream, WeightSite
from normprobe.rewrites.base import Survey, module_at
from normprobe.rewrites.biases import find_biases
from normprobe.rewrites.initialise.norms import norm_values
from normprobe.rewrites.mup.place import Place

_STATEFUL = ("ssm", "recurrent")


def head_weight(anatomy: Anatomy) -> WeightSite | None:
    """The weight of the readout; None where none was read, or it is computed from others."""
    if anatomy.head is None:
        return None
    name = anatomy.head.tied_to or anatomy.head.path
    return next((site for site in anatomy.weights if site.parameter == name and "head" in site.roles), None)


def width_of(head: WeightSite) -> int:
    """How many features the readout reads."""
    return head.fan_out if head.kind == "embedding" else head.fan_in


def places(survey: Survey, ratio: float, head_ratio: float) -> dict[str, Place]:
    """The place of every parameter, by name.

    Args:
        survey: of a model whose readout is multiplied.
        ratio: its width over that of the base.
        head_ratio: the features of a head of attention over those at the base.
    """
    named = dict(survey.model.named_parameters())
    reader = _Reader(survey, ratio, head_ratio)
    weights = {site.parameter: reader.weight(site) for site in survey.anatomy.weights}
    vectors = dict(reader.vectors(named, weights))
    unread = Place("unknown", why="the forward did not show what it is")
    return {name: weights.get(name) or vectors.get(name, unread) for name in named}


@dataclass(frozen=True)
class _Reader:
    survey: Survey
    ratio: float
    head_ratio: float

    @property
    def anatomy(self) -> Anatomy:
        return self.survey.anatomy

    def weight(self, site: WeightSite) -> Place:
        """The place of a weight."""
        stream = None if site.stream is None else self.anatomy.streams[site.stream]
        if "head" in site.roles:
            return self._head(site)
        if site.kind == "embedding":
            if "embedding" in site.roles and stream is not None and site.fan_out == stream.width:
                return Place("input", fan_out=self.ratio)
            return Place("unknown", why="whether the rows of this table grow with the width could not be told")
        if "embedding" in site.roles:
            return self._entry(site)
        if stream is None or "other" in site.roles:
            return self._aside(site)
        if site.branch is not None and stream.branches[site.branch].kind in _STATEFUL:
            return Place("unknown", why="which axes of a layer with a state grow with the width could not be told")
        return self._inside(site, stream)

    def _head(self, site: WeightSite) -> Place:
        if site is not head_weight(self.anatomy):
            return Place("unknown", why="it is a second readout")
        if "embedding" in site.roles:
            return Place("shared", self.ratio, self.ratio, True, "it is embedding and readout in one")
        return Place("readout", self.ratio, multiplied=True)

    def _entry(self, site: WeightSite) -> Place:
        """A product on the way into a stream: its fan-in stays where it reads what the model is given."""
        if reads_weights(self.survey.trace, site, {w.parameter for w in self.anatomy.weights}):
            return Place("unknown", why="it reads another weight's product, which may grow with the width or not")
        return Place("input", fan_out=self.ratio)

    def _aside(self, site: WeightSite) -> Place:
        """A weight outside the branches, as in a head of several layers: known where it keeps a stream's width."""
        widths = {stream.width for stream in self.anatomy.streams}
        if site.fan_in == site.fan_out and site.fan_in in widths:
            return Place("hidden", self.ratio, self.ratio)
        return Place("unknown", why="which of its axes grow with the width could not be told")

    def _inside(self, site: WeightSite, stream: Stream) -> Place:
        if groups(self.survey.trace, site) > 1:
            if site.shape[1] == 1:
                return Place("input", fan_out=self.ratio)
            return Place("unknown", why="whether the groups of its convolution grow in number could not be told")
        if site.branch is not None and stream.branches[site.branch].kind == "moe" and self._routes(site):
            return Place("readout", self.ratio)
        return Place("hidden", self.ratio, self.ratio)

    def _routes(self, site: WeightSite) -> bool:
        """Whether no weight of the branch reads what this one gives: it chooses among experts."""
        others = [w for w in self.anatomy.weights if (w.stream, w.branch) == (site.stream, site.branch)]
        read = {w.fan_in for w in others if "writer" in w.roles or "inner" in w.roles}
        return "writer" not in site.roles and all(site.shape[site.output_axis] % size for size in read)

    def vectors(self, named: Mapping[str, Tensor], weights: Mapping[str, Place]) -> Iterator[tuple[str, Place]]:
        """The places of parameters that are no weights."""
        widths = {stream.width for stream in self.anatomy.streams}
        beside_head = self._beside_head()
        for name, parameter in named.items():
            if parameter.numel() == 1 or (parameter.dim() == 1 and id(parameter) in beside_head):
                yield name, Place("fixed")
            elif parameter.shape[-1] in widths:
                yield name, Place("input", fan_out=self.ratio)
        for weight, biases in find_biases(self.survey, named).items():
            place = weights[weight]
            for bias in biases:
                if place.role == "unknown":
                    yield bias.parameter, place
                elif place.role != "readout":
                    yield bias.parameter, Place("input", fan_out=place.fan_out)
        for own in norm_values(self.anatomy, named):
            yield own, Place("input", fan_out=self._norm(own, named[own]))

    def _beside_head(self) -> set[int]:
        """The parameters in the module of the readout, of which a vector is its bias, by identity."""
        if self.anatomy.head is None:
            return set()
        module = module_at(self.survey.model, self.anatomy.head.path.rpartition(".")[0] or ".")
        return {id(parameter) for parameter in module.parameters(recurse=False)}

    def _norm(self, name: str, gain: Tensor) -> float:
        """The growth of a norm's parameter: those over the features of one head grow as the heads do."""
        held = {norm.path for norm in self.anatomy.norms if name in (norm.weight, norm.bias)}
        for site in self.anatomy.attention:
            if site.qk_norm is not None and held & {site.qk_norm.query, site.qk_norm.key}:
                return self.head_ratio if gain.shape[-1] == site.head_dim else self.ratio
        return self.ratio


def _node(trace: Trace, site: WeightSite) -> Node | None:
    """The operation that uses a weight first."""
    where = (site.site.op, site.site.ordinal, site.site.path, site.site.execution)
    for node in trace.nodes:
        call = trace.calls[node.call]
        if (node.op, node.ordinal, call.path, call.execution) == where:
            return node
    return None


def reads_weights(trace: Trace, site: WeightSite, weights: set[str]) -> bool:
    """Whether what a weight is first multiplied with was made with another weight."""
    node = _node(trace, site)
    todo, seen = [] if node is None else list(node.inputs), set[int]()
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        producer = trace.producer(value)
        if producer.name != site.parameter and producer.name in weights:
            return True
        todo += producer.inputs
    return False


def groups(trace: Trace, site: WeightSite) -> int:
    """The groups of a convolution; 1 of any other product."""
    node = _node(trace, site) if site.kind == "conv" else None
    found = node.args[-1] if node is not None and node.args else 1  # the last argument of torch's convolution
    return found if isinstance(found, int) else 1
