"""NP211."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Needs, Outcome, Unit, limit, number
from normprobe.checks.initialisation.drawn import common
from normprobe.records import Branch, Finding, Fix, ReportData, Severity, Stream, WeightMeasure


@final
@dataclass(frozen=True)
class DeepNormIncomplete(Check):
    """A post-norm trunk has half of DeepNorm: its factor in some layers, or factor or start alone.

    ## What it measures

    Three things on streams where every sum is normed. Whether a constant factor α on the trunk is the same for all
    branches of one kind. For weights that look untrained, how far one step can move the output: the sum of 2g²/α²
    over all writes, where g is the gain of the matrices that write to the stream relative to Xavier's,
    std · √((fan_in + fan_out) / 2), times a constant on the branch; where a norm or a learned factor stands behind
    them, nothing is said of the start. DeepNorm sets α = (2N)^¼ and g = β = (8N)^-¼ so that this sum is 1 at any depth.
    And whether a trunk without a factor is written by untrained matrices that all have exactly that g, and no
    other known recipe in common.

    ## Why it matters

    The proof holds for both factors together. With α alone, updates of a deep stack still add up to more than
    its norms take: it diverges later than plain post-norm, but it does. With β alone the branches say less, and
    the gradient still shrinks at every norm as in plain post-norm. One layer without α is a plain post-norm block in
    the middle of the stack.

    ## What to do

    Give every layer the same α, and multiply the initial weights of values, attention outputs and both MLP
    matrices by β.

    ## When to ignore it

    When the factors were tuned by hand, as for layers of different kinds in one stack.

    ## References

    Wang et al. 2022 (DeepNet), sec. 4.2 (theorem 4.2 and the table of α and β).
    """

    code, name, severity, since = "NP211", "deepnorm-incomplete", Severity.WARNING, "0.1.0"
    fixes = (Fix(rewrite="Initialise", settings={"scheme": "deepnorm"}),)
    needs = Needs.STRUCTURE | Needs.WEIGHTS

    max_update: float = limit(
        2.0,
        unit=Unit.RATIO,
        source="choice: twice the 1 that α and β of Wang et al. 2022, sec. 4.2, make of it",
    )

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for every trunk with several factors, and one where the writers are too large."""
        if not data.anatomy.streams:
            yield self.skip("no residual stream was found")
        for stream in data.anatomy.streams:
            alphas = [b.skip_scale for b in stream.branches if b.placement in ("post", "deepnorm")]
            if not any(b.placement == "deepnorm" for b in stream.branches):
                yield from self._bare(stream, data)
                continue
            if any(alpha is not None and alpha < 1 for alpha in alphas):
                continue  # an interpolation between trunk and write: DeepNorm's factor is larger than 1
            if None in alphas:
                yield self.skip("the factor on the trunk is no constant", [stream.name])
                continue
            odd = _odd(stream)
            if odd:
                yield self._uneven(stream, odd)
            else:
                yield from self._initial(stream, data)

    def _uneven(self, stream: Stream, odd: list[Branch]) -> Finding:
        kind = odd[0].kind
        factors = sorted({b.skip_scale or 0.0 for b in stream.branches if b.kind == kind})
        return self.finding(
            odd[0].place,
            f"the trunk of {stream.name} is multiplied by {' and '.join(map(number, factors))} at branches of one "
            f"kind, {kind}; DeepNorm has one factor for all layers",
            value=odd[0].skip_scale,
            source="Wang et al. 2022, sec. 4.2",
            places=[branch.place for branch in odd],
            fixes=(),
        )

    def _initial(self, stream: Stream, data: ReportData) -> Outcome:
        init = data.measurements.init
        if init is None:
            yield self.skip("the scale of the weights was not measured", [stream.name])
        elif init.trained is None:
            yield self.skip("it cannot be told whether the weights are as they were drawn", [stream.name])
        elif init.trained is False:
            shapes = {site.parameter: site.fan_in + site.fan_out for site in data.anatomy.weights}
            weights = {weight.parameter: weight for weight in init.weights}
            sizes = [_write(branch, weights, shapes) for branch in stream.branches]
            known = [size for size in sizes if size is not None]
            if self.exceeds(sum(known), self.max_update):
                yield self._large(stream, sum(known))
            elif len(known) < len(sizes):
                yield self.skip("the scale of some writers is not known", [stream.name])

    def _bare(self, stream: Stream, data: ReportData) -> Iterator[Finding]:
        """Writers that have DeepNorm's β, all of them, on a plain post-norm trunk."""
        init, branches = data.measurements.init, stream.branches
        if init is None or init.trained is not False or any(b.placement != "post" or not _free(b) for b in branches):
            return
        weights = {weight.parameter: weight for weight in init.weights}
        known = [weights[name] for branch in branches for name in branch.writers if name in weights]
        if len(known) >= len(branches) > 1 and _by_beta(known):
            alpha, beta = (2 * (len(branches) // 2)) ** 0.25, (8 * (len(branches) // 2)) ** -0.25
            yield self.finding(
                stream.name,
                f"the {len(known)} weights that write to this post-norm stream are drawn at {number(beta)} of Xavier's "
                f"scale, DeepNorm's β for {len(branches)} writes, and the trunk has no factor; α would be "
                f"{number(alpha)}",
                value=1.0,
                bound=alpha,
                source="Wang et al. 2022, sec. 4.2",
                fixes=(Fix(rewrite="ScaleResidual", settings={"kind": "deepnorm"}),),
            )

    def _large(self, stream: Stream, size: float) -> Finding:
        alpha = stream.branches[0].skip_scale or 1.0
        return self.finding(
            stream.name,
            f"the trunk is multiplied by {number(alpha)} as in DeepNorm, and the initial weights are not scaled to "
            f"it: one step moves the output by up to {number(size)} times what DeepNorm allows",
            value=size,
            against="max_update",
        )


def _by_beta(weights: list[WeightMeasure]) -> bool:
    """Whether DeepNorm's recipe is what these have in common, beside those of T-Fixup for stacks without norms at
    most."""
    return {name for name in common(weights) if not name.startswith("t_fixup")} == {"deepnorm"}


def _odd(stream: Stream) -> list[Branch]:
    """The branches whose trunk factor is not that of most branches of their kind."""
    found: list[Branch] = []
    for kind in dict.fromkeys(branch.kind for branch in stream.branches):
        alike = [branch for branch in stream.branches if branch.kind == kind and branch.skip_scale is not None]
        factors = [round(branch.skip_scale or 0.0, 6) for branch in alike]
        usual = max(dict.fromkeys(factors), key=factors.count, default=1.0)
        found += [branch for branch, factor in zip(alike, factors, strict=True) if factor != usual]
    return found


def _write(branch: Branch, weights: dict[str, WeightMeasure], fans: dict[str, int]) -> float | None:
    """2g²/α² of one branch, g the largest gain of its writers relative to Xavier's times the factor behind them; None
    where none is known, or an output norm makes the write as large as it is."""
    gains = [weights[w].std * math.sqrt(fans[w] / 2) for w in branch.writers if w in weights and w in fans]
    alpha, factor = branch.skip_scale, 1.0 if branch.branch_scale.kind == "none" else branch.branch_scale.value
    if not gains or not alpha or factor is None or branch.output_norm is not None:
        return None
    return 2 * (max(gains) * factor) ** 2 / alpha**2


def _free(branch: Branch) -> bool:
    """Whether nothing but its weights makes a write as large as it is."""
    return branch.branch_scale.kind == "none" and branch.output_norm is None
