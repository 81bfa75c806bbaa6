"""What a branch computes, told by how it mixes tokens.

An MLP acts on every token alone, or on every channel alone; a shift of the tokens before it, and a short convolution
added to what it refines, change nothing of that. Experts do so with weights that a router chooses for a token.
Attention weighs tokens, or samples of a map of them, by a softmax; a scan carries a state along them (seen as a
cumulative sum, as a loop that reads the positions one by one, or as shifts by 1, 2, 4 and so on); a convolution mixes
neighbours, as a pooling does whose window slides on by one, or all tokens where it goes by way of frequencies. What
brings tokens together in another way (a mean, a maximum, a fixed matrix) is `other`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from normprobe.anatomy.attention.kernels import mixing
from normprobe.anatomy.attention.ops import AttentionOp
from normprobe.anatomy.flow.ops import LIGHT, SAMPLERS, WEIGHTY, Role, base, foreign
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import argument_value, backward, last_makers, pools
from normprobe.anatomy.streams import mixers
from normprobe.anatomy.streams.parts import Part, enters
from normprobe.anatomy.streams.writes import Write
from normprobe.records.anatomy import BranchKind

CHANNEL_MIXERS: frozenset[BranchKind] = frozenset({"mlp", "moe"})
_CHOICES = frozenset({"aten.topk", "aten.argmax", "aten.max", "aten.sort", "aten.argsort"})
_PICKS = frozenset({"aten.index", "aten.index_select"})
_EVEN = frozenset(Role) - WEIGHTY | {Role.SOFTMAX}  # what lies between a router and its choice
_RECURRENT = ("lstm", "gru", "rnn")  # in the names of torch's own operations


def family(kind: BranchKind) -> str:
    """What a branch mixes: channels (it acts on every token alone), tokens, or tokens across sequences ("cross")."""
    if kind == "cross_attention":
        return "cross"
    return "channels" if kind in CHANNEL_MIXERS else "tokens"


def branch_kind(
    flow: Flow, part: Part, attention: list[AttentionOp], write: Write, chain: Sequence[Write] = ()
) -> BranchKind:
    """The kind of a branch of `write`, one of the writes of `chain`."""
    inside = [op for op in attention if op.step.id in part.region]
    if inside:
        own = any(_own_key(flow, op, part, write.source) or _shared_key(flow, op, chain) for op in inside)
        return "attention" if own else "cross_attention"
    steps = [flow.steps[i] for i in sorted(part.region)]
    names = {base(s.node.op) for s in steps}
    if names & SAMPLERS and any(s.role is Role.SOFTMAX for s in steps):
        return "attention" if _samples(flow, part, steps) else "cross_attention"
    if any(mixers.transforms(flow, s) for s in steps):
        return "conv" if any(s.role is Role.MATMUL and s.parameters for s in steps) else "other"
    if "aten._grouped_mm" in names or any(_routes(flow, part, s) for s in steps):
        return "moe"
    heavy = {base(s.node.op) for s in steps if s.role is Role.HEAVY}
    if any(word in name for name in heavy if not foreign(name) for word in _RECURRENT):
        return "recurrent"
    by_kernels = _by_kernels(flow, part, steps)
    if by_kernels is not None:
        return by_kernels
    mixer = _mixer(flow, part, steps)
    if mixer is not None:
        return mixer
    alone = not any(mixers.gathers(flow, flow.steps[i]) for i in part.core)
    return (
        "mlp"
        if alone and not _reads_elsewhere(flow, part, write) and any(_weights(flow, s) for s in steps)
        else "other"
    )


def _mixer(flow: Flow, part: Part, steps: list[Step]) -> BranchKind | None:
    """How convolutions, scans and products bring tokens together; None where they do not. Asked once of a region."""
    key = "mixer", part.region
    if key not in flow.memo:
        flow.memo[key] = _brings_together(flow, part, steps)
    found: BranchKind | None = flow.memo[key]
    return found


def _brings_together(flow: Flow, part: Part, steps: list[Step]) -> BranchKind | None:
    convolutions = [s for s in steps if mixers.mixes_neighbours(flow, s)]
    met = {mixers.multiplies_tokens(flow, s) for s in steps}
    products = True in met
    if any(mixers.scans(flow, s) for s in steps) or mixers.loops(flow, steps) or mixers.doubles(flow, steps):
        return "ssm" if convolutions else "linear_attention" if products else "recurrent"
    others = any(s.role is Role.MATMUL and s.parameters and s not in convolutions for s in steps)
    if convolutions and not (others and all(mixers.refines(flow, s, part.region) for s in convolutions)):
        return "conv"
    if products or mixers.sums_up(flow, steps):
        return "linear_attention"
    return "other" if None in met else None


def _by_kernels(flow: Flow, part: Part, steps: Sequence[Step]) -> BranchKind | None:
    """The kind of a branch with operations of other libraries that mix tokens, or may do so."""
    found = [(step, how.how) for step in steps if (how := mixing(flow, step)) is not None and how.how != "alone"]
    attending = [step for step, how in found if how == "attention"]
    if not attending:
        return "other" if found else None
    own = any(flow.producer.get(step.inputs[1], -1) in part.region for step in attending)
    return "attention" if own else "cross_attention"


def _weights(flow: Flow, step: Step) -> bool:
    """Whether a step multiplies by weights, be they packed; of another library's operations one that takes a matrix."""
    if step.role is Role.MATMUL:
        return bool(step.parameters) or not step.statics
    learned = (v for v in step.statics if flow.levels.parameters(v) or flow.levels.buffers(v))
    return step.role is Role.HEAVY and foreign(step.node.op) and any(len(flow.shape(v)) > 1 for v in learned)


