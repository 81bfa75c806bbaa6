"""NP802."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Needs, Outcome, Unit, limit, number
from normprobe.records import BoundedNorm, ReportData, Severity


@final
@dataclass(frozen=True)
class DytAlpha(Check):
    """The slope of a bounded stand-in for a norm does not fit the scale of its input.

    ## What it measures

    For Dynamic Tanh, γ · tanh(α · x) + β, and other bounded maps in the place of a norm: the outputs z = tanh(α · x)
    of what the model gave to each, gain and offset taken off; of a map with other limits than 1, in units of these. A
    warning: most of them are at a limit (|z| above 0.99), or their RMS is so small that nothing bends. A note: an RMS
    that is small, but not that small. An error: all are 0.

    ## Why it matters

    α stands for 1/σ, by which a norm would multiply. Too large, the map gives signs: it passes no sizes, and at
    |z| = 0.99 the gradient to what is behind it is a fiftieth of that at 0. Too small, it is the straight line
    γ · α · x: nothing holds the scale of the stream, and what is read from it is as many times too small as α is.

    ## What to do

    Start α near 1/σ of its input: 0.5 is for vision models, whose streams have a σ near 1; the authors took less
    in wide language models, and a factor √width on embeddings of small σ. To replace the norms of a trained model,
    take α from the curve of each norm (the measure `norms` fits it).

    ## When to ignore it

    When the model is trained and works: α is learned, and single layers may run straight.

    ## References

    Zhu et al. 2025 (Transformers without Normalization): the section on the values of α (α follows 1/σ of the
    input during and after training) and the one on its initialisation (0.5; less in wide language models); its
    appendix on language models (without a factor of √width on the embeddings the activations are too small).
    """

    code, name, severity, since = "NP802", "dyt-alpha", Severity.ERROR, "0.1.0"
    needs = Needs.STRUCTURE | Needs.FORWARD

    saturated: float = limit(
        0.5, unit=Unit.RATIO, source="choice: most elements; with inputs from a normal law, α · σ above 3.9"
    )
    small: float = limit(
        0.03, unit=Unit.ONE, source="choice: tanh is a straight line to z²/3, three in ten thousand; α · σ below 0.03"
    )
    straight: float = limit(0.003, unit=Unit.ONE, source="choice: a tenth of `small`, far below what any start gives")

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for all norms at their limits, and one for each degree of those that run straight."""
        if not data.anatomy.norms:
            yield self.skip("no norm was found")
        known = {one.path: one for one in data.measurements.bounded_norms}
        written = {norm.path for norm in data.anatomy.norms if norm.bend is not None}  # what is given is α · x there
        missed = [n.path for n in data.anatomy.norms if n.kind == "dyt" and n.executed and n.path not in known]
        if missed:
            yield self.skip("what it is given was not measured", missed)
        broken = [one.path for one in known.values() if not math.isfinite(one.output_rms)]
        if broken:
            yield self.skip("what it gives is not finite", broken)
        fed = [one for one in known.values() if one.path not in broken and (one.input_rms or one.path in written)]
        flat = [one for one in fed if self.exceeds(one.saturated, self.saturated)]
        low = [one for one in fed if one not in flat and self.exceeds(one.output_rms, least=self.small)]
        still = [one for one in low if one.output_rms == 0]
        straight = [one for one in low if one not in still and self.exceeds(one.output_rms, least=self.straight)]
        yield from self._flat(flat, len(known))
        yield from self._still(still)
        yield from self._straight(straight, len(known), "straight", Severity.WARNING)
        slightly = [one for one in low if one not in still and one not in straight]
        yield from self._straight(slightly, len(known), "small", Severity.NOTE)

    def _flat(self, found: Sequence[BoundedNorm], count: int) -> Outcome:
        if found:
            worst = max(found, key=lambda one: one.saturated)
            yield self.finding(
                worst.path,
                f"{number(100 * worst.saturated)} % of its elements are at a limit: its slope is too large for inputs "
                f"of RMS {number(worst.input_rms)}; {len(found)} of {count} such norms exceed the limit",
                value=worst.saturated,
                against="saturated",
                severity=Severity.WARNING,
                places=[one.path for one in found],
            )

    def _still(self, found: Sequence[BoundedNorm]) -> Outcome:
        if found:
            text, paths = "it gives its offset alone, as with a slope of 0", [one.path for one in found]
            yield self.finding(paths[0], text, value=0.0, against="straight", places=paths)

    def _straight(self, found: Sequence[BoundedNorm], count: int, against: str, severity: Severity) -> Outcome:
        if found:
            worst = min(found, key=lambda one: one.output_rms)
            slope = worst.limit * worst.output_rms / worst.input_rms
            yield self.finding(
                worst.path,
                f"it is the straight line {number(slope)} · x on inputs of RMS "
                f"{number(worst.input_rms)}, which reach {number(worst.output_rms)} of its limit: nothing holds their "
                f"scale; {len(found)} of {count} such norms are below the limit",
                value=worst.output_rms,
                against=against,
                severity=severity,
                places=[one.path for one in found],
            )
