"""What a branch computes, told by the operations inside it."""

from __future__ import annotations

from normprobe.anatomy.adds import Part
from normprobe.anatomy.attention_ops import AttentionOp
from normprobe.anatomy.flow import Flow
from normprobe.anatomy.ops import WEIGHTY, Role, base
from normprobe.records.anatomy import BranchKind

_ROUTING = frozenset({"aten.topk", "aten.sort", "aten._grouped_mm"})
_SCANS = frozenset({"aten.cumsum", "aten.cumprod"})
_RECURRENT = ("lstm", "gru", "rnn")


def branch_kind(flow: Flow, part: Part, attention: list[AttentionOp]) -> BranchKind:
    """Attention where an attention operation is inside (cross-attention where its keys are not computed from the
    branch's own read), then routed experts, scans, recurrences, convolutions; else an MLP if it is made of products."""
    inside = [op for op in attention if op.step.id in part.region]
    if inside:
        own = any(_computed_inside(flow, op.key, part) for op in inside)
        return "attention" if own else "cross_attention"
    steps = [flow.steps[i] for i in sorted(part.region)]
    names = {base(s.node.op) for s in steps}
    weighty = [s for s in steps if s.role in WEIGHTY]
    if names & _ROUTING:
        return "moe"
    if any(word in name for name in names for word in _RECURRENT):
        return "recurrent"
    if names & _SCANS:
        return "ssm"
    weighted = [s for s in weighty if s.parameters]
    if weighted and all("convolution" in s.node.op for s in weighted):
        return "conv"
    if any(s.role is Role.MATMUL and not s.parameters for s in weighty):
        return "linear_attention"
    if any(s.role is Role.MATMUL for s in weighty):
        return "mlp"
    return "other"


def _computed_inside(flow: Flow, value: int, part: Part) -> bool:
    return flow.producer.get(value, -1) in part.region
