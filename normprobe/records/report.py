"""Findings, skips and the document that `--format json` prints."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from pydantic import Field

from normprobe.records.anatomy import Anatomy
from normprobe.records.base import Record
from normprobe.records.declared import Declared
from normprobe.records.fixes import Fix
from normprobe.records.measurements import Level, Measurements
from normprobe.records.settings import FailOn, Settings

SCHEMA: Literal["normprobe-report/1"] = "normprobe-report/1"


class Severity(str, Enum):
    """How bad a finding is."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"

    @property
    def rank(self) -> int:
        """0 for an error, 1 for a warning, 2 for a note."""
        return (Severity.ERROR, Severity.WARNING, Severity.NOTE).index(self)


class Finding(Record):
    """One claim: what was found at `where`, the measured value, the limit and where the limit comes from.

    `fix` names the rewrite that mends it, the first of several; `fixes` has all of them with their settings, to be
    applied together. `places` lists every place when one finding stands for several with the same value. `about` names
    what at the place it is about, where its check can find several things there: a field of a configuration, a part of
    a norm; it is the same in the next run. `known` says that a baseline has it, so that it does not fail a run.
    """

    code: str = Field(pattern=r"^NP\d{3}$")
    name: str
    severity: Severity
    where: str
    places: tuple[str, ...] = ()
    about: str = ""
    message: str
    value: float | str | None = None
    limit: float | str | None = None
    unit: str = ""
    source: str
    fix: str | None = None
    fixes: tuple[Fix, ...] = ()
    known: bool = False

    @property
    def mends(self) -> tuple[Fix, ...]:
        """`fixes`; of a report that has the name alone, that rewrite with its own settings."""
        return self.fixes or ((Fix(rewrite=self.fix),) if self.fix else ())

    @property
    def every_place(self) -> tuple[str, ...]:
        """All places that it stands for."""
        return self.places or (self.where,)

    def fails(self, fail_on: FailOn | Severity) -> bool:
        """Whether it fails a run that fails from `fail_on` on."""
        return fail_on != "never" and not self.known and self.severity.rank <= Severity(fail_on).rank


class Skipped(Record):
    """Something that was not looked at, and why. `unasked` names what it needs and the option that asks for it, where
    the probe was not asked for that; else it is empty. `places` are those at which a check did not look; empty where it
    did not at all, or where this is of no check."""

    what: str
    why: str
    unasked: str = ""
    places: tuple[str, ...] = ()


class Ignored(Record):
    """A check that the settings left out: wholly, or with the findings at some places."""

    code: str
    name: str
    why: str
    findings: int | None = None  # findings left out; None where the check did not run


class Target(Record):
    """What was probed, and with which inputs."""

    name: str = ""
    source: str = ""
    class_name: str = Field(default="", alias="class")
    parameters: int = 0  # with the buffers of integers that stand for weights
    dtype: str = ""
    device: str = ""
    inputs: str = ""
    revision: str | None = None
    autocast: str | None = None


class ReportData(Record):
    """The whole document. Fields may be added, never renamed."""

    schema_: Literal["normprobe-report/1"] = Field(default=SCHEMA, alias="schema")
    target: Target = Target()
    level: Level = "forward"
    versions: dict[str, str] = Field(default_factory=dict)
    declared: tuple[Declared, ...] = ()
    anatomy: Anatomy = Anatomy()
    measurements: Measurements = Measurements()
    settings: Settings = Settings()
    checks: tuple[str, ...] = ()  # codes of those that ran
    findings: tuple[Finding, ...] = ()
    ignored: tuple[Ignored, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
