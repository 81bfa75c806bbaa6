"""Facts of the build that matched parts do not share: streams, branches, attention, the head, the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from normprobe.diffing.pairs import BranchPair, Lone, Pairs
from normprobe.records import Anatomy, AttentionSite, Severity, Skipped, Stream, Target, WeightSite
from normprobe.records.diff import Difference, Fact, Subject

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
Said = Iterator[Difference | Skipped]
CLOSE = 1e-2  # choice: constants are recovered from behaviour to better than that

_STREAM = ("width", "depth", "placement", "parallel", "input_multiplier", "topology", "copies")
_BRANCH = ("kind", "placement", "parallel", "skip_scale", "skip")
_ATTENTION = ("heads", "kv_heads", "head_dim", "scale", "softcap", "causal", "window", "sinks", "cross", "biased")
_ACTIVATIONS = {"relu", "leaky_relu", "gelu", "silu", "tanh", "sigmoid"}
_QK = ("kind", "axis", "rope")


def difference(
    subject: Subject, fact: str, severity: Severity, values: Sequence[Any], where: tuple[str, str], message: str = ""
) -> Difference:
    """One difference at one pair of places; the sentence gives the values unless it is told."""
    a, b = (plain(value) for value in values)
    told = message or f"{subject} {fact.replace('_', ' ')} is {words(a)} in A and {words(b)} in B"
    return Difference(subject=subject, fact=fact, severity=severity, a=a, b=b, where=(where,), message=told)


def plain(value: Any) -> Fact:
    """A fact as the document holds it."""
    if value is None or isinstance(value, (bool, str)):
        return value
    return float(value)


def words(value: Fact) -> str:
    """A fact as a sentence holds it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    return value.replace("_", " ") if isinstance(value, str) else f"{value:.6g}"


