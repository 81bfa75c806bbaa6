"""The branches of one stream as records."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from normprobe.anatomy.attention.ops import AttentionOp
from normprobe.anatomy.flow.ops import WEIGHTY, Role
from normprobe.anatomy.flow.sites import op_site
from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.streams import weights
from normprobe.anatomy.streams.blocks import Located, Named, block_names
from normprobe.anatomy.streams.entries import entry
from normprobe.anatomy.streams.kinds import branch_kind, family
from normprobe.anatomy.streams.lent import lent
from normprobe.anatomy.streams.parts import Part, bends
from normprobe.anatomy.streams.placement import Norms, branch_norms, placement
from normprobe.anatomy.streams.recipes import inner_norms, normed_inside, recipes
from normprobe.anatomy.streams.shortcuts import projections
from normprobe.anatomy.streams.writes import Way, Write
from normprobe.records import Branch, NormSite
from normprobe.records.anatomy import BranchKind, SkipKind

_SKIPS: dict[Way, SkipKind] = {"light": "identity", "projected": "projection", "gated": "gate", "mixed": "mixture"}


@dataclass(frozen=True)
class Reading:
    """One branch as read: its write, its steps, its kind, the norms around it, whether it is parallel to another."""

    write: Write
    part: Part
    kind: BranchKind
    norms: Norms
    post: bool
    parallel: bool


def read_branches(flow: Flow, chain: Sequence[Write], attention: list[AttentionOp]) -> list[Reading]:
    """The branches of a chain of writes, in order of execution."""
    cut = [_parts(flow, write, attention, chain) for write in chain]
    norms = [
        [branch_norms(flow, write, part, following) for part, _ in parts]
        for write, parts, following in zip(chain, cut, [*chain[1:], None], strict=True)
    ]
    posts = _posts(flow, chain, cut, norms)
    parallel = _parallel(chain, cut)
    readings = []
    for i, write in enumerate(chain):
        for (part, kind), around in zip(cut[i], norms[i], strict=True):
            readings.append(Reading(write, part, kind, around, posts[i], parallel[i]))
    return readings


def _parts(
    flow: Flow, write: Write, attention: list[AttentionOp], chain: Sequence[Write]
) -> list[tuple[Part, BranchKind]]:
    """Branches of different kinds that merge before the add are parallel; of one kind they are one branch (routed and
    shared experts, a dense MLP beside its experts). Merged parts of which one is linear are one branch as well: they
    could be one matrix (the convolutions of several widths that training keeps apart)."""
    kinds = [branch_kind(flow, part, attention, write, chain) for part in write.parts]
    families = [family(k) if family(k) == "channels" else k for k in kinds]
    if len(set(families)) == len(families) and (len(kinds) == 1 or all(bends(flow, p.region) for p in write.parts)):
        return list(zip(write.parts, kinds, strict=True))
    return [(write.whole, branch_kind(flow, write.whole, attention, write, chain))]


def _posts(
    flow: Flow, chain: Sequence[Write], cut: list[list[tuple[Part, BranchKind]]], norms: list[list[Norms]]
) -> list[bool]:
    """Which sums are normed as part of the stream. The norm behind the last sum could be the final norm: it belongs
    to the stream if most other sums of such branches are normed, or if it ends a block as others do; of a single write,
    if its branch has no norm of its own."""
    on_sum = [all(n.on_sum for n in group) for group in norms]
    if len(on_sum) > 1:
        families = [{family(kind) for _, kind in parts} for parts in cut]
        alike = [s for s, found in zip(on_sum[:-1], families, strict=False) if found == families[-1]] or on_sum[:-1]
        own = [_own(flow, write, group) for write, group in zip(chain, norms, strict=True)]
        on_sum[-1] = on_sum[-1] and (2 * sum(alike) > len(alike) or (own[-1] and any(own[:-1])))
    elif on_sum:
        on_sum[0] = on_sum[0] and not any(flow.steps[i].role is Role.NORM for i in chain[0].whole.region)
    return on_sum


def _own(flow: Flow, write: Write, norms: list[Norms]) -> bool:
    """Whether everything reads the sum through one norm in the module that adds."""
    inside = flow.path(write.step) + "."
    return all(len(n.on_sum) == 1 and flow.path(n.on_sum[0]).startswith(inside) for n in norms)


def _parallel(chain: Sequence[Write], cut: list[list[tuple[Part, BranchKind]]]) -> list[bool]:
    """Whether each write runs beside another: merged before its add, or reading the stream from before another add."""
    index = {w.step.id: i for i, w in enumerate(chain)}
    beside = [len(parts) > 1 for parts in cut]
    kinds = [{kind for _, kind in parts} for parts in cut]
    for i, write in enumerate(chain):
        for other in write.over:
            j = index.get(other)
            if j is not None and kinds[i] != kinds[j]:
                beside[i] = beside[j] = True
    return beside


def branch_records(
    flow: Flow, readings: Sequence[Reading], norms: Sequence[NormSite], model: nn.Module
) -> list[Branch]:
    """The records of the branches of one stream."""
    located = [_located(flow, reading) for reading in readings]
    blocks = block_names(located, {call.path for call in flow.trace.calls})
    factors = _sum_factors(flow, readings)
    records = [
        _record(flow, reading, place.path, block, norms, model, factor)
        for reading, place, block, factor in zip(readings, located, blocks, factors, strict=True)
    ]
    alike = recipes(flow, ((reading.kind, reading.part) for reading in readings))
    return [
        record.model_copy(update={"readers": names, "recipe": number})
        for record, names, number in zip(records, _readers(flow, readings), alike, strict=True)
    ]


def _readers(flow: Flow, readings: Sequence[Reading]) -> list[tuple[str, ...]]:
    """The parameters that read the stream into each branch, those in earlier branches among them."""
    branches = [(reading.write, reading.part) for reading in readings]
    own = [weights.reads(flow, write, part) for write, part in branches]
    others = lent(flow, branches, own)
    return [
        tuple(dict.fromkeys((*itertools.chain.from_iterable(mine.values()), *theirs)))
        for mine, theirs in zip(own, others, strict=True)
    ]


def _sum_factors(flow: Flow, readings: Sequence[Reading]) -> list[float]:
    """The constant behind each sum. Behind the last it could be the head's own: it counts if others have the same."""
    factors = [weights.sum_factor(flow, reading.write) for reading in readings]
    last = readings[-1].write
    others = {f for f, reading in zip(factors, readings, strict=True) if reading.write is not last}
    return [1.0 if r.write is last and f not in others else f for f, r in zip(factors, readings, strict=True)]


