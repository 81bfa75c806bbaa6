"""A piece of the recorded graph as the subject of identification: its operations are run again on other inputs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normprobe.anatomy.flow.levels import Levels
from normprobe.anatomy.flow.ops import ALIAS
from normprobe.capture.leaves import tensors as tensors_in
from normprobe.capture.parts import held_part, selected
from normprobe.capture.storage import held_tensor, inner_tensors
from normprobe.capture.trace import SOURCES, Node, Ref, Trace
from normprobe.capture.writes import written
from normprobe.errors import UnreadableAnatomyError
from normprobe.norms.subject import Instance, NotComparableError, draw
from normprobe.records import NormSpec


class GraphSubject:
    """Recorded nodes from value `origin` to value `end`, with the static nodes that they need.

    Args:
        model: holds the parameters and buffers that the static nodes start from; never touched.
        trace: the recording.
        levels: levels of its values.
        nodes: the operations on the signal, in order of time.
        origin: the value that is varied.
        end: the value that comes out; shaped like `origin`.

    Raises:
        UnreadableAnatomyError: a tensor is needed that was made outside the recorded forward, or from another signal.
    """

    def __init__(
        self, model: nn.Module, trace: Trace, levels: Levels, nodes: Sequence[Node], origin: int, end: int
    ) -> None:
        made = {origin}.union(*(n.outputs for n in nodes))
        if any(levels.signal(v) and v not in made for n in nodes for v in n.inputs):
            raise UnreadableAnatomyError("another signal is part of the computation")
        self._trace, self._levels, self._origin, self._end = trace, levels, origin, end
        self._nodes = [*static_nodes(trace, levels, nodes, parts=True), *nodes]
        recorded = trace.values[origin]
        if not recorded.dtype.is_floating_point:
            raise UnreadableAnatomyError(f"the computation begins with {recorded.dtype}, whose scale means nothing")
        self.shape = self.recorded_shape = recorded.shape
        self.dtype = recorded.dtype
        self._state = _state(model, self._nodes)
        self._parameters = frozenset(n.name for n in self._nodes if n.op == "parameter")
        devices = {t.device for t in self._state.values()} - {torch.device("meta")}
        self.device = devices.pop() if devices else torch.device("cpu")

    def instance(self, dtype: torch.dtype, seed: int | None, train: bool = False) -> Instance:
        """The operations in `dtype`, parameters drawn anew where a seed is given; there is no train mode of its own."""
        values = draw(self._state.items(), self._parameters, seed) if seed is not None else dict(self._state)
        tensors = {
            name: value.to(self.device, dtype) if value.is_floating_point() else value.to(self.device)
            for name, value in values.items()
        }

        def call(x: Tensor) -> Tensor:
            env = {**_shaped(self._trace, self._levels, self._nodes, dtype, x.device), self._origin: x}
            for node in self._nodes:
                _run(node, env, tensors, dtype, self.device)
            result = env[self._end]
            if not result.is_floating_point() or result.shape != x.shape:
                raise NotComparableError(f"output of shape {tuple(result.shape)}, input {tuple(x.shape)}")
            return result

        return Instance(call, tensors, self._parameters, dtype)


def without_casts(spec: NormSpec, recorded: str) -> NormSpec:
    """The spec of recorded operations, without claims that a recording in the dtype `recorded` cannot carry."""
    if recorded in ("float16", "bfloat16") or spec.reduction == "native":
        return spec
    note = f"recorded in {recorded}: casts that change nothing there leave no operation behind"
    told = spec.weight_multiply in ("none", "fused")
    update = {"reduction": "unknown", "weight_multiply": spec.weight_multiply if told else "unknown"}
    return spec.model_copy(update={**update, "evidence": (*spec.evidence, note)})


class StaticFunction:
    """A static value as a function of the parameters and buffers that it is computed from, in float64.

    Args:
        model: holds those parameters and buffers; never touched.
        trace: the recording.
        levels: levels of its values.
        value: the static value.

    Raises:
        UnreadableAnatomyError: a tensor is needed that was made outside the recorded forward.
    """

    def __init__(self, model: nn.Module, trace: Trace, levels: Levels, value: int) -> None:
        self._trace, self._levels, self._value = trace, levels, value
        self._nodes = static_nodes(trace, levels, [trace.producer(value)])
        self._nodes = [n for n in self._nodes if n.id != trace.producer(value).id] + [trace.producer(value)]
        self._state = _state(model, self._nodes)
        self.parameters = frozenset(n.name for n in self._nodes if n.op == "parameter")
        self._empty = any(held_tensor(model, n.name).is_meta for n in self._nodes if n.op in ("parameter", "buffer"))

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters and buffers in the order of their first use."""
        return tuple(self._state)

    def recipe(self) -> tuple[Hashable, ...]:
        """The operations, with shapes and numbers but without the names of parameters: what two functions of one recipe
        do to theirs, taken in order, is the same."""
        place: dict[int, tuple[int, int]] = {}

        def placed(ref: Ref) -> tuple[int, int] | None:
            return place.get(ref.value)

        rows: list[Hashable] = []
        for row, node in enumerate(self._nodes):
            read = pytree.tree_map_only(Ref, placed, (node.args, node.kwargs))
            place.update({value: (row, i) for i, value in enumerate(node.outputs)})
            abouts = [self._trace.values[v] for v in (*node.inputs, *node.outputs)]
            kinds = tuple((about.shape, about.dtype) for about in abouts)
            rows.append((node.op, node.name if node.op == "buffer" else "", repr(read), kinds))
        return tuple(rows)

    def start(self, seed: int) -> dict[str, Tensor]:
        """Random parameters and buffers."""
        return draw(self._state.items(), self.parameters, seed)

    def now(self) -> Tensor | None:
        """The value for the parameters and buffers that the model has; None where those are on the meta device."""
        if self._empty:
            return None
        held = {n: t.double() if t.is_floating_point() else t for n, t in self._state.items()}
        return self({name: tensor.cpu() for name, tensor in held.items()})

    def __call__(self, tensors: dict[str, Tensor]) -> Tensor:
        """The value for these parameters and buffers."""
        env = _shaped(self._trace, self._levels, self._nodes, torch.float64, torch.device("cpu"))
        for node in self._nodes:
            _run(node, env, tensors, torch.float64, torch.device("cpu"))
        return env[self._value]


