"""From a recorded forward to the Anatomy."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from torch import nn
from torch.jit import ScriptModule

from normprobe.anatomy.attention.kernels import mixing
from normprobe.anatomy.attention.ops import AttentionOp, find_attention
from normprobe.anatomy.attention.sites import ReadSite, read_attention
from normprobe.anatomy.flow.build import build as build_flow
from normprobe.anatomy.flow.ops import Role
from normprobe.anatomy.flow.statics import Statics
from normprobe.anatomy.flow.steps import Flow, Group, Step
from normprobe.anatomy.flow.tokens import with_tokens
from normprobe.anatomy.norm_sites.candidates import Candidates
from normprobe.anatomy.norm_sites.in_row import with_followed
from normprobe.anatomy.norm_sites.inline import find_inline_norms
from normprobe.anatomy.norm_sites.modules import find_module_norms, find_static_norms, find_unused_norms
from normprobe.anatomy.norm_sites.reduced import with_reduced
from normprobe.anatomy.norm_sites.reparametrizations import find_reparametrizations, find_unused_reparametrizations
from normprobe.anatomy.roles import with_roles
from normprobe.anatomy.streams.adds import find_writes
from normprobe.anatomy.streams.branches import norm_path, read_branches
from normprobe.anatomy.streams.chains import find_chains, linked, parted
from normprobe.anatomy.streams.kinds import branch_kind
from normprobe.anatomy.streams.mixers import multiplies_tokens
from normprobe.anatomy.streams.placement import norms_between
from normprobe.anatomy.streams.readout import (
    HeadWay,
    head_value,
    read_head,
    steps_behind,
    unread_head,
    way_behind,
)
from normprobe.anatomy.streams.siblings import with_siblings
from normprobe.anatomy.streams.streams import ReadStream, read_stream
from normprobe.anatomy.streams.unread import unread_sums
from normprobe.anatomy.streams.writes import Trunks, Write
from normprobe.anatomy.weights.blocked import Zeros, find_blocked
from normprobe.anatomy.weights.sites import find_weights
from normprobe.capture.trace import Trace
from normprobe.records import Anatomy, AttentionSite, Branch, NormSite, Skipped
from normprobe.records.norms import NormRole


@dataclass(frozen=True)
class Reading:
    """The Anatomy, and what could not be read with the reason; `wrote` as in `Trace`; `zeros` is what
    parameters of zeros do to gradients, as the values are now."""

    anatomy: Anatomy
    skipped: tuple[Skipped, ...]
    wrote: bool = False
    zeros: Zeros = field(default_factory=Zeros)


def read(model: nn.Module, trace: Trace) -> Reading:
    """Derive the Anatomy from a recorded forward of `model`; copies of its norms are run, the model itself is not."""
    levels = with_tokens(trace)
    statics = Statics(model, trace)
    candidates = Candidates(trace, levels)
    found = find_module_norms(model, trace, candidates)
    wholes = _attention_groups(trace, candidates)
    flow = build_flow(trace, levels, statics, [*found.groups, *wholes])
    if find_inline_norms(model, flow, found):
        flow = build_flow(trace, levels, statics, [*found.groups, *wholes])
    norms = with_followed(found.sites, flow)
    attention = find_attention(flow)
    streams, others, trunks = _streams(flow, model, norms, attention)
    sites = [read_attention(flow, op, norms) for op in attention]
    norms = with_reduced(norms, flow, _causal_queries(attention, sites))
    aside = [*find_static_norms(model, candidates), *find_unused_norms(model, trace)]
    value = head_value(flow, model)
    head = read_head(flow, value, model) if value is not None else None
    anatomy = Anatomy(
        norms=with_roles([*norms, *aside], streams, others, sites, flow),
        streams=tuple(s.record for s in streams),
        attention=tuple(_crossed(site.record, op, streams) for site, op in zip(sites, attention, strict=True)),
        reparametrizations=(*find_reparametrizations(model, flow), *find_unused_reparametrizations(model, trace)),
        head=head,
        weights=find_weights(flow, streams, head),
    )
    assumed = [Skipped(what="data flow", why=note) for note in trace.notes]
    unread = _unread(flow, value) if head is None else []
    unread += [*_unknown_kinds(flow, streams), *_unknown_rows(sites), *unread_sums(flow, trunks)]
    skipped = (*assumed, *found.skipped, *_scripted(model), *unread)
    return Reading(anatomy, skipped, trace.wrote, find_blocked(model, flow, norms))


def _causal_queries(attention: Sequence[AttentionOp], sites: Sequence[ReadSite]) -> list[int]:
    return [op.query for op, site in zip(attention, sites, strict=True) if site.record.causal]


def _unread(flow: Flow, value: int | None) -> list[Skipped]:
    why = unread_head(flow, value) if value is not None else None
    return [Skipped(what="head", why=why)] if why is not None else []


def _unknown_kinds(flow: Flow, streams: Sequence[ReadStream]) -> Iterator[Skipped]:
    """Operations that left the kind of branches unknown, each with the first place where it stands."""
    paths: dict[tuple[str, str], list[str]] = {}
    for reading in (r for stream in streams for r in stream.readings if r.kind == "other"):
        for step in (flow.steps[i] for i in sorted(reading.part.region)):
            told = mixing(flow, step)
            if told is not None and told.how == "unknown":
                paths.setdefault((step.node.op, f"the operation {told.why}"), []).append(flow.path(step) or ".")
            elif multiplies_tokens(flow, step) is None:
                why = "it cannot be told whether its factors hold several tokens"
                paths.setdefault((step.node.op, why), []).append(flow.path(step) or ".")
    for (op, why), found in paths.items():
        where = list(dict.fromkeys(found))
        others = f" and {len(where) - 1} more" if len(where) > 1 else ""
        yield Skipped(what=f"kind of the branch with {op} at {where[0]}{others}", why=why)


def _unknown_rows(sites: Sequence[ReadSite]) -> Iterator[Skipped]:
    """Operands of attention of which the weight's rows are not known, sites of one reason together."""
    paths: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for site in sites:
        for why in dict.fromkeys(why for _, why in site.unknown):
            operands = tuple(str(name) for name, reason in site.unknown if reason == why)
            paths.setdefault((operands, why), []).append(site.record.path)
    for (names, why), where in paths.items():
        others = f" and {len(where) - 1} more" if len(where) > 1 else ""
        yield Skipped(what=f"weight rows behind {', '.join(names)} at {where[0]}{others}", why=why)


