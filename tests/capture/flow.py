"""Questions to a recorded trace: what does a value depend on, which operations were there."""

from __future__ import annotations

from normprobe.capture.trace import SOURCES, Call, Trace


def sources(trace: Trace, value: int) -> set[str]:
    """Names of the parameters, buffers and inputs that `value` was computed from."""
    found, todo, seen = set(), [value], {value}
    while todo:
        node = trace.producer(todo.pop())
        if node.op in SOURCES:
            found.add(node.name)
        fresh = [v for v in node.inputs if v not in seen]
        seen.update(fresh)
        todo += fresh
    return found - {""}


def output_sources(trace: Trace) -> dict[str, set[str]]:
    return {name: sources(trace, value) for name, value in trace.outputs}


def ops(trace: Trace) -> list[str]:
    return [node.op for node in trace.nodes if node.op not in SOURCES]


def calls(trace: Trace, path: str) -> list[Call]:
    return [c for c in trace.calls if c.path == path and not c.composite]
