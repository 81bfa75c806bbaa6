"""What the checks share that judge the stored gains and offsets of the norms."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from normprobe.checks.base import Check, Needs, Outcome
from normprobe.records import Elements, Fix, NormGain, NormSite, ReportData

TRAINED = 0.5  # at most that share of the weights of a trained model fits a distribution that one draws from
DRAWN = 0.9  # at least that share of those of a fresh one does
SEVERAL = 8  # elements from which a gain is looked at channel by channel
HUGE = 1e6  # ten thousand times the gains of most trained models, below what fresh memory holds
RESET = (Fix(rewrite="Initialise", settings={"only": "norms"}),)  # gains 1, offsets 0; for models that are not trained
_BARE = frozenset({"affine", "identity"})  # normalise nothing: a gain of 0 there is a branch that starts closed


@dataclass(frozen=True)
class Stored:
    """A norm that runs, and its gain and offset."""

    site: NormSite
    known: NormGain

    @property
    def parts(self) -> list[tuple[Literal["gain", "offset"], Elements]]:
        """Gain and offset, those that there are."""
        pairs: list[tuple[Literal["gain", "offset"], Elements | None]]
        pairs = [("gain", self.known.gain), ("offset", self.known.offset)]
        return [(name, held) for name, held in pairs if held is not None]


@dataclass(frozen=True)
class GainCheck(Check):
    """Base of a check of the gains of all norms that run."""

    needs: ClassVar[Needs] = Needs.STRUCTURE | Needs.WEIGHTS

    def check(self, data: ReportData) -> Outcome:
        """Yield what `judge` finds, or one skip where no gain was read."""
        sites = {norm.path: norm for norm in data.anatomy.norms if norm.executed and norm.kind not in _BARE}
        known = {gain.path: gain for gain in data.measurements.norm_gains}
        if not data.anatomy.norms:
            yield self.skip("no norm was found")
        elif not known and any(site.weight or site.bias for site in sites.values()):
            yield self.skip("the values of the norms' gains were not read")
        else:
            yield from self.judge([Stored(site, known[path]) for path, site in sites.items() if path in known], data)

    @abstractmethod
    def judge(self, norms: Sequence[Stored], data: ReportData) -> Outcome:
        """Yield what is wrong with these gains."""


def unset(held: Elements) -> bool:
    """Whether elements hold what nobody sets or trains (NP109)."""
    return bool(held.non_finite) or held.peak > HUGE


def looks_trained(data: ReportData) -> bool:
    """Whether the weights fit no distribution that one draws from, whatever the norms hold."""
    init = data.measurements.init
    return init is not None and init.drawn is not None and init.drawn < TRAINED


def looks_drawn(data: ReportData) -> bool:
    """Whether the weights are as they were drawn, whatever the norms hold."""
    init = data.measurements.init
    return init is not None and init.drawn is not None and init.drawn >= DRAWN


def of(count: int, total: int) -> str:
    """`all 16` or `3 of 16`."""
    return f"all {total}" if count == total else f"{count} of {total}"
