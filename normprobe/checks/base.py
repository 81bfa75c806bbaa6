"""What every check shares: its facts, its limits with their sources, and the one comparison.

A check is a pure function of a report's records. It yields a `Finding` for every claim it can stand on, a
`Skipped` for everything it could not look at, and nothing where all is well. Nothing in this package imports
torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import ClassVar, TypeAlias

from normprobe.records import Finding, Fix, ReportData, Severity, Skipped
from normprobe.records.sweep import SweepReport

Outcome: TypeAlias = Iterator[Finding | Skipped]

# What a probe gives only when it is asked to, and the option that asks.
SIGNAL = "the signal (--level forward)"
GRADIENTS = "gradients (--backward)"
OPTIMISER = "an optimiser (--optimizer)"
COST = "what norms cost (--measures cost)"


class Needs(Flag):
    """What a check has to be given before it can speak."""

    STRUCTURE = auto()
    WEIGHTS = auto()
    FORWARD = auto()
    BACKWARD = auto()
    OPTIMIZER = auto()
    CONFIG = auto()
    SWEEP = auto()

    def words(self) -> list[str]:
        """The names of the flags that are set, in lower case and in the order of their declaration."""
        return [(flag.name or "").lower() for flag in Needs if flag in self]


class Unit(str, Enum):
    """Unit of a limit. `ONE` is the unit of the tensor that was measured."""

    ONE = "1"
    LOGIT = "logit"
    RATIO = "ratio"


@dataclass(frozen=True)
class Limit:
    """A limit as the documentation shows it: `name` is the field of the check that holds `value`, `least` what settings
    may lower it to."""

    name: str
    value: float
    unit: str
    source: str
    least: float = 0.0


def limit(value: float, *, unit: Unit, source: str, least: float = 0.0) -> float:
    """A field of a check that holds a limit, its unit and where it comes from.

    Args:
        value: the default, a finite number.
        unit: unit of `value`.
        least: what settings may lower the limit to: 0 where the quantity is never negative, more where the measure
            keeps nothing below, -inf where any number makes sense.
        source: a paper and section, a standard, a page of this documentation, or an honest "choice: …".

    Raises:
        ValueError: if `value` is not finite, is below `least`, or `source` is empty; a limit has to be able to
        fail and to explain itself.
    """
    if not math.isfinite(value) or not source.strip():
        raise ValueError(f"a limit needs a finite value and a source, found value {value!r}, source {source!r}")
    if value < least:
        raise ValueError(f"a limit of {value:g} cannot be set by settings that go down to {least:g}: give least=")
    return field(default=value, metadata={"unit": unit, "source": source, "least": least})


def _several(where: str, places: Iterable[str]) -> tuple[str, ...]:
    """Every place once; empty where that is `where` alone."""
    every = tuple(dict.fromkeys(places))
    return every if every != (where,) else ()


def number(value: float) -> str:
    """`value` with four significant digits, as it appears in messages."""
    return f"{value:.4g}"


@dataclass(frozen=True)
class Check(ABC):
    """Base of every check; subclasses are final, and their docstring is their page in the documentation.

    Attributes:
        code: NP and three digits; the first digit is the subject. Never reused.
        name: the defect in kebab-case; reads well after the word "ignore".
        severity: the worst severity that this check raises.
        since: version of normprobe that first had it.
        needs: what has to be known before it can speak.
        fixes: the rewrites that mend what it finds, to be applied together; none where none does. A finding may have
            settings of its own, or no fix.
        gives_way: codes of checks of a cause: where one of them found something and was heard, this one is left out.
        explains: codes of checks of what may come from its findings; among those of one severity they come behind it.
    """

    code: ClassVar[str]
    name: ClassVar[str]
    severity: ClassVar[Severity]
    since: ClassVar[str]
    needs: ClassVar[Needs] = Needs.STRUCTURE
    fixes: ClassVar[tuple[Fix, ...]] = ()
    gives_way: ClassVar[tuple[str, ...]] = ()
    explains: ClassVar[tuple[str, ...]] = ()

    @property
    def fix(self) -> str | None:
        """Name of the rewrite that mends what it finds, the first of several; None where none does."""
        return self.fixes[0].rewrite if self.fixes else None

    @abstractmethod
    def check(self, data: ReportData) -> Outcome:
        """Yield what was found, and what could not be looked at, in the records of `data`."""

    def run(self, data: ReportData) -> Outcome:
        """`check`, or one `Skipped` where the level of the probe cannot give what this check needs."""
        if Needs.BACKWARD in self.needs and data.level != "backward":
            why = f'needs gradients, the probe ran at level "{data.level}": run it at level "backward"'
            yield self.skip(why, unasked=GRADIENTS)
        elif Needs.OPTIMIZER in self.needs and data.measurements.optimizer is None:
            yield self.skip("no optimiser was given: pass optimizer= to normprobe.probe", unasked=OPTIMISER)
        elif Needs.FORWARD in self.needs and data.level == "structure":
            why = 'needs a measured forward pass, the probe ran at level "structure"'
            yield self.skip(why, unasked=SIGNAL)
        else:
            yield from self.check(data)

    @staticmethod
    def exceeds(value: float, most: float = math.inf, *, least: float = -math.inf) -> bool:
        """Whether `value` lies outside [least, most]; a value that is not finite always does."""
        return not (math.isfinite(value) and least <= value <= most)

    @classmethod
    def limits(cls) -> tuple[Limit, ...]:
        """The limits of this check in the order of their declaration, with their default values."""
        held = [(item, item.metadata) for item in dataclasses.fields(cls) if "source" in item.metadata]
        return tuple(
            Limit(item.name, getattr(cls, item.name), told["unit"].value, told["source"], told["least"])
            for item, told in held
        )

    @classmethod
    def page(cls) -> str:
        """The documentation text: the class docstring without its indentation."""
        return inspect.cleandoc(cls.__doc__ or "")

    @classmethod
    def summary(cls) -> str:
        """The first line of the documentation text."""
        return cls.page().partition("\n")[0]

    def finding(
        self,
        where: str,
        message: str,
        *,
        value: float | str | None = None,
        against: str | None = None,
        bound: float | None = None,
        source: str | None = None,
        severity: Severity | None = None,
        places: Iterable[str] = (),
        about: str = "",
        fixes: tuple[Fix, ...] | None = None,
    ) -> Finding:
        """A finding of this check.

        Args:
            where: place of the fault, "." for the whole model.
            message: what was found, without the place, so that equal findings can be gathered.
            value: what was measured.
            against: name of the limit that `value` exceeds; it fills limit, unit and source.
            bound: the limit, when it follows from the data (a dtype's range) and is no field of the check.
            source: where the claim comes from, when it stands on no limit or on `bound`.
            severity: the severity, when it is milder than the check's own.
            places: every place, when the finding stands for several.
            about: what at the place it is about, where this check can find several things there.
            fixes: what mends it, where that is not what mends all that this check finds; empty where nothing does.

        Raises:
            ValueError: if neither `against` nor `source` says where the claim comes from.
        """
        known, mends = self._named(against, source), self.fixes if fixes is None else fixes
        return Finding(
            code=self.code,
            name=self.name,
            severity=severity or self.severity,
            where=where or ".",
            places=_several(where or ".", places),
            about=about,
            message=message,
            value=value,
            limit=getattr(self, known.name) if known else bound,
            unit=known.unit if known else "",
            source=self._origin_of(known) if known and source in (None, known.source) else str(source),
            fix=mends[0].rewrite if mends else None,
            fixes=mends,
        )

    def _named(self, against: str | None, source: str | None) -> Limit | None:
        """The limit of this name; None where a source stands in its place."""
        known = next((item for item in self.limits() if item.name == against), None)
        if source is None and known is None:
            raise ValueError(f"{self.code}: a finding needs a source or one of the limits, found {against!r}")
        return known

    def _origin_of(self, known: Limit) -> str:
        """Where a limit comes from: its source, or the settings where they changed it."""
        if getattr(self, known.name) == known.value:
            return known.source
        return f"settings, in place of {number(known.value)} ({known.source})"

    def skip(self, why: str, places: Iterable[str] = (), unasked: str = "") -> Skipped:
        """What this check could not look at, and why; up to three places are named, the rest counted. `unasked`: what a
        probe that was asked for more would have given it."""
        paths = tuple(dict.fromkeys(places))
        named = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
        what = f"{self.code} {self.name}" + (f" at {named}" if paths else "")
        return Skipped(what=what, why=why, unasked=unasked, places=paths)


@dataclass(frozen=True)
class SweepCheck(Check):
    """Base of a check of several models of different sizes: `normprobe sweep` asks it, an audit of one does not."""

    needs: ClassVar[Needs] = Needs.SWEEP

    def check(self, data: ReportData) -> Outcome:
        """Nothing: one model says nothing of others."""
        yield from ()

    @abstractmethod
    def judge(self, sweep: SweepReport) -> Outcome:
        """Yield what was found in a sweep, and what could not be looked at."""