def _located(flow: Flow, reading: Reading) -> Located:
    steps = [flow.steps[i] for i in sorted(reading.part.region)]
    modules = tuple(dict.fromkeys(flow.path(s) for s in steps if s.parameters and s.role in WEIGHTY))
    add = op_site(flow, reading.write.step)
    return Located(add.path, family(reading.kind), modules, add.execution)


def _record(
    flow: Flow, reading: Reading, path: str, block: Named, norms: Sequence[NormSite], model: nn.Module, behind: float
) -> Branch:
    """The record of one branch; `behind` is the constant factor on the sum that it is added to."""
    write, part, around = reading.write, reading.part, reading.norms
    scale = weights.branch_scale(flow, write, part, model, behind)
    mixed = write.skip_scale is None and scale.kind not in ("none", "constant")  # (1 − a)·x + a·f(x) as a whole
    scaled = not mixed and write.way != "projected"
    return Branch(
        path=path,
        block=block[0],
        layer=block[1],
        kind=reading.kind,
        placement=placement(around, reading.post, write.skip_scale if scaled else 1.0),
        parallel=reading.parallel,
        pre_norm=norm_path(around.before, norms),
        output_norm=norm_path(around.behind, norms),
        post_norm=norm_path(around.on_sum, norms) if reading.post else None,
        writers=weights.writers(flow, part, model),
        inner_norms=inner_norms(flow, part, around, norms),
        normed_inside=normed_inside(flow, write.source, part, norms),
        parameters=weights.parameters(flow, part),
        entry=entry(flow, write, part),
        skip_scale=None if write.skip_scale is None else write.skip_scale * behind,
        skip=_skip(flow, write),
        branch_scale=scale,
        add=op_site(flow, write.step),
        trunk=1 if write.trunk else 0,
        apart=set(write.step.inputs) <= set(write.step.node.inputs),
    )


def _skip(flow: Flow, write: Write) -> SkipKind:
    """How the trunk comes to an add."""
    if write.way == "projected" and not projections(flow, write.trunk_input):
        return "pooling"
    return _SKIPS[write.way]


def norm_path(steps: Sequence[Step], norms: Sequence[NormSite]) -> str | None:
    """The path of the first of some norm steps; None where there is none."""
    group = steps[0].group if steps else None
    return None if group is None else norms[group.norm].path
