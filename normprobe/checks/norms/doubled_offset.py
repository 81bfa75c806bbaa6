"""NP112."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome, Unit, limit, number
from normprobe.checks.norms.gains import RESET, SEVERAL, GainCheck, Stored, looks_drawn
from normprobe.records import Elements, Finding, NormSite, ReportData, Severity

_KINDS = frozenset({"layernorm", "rmsnorm"})
_ROLES = frozenset({"pre", "output", "post", "final", "embedding"})


@final
@dataclass(frozen=True)
class DoubledOffset(GainCheck):
    """Norms hold weights of the other convention: the 1 of 1 + w is added twice, or never.

    ## What it measures

    The gains of all norms that apply 1 + w, which is found by behaviour. With right weights w lies about 0, in a
    fresh model and in most trained ones on both sides. Where the 1 is in the weights too, w is the gain itself:
    hardly one is below 0, and what is applied is a gain of about 2. That is said when it holds for all of
    these norms together, as a note where they vary about another number than 2; or for one of them, when it is about 2
    while the others in its role are about 1. Gains that are what a fresh instance of the model's class starts with
    are passed: Nemotron, as transformers has it, starts with a w of 1.

    And the gains of all layer and RMS norms on the stream that apply w as it is, where the weights do not look as
    they were drawn (then it is NP109's): the elements lie on both sides of 0, as deviations from 1 do and gains do
    not. It is said when it holds for all of them together.

    ## Why it matters

    File formats differ in what they keep: some checkpoints hold w, GGUF files hold 1 + w. A loader that mixes
    the two up doubles the scale behind every norm, or leaves near to nothing of it with signs by chance. The model
    still runs, with text in mixed scripts or with embeddings that are all alike.

    ## What to do

    Subtract 1 from the norm weights once, or use a norm that applies w as it is; where the 1 is missing, add it or
    use a norm that applies 1 + w. Compare the output with the original.

    ## When to ignore it

    Where the gains were trained to lie above 1 throughout: stored values alone do not tell these from doubled ones.

    ## References

    Gemma Team 2024: the released implementation applies 1 + w. The GGUF conversion of Gemma in llama.cpp adds
    the 1 to the stored weights.
    """

    code, name, severity, since = "NP112", "doubled-offset", Severity.WARNING, "0.1.0"
    fixes = RESET
    explains = ("NP109",)

    negative: float = limit(
        0.02, unit=Unit.RATIO, source="choice: share of w below 0 under which they are no deviations from 1"
    )
    least: float = limit(1.5, unit=Unit.ONE, source="choice: midway between the gain 1 and the doubled 2")
    near: float = limit(0.25, unit=Unit.ONE, source="choice: how far about 2, or about 1 for the others, still is")
    mixed: float = limit(
        0.1, unit=Unit.RATIO, source="choice: share of the rarer sign, ten times that of any norm of all-MiniLM-L6-v2"
    )

    def judge(self, norms: Sequence[Stored], data: ReportData) -> Outcome:
        """Yield one finding for all norms of a form, or one for each that stands out."""
        if not looks_drawn(data):
            yield from self._never(norms)
        for found in self._twice(norms):
            yield found if looks_drawn(data) else found.model_copy(update={"fix": None, "fixes": ()})

    def _never(self, norms: Sequence[Stored]) -> Iterator[Finding]:
        held = [(n, n.known.gain) for n in norms if _plain(n.site) and n.known.gain is not None]
        pairs = [(norm, gain) for norm, gain in held if not gain.non_finite]
        count = sum(gain.count for _, gain in pairs)
        below = sum(gain.negative for _, gain in pairs)
        zeros = sum(gain.zeros for _, gain in pairs)
        rarer = min(below, count - below - zeros)
        if count < SEVERAL or not self.exceeds(rarer / count, self.mixed):
            return
        typical = statistics.median(gain.typical for _, gain in pairs)
        yield self.finding(
            pairs[0][0].site.path,
            f"these norms apply w as it is, and {below} of {count} elements are below 0, of a size of about "
            f"{number(typical)}: as if they were deviations from 1, which was never added",
            value=rarer / count,
            against="mixed",
            places=[norm.site.path for norm, _ in pairs],
            fixes=(),
        )

    def _twice(self, norms: Sequence[Stored]) -> Iterator[Finding]:
        held = [(n, n.known.gain) for n in norms if n.known.one_plus and n.known.gain is not None]
        pairs = [(norm, gain) for norm, gain in held if not gain.non_finite and not _at_start(norm)]
        if not pairs:
            return
        median = statistics.median(gain.median for _, gain in pairs)
        below = sum(gain.stored_negative for _, gain in pairs) / sum(gain.count for _, gain in pairs)
        if below <= self.negative and median >= self.least:
            moved = any(gain.constant is None for _, gain in pairs)
            unsure = moved and self.exceeds(abs(median - 2), self.near)
            yield self._all([norm for norm, _ in pairs], median, Severity.NOTE if unsure else self.severity)
            return
        for norm, gain in pairs:
            if self._alone(norm, gain, pairs):
                yield self._one(norm, gain)

    def _all(self, norms: Sequence[Stored], median: float, severity: Severity) -> Finding:
        return self.finding(
            norms[0].site.path,
            f"these norms apply 1 + w, and w lies about {number(median - 1)} and hardly ever below 0: the gain is "
            f"about {number(median)}, as if the 1 had been added to the weights already",
            value=median,
            against="least",
            severity=severity,
            places=[norm.site.path for norm in norms],
        )

    def _one(self, norm: Stored, gain: Elements) -> Finding:
        return self.finding(
            norm.site.path,
            f"this norm applies 1 + w to a gain of about {number(gain.median)}, and the others in its role to one "
            "of about 1: as if the 1 had been added to its weights already",
            value=gain.median,
            against="least",
        )

    def _alone(self, norm: Stored, gain: Elements, pairs: Sequence[tuple[Stored, Elements]]) -> bool:
        """Whether this gain is about 2, and the two or more others in its role are about 1."""
        others = [held.median for other, held in pairs if other.site.role == norm.site.role and other is not norm]
        about = [abs(gain.median - 2), *(abs(other - 1) for other in others)]
        return gain.stored_negative == 0 and len(others) >= 2 and not any(self.exceeds(x, self.near) for x in about)


def _at_start(norm: Stored) -> bool:
    """Whether the gain is what a fresh instance of the model's class has."""
    return norm.known.start is not None and norm.known.gain is not None and norm.known.gain.constant == norm.known.start


def _plain(norm: NormSite) -> bool:
    """Whether a norm on a stream applies w as it is; gains of batch norms and inside branches may be trained away."""
    return norm.affine in ("weight", "weight+bias") and norm.kind in _KINDS and norm.role in _ROLES
