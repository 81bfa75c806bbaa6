"""NP803."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

from normprobe.checks.base import Check, Needs, Outcome, Unit, limit, number
from normprobe.checks.norms.gains import looks_trained
from normprobe.records import Branch, ReportData, Severity


class Row(NamedTuple):
    """A branch, and the standard deviation of what its first weights are given."""

    branch: Branch
    std: float


@final
@dataclass(frozen=True)
class NfnetScale(Check):
    """Constants that stand in for norms on a residual stream do not fit what it carries.

    ## What it measures

    For streams without norms that are held at a scale by constants, x + α · f(x / β): branches that are written
    through a factor, and read the trunk through a constant or by standardised weights. The standard deviation of
    what the first weights of each branch are given, in a model that does not look trained.

    1/β is there to make it 1, and all of a stage the same: an activation lowers it (to 0.56 by silu, 0.58 by relu,
    whose gain may be part of the weights), and so does a pooling between stages, by what the neighbours differ. So a
    branch is compared with that one of its stage, up to the next projected or pooled shortcut, which lies nearest to
    the stage before; and that one with the stage before, the first with 1, or with what enters the stream where that is
    less.

    ## Why it matters

    No norm corrects a wrong constant. What is too large or too small stays so to the end of the branch, whose weights
    are standardised for an input of variance 1, and the stream's variance then is not the one that the next β was
    computed from: the errors multiply with depth.

    ## What to do

    Take β² = the variance that is expected at the branch: 1 at the start of a stage, and α² more behind every branch.
    Multiply by 1/β; and give each activation the gain that makes its output's variance 1, on the activation or in
    the weights, not in both.

    ## When to ignore it

    When the input given here does not have the variance of the training data.

    ## References

    Brock, De & Smith 2021 (Characterizing signal propagation to close the performance gap in unnormalized ResNets),
    sec. 3 and 4; Brock et al. 2021 (High-Performance Large-Scale Image Recognition Without Normalization), sec. 3.
    """

    code, name, severity, since = "NP803", "nfnet-scale", Severity.WARNING, "0.1.0"
    needs = Needs.STRUCTURE | Needs.WEIGHTS | Needs.FORWARD

    most: float = limit(
        2.5,
        unit=Unit.RATIO,
        source="choice: six times the variance that is meant",
    )
    least: float = limit(0.4, unit=Unit.RATIO, source="choice: a sixth of it; 48 closed branches of α = 0.2 leave 0.58")
    between: float = limit(
        0.1,
        unit=Unit.RATIO,
        source="choice: of the stage before; pooling 4 × 4 unlike neighbours leaves 0.25",
    )

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding a stream for branches whose input is too large, and one for those where it is too small."""
        if not data.anatomy.streams:
            yield self.skip("no residual stream was found")
        if looks_trained(data):
            return
        measured = {one.stream: one for one in data.measurements.residual}
        for stream in data.anatomy.streams:
            if not data.anatomy.held_by_constants(stream):
                continue
            known = measured.get(stream.name)
            rows = [] if known is None else [(stream.branches[s.branch], s.input_std) for s in known.states]
            seen = [Row(branch, std) for branch, std in rows if std is not None]
            if known is None or not seen:
                yield self.skip("what its branches read was not measured", [stream.name])
                continue
            yield from self._told(list(self._judged(seen, known.entry_rms)), len(seen))

    def _judged(self, rows: list[Row], entry: float) -> Iterator[tuple[Row, float, str]]:
        """The branches that are off, each with how often it has what is meant and the limit that this exceeds."""
        before = low = 1.0
        between = self.between
        if rows[0].branch.skip == "identity" and entry > 0:  # it reads what enters the stream, and nothing is pooled
            low, between = min(1.0, entry), self.least
        for ends, stage in _stages(rows):
            meant = min((row.std for row in stage), key=lambda std: _apart(std, before), default=before)
            whole = self._off(meant, before, low, between) if stage else ""
            for row in stage:
                against = whole or self._off(row.std, meant, meant, self.least)
                if against:
                    yield row, row.std / (_meant(whole, before, low) if whole else meant), against
            before = low = before if whole else meant
            between = self.between
            for row in ends:
                against = self._off(row.std, before, low, self.least)
                if against:
                    yield row, row.std / before, against

    def _off(self, std: float, high: float, low: float, least: float) -> str:
        """The name of the limit that a size exceeds, over `high` or over `low`; empty where it is none."""
        if self.exceeds(std / high, self.most):
            return "most"
        if not self.exceeds(std / low, least=least):
            return ""
        return "least" if least == self.least else "between"

    def _told(self, off: list[tuple[Row, float, str]], count: int) -> Outcome:
        for against in dict.fromkeys(against for _, _, against in off):
            found = [(row, ratio) for row, ratio, limit_ in off if limit_ == against]
            row, ratio = found[0]  # what is off further on may follow from it
            factor = row.branch.entry.scale if row.branch.entry is not None else None
            through = "" if factor in (None, 1.0) else f", the stream times {number(factor)},"
            yield self.finding(
                row.branch.place,
                f"what its first weights are given{through} has a standard deviation of {number(row.std)}, "
                f"{number(ratio)} times what the constants before it make; {len(found)} of {count} branches are off",
                value=ratio,
                against=against,
                places=[one.branch.place for one, _ in found],
            )


def _stages(rows: list[Row]) -> Iterator[tuple[list[Row], list[Row]]]:
    """The branches between two shortcuts that change the trunk, and before them the one beside the second of these,
    which still reads what they read."""
    stage: list[Row] = []
    for row in rows:
        if row.branch.skip == "identity":
            stage.append(row)
        else:
            yield [row], stage
            stage = []
    yield [], stage


def _meant(against: str, high: float, low: float) -> float:
    """What a size that exceeds a limit is compared with."""
    return high if against == "most" else low


def _apart(value: float, other: float) -> float:
    """How far two sizes are apart, whichever is larger; infinite where one is 0 or not finite."""
    ratio = value / other
    return abs(math.log(ratio)) if math.isfinite(ratio) and ratio > 0 else math.inf
