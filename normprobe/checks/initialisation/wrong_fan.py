"""NP604."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome, Unit, limit, number
from normprobe.checks.initialisation.drawn import NEEDS, DrawnCheck
from normprobe.records import Fix, Initialisation, ReportData, Severity, WeightMeasure, WeightSite


@final
@dataclass(frozen=True)
class WrongFan(DrawnCheck):
    """Weights are drawn by a recipe for fan_in that was given another number than that of their inputs.

    ## What it measures

    Weights that fit no recipe with their own fans, but LeCun's, Kaiming's or torch's default with another count:
    their outputs (a matrix stored as [in, out]), or what torch's initialisers read off the shape (a stack of
    experts as one matrix with many inputs). The fans are those of the products that the recorded forward
    computed. Several weights have to agree on the recipe, so that no coincidence is told.

    ## Why it matters

    The gain of the layer is off by the root of the ratio of the counts: twice for a fourfold MLP stored as
    [in, out], and an eighth for the experts of a stack of 64.

    ## What to do

    Draw each matrix by itself, transposed where it is stored as [in, out].

    ## When to ignore it

    When the gradient's scale was to be kept instead of the signal's (`mode="fan_out"`), which is a choice for
    weights that are stored as [out, in].

    ## References

    He et al. 2015, sec. 2.2 and 2.3; PyTorch documentation, `torch.nn.init` (fans are counted for [out, in]).
    """

    code, name, severity, since = "NP604", "wrong-fan", Severity.WARNING, "0.1.0"
    fixes = (Fix(rewrite="Initialise", at_places=True),)
    needs = NEEDS
    explains = "NP301", "NP302", "NP306", "NP501", "NP502", "NP503"

    min_weights: float = limit(
        2.0, unit=Unit.ONE, source="choice: one weight fits a wrong count by chance, two of a role seldom do"
    )

    def judge(self, init: Initialisation, data: ReportData) -> Outcome:
        """Yield one finding for the weights of each role and recipe."""
        sites = {site.parameter: site for site in data.anatomy.weights}
        groups: dict[tuple[str, str], list[WeightMeasure]] = {}
        for weight in init.weights:
            for recipe in _told(weight, sites.get(weight.parameter)):
                groups.setdefault((weight.roles[0], recipe), []).append(weight)
        for (role, recipe), weights in groups.items():
            if len(weights) >= self.min_weights:
                first, site = weights[0], sites[weights[0].parameter]
                yield self.finding(
                    first.parameter,
                    f"{len(weights)} {role} weights, {site.fan_in} inputs and {site.fan_out} outputs each, fit "
                    f"{recipe} with another count than that of the inputs: their gain is {number(first.gain)}",
                    value=first.gain,
                    against="min_weights",
                    places=[w.parameter for w in weights],
                    fixes=_by(recipe),
                )


def _by(recipe: str) -> tuple[Fix, ...]:
    """Draws by the recipe that was meant, with the right fans; nothing where `Initialise` does not have it."""
    if recipe not in ("lecun", "kaiming"):
        return ()
    return (Fix(rewrite="Initialise", settings={"scheme": recipe}, at_places=True),)


def _told(weight: WeightMeasure, site: WeightSite | None) -> Iterator[str]:
    """The recipes by which a weight was misread; `fan_out` of a weight stored as [out, in] is a choice."""
    for recipe in weight.misread[:1]:
        if site is not None and (site.output_axis != 0 or site.kind == "experts"):
            yield recipe
