"""The rows of tables that stay as they are."""

from __future__ import annotations

from normprobe.capture.trace import Trace
from normprobe.records import WeightSite


def padding_rows(trace: Trace, site: WeightSite) -> tuple[int, ...]:
    """The row of a table that its lookup names as padding, counted from the start."""
    if site.kind != "embedding":
        return ()
    for node in trace.nodes:
        if node.op.startswith("aten.embedding") and trace.producer(node.inputs[0]).name == site.parameter:
            row = node.args[2] if len(node.args) > 2 else node.kwargs.get("padding_idx", -1)
            return (int(row),) if isinstance(row, int) and row >= 0 else ()
    return ()
