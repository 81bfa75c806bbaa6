"""NP404."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from normprobe.checks.attention.each_site import matched
from normprobe.checks.base import Check, Outcome, Unit, limit, number
from normprobe.checks.declarations import governs, stated
from normprobe.records import AttentionSite, Finding, HeadLogits, ReportData, Severity

_SAME = 0.01  # scales closer than this are one
_PRODUCTS = 4  # that the logits of one site may be a sum of
_DEEPER = "1/√d divided by the number of the layer, as GPT-2 has it with `scale_attn_by_inverse_layer_idx`"
_Fit = tuple[AttentionSite, float]


@final
@dataclass(frozen=True)
class AttentionScale(Check):
    """The factor on q·k does not match the head width, or differs between layers.

    ## What it measures

    The constant factor on q·k in force, wherever it is applied, times √(head width): 1 for the usual scale. Three
    things are told apart. One site of several alike (on one stream, and both or neither of them cross-attention) has
    another scale than most: a warning, or a note where no other has its heads and its window. A scale of 0 or below is
    a warning too, and so is one that is no finite number. Layers of several sizes whose scales follow one law (1, 1/d,
    1/√d, 1/√width) do not differ. All have a scale far from 1/√d, and what was measured shows that nothing makes up
    for it: a warning. In new models these are logits of a standard deviation of
    more than 5. In trained ones it is a median of these standard deviations over the heads that is above 5 or below
    0.5 and would lie between the two at 1/√d: weights that were trained for another scale than this one. Or the scale
    is exactly that of the full width of all heads, however near that is: a warning, unless the model is trained or its
    configuration states that number. Else a note that says which form the scale has. New models whose logits have a
    standard deviation near 1 at another scale draw their weights to fit, as T5 does, and are passed; so is a learned
    scale.

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

    Vaswani et al. 2017, sec. 3.2.1 and footnote 4; Yang et al. 2022 (muP), definition 4.1 (1/d). Scales of 1 are
    those of released implementations: T5 and GPT-Neo multiply q·k by nothing.
    """

    code, name, severity, since = "NP404", "attention-scale", Severity.WARNING, "0.1.0"
    explains = "NP401", "NP402", "NP403"

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

    min_std: float = limit(
        0.5,
        unit=Unit.LOGIT,
        source="choice: half that of unit queries and keys; of heads of trained models the median is 2 to 3, and no "
        "attention is learned where it is next to uniform (docs/calibration.md#attention)",
    )

    def check(self, data: ReportData) -> Outcome:
        """Yield what is wrong with the scale of single sites, and of all."""
        if not data.anatomy.attention:
            yield self.skip("no attention site was found")
        unknown = [one.path for one in data.anatomy.attention if one.scale is None and one.scale_parameter is None]
        if unknown:
            yield self.skip("the factor on q·k is not constant", unknown)
        seen = _Seen.of(data)
        for sites in _alike(data):
            group = [fit for fit in sites if math.isfinite(fit[1])]
            usual = None if _of_one_law(group) else _usual(group)
            odd = [] if usual is None else [fit for fit in group if not _same(fit[1], usual)]
            others = {_build(site) for site, fit in group if (site, fit) not in odd}
            for site, fit in odd:
                yield self._differs(site, fit, usual or math.nan, alike=_build(site) in others)
            rest = [fit for fit in group if fit not in odd]
            yield from self._turned([fit for fit in sites if fit not in odd and not 0 < fit[1] < math.inf])
            yield from self._all([fit for fit in rest if not fit[1] <= 0], seen)

    def _differs(self, site: AttentionSite, fit: float, usual: float, alike: bool) -> Finding:
        own = "" if alike else ", with other heads or another window,"
        return self.finding(
            site.path,
            f"the scale is {number(site.scale or 0.0)}, {number(fit)} times 1/√{site.head_dim}; that of the other "
            f"sites like it{own} is {number(usual)} times",
            value=fit / usual,
            source="the recorded data flow: sites on the same stream",
            severity=None if alike else Severity.NOTE,
        )

    def _turned(self, fits: list[_Fit]) -> Iterator[Finding]:
        """One finding for scales of 0, one for those below, and one for those that are no finite number."""
        kinds = [_wrong(fit) for _, fit in fits]
        for what in dict.fromkeys(kinds):
            sites = [site for (site, _), kind in zip(fits, kinds, strict=True) if kind == what]
            yield self.finding(
                sites[0].path,
                f"the scale is {_span([site.scale or 0.0 for site in sites])}: {what}",
                value=sites[0].scale,
                source="Vaswani et al. 2017, sec. 3.2.1: q·k is divided by a root, which is above 0",
                places=[site.path for site in sites],
            )

    def _all(self, fits: list[_Fit], seen: _Seen) -> Iterator[Finding]:
        """One finding for each form of a scale that is far from 1/√d, or that of all heads."""
        falling = _by_depth(fits)
        forms: dict[tuple[str, bool], list[_Fit]] = {}
        for site, fit in fits:
            told = seen.stated.get(site.path)
            full = not falling and told is None and _of_all_heads(site, fit)
            if full or self.exceeds(_distance(fit), self.max_off):
                form = _DEEPER if falling else told or _form(site, full)
                forms.setdefault((form, full), []).append((site, fit))
        for (form, full), found in forms.items():
            stds = seen.stds([site for site, _ in found])
            drawn_to_fit = stds and seen.trained is False and not any(self.exceeds(_distance(std), 2.0) for std in stds)
            if full or not drawn_to_fit:
                misfit = self._misfit(found, stds) if seen.trained else None
                yield misfit or self._far(found, form, full, max(stds, default=math.nan), seen)

    def _misfit(self, found: list[_Fit], stds: list[float]) -> Finding | None:
        """What the logits say if the weights were trained for 1/√d, and not for the scale in force."""
        (first, fit), *_ = found
        std = statistics.median(stds) if stds else math.nan
        usual = std / fit if fit > 0 else math.nan
        if math.isnan(std) or not self._unusual(std) or self._unusual(usual):
            return None
        return self.finding(
            first.path,
            f"the scale is {number(first.scale or 0.0)}, {number(fit)} times 1/√{first.head_dim}, and the logits have "
            f"a standard deviation of {number(std)} in the median head; at 1/√{first.head_dim} it would be "
            f"{number(usual)}, as in models that are trained with that",
            value=std,
            against="max_std" if std > self.max_std else "min_std",
            places=[site.path for site, _ in found],
        )

    def _unusual(self, std: float) -> bool:
        return self.exceeds(std, self.max_std, least=self.min_std)

    def _far(self, found: list[_Fit], form: str, full: bool, std: float, seen: _Seen) -> Finding:
        sites = [site for site, _ in found]
        fits, scales = [fit for _, fit in found], list(dict.fromkeys(site.scale or 0.0 for site in sites))
        large = seen.trained is False and std > self.max_std
        slip = full and not seen.trained
        widths = {site.head_dim for site in sites}
        width = str(sites[0].head_dim) if len(widths) == 1 else "(head width)"
        against = "max_std" if large else None if full else "max_off"
        return self.finding(
            sites[0].path,
            f"the scale{' is' if len(scales) == 1 else 's are'} {_span(scales)}, {_span(fits)} times 1/√{width}: {form}"
            + (f"; the logits have a standard deviation of up to {number(std)}" if math.isfinite(std) else ""),
            value=std if large else max(fits, key=_distance),
            against=against,
            source=None if against else "Vaswani et al. 2017, sec. 3.2.1 (d is the width of one head)",
            severity=self.severity if large or slip else Severity.NOTE,
            places=[site.path for site in sites],
        )


@dataclass(frozen=True)
class _Seen:
    """What was measured and stated beside the scales: heads by the path of their site, whether the model is trained,
    and by their paths what states the scale that sites have."""

    heads: dict[str, list[HeadLogits]]
    trained: bool | None
    stated: dict[str, str]

    @classmethod
    def of(cls, data: ReportData) -> _Seen:
        heads: dict[str, list[HeadLogits]] = {}
        for pair in matched(data):
            heads.setdefault(pair.measure.path, []).extend(pair.measure.heads)
        init, every = data.measurements.init, stated(data, "attention_scale")
        told = {
            site.path: f"as {one.field} = {number(one.stated)} states"
            for site in data.anatomy.attention
            for one in every
            if governs(one, site.path, data.declared) and site.scale is not None and _same(site.scale, float(one.value))
        }
        return cls(heads, None if init is None else init.trained, told)

    def stds(self, sites: list[AttentionSite]) -> list[float]:
        """Standard deviations of the logits of all heads of these sites that were measured."""
        paths = dict.fromkeys(site.path for site in sites)
        return [head.std for path in paths for head in self.heads.get(path, []) if math.isfinite(head.std)]


def _alike(data: ReportData) -> list[list[_Fit]]:
    """Sites of constant scale in order of time, those on one stream together, cross-attention apart; where no stream
    is known, those of one shape."""
    streams = {weight.parameter: weight.stream for weight in data.anatomy.weights}
    groups: dict[tuple[object, ...], list[_Fit]] = {}
    for site in data.anatomy.attention:
        if site.scale is not None:
            query = site.columns.get("q")
            stream = None if query is None else streams.get(query.parameter)
            where = (site.heads, site.head_dim) if stream is None else (stream,)
            groups.setdefault((*where, site.cross), []).append((site, site.scale * math.sqrt(site.head_dim)))
    return list(groups.values())


def _of_one_law(group: list[_Fit]) -> bool:
    """Whether all scales are the same number, or one number over the head width, its root, or the root of the full
    width: what one line of code makes of layers of several sizes."""
    heads, full = [site.head_dim for site, _ in group], [site.heads * site.head_dim for site, _ in group]
    laws = ([1.0] * len(group), heads, [math.sqrt(size) for size in heads], [math.sqrt(size) for size in full])
    factors = ([(site.scale or 0.0) * size for (site, _), size in zip(group, law, strict=True)] for law in laws)
    return any(all(_same(one, found[0]) for one in found) for found in factors)


def _build(site: AttentionSite) -> tuple[object, ...]:
    """What besides its scale tells one kind of site from another."""
    return site.heads, site.kv_heads, site.head_dim, site.window, site.qk_norm is None


def _usual(group: list[_Fit]) -> float | None:
    """The scale that at least two thirds of these sites have; None where none is so common."""
    counts = Counter(round(math.log(fit) / _SAME) for _, fit in group if fit > 0)
    (common, count), *_ = counts.most_common(1) or [(0, 0)]
    if count < 2 or 3 * count < 2 * len(group):
        return None
    return next(fit for _, fit in group if fit > 0 and round(math.log(fit) / _SAME) == common)


def _wrong(fit: float) -> str:
    """What a scale does that is not above 0, or no finite number."""
    if not math.isfinite(fit):
        return "no logit is a finite number"
    return "every query sees all keys alike" if fit == 0 else "the keys that match a query least get most"


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= 2 * _SAME * abs(other)


def _distance(fit: float) -> float:
    """By which factor a number is off 1, above or below."""
    return max(fit, 1 / fit) if fit > 0 else math.inf


def _by_depth(fits: list[_Fit]) -> bool:
    """Whether the k-th of at least three sites has 1/k of the scale of the first."""
    return len(fits) >= 3 and fits[0][1] > 0 and all(_same(k * fit, fits[0][1]) for k, (_, fit) in enumerate(fits, 1))


def _of_all_heads(site: AttentionSite, fit: float) -> bool:
    """Whether the scale is 1/√(width of all heads). Where more than q·k is summed up, a factor of a few is no such
    slip (DeBERTa's 1/√(3d) for three products), and 1/d is muP's."""
    near = site.biased and site.heads <= _PRODUCTS
    return site.heads > 1 and not near and _same(fit * math.sqrt(site.heads), 1.0) and site.heads != site.head_dim


def _span(values: list[float]) -> str:
    low, high = min(values), max(values)
    return number(values[0]) if _same(low, high) or not low < high else f"{number(low)} to {number(high)}"


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
