"""NP213."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Outcome
from normprobe.checks.placement.counterparts import NORMED, bare, equal_blocks
from normprobe.records import Branch, Finding, ReportData, Severity, Stream


@final
@dataclass(frozen=True)
class MissingBranchNorm(Check):
    """The branches at one place have no norm in any block, and the others of each block have one.

    ## What it measures

    The placement of every branch in blocks with the same branches, two blocks or more. Branches of attention, MLP,
    experts or state space that read the raw stream and write to it raw, in every block, where all others of the
    block are normed: at their input, at their output, or by a norm on their sum. Learned or constant factors on
    such branches stand in for a norm, convolutions do without one in published models, and a stream whose branches
    all have none is built so: none of these is reported. Where one block differs from the others, that is NP206.

    ## Why it matters

    A branch without a norm writes in proportion to what it reads, so that the stream is multiplied at each
    block instead of added to, and its gradient with it. Where half of the branches are normed nobody meant
    that: an option that reached one kind of branch alone, a norm that was replaced by an identity, keys that a
    conversion dropped.

    ## What to do

    Put the norm back that its neighbours have; in a converted model look for its weights among those that were
    not loaded, and for norms that are never called (NP208).

    ## When to ignore it

    When the model was trained so, or the branch is a small adapter that starts at zero.

    ## References

    Xiong et al. 2020, table 1 (Pre-LN norms the input of both sublayers).
    """

    code, name, severity, since = "NP213", "missing-branch-norm", Severity.WARNING, "0.1.0"

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for every place at which the branches of all equal blocks lack a norm."""
        if not data.anatomy.streams:
            yield self.skip("no residual stream was found")
        for stream in data.anatomy.streams:
            for blocks in equal_blocks(stream):
                places = list(zip(*blocks, strict=True))
                raw = [place for place in places if all(bare(branch) for branch in place)]
                rest = [place for place in places if place not in raw]
                if len(blocks) > 1 and rest and all(b.placement in NORMED for place in rest for b in place):
                    for place in raw:
                        yield self._found(stream, place, [branch for each in rest for branch in each])

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
