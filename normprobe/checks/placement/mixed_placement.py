"""NP206."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Outcome
from normprobe.checks.placement.counterparts import NORMED, bare, counterparts, unnormed
from normprobe.checks.placement.lopsided_qk_norm import lopsided
from normprobe.checks.placement.trunk_norms import POST, taken_behind
from normprobe.records import Anatomy, Branch, Finding, ReportData, Severity, Stream

_SOURCE = "the recorded data flow"


@final
@dataclass(frozen=True)
class MixedPlacement(Check):
    """Counterparts in equal blocks have their norms in different places, or one of them lacks a norm.

    ## What it measures

    The norms of every branch against those of its counterparts: branches of the same kind at the same place in
    blocks with the same branches. Where most counterparts agree, those that differ are named, and so is the only
    branch of a stream without a norm where its one counterpart has one. Blocks of different kinds (attention and
    state space, dense and sparse) may differ; sums that are normed as a whole in a stream whose other sums are not
    are NP204's. The first branch may do without a norm before it where the stream begins with one.

    Norms inside a branch (on queries and keys, on a latent, on the inner features of an MLP) are compared as well,
    among branches of one kind that run the same operations as often, norms apart: layers that leave out the rotary
    embedding or share keys with others may have other norms. Where queries or keys alone lack theirs, that is
    NP209's.

    It is a warning where one single branch lacks a norm that its counterparts have, else a note.

    ## Why it matters

    A stack is built from one recipe, so one block that differs is seldom meant: a norm that one block skips
    (its branch reads the raw stream and writes in proportion to it, or leaves the sum of a post-norm stack raw), an
    option that reaches some blocks only, keys that a conversion dropped, a conversion that mixed two layouts.
    Hybrid recipes exist and train.

    ## What to do

    Compare the block that is named with its neighbours; in a converted model look for the norm's weights among
    those that were not loaded. Where it is meant, state it in the configuration.

    ## When to ignore it

    When the recipe changes with depth on purpose.

    ## References

    None; this is a statement about the recorded data flow.
    """

    code, name, severity, since = "NP206", "mixed-placement", Severity.WARNING, "0.1.0"

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for every placement that a few branches of a stream have against their counterparts, and
        one for those that lack norms inside."""
        if not data.anatomy.streams:
            yield self.skip("no residual stream was found")
        for stream in data.anatomy.streams:
            for branches in counterparts(stream):
                yield from self._odd(stream, _compared(stream, branches))
            yield from self._inside(stream, data.anatomy)

    def _odd(self, stream: Stream, branches: list[Branch]) -> Iterator[Finding]:
        if _lone(stream, branches):
            branches = sorted(branches, key=lambda branch: branch.placement == "none")
        elif not _agree(branches):
            return
        (usual, most), *others = Counter(branch.placement for branch in branches).most_common()
        for placement, count in others:
            if placement in (*POST, "unknown"):
                continue
            odd = [branch for branch in branches if branch.placement == placement]
            yield self.finding(
                stream.place(odd[0]),
                f"placement {placement} of the {odd[0].kind} branch, where {most} of its {len(branches) - 1} "
                f"counterparts in {stream.name} have {usual}{'' if count == 1 else f'; {count} branches differ so'}",
                value=placement,
                source=_SOURCE,
                severity=None if count == 1 and usual in NORMED and _lacks(odd[0], branches) else Severity.NOTE,
                places=[stream.place(branch) for branch in odd],
            )

    def _inside(self, stream: Stream, anatomy: Anatomy) -> Iterator[Finding]:
        for recipe in dict.fromkeys(branch.recipe for branch in stream.branches if branch.recipe is not None):
            alike = [branch for branch in stream.branches if branch.recipe == recipe]
            (usual, most), *_ = Counter(len(branch.inner_norms) for branch in alike).most_common()
            odd = [branch for branch in alike if len(branch.inner_norms) < usual and not _halved(branch, anatomy)]
            if odd and 2 * most > len(alike):
                whole = [branch for branch in alike if len(branch.inner_norms) == usual]
                yield self._lacking(stream, odd, whole, len(alike))

    def _lacking(self, stream: Stream, odd: list[Branch], whole: list[Branch], count: int) -> Finding:
        has = whole[0].inner_norms
        named = " and ".join(has) if len(has) < 3 else f"{has[0]}, {has[1]} and {len(has) - 2} more"
        return self.finding(
            stream.place(odd[0]),
            f"the {odd[0].kind} branch has {len(odd[0].inner_norms)} norms inside, where {len(whole)} of its "
            f"{count - 1} counterparts in {stream.name} with the same operations have {len(has)} ({named})"
            f"{'' if len(odd) == 1 else f'; {len(odd)} branches differ so'}",
            value=float(len(odd[0].inner_norms)),
            source=_SOURCE,
            severity=None if len(odd) == 1 else Severity.NOTE,
            places=[stream.place(branch) for branch in odd],
            about="inner norms",
        )


def _compared(stream: Stream, branches: list[Branch]) -> list[Branch]:
    """The branches to compare. The norm that the stream begins with may stand for the first one's own, before it; where
    every norm on a sum is the first of the block that follows, nothing norms the last sum."""
    first, last = stream.branches[0], stream.branches[-1]
    entered = stream.entry_norm is not None and all(branch.placement not in POST for branch in branches)
    ends = [first] * entered + [last] * taken_behind(stream)
    return [branch for branch in branches if branch.placement != "none" or all(branch is not end for end in ends)]


def _agree(branches: Sequence[Branch]) -> bool:
    """Whether more than half of the branches have their norms in one place."""
    counts = Counter(branch.placement for branch in branches)
    return any(2 * count > len(branches) for count in counts.values())


def _lacks(branch: Branch, counterparts: Sequence[Branch]) -> bool:
    """Whether nothing stands in for the norm that a branch has not: norms inside do, unless the counterparts have them
    beside it."""
    beside = all(other.normed_inside for other in counterparts if other is not branch)
    return unnormed(branch) and (beside or not branch.normed_inside)


def _lone(stream: Stream, branches: Sequence[Branch]) -> bool:
    """Whether one of two counterparts is the only branch of its stream without a norm, of three branches at least."""
    raw = [branch for branch in branches if bare(branch)]
    rest = [branch for branch in stream.branches if not any(branch is one for one in raw)]
    return len(branches) == 2 and len(raw) == 1 and len(rest) > 1 and all(b.placement in NORMED for b in rest)


def _halved(branch: Branch, anatomy: Anatomy) -> bool:
    """Whether an attention site of a branch norms only one of queries and keys."""
    own = set(branch.parameters)
    sites = [site for site in anatomy.attention if own & {rows.parameter for rows in site.columns.values()}]
    return any(lopsided(site) for site in sites)
