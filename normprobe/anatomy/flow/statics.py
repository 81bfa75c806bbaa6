"""Values of static tensors: computed again from buffers, recorded numbers and creation operations when asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normprobe.capture.trace import Ref, Trace

_LARGEST = 1 << 22  # elements; larger static tensors are not computed again


class Statics:
    """Recomputes static values of a trace. Parameters count as unknown: their values may change."""

    def __init__(self, model: nn.Module, trace: Trace) -> None:
        self._model, self._trace = model, trace
        self._known: dict[int, Tensor | None] = {}

    def tensor(self, value: int) -> Tensor | None:
        """The tensor behind a static value on its own device; None where it cannot be known."""
        if value not in self._known:
            self._compute(value)
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

    def _compute(self, value: int) -> None:
        todo = [value]
        while todo:
            current = todo[-1]
            node = self._trace.producer(current)
            waiting = [v for v in node.inputs if v not in self._known] if node.function is not None else []
            if waiting:
                todo += waiting
                continue
            todo.pop()
            if current not in self._known:
                self._known.update(self._run(current))

    def _run(self, value: int) -> dict[int, Tensor | None]:
        node = self._trace.producer(value)
        unknown: dict[int, Tensor | None] = dict.fromkeys(node.outputs)
        if node.op == "buffer":
            buffer = self._model.get_buffer(node.name)
            return {value: None if buffer.is_meta or buffer.numel() > _LARGEST else buffer.detach()}
        if node.op == "constant" and node.args:
            return {value: torch.tensor(node.args[0], dtype=self._trace.values[value].dtype)}
        if node.function is None or self._too_large(value) or any(self._known[v] is None for v in node.inputs):
            return unknown
        if node.function._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.function.tags:
            return unknown
        swap: Any = pytree.tree_map_only(Ref, lambda ref: self._known[ref.value], (node.args, node.kwargs))
        if isinstance(swap[1].get("device"), torch.device) and swap[1]["device"].type == "meta":
            return unknown
        output = node.function(*swap[0], **swap[1])
        made = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
        return dict(zip(node.outputs, made, strict=True))

    def _too_large(self, value: int) -> bool:
        shape = self._trace.values[value].shape
        return torch.Size(shape).numel() > _LARGEST
