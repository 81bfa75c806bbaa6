"""Results that were written past the dispatcher: by a Triton kernel, or by code that is handed an address."""

from __future__ import annotations

from math import prod

from normprobe.capture.trace import Call, Trace

UNSEEN = "unseen.write"  # whatever a module did to its inputs to fill a tensor, where no operation was recorded


def unwritten(trace: Trace, call: Call, value: int) -> bool:
    """Whether `value` is memory that was allocated within `call` and, as far as was recorded, never written."""
    node = trace.producer(value)
    while getattr(node.function, "is_view", False):
        node = trace.producer(node.inputs[0])
    allocated = node.op.startswith("aten.") and "empty" in node.op and node.id >= call.first_node
    return allocated and bool(call.inputs) and prod(trace.values[value].shape) > 0
