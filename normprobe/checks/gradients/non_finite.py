"""NP504."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Needs, Outcome
from normprobe.records import GradientMeasure, Measurements, ReportData, Severity


@final
@dataclass(frozen=True)
class NonFinite(Check):
    """The model's outputs, its residual stream or its gradients are NaN or infinite.

    ## What it measures

    Whether every element of the outputs, of the stream after each write, and of the loss and gradients (where
    they were taken) is finite. The place is the first operation whose result was not finite, where it is
    known, else the first write. Infinities that never reach the stream or the outputs, as in an attention
    mask, are no finding.

    ## Why it matters

    Everything after the place is lost, and every other number of the report that depends on it is not a
    measurement.

    ## What to do

    Look at the place: an overflow in float16 (NP304), a row of zeros in a norm whose eps vanishes (NP102), a
    fully masked row of attention, a broken weight.

    ## When to ignore it

    Never, except that a head which masks part of its vocabulary with -inf does so on purpose.

    ## References

    IEEE 754-2019, sec. 6 (infinities and NaN, and how they spread).
    """

    code, name, severity, since = "NP504", "non-finite", Severity.ERROR, "0.1.0"
    needs = Needs.STRUCTURE | Needs.FORWARD

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding at the first place that is not finite."""
        found = data.measurements
        lost = list(self._lost(found))
        if lost:
            kinds = ", ".join(dict.fromkeys(kind for kind, _ in lost))
            places = [place for _, place in lost if place != "."]
            first = found.first_non_finite or (places[0] if places else ".")
            yield self.finding(
                first,
                f"not finite from here on: {kinds}{_made_by(found)}",
                value="not finite",
                source="IEEE 754-2019, sec. 6",
                places=dict.fromkeys([first, *places]),
            )
        elif found.output_finite is None:
            seen = f"; {found.first_non_finite} gave a value that is not finite" if found.first_non_finite else ""
            yield self.skip(f"the outputs were not looked at{seen}")

    def _lost(self, found: Measurements) -> Iterator[tuple[str, str]]:
        """What is not finite, and where, in the order of the forward and the backward pass."""
        for stream in found.residual:
            for state in stream.states:
                if not state.finite or self.exceeds(state.abs_max) or self.exceeds(state.rms_median):
                    yield f"stream {stream.stream}", state.path
        if found.output_finite is False:
            yield "outputs", "."
        if found.gradients is not None:
            yield from self._lost_gradients(found.gradients)

    def _lost_gradients(self, gradients: GradientMeasure) -> Iterator[tuple[str, str]]:
        if self.exceeds(gradients.value):
            yield "loss", "."
        for branch in gradients.branches:
            if self.exceeds(branch.parameter_norm) or self.exceeds(branch.activation_rms):
                yield f"gradients in stream {branch.stream}", branch.path


def _made_by(found: Measurements) -> str:
    """The operation that gave the first such value or gradient, where it is known."""
    backward = None if found.gradients is None else found.gradients.first_non_finite
    made = found.first_non_finite_operation or backward
    if made is None:
        return ""
    path = None if made.site is None else made.site.path
    place = "" if path is None else f" in {'the model itself' if path == '.' else path}"
    return f"; the {made.direction} of {made.operation}{place} gave the first"