def static_nodes(trace: Trace, levels: Levels, nodes: Sequence[Node], parts: bool = False) -> list[Node]:
    """The static nodes behind `nodes`, in order of time; with `parts` what is selected from a parameter counts as a
    parameter of its own, under the name of that part."""
    todo = [v for n in nodes for v in n.inputs if not levels.signal(v)]
    found: dict[tuple[int, int], Node] = {}
    while todo:
        value = todo.pop()
        node = trace.producer(value)
        name = selected(trace, value) if parts and node.op not in SOURCES else None
        key = node.id, -1 if name is None else value
        if key in found:
            continue
        if node.op == "input" or (node.op == "constant" and not node.args):
            raise UnreadableAnatomyError("a tensor made outside the recorded forward is part of the computation")
        if name is not None:
            kind = "parameter" if levels.parameters(value) else "buffer"
            found[key] = Node(node.id, kind, (), (value,), node.call, node.ordinal, name=name)
            continue
        found[key] = node
        todo += [v for v in node.inputs if not levels.signal(v)]  # of a signal only the shape is read
    return [found[i] for i in sorted(found)]


def _shaped(
    trace: Trace, levels: Levels, nodes: Sequence[Node], dtype: torch.dtype, device: torch.device
) -> dict[int, Tensor]:
    """Tensors in the shape of the signals of which static nodes (`empty_like`) read only that."""
    static = [n for n in nodes if not any(levels.signal(v) for v in n.outputs)]
    read = (trace.values[v] for n in static for v in n.inputs if levels.signal(v))
    return {
        v.id: torch.zeros(v.shape, dtype=dtype if v.dtype.is_floating_point else v.dtype, device=device) for v in read
    }


def _state(model: nn.Module, nodes: Sequence[Node]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for node in nodes:
        if node.op in ("parameter", "buffer"):
            tensor = held_part(model, node.name).detach()
            if inner_tensors(tensor):
                raise UnreadableAnatomyError("a part of a tensor of several parts belongs to the computation")
            state[node.name] = torch.ones(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor
    return state


def _run(
    node: Node, env: dict[int, Tensor], tensors: dict[str, Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    """Run one recorded operation on the values in `env`; tensors that it makes from nothing lie on `device`."""
    if node.op in ("parameter", "buffer"):
        env[node.outputs[0]] = tensors[node.name]
        return
    if node.op == "constant":  # one number
        env[node.outputs[0]] = torch.tensor(node.args[0], device=device)
        return
    if node.function is None and node.op != ALIAS:
        raise UnreadableAnatomyError(f"{node.op} was recorded as a whole and cannot be run on other inputs")
    if node.function is None:  # a view of memory that was written in place
        shown, latest = env[node.inputs[0]], env[node.inputs[-1]]
        if shown.shape != latest.shape:
            raise UnreadableAnatomyError("a part of a tensor was written in place, and the whole is read")
        env[node.outputs[0]] = latest
        return
    args, kwargs = pytree.tree_map_only(Ref, lambda ref: env[ref.value], (node.args, node.kwargs))
    if dtype is torch.float64:
        args, kwargs = pytree.tree_map_only(torch.dtype, _widened, (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = device
    output = node.function(*args, **kwargs)
    changed = written(node.function, args, kwargs)
    made = [t for t in tensors_in(output) if not any(t is w for w in changed)]
    env.update(zip(node.outputs, (*made, *changed), strict=False))


def _widened(dtype: torch.dtype) -> Any:
    return torch.float64 if dtype.is_floating_point else dtype
