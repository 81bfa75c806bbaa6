"""Contents of values that depend on no weights: computed again from what the recorder kept, when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normprobe.anatomy.flow.ops import base
from normprobe.capture.storage import held_tensor
from normprobe.capture.trace import Node, Ref, Trace
from normprobe.capture.writes import written, written_arguments

_LARGEST = 1 << 24  # elements; values that need larger tensors are not computed again
_SHARED = 1 << 16  # elements; what is larger is not kept for other values
_MOST = 2000  # operations; values that took more are not computed again


class Statics:
    """Runs the operations behind a value again, in their order and with their writes in place.

    Parameters count as unknown: their values may change. Buffers, small inputs and constants are known, and so are
    tensors made from sizes and numbers alone, on the meta device too.
    """

    def __init__(self, model: nn.Module, trace: Trace) -> None:
        self._model, self._trace = model, trace
        self._known: dict[int, Tensor | None] = {}
        self._made: dict[int, Tensor] = {}  # on the way to others, by operations of which none writes in place

    def tensor(self, value: int) -> Tensor | None:
        """What `value` held, None where it cannot be known; on the processor where the model is on meta."""
        if value not in self._known:
            self._known[value] = self._compute(value)
        return self._known[value]

    def number(self, value: int) -> float | None:
        """The one number that all elements of a static value are, zeros of a mask apart; None if there is none."""
        tensor = self.tensor(value)
        if tensor is None or tensor.numel() == 0 or tensor.is_complex():
            return None
        wide = tensor.double().flatten()
        kept = wide[wide != 0]
        if kept.numel() and bool((kept == kept[0]).all()):
            return float(kept[0])
        return None

    def _compute(self, value: int) -> Tensor | None:
        nodes = self._behind(value, self._made)
        writing = nodes is not None and any(written_arguments(node.function) for node in nodes)
        if writing:  # what others share must not be written
            nodes = self._behind(value, {})
        found = {} if writing else dict(self._made)
        for node in nodes or ():
            try:
                made = self._run(node, found)
            except (RuntimeError, TypeError, NotImplementedError):  # an operation that wants another device
                return None
            found.update(zip(node.outputs, made, strict=True))
        if not writing:
            self._made.update((v, t) for v, t in found.items() if t.numel() <= _SHARED)
        return found.get(value)

    def _behind(self, value: int, made: Mapping[int, Tensor]) -> list[Node] | None:
        """The operations that `value` was computed by from what is made already, in order of time; None where one of
        them is out of reach."""
        found: dict[int, Node] = {}
        todo = [value]
        while todo:
            current = todo.pop()
            node = self._trace.producer(current)
            if current in made or node.id in found:
                continue
            if len(found) > _MOST or not self._runs(node):
                return None
            found[node.id] = node
            todo += node.inputs if not _reads_shapes_only(node) else ()
        return [found[i] for i in sorted(found)]

    def _runs(self, node: Node) -> bool:
        if node.op == "buffer":
            buffer = held_tensor(self._model, node.name)
            return not buffer.is_meta and buffer.numel() <= _LARGEST
        if node.function is None:
            known = node.op == "normprobe.alias" or bool(node.args)
            return known or all(v in self._trace.held for v in node.outputs)
        seeded = torch.Tag.nondeterministic_seeded in getattr(node.function, "tags", ())
        return not seeded and all(self._size(v) <= _LARGEST for v in node.outputs)

    def _run(self, node: Node, found: dict[int, Tensor]) -> list[Tensor]:
        """The tensors that `node` makes and those that it writes, as the recorder numbered them."""
        if node.function is None:
            return [self._source(node, found)]
        wanted: Any = pytree.tree_map_only(Ref, lambda ref: found.get(ref.value), (node.args, node.kwargs))
        if _reads_shapes_only(node):
            wanted = pytree.tree_map_only(Ref, self._blank, (node.args, node.kwargs))
        args, kwargs = pytree.tree_map_only(torch.device, _real, wanted)
        output = node.function(*args, **kwargs)
        changed = written(node.function, args, kwargs)
        made = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
        return [*(t for t in made if not any(t is w for w in changed)), *changed]

    def _source(self, node: Node, found: dict[int, Tensor]) -> Tensor:
        (value,) = node.outputs
        if node.op == "normprobe.alias":  # the same memory, read after it was written through another view
            return found[node.inputs[0]]
        if node.op == "buffer":
            return held_tensor(self._model, node.name).detach().clone()
        if value in self._trace.held:
            return self._trace.held[value].clone()
        about = self._trace.values[value]
        return torch.full(about.shape, node.args[0], dtype=about.dtype)

    def _blank(self, ref: Ref) -> Tensor:
        about = self._trace.values[ref.value]
        return torch.empty((), dtype=about.dtype).expand(about.shape)

    def _size(self, value: int) -> int:
        return torch.Size(self._trace.values[value].shape).numel()


def _reads_shapes_only(node: Node) -> bool:
    return base(node.op).endswith("_like") or node.op.startswith("aten.new_")


def _real(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device
