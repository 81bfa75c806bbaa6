"""What a tensor was made of, as autograd's graph keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from normprobe.records import OpSite


def behind(
    edge: GradientEdge, edges: Mapping[OpSite, GradientEdge], leaves: Mapping[str, Tensor]
) -> frozenset[OpSite | str]:
    """Those of some places and leaves that a gradient comes to from one place in the graph.

    Args:
        edge: the place.
        edges: other places, by operation.
        leaves: tensors that the graph begins with, by name.
    """
    made_of = set(nodes(edge.node))
    held = {id(getattr(node, "variable", None)) for node in made_of}
    names = {name for name, leaf in leaves.items() if id(leaf) in held}
    return frozenset({site for site, other in edges.items() if other.node in made_of} | names)


def nodes(start: Node) -> Iterator[Node]:
    """The nodes that a gradient at `start` goes on to, `start` the first."""
    seen, front = {start}, [start]
    while front:
        node = front.pop()
        yield node
        fresh = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= fresh
        front += fresh