def _scripted(model: nn.Module) -> list[Skipped]:
    """TorchScript runs its modules without calling them: their operations are seen, the modules are not."""
    names = [path or "." for path, module in model.named_modules() if isinstance(module, ScriptModule)]
    return [Skipped(what=f"modules under {names[0]}", why="script modules do not tell when they run")] if names else []


def _crossed(record: AttentionSite, op: AttentionOp, streams: Sequence[ReadStream]) -> AttentionSite:
    """The site, marked where it is the attention of a cross-attention branch."""
    for reading in (r for stream in streams for r in stream.readings):
        if reading.kind == "cross_attention" and op.step.id in reading.part.region:
            return record.model_copy(update={"cross": True})
    return record


def _attention_groups(trace: Trace, candidates: Candidates) -> list[Group]:
    """One step for each attention function that was recorded as a whole."""
    groups = []
    for call in trace.calls:
        nodes = candidates.nodes(call) if "query" in call.arguments else frozenset()
        if nodes:
            groups.append(Group(Role.ATTENTION, nodes, call.inputs[0], call.id))
    return groups


def _streams(
    flow: Flow, model: nn.Module, norms: list[NormSite], attention: list[AttentionOp]
) -> tuple[list[ReadStream], list[tuple[NormRole, Step]], Trunks]:
    """The streams, the roles of norms on the sums of long skips around them and between the layers of a branch, and
    all residual adds."""
    trunks = find_writes(flow)
    chains, skips = find_chains(flow, trunks)
    head = head_value(flow, model)
    if head is None:
        return [], [], trunks
    behind = steps_behind(flow, head)
    crossing = [_crossing(flow, chain, attention) for chain in chains]
    around = [s for chain in skips for r in read_branches(flow, chain, attention) if r.post for s in r.norms.on_sum]
    others: list[tuple[NormRole, Step]] = [("post", step) for step in around]
    for write in trunks.writes.values():
        others += [("pre", step) for part in write.parts for step in norms_between(flow, write.source, part)]
    streams = []
    following = [parted(flow, one, other) for one, other in pairwise(chains)]
    for i, chain in enumerate(chains):
        foreign = frozenset[int]().union(*crossing[:i], *crossing[i + 1 :])
        way = way_behind(flow, HeadWay(head, behind, foreign), [write.step.id for write in chain])
        alone = not any(linked(flow, chain, other) for other in chains)
        read = read_stream(flow, chain, attention, norms, model, way, trunks, alone)
        unskipped = following[i] if i < len(following) else ()
        streams.append(replace(read, record=read.record.model_copy(update={"unskipped": unskipped})))
    streams = _unique_names(streams)
    streams = with_siblings([_with_own_final(flow, stream, streams) for stream in streams])
    return [_with_own_entry(stream, {norm_path((s,), norms) for s in around}) for stream in streams], others, trunks


