"""NP404."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from normprobe.checks.attention.each_site import matched
from normprobe.checks.base import Check, Outcome, Unit, limit, number
from normprobe.records import AttentionSite, Finding, HeadLogits, ReportData, Severity

_SAME = 0.01  # scales closer than this are one
_Fit = tuple[AttentionSite, float]


@final
@dataclass(frozen=True)
class AttentionScale(Check):
    """The factor on q·k does not match the head width, or differs between layers.

    ## What it measures

    The constant factor on q·k in force, wherever it is applied, times √(head width): 1 for the usual scale. Three
    things are told apart. One site of several alike (paths that differ in numbers alone) has another scale than most:
    a warning. All have a scale far from 1/√d, and what was measured shows that nothing makes up for it (new weights,
    and logits of a standard deviation of more than 5), or the scale is exactly that of the full width of all heads: a
    warning, unless the model is trained. Else a note that says which form the scale has. New models whose logits have
    a standard deviation near 1 at another scale draw their weights to fit, as T5 does, and are passed; so is a
    learned scale.

    ## Why it matters

    q·k of unit entries has a standard deviation of √d. Without the factor, softmax starts saturated; with 1/d, or
    with the full width in place of the head's, attention starts almost uniform, and gradients to queries and keys are
    as much smaller. Both train, worse than they should. In a port, a scale that differs from that of the training
    changes every output.

    ## What to do

    Compare with the definition of the model. 1/d is right under muP, 1 where weights are drawn for it or queries and
    keys have norms with gains that were trained with it, other numbers where a configuration names them.

    ## When to ignore it

    As a note: when the model is meant to have this scale.

    ## References

    Vaswani et al. 2017, sec. 3.2.1 and footnote 4; Yang et al. 2022 (muP), definition 4.1 (1/d); Raffel et al. 2020
    (T5), sec. 2.1, whose attention has no factor.
    """

    code, name, severity, since = "NP404", "attention-scale", Severity.WARNING, "0.1.0"

    max_off: float = limit(
        2.0,
        unit=Unit.RATIO,
        source="choice: over or under 1/√d; published scales that adjust for parts of the head lie within "
        "(docs/calibration.md#attention)",
    )
    max_std: float = limit(
        5.0,
        unit=Unit.LOGIT,
        source="choice: five times that of unit queries and keys (Vaswani et al. 2017, footnote 4)",
    )

    def check(self, data: ReportData) -> Outcome:
        """Yield what is wrong with the scale of single sites, and of all."""
        if not data.anatomy.attention:
            yield self.skip("no attention site was found")
        unknown = [one.path for one in data.anatomy.attention if one.scale is None and one.scale_parameter is None]
        if unknown:
            yield self.skip("the factor on q·k is not constant", unknown)
        known = [(one, one.scale * math.sqrt(one.head_dim)) for one in data.anatomy.attention if one.scale is not None]
        logits = _heads_by_path(data)
        init = data.measurements.init
        for group in _alike(known):
            usual = _usual(group)
            odd = [] if usual is None else [fit for fit in group if not _same(fit[1], usual)]
            for site, fit in odd:
                yield self._differs(site, fit, usual or math.nan)
            rest = [fit for fit in group if fit not in odd]
            yield from self._all(rest, logits, None if init is None else init.trained)

    def _differs(self, site: AttentionSite, fit: float, usual: float) -> Finding:
        return self.finding(
            site.path,
            f"the scale is {number(site.scale or 0.0)}, {number(fit)} times 1/√{site.head_dim}; that of the other "
            f"sites like it is {number(usual)} times",
            value=fit / usual,
            source="the recorded data flow: sites that differ in their number alone",
        )

    def _all(self, fits: list[_Fit], logits: dict[str, list[HeadLogits]], trained: bool | None) -> Iterator[Finding]:
        """One finding for each scale that is far from 1/√d."""
        far = [fit for fit in fits if self.exceeds(max(fit[1], 1 / fit[1]) if fit[1] > 0 else math.inf, self.max_off)]
        for scale in dict.fromkeys(site.scale for site, _ in far):
            sites = [site for site, _ in far if site.scale == scale]
            heads = [head for path in dict.fromkeys(site.path for site in sites) for head in logits.get(path, [])]
            stds = [head.std for head in heads if math.isfinite(head.std)]
            fresh = trained is False
            if fresh and stds and not any(self.exceeds(max(std, 1 / std) if std else math.inf, 2.0) for std in stds):
                continue  # drawn to fit
            yield self._far(sites, max(stds, default=math.nan), fresh, trained)

    def _far(self, sites: list[AttentionSite], std: float, fresh: bool, trained: bool | None) -> Finding:
        first = sites[0]
        scale = first.scale or 0.0
        full = _same(scale * math.sqrt(first.heads * first.head_dim), 1.0) and not _same(scale * first.head_dim, 1.0)
        large = fresh and std > self.max_std
        seen = f"; the logits have a standard deviation of up to {number(std)}" if math.isfinite(std) else ""
        return self.finding(
            first.path,
            f"the scale is {number(scale)}, {number(scale * math.sqrt(first.head_dim))} times 1/√{first.head_dim}: "
            f"{_form(first, full)}{seen}",
            value=std if large else scale * math.sqrt(first.head_dim),
            against="max_std" if large else "max_off",
            severity=self.severity if large or (full and not trained) else Severity.NOTE,
            places=[site.path for site in sites],
        )


def _heads_by_path(data: ReportData) -> dict[str, list[HeadLogits]]:
    found: dict[str, list[HeadLogits]] = {}
    for pair in matched(data):
        found.setdefault(pair.measure.path, []).extend(pair.measure.heads)
    return found


def _alike(fits: list[_Fit]) -> list[list[_Fit]]:
    """Sites whose paths differ in numbers alone."""
    groups: dict[tuple[str, bool], list[_Fit]] = {}
    for site, fit in fits:
        groups.setdefault((re.sub(r"\d+", "#", site.path), site.cross), []).append((site, fit))
    return list(groups.values())


def _usual(group: list[_Fit]) -> float | None:
    """The scale that at least two thirds of these sites have; None where none is so common."""
    counts = Counter(round(math.log(fit) / _SAME) for _, fit in group if fit > 0)
    (common, count), *_ = counts.most_common(1) or [(0, 0)]
    if count < 2 or 3 * count < 2 * len(group):
        return None
    return next(fit for _, fit in group if fit > 0 and round(math.log(fit) / _SAME) == common)


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= 2 * _SAME * abs(other)


def _form(site: AttentionSite, full: bool) -> str:
    """The form that a scale has, in words."""
    scale = site.scale or 0.0
    if _same(scale, 1.0):
        return "no factor at all, which is right where weights or the gains of query and key norms were made for it"
    if _same(scale * site.head_dim, 1.0):
        return f"1/{site.head_dim}, which muP has, and the usual factor squared"
    if full:
        return f"that of {site.heads} heads together, {site.heads * site.head_dim} features, not of one"
    return "neither that of the head width, nor of all heads, nor of muP"
