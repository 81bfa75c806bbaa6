"""Whether a norm's gain and offset are its own."""

from __future__ import annotations

from normprobe.records import NormSite
from normprobe.rewrites.base import Survey


def why_shared(survey: Survey, norm: NormSite) -> str | None:
    """What else the recorded forward uses the gain or the offset of a norm for; None where it uses them there alone.

    A parameter that has several names is one.
    """
    trace = survey.trace
    named = dict(survey.model.named_parameters(remove_duplicate=False))
    own = {id(named[name]) for name in (norm.weight, norm.bias) if name in named}
    names = {node.outputs[0]: node.name for node in trace.nodes if node.op == "parameter" and node.outputs}
    held = {value for value, name in names.items() if name in named and id(named[name]) in own}
    runs = {call.id for call in trace.calls if call.path == norm.path and not call.composite}
    for node in trace.nodes:
        used = held.intersection(node.inputs)
        if used and not any(trace.inside(node.call, run) for run in runs):
            return f"{names[used.pop()]} is used in {trace.path(node) or '.'} too"
    return None
