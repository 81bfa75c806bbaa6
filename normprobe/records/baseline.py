"""Findings that a team knows of and has put off."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from normprobe.records.base import Record
from normprobe.records.report import Severity

BASELINE: Literal["normprobe-baseline/1"] = "normprobe-baseline/1"


class KnownFinding(Record):
    """One check at one place, and what it is about there; what was measured is no part of it, so that it holds in the
    next run too."""

    code: str = Field(pattern=r"^NP\d{3}$")
    name: str
    severity: Severity
    where: str
    about: str = ""


class Baseline(Record):
    """The findings of one run. `model` is the class of the model."""

    schema_: Literal["normprobe-baseline/1"] = Field(default=BASELINE, alias="schema")
    model: str = ""
    findings: tuple[KnownFinding, ...] = ()