def _own_key(flow: Flow, op: AttentionOp, part: Part, source: int) -> bool:
    """Whether the keys come from the branch's read of the stream, or from the stream before it was pooled."""
    if flow.producer.get(op.key, -1) in part.region:
        return True
    walked = [step for _, step in backward(flow, source, _changes) if step is not None]
    if not any(pools(step) for step in walked):
        return False
    states = {value for step in walked for value in step.inputs}
    oldest = min(flow.producer.get(value, -1) for value in states)
    return any(v in states for v, _ in backward(flow, op.key, lambda _, v: flow.producer.get(v, -1) < oldest))


def _shared_key(flow: Flow, op: AttentionOp, chain: Sequence[Write]) -> bool:
    """Whether the keys were computed by another branch of the same trunk (layers that share keys and values)."""
    made = flow.producer.get(op.key, -1)
    return any(made in part.region for write in chain for part in write.parts)


def _changes(step: Step | None, _: int) -> bool:
    """Whether a step does more than to move, scale or pool a signal."""
    return step is None or not (step.role in LIGHT or pools(step))


def _samples(flow: Flow, part: Part, steps: list[Step]) -> bool:
    """Whether the map that a branch samples was computed from its own read of the stream."""
    maps = [argument_value(s.node.args[0]) for s in steps if base(s.node.op) in SAMPLERS]
    return any(flow.producer.get(value, -1) in part.region for value in maps if value is not None)


def _routes(flow: Flow, part: Part, choice: Step) -> bool:
    """Whether a step chooses among the outputs of a router, and so which tokens or weights are picked, or how strongly
    others count. The largest features that are kept and go on as features are no such choice."""
    if base(choice.node.op) not in _CHOICES or flow.floating(choice.outputs[-1]):
        return False
    if not _scores(flow, part, choice):
        return False
    chosen = {choice.outputs[-1]} if flow.readers(choice.outputs[-1]) else set()
    for step in (flow.steps[i] for i in sorted(part.region) if i > choice.id):
        if chosen.isdisjoint(step.inputs):
            continue
        if _steers(flow, step, chosen):
            return True
        if step.role in _EVEN or not all(flow.floating(v) for v in step.outputs):
            chosen.update(step.outputs)
    return False


def _scores(flow: Flow, part: Part, choice: Step) -> bool:
    """Whether a step chooses among what weights alone gave, earlier choices (of groups, say) apart."""
    todo, seen, makers = [choice], {choice.id}, list[Step]()
    while todo:
        for step in last_makers(flow, todo.pop().inputs[0], part.region, _EVEN):
            if base(step.node.op) not in _CHOICES:
                makers.append(step)
            elif step.id not in seen:
                seen.add(step.id)
                todo.append(step)
    return bool(makers) and all(s.role is Role.MATMUL and s.parameters for s in makers)


def _steers(flow: Flow, step: Step, chosen: set[int]) -> bool:
    """Whether a step picks rows by `chosen` numbers, or weighs others by them: one for many features."""
    others = [v for v in step.inputs if v not in chosen and flow.floating(v)]
    if base(step.node.op) in _PICKS:
        return argument_value(step.node.args[0]) in others
    size = max(math.prod(flow.shape(v)) for v in step.inputs if v in chosen)
    spread = step.role is Role.GATE and flow.floating(step.outputs[0]) and size < math.prod(flow.shape(step.outputs[0]))
    return bool(others) and (step.role is Role.MATMUL or spread)


def _reads_elsewhere(flow: Flow, part: Part, write: Write) -> bool:
    """Whether a signal enters the branch that was not computed from this read of the stream, other than as a shift
    or a scale before the first weights, or as a scale behind the last (all by a condition)."""
    heavy = [i for i in part.region if flow.steps[i].role in WEIGHTY]
    first, last = (min(heavy), max(heavy)) if heavy else (-1, -1)
    for index in part.region:
        step = flow.steps[index]
        given = index < first or (index > last and step.role is Role.GATE)
        if not (given and step.role in (Role.ADD, Role.GATE)) and any(
            enters(flow, v, write.source, write.whole.region) for v in step.inputs
        ):
            return True
    return False
