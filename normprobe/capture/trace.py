"""The recorded data flow of one forward: values, operations and module calls.

It holds no tensor of the model, only copies of small inputs and constants (masks, positions).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from normprobe.capture.calls import CallSpec

SOURCES = frozenset({"parameter", "buffer", "input", "constant"})


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands in a recorded argument for the value with this number."""

    value: int


@dataclass(slots=True)
class Node:
    """One operation. `args` and `kwargs` are those of the call with tensors replaced by `Ref`.

    `op` is the operator's qualified name, or for a source one of `SOURCES` (then `name` is its path).
    `ordinal` counts the calls of the same op directly inside the same module call.
    """

    id: int
    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    call: int
    ordinal: int
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    function: Any = None
    name: str = ""


@dataclass(slots=True)
class Value:
    """One tensor at one moment. In-place writes make a new value of the same tensor."""

    id: int
    node: int
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class Call:
    """One run of a module's forward (`composite` names a torch function that was recorded as a whole instead).

    `inputs` are the values of the tensor arguments in order, `outputs` those of the returned tensors;
    `arguments` maps parameter names of a composite to values or plain arguments.
    """

    id: int
    parent: int
    path: str
    execution: int
    class_name: str = ""
    spec: CallSpec | None = None
    composite: str = ""
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    first_node: int = 0
    last_node: int = 0


@dataclass(slots=True)
class Trace:
    """Everything recorded in one forward. Nodes, values and calls are numbered from 0 in order of time.

    `held` keeps what small inputs and constants contained, by value; `wrote` tells whether the forward wrote into a
    parameter, or into a large tensor that the model keeps elsewhere.
    """

    nodes: list[Node] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    outputs: list[tuple[str, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    held: dict[int, Tensor] = field(default_factory=dict)
    wrote: bool = False

    def producer(self, value: int) -> Node:
        """The operation that made `value`."""
        return self.nodes[self.values[value].node]

    def inside(self, call: int, ancestor: int) -> bool:
        """Whether `call` is `ancestor` or runs within it."""
        while call > ancestor:
            call = self.calls[call].parent
        return call == ancestor

    def path(self, node: Node) -> str:
        """Path of the module in whose forward `node` ran."""
        return self.calls[node.call].path
