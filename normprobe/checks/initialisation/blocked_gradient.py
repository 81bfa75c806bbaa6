"""NP606."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome
from normprobe.checks.initialisation.drawn import NEEDS, DrawnCheck, usual_scheme
from normprobe.records import Fix, Initialisation, ReportData, Severity

_NAMED = 4  # parameters that the message names


@final
@dataclass(frozen=True)
class BlockedGradient(DrawnCheck):
    """Weights that are 0 and stay so, as other zeros keep the gradient from them.

    ## What it measures

    Weights, factors and gains that are nothing but zeros and that no gradient can reach: on every way from the
    outputs to them stands another zero, or an activation whose slope at 0 is 0. A zero that gets a gradient is
    taken to move, and what then gets one as well; what is left when nothing new moves stays at 0 for ever. It is
    read off the data flow of a model that is not trained: the values and the output of an attention, both factors
    of a gated MLP, the readers and the writers of a branch, a factor or a gain and the weights behind it. Biases
    count where they would let a gradient through; parameters that need no gradient are not named. And, as a
    warning where gradients were taken, branches none of whose parameters has one though one reaches their add, but for
    those that start closed by a factor of 0 which gets one itself (a gate that another input makes); and norms at the
    ends of a branch whose gain has none though the weights of the branch do: what they return is detached. Of a packed
    weight (queries, keys and values in one) single rows are named that are 0 and stay so.

    ## Why it matters

    One zero factor is a sound start (ReZero, Fixup, a zero-initialised gain): it gets a gradient from what is
    before it, moves, and the rest follows. The derivative by either of two zero factors has the other one in it:
    both stay 0 for ever, and what they are part of is dead weight. Nothing else looks wrong, and the loss falls
    as far as the other branches take it.

    ## What to do

    Leave one of them at 0 and draw the others (`Initialise`). Take the `detach` or `no_grad` behind the norm away.

    ## When to ignore it

    Never for weights that are to learn.

    ## References

    Bachlechner et al. 2021 (ReZero), sec. 3; Zhang, Dauphin & Ma 2019 (Fixup), sec. 3 (the last layer of a
    branch alone is 0).
    """

    code, name, severity, since = "NP606", "blocked-gradient", Severity.ERROR, "0.1.0"
    fixes = (Fix(rewrite="Initialise", at_places=True),)
    needs = NEEDS
    open_too = True
    explains = "NP305", "NP501", "NP502"

    def judge(self, init: Initialisation, data: ReportData) -> Outcome:
        """Yield one finding for all branches that are blocked by the same factors, and one for those without a
        gradient."""
        places = [(blocked.path, blocked.zeros) for blocked in init.blocked]
        if places:
            yield self.finding(
                places[0][0],
                _message(places[0][1]),
                value=0.0,
                source="the product rule: each derivative has the other factor in it",
                places=[path for path, _ in places],
                about="factors",
                fixes=_opened({name: None for _, zeros in places for name in zeros}, init, data),
            )
        known = {(blocked.stream, blocked.branch) for blocked in init.blocked} | set(init.closed)
        gradients = data.measurements.gradients
        branches = () if gradients is None else gradients.branches
        idle = [
            branch.path
            for branch in branches
            if branch.parameters and branch.parameter_norm == 0 and branch.activation_rms > 0
            if (branch.stream, branch.branch) not in known
        ]
        cut = [norm for branch in branches for norm in branch.cut_norms]
        why = "none of its parameters gets a gradient, though one reaches its add"
        yield from self._measured(idle, why, "measured gradient")
        why = "its gain gets no gradient, though the weights of its branch do: what it returns is detached"
        yield from self._measured(cut, why, "detached norm")

    def _measured(self, places: Sequence[str], why: str, about: str) -> Outcome:
        if places:
            yield self.finding(
                places[0],
                why,
                value=0.0,
                source="the measured gradients",
                severity=Severity.WARNING,
                places=places,
                about=about,
                fixes=(),
            )


def _opened(zeros: Iterable[str], init: Initialisation, data: ReportData) -> tuple[Fix, ...]:
    """Draws these zeros as far as `Initialise` can, but for writers in a model whose writers all start at 0."""
    roles = {site.parameter: site.roles for site in data.anatomy.weights}
    known = [name for name in zeros if name in roles or any(norm.weight == name for norm in data.anatomy.norms)]
    writers = [weight for weight in init.weights if "writer" in weight.roles]
    closed = {weight.parameter for weight in writers if all(one.mean == one.std == 0 for one in writers)}
    drawn = [name for name in known if name not in closed] or known
    scheme = usual_scheme(weight for weight in init.weights if weight.parameter not in drawn)
    return (Fix(rewrite="Initialise", settings={"scheme": scheme, "only": tuple(drawn)}),) if drawn else ()


def _message(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} is 0 and stays so: an activation behind it passes no gradient at 0"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    named = " and ".join(names) if len(names) == 2 else ", ".join(names[:_NAMED]) + more
    return f"{named} are 0 and stay so: each keeps the gradient from the others"
