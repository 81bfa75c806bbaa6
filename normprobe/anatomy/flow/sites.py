"""The keys by which a measured pass finds recorded operations again."""

from __future__ import annotations

from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.records import OpSite


def op_site(flow: Flow, step: Step) -> OpSite:
    """The key of the operation of `step`; a torch function that was recorded as a whole is counted as a call."""
    call = flow.trace.calls[step.call]
    if call.composite:
        execution = flow.trace.calls[call.parent].execution
        return OpSite(path=call.path, op=call.composite, ordinal=call.execution, execution=execution)
    execution = flow.trace.calls[step.node.call].execution
    return OpSite(path=flow.path(step), op=step.node.op, ordinal=step.node.ordinal, execution=execution)
