"""Parameters that are 0 and stay so: every way of a gradient to them passes another zero."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normprobe.anatomy.attention.ops import operands
from normprobe.anatomy.flow.ops import ACCUMULATING, REST, SCALES, Role, base, unmoved
from normprobe.anatomy.flow.steps import Flow, Step, ref
from normprobe.anatomy.weights.followers import at_zero
from normprobe.anatomy.weights.zero_parts import zero_parts
from normprobe.capture.storage import held_tensor
from normprobe.records import NormSite
from normprobe.records.parts import whole

_ADDED = {"aten.linear": 2, "aten.convolution": 2}  # which argument of a product is its bias
_FILLING = frozenset(f"aten.{n}" for n in ("masked_fill", "masked_fill_", "fill", "constant_pad_nd"))
_FROM_ZERO = frozenset({"layernorm", "rmsnorm", "l2norm", "scalenorm", "groupnorm", "instancenorm", "dyt"})


@dataclass(frozen=True)
class Zeros:
    """What parameters of zeros keep gradients from: `stay` are 0 themselves and never get one, `late` get none before
    zeros elsewhere have moved."""

    stay: tuple[str, ...] = ()
    late: frozenset[str] = frozenset()


def find_blocked(model: nn.Module, flow: Flow, norms: Sequence[NormSite]) -> Zeros:
    """The weights, factors and gains that are nothing but zeros and never get a gradient, as others are 0 as well; and
    the parameters that get one later.

    By the product rule a factor has a gradient only where all others are not 0. What has one moves away from 0; then
    the next ones have one, until nothing new moves. What an operation does that is not known counts as a way for the
    gradient, and what it makes as not 0.

    Args:
        model: the model that `flow` was recorded from; on meta nothing is 0.
        flow: its flow.
        norms: numbered as the groups of the flow are.
    """
    zeros: dict[str, Tensor] = {name: parameter for name, parameter in model.named_parameters() if _zero(parameter)}
    parts = zero_parts(model, flow)
    names = {name for name, _ in model.named_parameters()}
    zeros |= {name: held_tensor(model, whole(name, names)) for name in parts.values()}
    if not zeros:
        return Zeros()
    left = frozenset(zeros)
    first = last = Gradients(flow, norms, left, parts).reached()
    while moving := left & last & {n for n, p in zeros.items() if p.requires_grad}:
        left -= moving
        last = Gradients(flow, norms, left, parts).reached()
    learning = {name for name in left if zeros[name].requires_grad}
    if learning:
        free = Gradients(flow, norms, frozenset(), parts)
        learning &= free.reached() & free.multiplied()
    return Zeros(tuple(name for name in zeros if name in learning), last - first)


def _zero(parameter: Tensor) -> bool:
    plain = type(parameter) is nn.Parameter and not parameter.is_meta and parameter.is_floating_point()
    if not plain or not parameter.numel() or bool(parameter[(0,) * parameter.dim()] != 0):
        return False
    return not bool(torch.count_nonzero(parameter))


class Gradients:
    """Where gradients of the outputs get to while the parameters `zeros` are 0; `parts` are signals that are 0 while a
    part of a parameter is."""

    def __init__(self, flow: Flow, norms: Sequence[NormSite], zeros: frozenset[str], parts: Mapping[int, str]) -> None:
        self._flow, self._norms, self._zeros, self._parts = flow, norms, zeros, parts
        self._nothing = {v for v, name in parts.items() if name in zeros}  # signals that are 0 whatever comes in
        for step in flow.steps if zeros else ():
            if self._makes_nothing(step):
                self._nothing.update(step.outputs)

    def reached(self) -> frozenset[str]:
        """The parameters that get one."""
        live = set(self._flow.outputs)
        found: set[str] = set()
        for step in reversed(self._flow.steps):
            if any(v in live and self._flow.floating(v) for v in step.outputs):
                passed, reached = self._back(step)
                live.update(passed)
                found.update(reached)
                found.update(self._parts[v] for v in step.outputs if v in live and v in self._parts)
        return frozenset(found)

    def multiplied(self) -> frozenset[str]:
        """The parameters that something is multiplied by."""
        trace, norms = self._flow.trace, [s.group.norm for s in self._flow.steps if s.group and s.role is Role.NORM]
        used = {v for step in self._flow.steps for v in self._factors(step) if v in step.statics}
        makers = [trace.producer(unmoved(trace, value)) for value in used]
        gains = [self._norms[i].weight for i in norms]
        named = [maker.name for maker in makers if maker.op == "parameter"]
        return frozenset([*named, *(gain for gain in gains if gain), *self._parts.values()])

    def _back(self, step: Step) -> tuple[set[int], set[str]]:
        """The signals and the parameters to which a step hands a gradient on."""
        if step.role is Role.NORM and step.group is not None:
            return self._behind_norm(step, self._norms[step.group.norm])
        of, shut = self._flow.levels.parameters, self._shut(step)
        named = {p for v in step.statics if v not in shut for p in of(v)}
        beside = set(step.parameters) - {p for v in step.statics for p in of(v)}
        return set(step.inputs) - shut, named | beside

    def _shut(self, step: Step) -> set[int]:
        """What a step reads and hands no gradient to."""
        if step.role is Role.ACT and self._nothing.issuperset(step.inputs):
            told = at_zero(self._flow, step)
            return set(step.inputs) if told is not None and told[1] == 0.0 else set()
        read = operands(self._flow, step) if step.role is Role.ATTENTION else None
        if read is not None:
            query, key, value = ({v} if self._is_nothing(v) else set() for v in read)
            return ({read[0]} if key or value else set()) | ({read[1]} if query or value else set())
        factors = set(self._factors(step))
        return {v for v in factors if any(map(self._is_nothing, factors - {v}))}

    def _behind_norm(self, step: Step, norm: NormSite) -> tuple[set[int], set[str]]:
        gain = {whole(norm.weight or "", step.parameters)}
        idle = gain if self._nothing.issuperset(step.inputs) and _from_zero(norm) else set()
        passed = set() if self._closed(norm) else set(step.inputs)
        return passed, set(step.parameters) - idle

    def _closed(self, norm: NormSite) -> bool:
        """Whether a norm multiplies by a gain of 0."""
        return norm.kind != "grn" and norm.affine in ("weight", "weight+bias") and norm.weight in self._zeros

    def _makes_nothing(self, step: Step) -> bool:
        if step.role is Role.NORM and step.group is not None:
            norm = self._norms[step.group.norm]
            known = norm.affine != "other" and (norm.bias is None or norm.bias in self._zeros)
            nothing = self._nothing.issuperset(step.inputs) and _from_zero(norm)
            return known and (nothing or self._closed(norm))
        if step.role is Role.ACT:
            told = at_zero(self._flow, step) if self._nothing.issuperset(step.inputs) else None
            return told is not None and told[0] == 0.0
        if step.role in (Role.MOVE, Role.SHIFT, Role.ADD, Role.POOL):
            return self._keeps_nothing(step)
        return any(map(self._is_nothing, self._factors(step))) and all(map(self._is_nothing, _added(step)))

    def _keeps_nothing(self, step: Step) -> bool:
        given = step.node.args[-1:] if base(step.node.op) in _FILLING else ()
        given = step.node.args[:2] if step.role is Role.SHIFT else given
        fills = any(isinstance(a, (int, float)) and a != 0 for a in given)
        read = [v for v in (*step.inputs, *step.statics) if self._flow.floating(v)]
        return not fills and bool(read) and all(self._is_nothing(v) or self._constant_zero(v) for v in read)

    def _factors(self, step: Step) -> list[int]:
        """The tensors of which one that is 0 makes all of a product 0; of attention, the values."""
        name, args = base(step.node.op), step.node.args
        if step.role is Role.ATTENTION:
            read = operands(self._flow, step)
            return [] if read is None else [read[2]]
        if step.group is not None or name == REST or set(step.outputs).isdisjoint(step.node.outputs):
            return []
        if step.role is Role.MATMUL and name.startswith("aten."):
            args = args[1:3] if name in ACCUMULATING else args[:2]
        elif step.role in (Role.SCALE, Role.GATE) and name in SCALES:
            args = args[: 1 if name.startswith("aten.div") else 2]
        else:
            return []
        return [v for v in map(ref, args) if v >= 0]

    def _is_nothing(self, value: int) -> bool:
        if value in self._nothing or self._flow.levels.signal(value):
            return value in self._nothing
        maker = self._flow.trace.producer(unmoved(self._flow.trace, value))
        return maker.op == "parameter" and maker.name in self._zeros

    def _constant_zero(self, value: int) -> bool:
        if self._flow.levels.signal(value) or self._flow.levels.parameters(value):
            return False
        held = self._flow.statics.tensor(value)
        return held is not None and not bool(torch.count_nonzero(held))


def _from_zero(norm: NormSite) -> bool:
    """Whether a norm makes zeros of zeros in training; a batch norm takes the mean of its batch there."""
    return norm.kind in _FROM_ZERO or (norm.kind == "batchnorm" and not norm.frozen)


def _added(step: Step) -> Iterable[int]:
    """What a product adds besides."""
    at = 0 if base(step.node.op) in ACCUMULATING else _ADDED.get(base(step.node.op))
    given = step.node.args[at] if at is not None and len(step.node.args) > at else None
    return [ref(given)] if ref(given) >= 0 else []
