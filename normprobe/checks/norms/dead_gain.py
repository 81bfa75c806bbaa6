"""NP110."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome, Unit, limit
from normprobe.checks.norms.gains import RESET, GainCheck, Stored, looks_drawn, looks_trained, of
from normprobe.records import Elements, Finding, Fix, ReportData, Severity


@final
@dataclass(frozen=True)
class DeadGain(GainCheck):
    """A norm multiplies channels by exactly zero.

    ## What it measures

    How many elements of the gain, as it is used (1 + w where that is stored), are exactly 0. All of them: an
    error, for a norm that all of the signal passes; a warning for one inside a branch. A norm on the output of
    a branch, beside which the stream goes on, is silent where all gains of this role are 0 and the model is not
    trained: they let every block start as the identity. It is a note where the model is trained, and a warning
    where other gains of the role are not 0. Some of the elements: a warning above half of them, else a note. Global
    response normalisation adds its input, which is there whatever the gain is: it is left out. So are the gains of
    all query or all key norms of a new model: its attention starts uniform, and learns.

    ## Why it matters

    Behind a gain of 0 nothing is left of the channel but the offset, the same for every input. With all of
    them the norm gives a constant, and what reads it learns and says nothing. Fresh memory is often zero, so
    this is also how a gain looks that was never set.

    ## What to do

    Where all are 0: look for keys that were missed in loading, or set the gain to 1 (w to 0 where 1 + w is
    used). Single channels may be pruned away with the weights that read them.

    ## When to ignore it

    In a pruned model. A gain of 0 still gets a gradient, so that training alone can revive it.

    ## References

    Goyal et al. 2017, sec. 5.1 (the last gain of every residual block starts at 0); Liu et al. 2017 (Network
    Slimming: channels are pruned by their gain).
    """

    code, name, severity, since = "NP110", "dead-gain", Severity.ERROR, "0.1.0"
    fixes = RESET

    many: float = limit(0.5, unit=Unit.RATIO, source="choice: half of the channels, more than pruning alone leaves")

    def judge(self, norms: Sequence[Stored], data: ReportData) -> Outcome:
        """Yield one finding for each gain with zeros."""
        beside = {branch.output_norm for stream in data.anatomy.streams for branch in stream.branches}
        for norm in norms:
            gain = norm.known.gain
            if gain is None or not gain.zeros or norm.site.kind == "grn":  # x + gain · …: a gain of 0 leaves x
                continue
            bypassed = norm.site.role == "output" or norm.site.path in beside
            severity: Severity | None = self._severity(norm, gain)
            if _uniform_start(norm, norms) and not looks_trained(data):
                continue
            if gain.zeros == gain.count and bypassed:
                severity = _bypassed([n for n in norms if n.site.role == norm.site.role], looks_trained(data))
            if severity is not None:
                yield self._found(norm, gain, severity, bypassed, None if looks_drawn(data) else ())

    def _severity(self, norm: Stored, gain: Elements) -> Severity:
        if gain.zeros < gain.count:
            return Severity.WARNING if self.exceeds(gain.zeros / gain.count, self.many) else Severity.NOTE
        return Severity.WARNING if norm.site.role == "inner" else Severity.ERROR

    def _found(
        self, norm: Stored, gain: Elements, severity: Severity, bypassed: bool, fixes: tuple[Fix, ...] | None
    ) -> Finding:
        text = f"the gain is 0 in {of(gain.zeros, gain.count)} channels"
        offset = norm.known.offset
        if gain.zeros == gain.count:
            left = "the offset" if offset is not None and offset.peak else "0"
            text += f": its output is {left} whatever comes in" + (", and its branch adds no more" if bypassed else "")
        return self.finding(
            norm.site.path,
            text,
            value=gain.zeros / gain.count,
            severity=severity,
            bound=0.0,
            source="x · 0 = 0",
            fixes=fixes,
        )


def _uniform_start(norm: Stored, norms: Sequence[Stored]) -> bool:
    """Whether the gain is one of several of queries, or of keys, that are all 0: attention that starts uniform."""
    alike = [other.known.gain for other in norms if other.site.role == norm.site.role]
    closed = all(gain is not None and gain.zeros == gain.count for gain in alike)
    return norm.site.role in ("query", "key") and len(alike) > 1 and closed


def _bypassed(alike: Sequence[Stored], trained: bool) -> Severity | None:
    """How bad it is that the gain on a branch is 0; None where this is how all of its role start."""
    if any(norm.known.gain is not None and norm.known.gain.zeros < norm.known.gain.count for norm in alike):
        return Severity.WARNING
    return Severity.NOTE if trained else None
