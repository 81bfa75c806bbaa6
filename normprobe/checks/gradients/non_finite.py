"""NP504."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from normprobe.checks.attention.each_site import matched, overflow
from normprobe.checks.base import Check, Needs, Outcome
from normprobe.records import (
    Anatomy,
    BrokenTensor,
    Finding,
    GradientMeasure,
    Measurements,
    ReportData,
    Severity,
)
from normprobe.records.non_finite import NonFinite as Origin
from normprobe.records.parts import whole

_Lost: TypeAlias = tuple[str, str]  # what, and where


@final
@dataclass(frozen=True)
class NonFinite(Check):
    """The model's outputs, its residual stream, its gradients or its weights are NaN or infinite.

    ## What it measures

    Whether every element of the outputs, of the stream after each write, and of the loss and the gradients of all
    parameters (where they were taken) is finite. The place is the parameter or buffer that holds NaN or an infinity,
    where the first module to fail has one; else that module, else the first write. Gradients have a place of their
    own only where all of the forward is finite: that whose backward gave the first. Where nothing is lost, the
    weights that products, norms and branches use: attention kernels give finite outputs to rows of NaN logits.
    Infinities in masks that never reach the stream or the outputs are no finding, nor are unused weights.

    ## Why it matters

    Everything after the place is lost, and every other number of the report that depends on it is not a
    measurement.

    ## What to do

    Look at the place: an overflow in float16 (NP304), attention logits too large for their dtype (NP401), a row of
    zeros in a norm whose eps vanishes (NP102), a fully masked row of attention, a broken weight.

    ## When to ignore it

    Never, except that a head which masks part of its vocabulary with -inf does so on purpose.

    ## References

    IEEE 754-2019, sec. 6 (infinities and NaN, and how they spread).
    """

    code, name, severity, since = "NP504", "non-finite", Severity.ERROR, "0.1.0"
    needs = Needs.STRUCTURE | Needs.FORWARD

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding: at what the forward lost, of which lost gradients follow, else at the gradients."""
        found = data.measurements
        forward = list(self._forward(found))
        backward = [] if found.gradients is None else list(self._backward(found.gradients, data.anatomy))
        if forward:
            causes = _causes(found)
            first = next(iter(causes), None) or found.first_non_finite or _first_place(forward)
            made = "".join(f"; {name} holds {held}" for name, held in causes.items())
            after = "; gradients are not finite either" if backward else ""
            made = f"{_made_by(found.first_non_finite_operation)}{_overflow(data)}{made}{after}"
            yield self._found(first, forward, f"not finite from here on: {_kinds(forward)}{made}")
        elif backward and found.gradients is not None:
            made = _made_by(found.gradients.first_non_finite)
            first = _place(found.gradients.first_non_finite) or _first_place(backward)
            message = f"not finite, though all of the forward is: {_kinds(backward)}{made}"
            yield self._found(first, backward, message)
        elif hidden := _hidden(data):
            held = "".join(f"; {name} holds {amount}" for name, amount in hidden.items())
            message = f"weights are not finite, though all that is computed from them is: an operation hides it{held}"
            yield self._found(next(iter(hidden)), [("weights", name) for name in hidden], message)
        elif found.output_finite is None:
            seen = f"; {found.first_non_finite} gave a value that is not finite" if found.first_non_finite else ""
            yield self.skip(f"the outputs were not looked at{seen}")

    def _found(self, first: str, lost: Sequence[_Lost], message: str) -> Finding:
        places = dict.fromkeys([first, *(place for _, place in lost if place != ".")])
        return self.finding(first, message, value="not finite", source="IEEE 754-2019, sec. 6", places=places)

    def _forward(self, found: Measurements) -> Iterator[_Lost]:
        """What is not finite in the forward and where, in the order of time."""
        for stream in found.residual:
            for state in stream.states:
                if not state.finite or self.exceeds(state.abs_max) or self.exceeds(state.rms_median):
                    yield f"stream {stream.stream}", state.path
        if found.output_finite is False:
            yield "outputs", "."
        if found.gradients is not None and self.exceeds(found.gradients.value):
            yield "loss", "."

    def _backward(self, gradients: GradientMeasure, anatomy: Anatomy) -> Iterator[_Lost]:
        """The same of gradients: of branches, then of the parameters outside them."""
        for branch in gradients.branches:
            lost = branch.traced and self.exceeds(branch.activation_rms)
            if lost or self.exceeds(branch.parameter_norm):
                yield f"gradients in stream {branch.stream}", branch.path
        inside = {name for stream in anatomy.streams for branch in stream.branches for name in branch.parameters}
        for name in gradients.non_finite_parameters:
            if name not in inside:
                yield "gradients of parameters outside the streams", name


def _kinds(lost: Sequence[_Lost]) -> str:
    return ", ".join(dict.fromkeys(kind for kind, _ in lost))


def _first_place(lost: Sequence[_Lost]) -> str:
    return next((place for _, place in lost if place != "."), ".")


def _causes(found: Measurements) -> dict[str, str]:
    """The parameters and buffers that are not finite, of the first module that lost something where it is known."""
    inside = "" if found.first_non_finite in (None, ".") else f"{found.first_non_finite}."
    held = [one for one in found.non_finite_tensors if one.name.startswith(inside)]
    return {one.name: _amount(one) for one in held}


def _overflow(data: ReportData) -> str:
    """That it begins with attention logits that are too large for their dtype, where it does."""
    pairs = (pair for pair in matched(data) if pair.measure.path == data.measurements.first_non_finite)
    return next((f"; {told}" for pair in pairs if (told := overflow(pair))), "")


def _hidden(data: ReportData) -> dict[str, str]:
    """The weights that are not finite, of those that products, norms and branches use; rows of a table that no token
    took are none."""
    anatomy = data.anatomy
    used = {weight.parameter for weight in anatomy.weights if weight.kind != "embedding"}
    used |= {name for stream in anatomy.streams for branch in stream.branches for name in branch.parameters}
    norms = [norm for norm in anatomy.norms if norm.executed]
    broken = {one.name: one for one in data.measurements.non_finite_tensors}
    used |= {whole(name, broken) for norm in norms for name in (norm.weight, norm.bias) if name is not None}
    return {name: _amount(one) for name, one in broken.items() if name in used}


def _amount(one: BrokenTensor) -> str:
    """`1 NaN and 2 infinities of 64 values`."""
    infinite = f"{one.infinite} infinit{'y' if one.infinite == 1 else 'ies'}" if one.infinite else ""
    parts = [f"{one.nan} NaN" if one.nan else "", infinite]
    return f"{' and '.join(filter(None, parts))} of {one.count} values"


def _place(made: Origin | None) -> str | None:
    return None if made is None or made.site is None else made.site.path


def _made_by(made: Origin | None) -> str:
    """The operation that gave the first such value or gradient, where it is known."""
    if made is None:
        return ""
    path = _place(made)
    place = "" if path is None else f" in {'the model itself' if path == '.' else path}"
    return f"; the {made.direction} of {made.operation}{place} gave the first"
