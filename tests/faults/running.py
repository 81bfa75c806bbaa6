"""One fault in one model: planted, probed, and held against what it has to say."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import normprobe
from normprobe import Report
from normprobe.records import Anatomy, Finding, Severity
from tests.faults.fault import Conditions, Fault, NotHereError, Site

Built: TypeAlias = tuple[nn.Module, Any]
Build: TypeAlias = Callable[[], Built]
Said: TypeAlias = Literal["found", "missed", "mild", "behind", "before", "does not run"]


@dataclass(frozen=True)
class Outcome:
    """What became of one fault in one model.

    Attributes:
        said: "found"; "missed"; "mild": found, less severe than it is; "behind": something that the fault does not
            deserve sorts in front; "before": the untouched model raises it at the same place; "does not run": the
            model with the fault, or a probe of it, raised.
        detail: what was found in its place.
    """

    fault: str
    code: str
    model: str
    site: str
    said: Said
    detail: str = ""

    def __str__(self) -> str:
        more = f": {self.detail}" if self.detail else ""
        return f"{self.code} {self.fault!r} in {self.model} at {self.site}: {self.said}{more}"


@dataclass
class Subject:
    """A model that can be built again and again, with what a probe says of it untouched, for each set of conditions."""

    name: str
    build: Build
    _anatomy: Anatomy | None = None
    _sound: dict[Conditions, Report] = field(default_factory=dict)

    @property
    def anatomy(self) -> Anatomy:
        """Of the model as it is built."""
        if self._anatomy is None:
            self._anatomy = normprobe.probe(*self.build(), level="structure").anatomy
        return self._anatomy

    def sound(self, conditions: Conditions) -> Report:
        """The report on the untouched model."""
        if conditions not in self._sound:
            model, inputs = self._made(conditions)
            made = None if conditions.sound is None else conditions.sound(model, self.anatomy)
            self._sound[conditions] = _probe(model, inputs, conditions, made)
        return self._sound[conditions]

    def faulty(self, fault: Fault, seed: int) -> tuple[Site, Report]:
        """The site at which a fault was planted, and the report on the model with it.

        Raises:
            NotHereError: it does not apply.
        """
        conditions = fault.conditions
        if not fault.applies(self.anatomy):
            raise NotHereError("no site")
        sound = self.sound(conditions)
        if conditions.states is not None and all(one.fact != conditions.states for one in sound.data.declared):
            raise NotHereError(f"no configuration states {conditions.states}")
        model, inputs = self._made(conditions)
        site = fault.plant(model, self.anatomy, seed)
        made = None if conditions.optimizer is None else conditions.optimizer(model)
        return site, _probe(model, inputs, conditions, made)

    def _made(self, conditions: Conditions) -> Built:
        model, inputs = self.build()
        inputs = copy.deepcopy(inputs)
        if conditions.inputs is not None:
            inputs = conditions.inputs(inputs)
        if conditions.prepare is not None:
            conditions.prepare(model, self.anatomy, inputs)
        if conditions.dtype is not None:
            dtype = getattr(torch, conditions.dtype)
            model.to(dtype)
            inputs = pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)
        return model, inputs


def _probe(model: nn.Module, inputs: Any, conditions: Conditions, optimizer: Any) -> Report:
    return normprobe.probe(
        model, inputs, level=conditions.level, measures=conditions.measures, optimizer=optimizer, seed=0
    )


def judged(subject: Subject, fault: Fault, seed: int = 0) -> Outcome | None:
    """What became of `fault` in `subject`; None where it does not apply."""
    try:
        site, report = subject.faulty(fault, seed)
    except NotHereError:
        return None
    except Exception as error:  # whatever a model, or a probe of it, raises
        return Outcome(
            fault.name, fault.code, subject.name, "?", "does not run", f"{type(error).__name__}: {error}"[:300]
        )
    said, detail = _said(fault, fault.least(subject.anatomy, site), report, subject.sound(fault.conditions))
    return Outcome(fault.name, fault.code, subject.name, site.path, said, detail)


def _said(fault: Fault, least: str, report: Report, sound: Report) -> tuple[Said, str]:
    known = set(_keys(sound.findings))
    fresh = [f for f in report.findings if not known >= set(_keys([f]))]
    mine = [f for f in fresh if f.code == fault.code]
    if not mine:
        again = any(f.code == fault.code for f in report.findings)
        return ("before" if again else "missed"), _codes(fresh) or "nothing new"
    first = mine[0]
    if first.severity.rank > Severity(least).rank:
        return "mild", f"{first.severity.value} in place of {least}"
    front = [f for f in fresh[: fresh.index(first)] if f.severity is first.severity and f.code not in fault.also]
    return ("behind", _codes(front)) if front else ("found", "")


def _keys(findings: Iterable[Finding]) -> Iterator[tuple[str, str, str]]:
    """Code, severity and place of each; of findings with several places, each."""
    for finding in findings:
        for place in finding.every_place:
            yield finding.code, finding.severity.value, place


def _codes(findings: Iterable[Finding]) -> str:
    return ", ".join(f"{f.code} {f.severity.value} at {f.where}" for f in findings)