def _with_own_entry(stream: ReadStream, around: Collection[str | None]) -> ReadStream:
    """The stream without an entry norm that stands on the sum of a long skip around an earlier one."""
    if stream.record.entry_norm not in around:
        return stream
    return replace(stream, record=stream.record.model_copy(update={"entry_norm": None}))


def _with_own_final(flow: Flow, stream: ReadStream, streams: Sequence[ReadStream]) -> ReadStream:
    """The stream without a final norm that is a norm of another stream's branch; where another stream goes on from it
    (the next stage, the language model behind a tower) it is not said to need one."""
    record = stream.record
    others = [other for other in streams if other is not stream]
    if record.final_norm is not None:
        into = [o for o in others for b in o.record.branches if record.final_norm in _norms_of(b)]
    elif record.needs_final_norm is not False:
        into = [o for o in others if _follows(flow, o, stream)]
    else:
        into = []
    if not into:
        return stream
    reason = f"the stream {into[0].record.name} goes on from it"
    lost = {"final_norm": None, "needs_final_norm": None, "final_norm_reason": reason, "raw_end": None}
    return replace(stream, record=record.model_copy(update=lost))


def _norms_of(branch: Branch) -> tuple[str | None, ...]:
    return branch.pre_norm, branch.output_norm, branch.post_norm


def _follows(flow: Flow, later: ReadStream, earlier: ReadStream) -> bool:
    """Whether a stream begins with what another one ended in."""
    return earlier.readings[-1].write.step.id in steps_behind(flow, later.readings[0].write.source)


def _crossing(flow: Flow, chain: Sequence[Write], attention: list[AttentionOp]) -> frozenset[int]:
    """The steps of a chain's cross-attention branches."""
    parts = [(write, part) for write in chain for part in write.parts]
    crossing = [p.region for w, p in parts if branch_kind(flow, p, attention, w, chain) == "cross_attention"]
    return frozenset[int]().union(*crossing)


def _unique_names(streams: Sequence[ReadStream]) -> list[ReadStream]:
    seen: dict[str, int] = {}
    named = []
    for stream in streams:
        name = stream.record.name
        count = seen[name] = seen.get(name, 0) + 1
        told = name if count == 1 else f"{name}#{count}"
        named.append(replace(stream, record=stream.record.model_copy(update={"name": told})))
    return named
