"""Results that were written past the dispatcher: by a Triton kernel, or by code that is handed an address."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor

from normprobe.capture.leaves import tensors
from normprobe.capture.outputs import named_tensors
from normprobe.capture.trace import Trace

UNSEEN = "unseen.write"  # whatever was done to the inputs to fill a tensor, where no operation was recorded


class Unseen:
    """Records one operation for each returned tensor that is, as far as was recorded, memory never written.

    Args:
        trace: the recording.
        read: the value of a tensor.
        emit: records an operation: its name, inputs, what it made, its arguments, function, and what it wrote into.
    """

    def __init__(self, trace: Trace, read: Callable[[Tensor], int], emit: Callable[..., int]) -> None:
        self._trace, self._read, self._emit = trace, read, emit

    def fill(self, start: int, used: Callable[[], Sequence[Tensor]], output: Any) -> None:
        """Whatever was allocated since node `start` and is returned comes from the tensors that `used` names."""
        for _, tensor in named_tensors(output):
            inputs = used() if self._unwritten(start, self._read(tensor)) else ()
            if inputs:
                self._emit(UNSEEN, tuple(map(self._read, inputs)), (), changed=[tensor])

    @contextmanager
    def functions(self) -> Iterator[None]:
        """Looks at the results of autograd functions, which is how kernels are launched inside a forward."""
        plain = torch.autograd.Function.__dict__["apply"]

        def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            start = len(self._trace.nodes)
            output = plain.__func__(function, *args, **kwargs)
            self.fill(start, lambda: tensors((args, kwargs)), output)
            return output

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.autograd.Function.apply = plain  # type: ignore[method-assign]

    def _unwritten(self, start: int, value: int) -> bool:
        node = self._trace.producer(value)
        while getattr(node.function, "is_view", False):
            node = self._trace.producer(node.inputs[0])
        allocated = node.op.startswith("aten.") and "empty" in node.op and node.id >= start
        return allocated and prod(self._trace.values[value].shape) > 0
