"""Measurements by depth as series that a renderer can draw: residual growth, attention logits, gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from normprobe.records import (
    AttentionMeasure,
    GradientMeasure,
    HeadLogits,
    Measurements,
    ReportData,
    StreamMeasure,
)
from normprobe.report.captions import Facts, largest, spread, stream_captions
from normprobe.report.overview import owner
from normprobe.report.streams import stream_title
from normprobe.report.wording import BRANCHES, number, place, plural


@dataclass(frozen=True)
class Series:
    """One quantity by depth.

    Attributes:
        label: what it belongs to, a stream most often.
        values: one a write or site, in execution order; may hold values that are not finite.
        places: the module path of each value.
        step: what one step of depth is: a write, a site or a branch.
        log: whether a logarithmic scale suits it.
        reference: values of a reference curve, as many as `values`, or empty.
        reference_label: name of that curve.
        companion: a second curve on the same scale, such as the largest element, or empty.
        companion_label: name of that curve.
        captions: facts that say what the numbers mean, a line each.
    """

    label: str
    values: tuple[float, ...]
    places: tuple[str, ...]
    step: str
    log: bool = True
    reference: tuple[float, ...] = ()
    reference_label: str = ""
    companion: tuple[float, ...] = ()
    companion_label: str = ""
    captions: tuple[Facts, ...] = ()


@dataclass(frozen=True)
class Chart:
    """Series of one quantity under one title."""

    title: str
    caption: str
    series: tuple[Series, ...]


def charts(data: ReportData) -> list[Chart]:
    """Every chart that the measurements allow; none for what was not measured."""
    built = (_residual(data), _attention(data), _gradients(data))
    return [chart for chart in built if chart.series]


def _residual(data: ReportData) -> Chart:
    series = tuple(_stream(data, one) for one in data.measurements.residual if one.states)
    caption = "median token RMS after each write, log scale"
    return Chart("Residual growth", caption, series)


def _stream(data: ReportData, measure: StreamMeasure) -> Series:
    values = tuple(state.rms_median for state in measure.states)
    first = values[0]
    rooted = tuple(first * math.sqrt(write) for write in range(1, len(values) + 1))
    usable = math.isfinite(first) and first > 0
    return Series(
        label=stream_title(data, measure.stream),
        values=values,
        places=tuple(state.path for state in measure.states),
        step="write",
        reference=rooted if usable and len(values) > 1 else (),
        reference_label="√L reference",
        companion=tuple(state.abs_max for state in measure.states),
        companion_label="largest |x|",
        captions=stream_captions(measure),
    )


def _attention(data: ReportData) -> Chart:
    groups: dict[str, list[AttentionMeasure]] = {}
    for measure in data.measurements.attention:
        stream = owner(data.anatomy, measure.path)
        if measure.heads:
            groups.setdefault(stream_title(data, stream.name) if stream else "off the streams", []).append(measure)
    series = tuple(_logits(label, sites) for label, sites in groups.items())
    return Chart("Attention logits", "largest of any head at each site, after scale and mask", series)


def _logits(label: str, sites: Sequence[AttentionMeasure]) -> Series:
    tops = [site.heads[largest([head.sampled_max for head in site.heads])] for site in sites]
    values = tuple(head.sampled_max for head in tops)
    peak = largest(values)
    bound = max((head.bound for site in sites for head in site.heads), key=_order)
    return Series(
        label=label,
        values=values,
        places=tuple(site.path for site in sites),
        step="site",
        log=False,
        captions=(
            (
                f"peak {number(values[peak])} in head {tops[peak].head} of {place(sites[peak].path)}",
                _rows(sites[peak]),
                f"bound {number(bound)}",
            ),
            _heads([head for site in sites for head in site.heads]),
        ),
    )


def _rows(site: AttentionMeasure) -> str:
    return f"{plural(site.rows, 'row' if site.basis.exact else 'sampled row')} a head, {site.basis.dtype}"


def _order(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _heads(heads: Sequence[HeadLogits]) -> Facts:
    return (
        f"over {plural(len(heads), 'head')}: entropy / ln(keys) {_over_keys(heads, 'entropy')}",
        f"saturated rows {_over_keys(heads, 'saturated')}",
        f"weight on the first key {spread([h.first_token for h in heads])}",
        *_known("weight on sinks", [h.sink for h in heads]),
        f"standard deviation {spread([h.std for h in heads])}",
        *_known("RMS of q", [h.q_rms for h in heads]),
        *_known("RMS of k", [h.k_rms for h in heads]),
        *_known("largest q·k", [_uncapped(heads)]),
    )


def _known(label: str, values: Sequence[float | None]) -> Iterator[str]:
    """A spread of those values that were seen, if any was."""
    known = [value for value in values if value is not None]
    if known:
        yield f"{label} {spread(known)}"


def _uncapped(heads: Sequence[HeadLogits]) -> float | None:
    """The largest logit before soft cap and bias; None where neither changes one."""
    judged = [h for h in heads if h.uncapped_max != h.sampled_max and not math.isnan(h.sampled_max)]
    known = [h.uncapped_max for h in judged if h.uncapped_max is not None]
    return known[largest(known)] if known else None


def _over_keys(heads: Sequence[HeadLogits], field: Literal["entropy", "saturated"]) -> str:
    """The spread of a value that is undefined in rows with one key: such a head has NaN beside finite logits."""
    known: list[float] = []
    undefined = 0
    for head in heads:
        value = head.entropy if field == "entropy" else head.saturated
        if math.isnan(value) and all(map(math.isfinite, (head.sampled_max, head.first_token))):
            undefined += 1
        else:
            known.append(value)
    said = f"{f'{undefined} ' if known else ''}undefined (one key)" if undefined else ""
    return ", ".join(filter(None, (spread(known), said)))


def _gradients(data: ReportData) -> Chart:
    gradients = data.measurements.gradients
    caption = "L2 norm over each branch's parameters, log scale"
    if gradients is None:
        return Chart("Gradients", caption, ())
    names = dict.fromkeys(branch.stream for branch in gradients.branches)
    first = next(iter(names), None)
    loss = f"loss {number(gradients.value)} ({gradients.loss})"
    series = (
        _gradient(data, name, ((*((loss,) if name == first else ()), *_beside(gradients, name)),)) for name in names
    )
    return Chart("Gradients", caption, tuple(series))


def _beside(gradients: GradientMeasure, stream: str) -> Iterator[str]:
    """Ratio and slope of the stream that they are of, with the closed form, and steps beside weights."""
    if stream == gradients.stream:
        yield from _with_depth(gradients)
    branches = [branch for branch in gradients.branches if branch.stream == stream]
    for name, ratios in (
        ("gradient descent", [branch.update_ratio for branch in branches]),
        ("Adam's first step", [branch.adam_ratio for branch in branches]),
    ):
        known = [ratio for ratio in ratios if ratio is not None]
        if known and gradients.lr is not None:
            yield f"update / weight at lr {number(gradients.lr)}, {name}: {spread(known)}"


def _with_depth(gradients: GradientMeasure) -> Iterator[str]:
    kinds = [kind for kind in gradients.kinds if kind.branches > 1]
    if not kinds:
        yield "no ratio and no slope: no two branches of one kind have parameters"
        return
    for kind in kinds:
        yield f"last to first {BRANCHES.get(kind.kind, kind.kind)} ×{number(kind.last_to_first)}"
    several = " with a level for each kind" if len(gradients.kinds) > 1 else ""
    yield f"slope of ln norm {number(gradients.slope)} a write{several}"
    if (law := gradients.expected) is not None:
        yield (
            f"closed form at initialisation {number(law.slope)} a write, ×{number(law.last_to_first)} last to first "
            f"({law.source}): a larger slope means that the first branches get less of the gradient than their "
            "placement explains, a smaller one more"
        )


def _gradient(data: ReportData, stream: str, captions: tuple[Facts, ...]) -> Series:
    branches = list(_branches(data.measurements, stream))
    return Series(
        label=stream_title(data, stream),
        values=tuple(value for _, value in branches),
        places=tuple(path for path, _ in branches),
        step="branch",
        captions=captions,
    )


def _branches(measured: Measurements, stream: str) -> Iterator[tuple[str, float]]:
    if measured.gradients is not None:
        for branch in measured.gradients.branches:
            if branch.stream == stream:
                yield branch.path, branch.parameter_norm
