"""Experts that no token reached: their parameters stand where those of an expert beside them were seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from normprobe.capture.trace import Trace
from normprobe.records import Anatomy, Branch


def with_unreached(model: nn.Module, trace: Trace, anatomy: Anatomy) -> Anatomy:
    """`anatomy` with the parameters of experts that no token reached, in the places of the expert that they are like.

    A rewrite that left them out would hold for the recorded tokens alone. An expert is a module of which no parameter
    was read, beside one of the same class and shapes that belongs to a branch with a choice made outside of both.
    """
    pairs = list(_pairs(model, trace, anatomy))
    if not pairs:
        return anatomy
    weights = list(anatomy.weights)
    for pair in pairs:
        seen = (site for site in anatomy.weights if site.parameter in pair)
        weights += (s.model_copy(update={"parameter": pair[s.parameter], "source": _of(pair, s.source)}) for s in seen)
    streams = tuple(
        stream.model_copy(update={"branches": tuple(_branch(branch, pairs) for branch in stream.branches)})
        for stream in anatomy.streams
    )
    return anatomy.model_copy(update={"weights": tuple(weights), "streams": streams})


def _of(pair: Mapping[str, str], name: str | None) -> str | None:
    return None if name is None else pair.get(name, name)


def _branch(branch: Branch, pairs: list[dict[str, str]]) -> Branch:
    fields = {name: getattr(branch, name) for name in ("readers", "writers", "parameters")}
    return branch.model_copy(
        update={
            name: (*held, *(pair[like] for pair in pairs for like in held if like in pair))
            for name, held in fields.items()
        }
    )


def _pairs(model: nn.Module, trace: Trace, anatomy: Anatomy) -> Iterator[dict[str, str]]:
    """For every expert that no token reached the names of its parameters, by those of the one that it is like."""
    routed = _routed(anatomy)
    names = {node.name for node in trace.nodes if node.op == "parameter"}
    read = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in names}
    for path, parent in model.named_modules() if routed else ():
        children = {f"{path}.{name}" if path else name: child for name, child in parent.named_children()}
        reached = _reached(children, routed)
        for where, child in children.items() if reached else ():
            held = list(child.named_parameters())
            like = next((w for w in reached if _alike(children[w], child)), None)
            if like is not None and held and not any(id(p) in read for _, p in held):
                yield {f"{like}.{name}": f"{where}.{name}" for name, _ in held}


def _reached(children: Mapping[str, nn.Module], routed: Mapping[str, tuple[int, int]]) -> list[str]:
    """The experts among these modules; none where they are blocks or whole layers, which hold the router too."""
    found: dict[str, tuple[int, int]] = {}
    for where in children:
        own = {name: place for name, place in routed.items() if name.startswith(where + ".")}
        outside = {place for name, place in routed.items() if name not in own}
        if len(set(own.values())) == 1 and outside.issuperset(own.values()):
            found[where] = next(iter(own.values()))
    return list(found) if len(set(found.values())) == 1 else []


def _alike(one: nn.Module, other: nn.Module) -> bool:
    forms = ([(name, p.shape) for name, p in each.named_parameters()] for each in (one, other))
    return type(one) is type(other) and next(forms) == next(forms)


def _routed(anatomy: Anatomy) -> dict[str, tuple[int, int]]:
    """The weights of branches that choose among experts, and which branch that is."""
    moe = {(i, j) for i, s in enumerate(anatomy.streams) for j, b in enumerate(s.branches) if b.kind == "moe"}
    return {
        site.parameter: (site.stream, site.branch)
        for site in anatomy.weights
        if site.stream is not None and site.branch is not None and (site.stream, site.branch) in moe
    }
