"""NP206."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias, final

from normprobe.checks.base import Check, Outcome
from normprobe.checks.placement.trunk_norms import POST
from normprobe.records import Branch, Finding, ReportData, Severity, Stream

_Key: TypeAlias = tuple[tuple[str, ...], int]


@final
@dataclass(frozen=True)
class MixedPlacement(Check):
    """Branches that stand at the same place in equal blocks have their norms in different places.

    ## What it measures

    The placement of every branch against that of its counterparts: branches of the same kind at the same
    place in blocks with the same branches. Where most counterparts agree, those that differ are named. Blocks
    of different kinds (attention and state space, dense and sparse) may differ; sums that are normed as a
    whole are NP204's. The first branch may do without a norm where the stream begins with one.

    ## Why it matters

    A stack is built from one recipe, so one block that differs is seldom meant: a norm that one block skips
    (its branch reads the raw stream and writes in proportion to it), an option that reaches some blocks only,
    a conversion that mixed two layouts. A note, since hybrid recipes exist and train.

    ## What to do

    Compare the block that is named with its neighbours. Where it is meant, state it in the configuration.

    ## When to ignore it

    When the recipe changes with depth on purpose.

    ## References

    None; this is a statement about the recorded data flow.
    """

    code, name, severity, since = "NP206", "mixed-placement", Severity.NOTE, "0.1.0"

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for every placement that a few branches of a stream have against their counterparts."""
        if not data.anatomy.streams:
            yield self.skip("no residual stream was found")
        for stream in data.anatomy.streams:
            for branches in _counterparts(stream).values():
                yield from self._odd(stream, branches)

    def _odd(self, stream: Stream, branches: list[Branch]) -> Iterator[Finding]:
        (usual, most), *others = Counter(branch.placement for branch in branches).most_common()
        if 2 * most <= len(branches):
            return
        for placement, count in others:
            if placement in (*POST, "unknown") or usual in POST:
                continue
            odd = [branch for branch in branches if branch.placement == placement]
            yield self.finding(
                stream.place(odd[0]),
                f"placement {placement} of the {odd[0].kind} branch, where {most} of its {len(branches) - 1} "
                f"counterparts in {stream.name} have {usual}{'' if count == 1 else f'; {count} branches differ so'}",
                value=placement,
                source="the recorded data flow",
                places=[stream.place(branch) for branch in odd],
            )


def _counterparts(stream: Stream) -> dict[_Key, list[Branch]]:
    """The branches of a stream by the kinds of their block's branches and their place among them."""
    found: dict[_Key, list[Branch]] = {}
    for block in stream.blocks():
        kinds = tuple(branch.kind for branch in block)
        for place, branch in enumerate(block):
            entered = branch is stream.branches[0] and stream.entry_norm is not None
            if not (entered and branch.placement == "none"):  # that norm may stand for its own
                found.setdefault((kinds, place), []).append(branch)
    return found