def same(a: Any, b: Any) -> bool:
    """Whether two facts agree; numbers up to what recovering them from behaviour may cost."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or math.isclose(a, b, rel_tol=CLOSE)
    return bool(a == b)


def build_facts(a: Anatomy, b: Anatomy, pairs: Pairs) -> Said:
    """Everything but the norms that the build of two models does not share."""
    for one, other in pairs.streams:
        yield from _stream(one, other)
    for pair in pairs.branches:
        yield from _branch(pair)
        yield from _activations("branch", *(_of_branch(s, at) for s, at in zip((a, b), _places(pair), strict=True)))
    yield from _activations("weights", *([w for w in s.weights if w.branch is None] for s in (a, b)))
    for x, y in pairs.attention:
        yield from _attention(x, y)
    yield from _head(a, b)
    yield from map(_lone, pairs.lone)
    kinds = tuple(", ".join(sorted({r.kind for r in side.reparametrizations})) for side in (a, b))
    if kinds[0] != kinds[1]:
        yield difference("model", "reparametrization", NOTE, (kinds[0] or None, kinds[1] or None), (".", "."))


def target_facts(a: Target, b: Target) -> Said:
    """What the whole models do not share: dtype and automatic mixed precision."""
    for fact in ("dtype", "autocast"):
        values = getattr(a, fact), getattr(b, fact)
        if values[0] != values[1]:
            yield difference("model", fact, WARNING, values, (".", "."))


def grouped(differences: Iterable[Difference]) -> tuple[Difference, ...]:
    """Differences of the same values as one with all their places, the worst severity first, else in order."""
    groups: dict[Any, Difference] = {}
    for one in differences:
        key = (one.subject, one.fact, one.severity, repr(one.a), repr(one.b), one.message)
        held = groups.get(key)
        groups[key] = one if held is None else held.model_copy(update={"where": (*held.where, *one.where)})
    return tuple(sorted(groups.values(), key=lambda each: each.severity.rank))


def compare(subject: Subject, facts: Sequence[str], a: Any, b: Any, where: tuple[str, str]) -> Said:
    """Each of `facts` that two records do not share, as an error."""
    for fact in facts:
        values = getattr(a, fact), getattr(b, fact)
        if not same(*values):
            yield difference(subject, fact, ERROR, values, where)


def _stream(a: Stream, b: Stream) -> Said:
    where = (a.name, b.name)
    yield from compare("stream", _STREAM, a, b, where)
    if a.feature_axis != b.feature_axis and None not in (a.feature_axis, b.feature_axis):
        yield difference("stream", "feature_axis", NOTE, (a.feature_axis, b.feature_axis), where)


def _branch(pair: BranchPair) -> Said:
    a, b = pair.a, pair.b
    where = (a.path, b.path)
    yield from compare("branch", _BRANCH, a, b, where)
    x, y = a.branch_scale, b.branch_scale
    if x.kind != y.kind and {x.kind, y.kind} - {"none", "constant"}:
        yield difference("branch", "branch_scale", ERROR, (x.kind, y.kind), where)
    else:
        factors = tuple(1.0 if scale.kind == "none" else scale.value for scale in (x, y))
        if not same(*factors):
            yield difference("branch", "branch_scale", ERROR, factors, where)


def _places(pair: BranchPair) -> list[tuple[int, int]]:
    """The stream and the place in it of both branches."""
    return list(zip(pair.streams, pair.index, strict=True))


def _of_branch(anatomy: Anatomy, at: tuple[int, int]) -> list[WeightSite]:
    return [w for w in anatomy.weights if (w.stream, w.branch) == at]


def _activations(subject: Subject, a: Sequence[WeightSite], b: Sequence[WeightSite]) -> Said:
    """Activations behind the weights of a branch, or those outside of branches, where both models have as many."""
    if len(a) != len(b):
        return
    for x, y in zip(a, b, strict=True):
        values = x.followed_by, y.followed_by
        if values[0] != values[1] and {*values} <= _ACTIVATIONS:
            yield difference(subject, "activation", ERROR, values, (x.parameter, y.parameter))


def _attention(a: AttentionSite, b: AttentionSite) -> Said:
    where = (a.path, b.path)
    for fact in _ATTENTION:
        values = getattr(a, fact), getattr(b, fact)
        if fact == "causal" and None in values and values[0] != values[1]:
            yield Skipped(what=f"mask of {a.path} and {b.path}", why="the mask of one of them could not be read")
        elif not same(*values):
            yield difference("attention", fact, ERROR, values, where)
    learned = tuple(site.scale_parameter is not None for site in (a, b))
    if learned[0] != learned[1]:
        yield difference("attention", "learned_scale", ERROR, learned, where)
    if (a.qk_norm is None) != (b.qk_norm is None):
        kinds = tuple(None if site.qk_norm is None else site.qk_norm.kind for site in (a, b))
        yield difference("attention", "qk_norm", ERROR, kinds, where)
    elif a.qk_norm is not None and b.qk_norm is not None:
        for fact in _QK:
            values = getattr(a.qk_norm, fact), getattr(b.qk_norm, fact)
            if "unknown" in values and values[0] != values[1]:
                yield Skipped(what=f"QK-Norm {fact} of {a.path} and {b.path}", why="unknown in one of the models")
            elif values[0] != values[1]:
                yield difference("attention", f"qk_norm_{fact}", ERROR, values, where)
    if a.kernel != b.kernel:
        yield difference("attention", "kernel", NOTE, (a.kernel, b.kernel), where)


def _head(a: Anatomy, b: Anatomy) -> Said:
    if a.head is None or b.head is None:
        if a.head is not b.head:
            yield Skipped(what="head", why=f"the readout of {'A' if a.head is None else 'B'} was not found")
        return
    where = (a.head.path, b.head.path)
    yield from compare("head", ("logit_multiplier", "softcap"), a.head, b.head, where)
    tied = tuple(head.tied_to is not None for head in (a.head, b.head))
    if tied[0] != tied[1]:
        yield difference("head", "tied", NOTE, tied, where)


def _lone(lone: Lone) -> Difference:
    has, lacks = ("A", "B") if lone.side == "a" else ("B", "A")
    where = (lone.path, lone.near) if lone.side == "a" else (lone.near, lone.path)
    values = ("there", None) if lone.side == "a" else (None, "there")
    message = f"{has} has this {lone.what}, {lacks} has none there"
    return difference(lone.subject, lone.what.replace(" ", "_"), ERROR, values, where, message)
