"""Where a stream can be intercepted before its first write or behind its last: at a module that data flow proves."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch.utils import _pytree as pytree

from normprobe.anatomy.flow.ops import LIGHT, Role
from normprobe.anatomy.streams.readout import steps_behind
from normprobe.capture.calls import TensorSpec
from normprobe.capture.trace import Call, Node
from normprobe.records import Branch, OpSite, Stream
from normprobe.rewrites.base import Survey, module_at


@dataclass(frozen=True)
class Boundary:
    """A module at which the whole stream passes.

    Attributes:
        path: the module.
        side: "input": it reads the stream through one argument; "output": the first tensor it returns is the stream.
        index: position of that argument; -1 where it is given by keyword only.
        name: name of that argument.
    """

    path: str
    side: Literal["input", "output"]
    index: int = 0
    name: str = ""


class Boundaries:
    """Finds boundaries in one recorded forward."""

    def __init__(self, survey: Survey) -> None:
        trace = survey.trace
        self.survey, self.trace = survey, trace
        self.flow = survey.flow
        self.runs = Counter(call.path for call in trace.calls if not call.composite)
        self.head = trace.outputs[0][1] if trace.outputs else -1
        self.behind = steps_behind(self.flow, self.head)

    @cached_property
    def uses(self) -> Mapping[str, list[int]]:
        """The steps that use each parameter, in order."""
        found: dict[str, list[int]] = {}
        for step in self.flow.steps:
            for name in step.parameters:
                found.setdefault(name, []).append(step.id)
        return found

    def entry(self, stream: Stream) -> Boundary | None:
        """The module that reads the whole stream before its first branch does, the earliest; None: there is none."""
        value, found = self.start(stream), None
        once = [c for c in self.trace.calls if self._once(c)]
        while value is not None and stream.width is not None:
            found = self._reader(value, stream.width, once) or found
            step = self.flow.made_by(value)
            light = step is not None and step.role in LIGHT and len(step.inputs) == 1
            value = step.inputs[0] if step is not None and light else None
        return found

    def start(self, stream: Stream) -> int | None:
        """The stream as the first add reads it; None where that add does not read it as an operand of its own."""
        first = stream.branches[0]
        node = self.node(first.add)
        return None if node is None or not first.apart else node.inputs[first.trunk]

    def find(self, stream: Stream) -> Boundary | None:
        """The module that alone reads the stream on its way to the head, else the one that returns it; None: neither.

        The reader comes first, since other readers of the raw stream then stay as they are.
        """
        value = self._last_value(stream.branches[-1].add)
        if value is None or stream.width is None:
            return None
        once = [c for c in self.trace.calls if self._once(c)]
        return self._reader(value, stream.width, once) or self._producer(value, stream, once)

    def write(self, branch: Branch) -> str | None:
        """The module whose first output is what `branch` adds, unchanged, and nothing else reads; None: there is none.

        The last that returns it (a dropout behind the weights), or what that lies in and returns it too.
        """
        node = self.node(branch.add)
        if node is None or not branch.apart:
            return None
        return self._returning(node.inputs[1 - branch.trunk], node, branch)

    def _returning(self, value: int, reader: Node, branch: Branch) -> str | None:
        """The module that returns `value` to `reader` alone; of a sum of several branches that of the own part."""
        if any(step.node.id != reader.id for step in self.flow.readers(value)):
            return None
        calls = [c for c in self.trace.calls if c.outputs[:1] == (value,) and self._once(c)]
        calls = [c for c in calls if not self.trace.inside(reader.call, c.id)]
        around = [c.path for c in calls if self.trace.inside(calls[-1].id, c.id)]
        if around:
            return around[0]
        step = self.flow.made_by(value)
        parts = step.inputs if step is not None and step.role is Role.ADD else ()
        own = [part for part in parts if self._written_by(part, branch)]
        return self._returning(own[0], step.node, branch) if step is not None and len(own) == 1 else None

    def _written_by(self, value: int, branch: Branch) -> bool:
        """Whether a weight that writes the branch made this value, moves, factors and biases apart."""
        step = self.flow.made_by(value)
        while step is not None and step.role in LIGHT and len(step.inputs) == 1:
            step = self.flow.made_by(step.inputs[0])
        if step is not None and step.role is Role.ADD:
            return any(self._written_by(part, branch) for part in step.inputs)
        return step is not None and not set(branch.writers).isdisjoint(step.parameters)

    def _once(self, call: Call) -> bool:
        return not call.composite and self.runs[call.path] == 1 and call.path != "."

    def _last_value(self, site: OpSite) -> int | None:
        node = self.node(site)
        return None if node is None else node.outputs[0]

    def node(self, site: OpSite) -> Node | None:
        """The recorded operation at this place."""
        for node in self.trace.nodes:
            call = self.trace.calls[node.call]
            if (node.op, node.ordinal, call.path, call.execution) == (site.op, site.ordinal, site.path, site.execution):
                return node
        return None

    def _reader(self, value: int, width: int, calls: list[Call]) -> Boundary | None:
        forms = self._forms(value, width)
        for call in calls:
            read = [v for v in call.inputs if v in forms]
            if len(read) == 1 and self._cuts(call, value):
                place = _argument(call, read[0])
                if place is not None:
                    return self._named(call.path, *place)
        return None

    def _forms(self, value: int, width: int) -> set[int]:
        """`value` and what light steps make of it while its last axis stays the features."""
        found, todo = {value}, [value]
        while todo:
            for step in self.flow.readers(todo.pop()):
                if step.role in LIGHT and len(step.inputs) == 1:
                    fresh = [v for v in step.outputs if v not in found and self.flow.shape(v)[-1:] == (width,)]
                    found.update(fresh)
                    todo += fresh
        return found

    def _cuts(self, call: Call, value: int) -> bool:
        """Whether every way from `value` to the head passes through this run."""
        todo, seen = [value], {value}
        while todo:
            current = todo.pop()
            if current == self.head:
                return False
            for step in self.flow.readers(current):
                if step.id in self.behind and not self.trace.inside(step.call, call.id):
                    fresh = [v for v in step.outputs if v not in seen]
                    seen.update(fresh)
                    todo += fresh
        return True

    def _producer(self, value: int, stream: Stream, calls: list[Call]) -> Boundary | None:
        found = [c.path for c in calls if c.outputs[:1] == (value,) and c.outputs.count(value) == 1]
        found = [path for path in found if self._writes_inside(path, value)]
        if not found:
            return None
        block = stream.branches[-1].block
        return Boundary(block if block in found else found[0], "output")

    def _writes_inside(self, path: str, value: int) -> bool:
        call = next(c for c in self.trace.calls if c.path == path and not c.composite)
        return self.trace.inside(self.trace.producer(value).call, call.id)

    def _named(self, path: str, index: int, name: str) -> Boundary:
        if index >= 0 and not name:
            parameters = list(inspect.signature(module_at(self.survey.model, path).forward).parameters.values())
            plain = index < len(parameters) and parameters[index].kind is not inspect.Parameter.VAR_POSITIONAL
            name = parameters[index].name if plain else ""
        return Boundary(path, "input", index, name)


def _argument(call: Call, value: int) -> tuple[int, str] | None:
    """Position and name of the argument that holds `value`; None where it lies inside a structure."""
    assert call.spec is not None
    leaves = pytree.tree_flatten_with_path((call.spec.args, call.spec.kwargs))[0]
    keys = [path for path, leaf in leaves if isinstance(leaf, TensorSpec)]
    path = keys[call.inputs.index(value)]
    if len(path) != 2:
        return None
    if isinstance(path[1], pytree.SequenceKey):
        return path[1].idx, ""
    return (-1, str(path[1].key)) if isinstance(path[1], pytree.MappingKey) else None
