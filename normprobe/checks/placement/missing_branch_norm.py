"""NP213."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import final

from normprobe.checks.additions import Additions
from normprobe.checks.base import Check, Outcome
from normprobe.checks.placement.counterparts import NORMED, bare, equal_blocks
from normprobe.checks.placement.trunk_norms import read_behind, within
from normprobe.records import Branch, Finding, ReportData, Severity, Stream


@final
@dataclass(frozen=True)
class MissingBranchNorm(Check):
    """The branches at one place have no norm in any block, and the others of each block have one.

    ## What it measures

    The placement of every branch in blocks with the same branches, two blocks or more. Branches of attention, MLP,
    experts or state space that read the raw stream and write to it raw, in every block, where all others of the
    block are normed: at their input, at their output, or by a norm on their sum. Learned or constant factors on
    such branches stand in for a norm, and so do norms inside that every way through the branch passes; convolutions do
    without one in published models, so do MLPs half as wide inside as the stream or less (adapters), and a stream whose
    branches all have none is built so: none of these is reported. Branches that a weight of zeros writes in every block
    are skipped: an addition to a layer starts so; and where a norm runs in the block (in the model, where no modules
    tell the blocks apart) of which it is not known what it belongs to. Where one block differs from the others, that is
    NP206.

    ## Why it matters

    A branch without a norm writes in proportion to what it reads, so that the stream is multiplied at each
    block instead of added to, and its gradient with it. Where half of the branches are normed nobody meant
    that: an option that reached one kind of branch alone, a norm that was replaced by an identity, keys that a
    conversion dropped.

    ## What to do

    Put the norm back that its neighbours have; in a converted model look for its weights among those that were
    not loaded, and for norms that are never called (NP208).

    ## When to ignore it

    When the model was trained so.

    ## References

    Xiong et al. 2020, table 1 (Pre-LN norms the input of both sublayers).
    """

    code, name, severity, since = "NP213", "missing-branch-norm", Severity.WARNING, "0.1.0"

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for every place at which the branches of all equal blocks lack a norm."""
        if not data.anatomy.streams:
            yield self.skip("no residual stream was found")
        added, free = Additions.of(data), _free(data)
        for stream in data.anatomy.streams:
            for blocks in equal_blocks(stream):
                if len(blocks) > 1:
                    yield from self._judge(stream, list(zip(*blocks, strict=True)), added, free)

    def _judge(self, stream: Stream, places: list[tuple[Branch, ...]], added: Additions, free: list[str]) -> Outcome:
        behind = [*read_behind(stream), stream.branches[0]]  # the first of all may read what a norm has made as well
        raw = [place for place in places if all(bare(branch) for branch in place)]
        others = [branch for place in places if place not in raw for branch in place]
        normed = [branch for branch in others if branch.placement != "none" or not branch.normed_inside]
        if not normed or any(branch.placement not in NORMED for branch in normed):
            return
        for place in raw:
            if len(behind) > 1 and all(any(branch is one for one in behind) for branch in place):
                continue  # NP204's
            unknown = [path for path in free if any(_may_hold(branch, path) for branch in place)]
            if unknown:
                why = f"{unknown[0]} runs in its block, and which branch it belongs to could not be told"
                yield self.skip(why, [stream.place(branch) for branch in place])
            elif all(added.from_zero(branch) for branch in place):
                why = "it reads the stream raw, and weights of zeros write in each block: additions to a layer start so"
                yield self.skip(why, [stream.place(branch) for branch in place])
            elif not all(added.narrow(branch, stream.width) for branch in place):
                yield self._found(stream, place, normed)

    def _found(self, stream: Stream, raw: tuple[Branch, ...], normed: list[Branch]) -> Finding:
        ((kind, usual), _), *_ = Counter((branch.kind, branch.placement) for branch in normed).most_common(1)
        return self.finding(
            stream.place(raw[0]),
            f"the {raw[0].kind} branch has no norm in any of the {len(raw)} blocks of {stream.name} that are built "
            f"like this one, and their {kind} branch has one (placement {usual})",
            value="none",
            source="Xiong et al. 2020, table 1",
            places=[stream.place(branch) for branch in raw],
        )


def _may_hold(branch: Branch, norm: str) -> bool:
    """Whether a norm may lie in the block of a branch; where no module is that block alone, any may."""
    return branch.layer is not None or branch.block == "." or within(norm, branch.block)


def _free(data: ReportData) -> list[str]:
    """Norms that ran, are read and belong to no branch and to no end of a stream, as far as that is known."""
    streams = data.anatomy.streams
    held = {name for stream in streams for name in (stream.entry_norm, stream.final_norm)}
    for branch in (branch for stream in streams for branch in stream.branches):
        held |= {branch.pre_norm, branch.output_norm, branch.post_norm, *branch.inner_norms}
    roles = ("inner", "pre", "post", "output")
    ran = [norm for norm in data.anatomy.norms if norm.executed and norm.role in roles and not norm.unread]
    return [norm.path for norm in ran if norm.path not in held]
