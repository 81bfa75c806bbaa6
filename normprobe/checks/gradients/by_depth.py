"""What the checks of gradients by depth share: how far a gradient goes up or down on its way from the last write, or
layer, back to the first."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

from normprobe.checks.base import Check, Needs, Outcome
from normprobe.records import GradientMeasure, ReportData, Severity

NEEDS = Needs.STRUCTURE | Needs.FORWARD | Needs.BACKWARD
FAR = 1e3  # how far the gradient may go, down or up, before it counts as vanishing or exploding
SOURCE = "choice: a thousandfold between two ends of a model, which one learning rate and clip seldom serve"


@dataclass(frozen=True)
class Way:
    """A gradient on its way back: `first` reaches the first place, `last` leaves the last one; `count` places."""

    first: float
    last: float
    path: str
    end: str
    count: int
    what: str

    @property
    def ratio(self) -> float:
        """First over last; below 1 it has fallen on its way back."""
        return self.first / self.last


def way_back(gradients: GradientMeasure) -> Way | None:
    """Along the stream with most branches, else through the layers of a model without a stream; None where nothing
    reached both ends, or what did is not finite (which NP504 tells). Where features are taken off the stream, along it
    up to the first place of these."""
    rows = [(b.path, b.activation_rms) for b in gradients.compared()]
    what = "at the adds of the stream"
    if not rows:
        rows = [(layer.parameter, layer.output_norm) for layer in gradients.layers]
        what = "by the outputs of the layers"
    rows = [(path, size) for path, size in rows if not math.isnan(size)]
    if len(rows) < 2 or not all(math.isfinite(size) for _, size in rows) or not rows[-1][1] > 0:
        return None
    (path, first), (end, last) = rows[0], rows[-1]
    return Way(first, last, path, end, len(rows), what)


def severity(data: ReportData) -> Severity:
    """A warning. A note of a model that was trained, as it has shown that it learns; and of one with batch norms whose
    statistics were never moved, as these norm nothing in eval mode, in which gradients are taken."""
    init, batchnorm = data.measurements.init, data.measurements.batchnorm
    fresh = batchnorm is not None and any(site.default and site.keeps == "moving" for site in batchnorm.sites)
    return Severity.NOTE if fresh or (init is not None and init.trained) else Severity.WARNING


def tapped(gradients: GradientMeasure) -> str:
    """Why a way is too short to compare; empty where it ends with the stream."""
    if gradients.until is None:
        return ""
    return f"the output takes features off the stream behind {gradients.compared()[-1].path}: later ones tell nothing"


@dataclass(frozen=True)
class WayCheck(Check):
    """Base of a check of how far a gradient goes on its way back."""

    def check(self, data: ReportData) -> Outcome:
        """Yield what `judge` says of the way back, or why there is none."""
        gradients = data.measurements.gradients
        way = None if gradients is None else way_back(gradients)
        if gradients is None:
            yield self.skip("no gradients were measured")
        elif way is None:
            short = tapped(gradients) if len(gradients.compared()) < 2 else ""
            yield self.skip(short or "no finite gradient reached two places of a stream or layers")
        else:
            yield from self.judge(way, severity(data))

    @abstractmethod
    def judge(self, way: Way, severity: Severity) -> Outcome:
        """Yield one finding where the gradient goes too far; `severity` is what the model deserves."""
