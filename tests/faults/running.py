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
from normprobe.errors import InputError
from normprobe.records import Anatomy, Finding, Severity
from tests.faults.fault import Conditions, Fault, NotHereError, Site

Built: TypeAlias = tuple[nn.Module, Any]
Build: TypeAlias = Callable[[], Built]
Said: TypeAlias = Literal["found", "not told", "missed", "mild", "behind", "does not run"]


@dataclass(frozen=True)
class Outcome:
    """What became of one fault in one model.

    Attributes:
        said: "found"; "not told": the check says that it could not look, and why; "missed"; "mild": found, less
            severe than it is; "behind": something that the fault does not deserve sorts in front; "does not run": the
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
        if conditions.dtype is None and not fault.applies(self.anatomy):
            raise NotHereError("no site")
        sound = self._judgeable(conditions)
        if conditions.states is not None and all(one.fact != conditions.states for one in sound.data.declared):
            raise NotHereError(f"no configuration states {conditions.states}")
        known = {place for code, _, place in _keys(sound.findings) if code == fault.code}
        model, inputs = self._made(conditions)
        site = fault.plant(model, sound.anatomy, seed, known)
        made = None if conditions.optimizer is None else conditions.optimizer(model)
        return site, _probe(model, inputs, conditions, made)

    def _judgeable(self, conditions: Conditions) -> Report:
        try:
            return self.sound(conditions)
        except InputError as error:
            raise NotHereError("the untouched model does not run so") from error

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
    asked = {"level": conditions.level, "measures": conditions.measures, "optimizer": optimizer}
    with conditions.around():
        return normprobe.probe(model, inputs, **asked, seed=0)


def judged(subject: Subject, fault: Fault, seed: int = 0) -> Outcome | None:
    """What became of `fault` in `subject`; None where it does not apply."""
    try:
        site, report = subject.faulty(fault, seed)
    except Exception as error:  # whatever a model, or a probe of it, raises
        if _not_here(error):
            return None
        why = f"{type(error).__name__}: {error}"[:300]
        return Outcome(fault.name, fault.code, subject.name, "?", "does not run", why)
    sound = subject.sound(fault.conditions)
    try:
        said, detail = _said(fault, fault.least(sound.anatomy, site), report, sound)
    except NotHereError:
        return None
    return Outcome(fault.name, fault.code, subject.name, site.path, said, detail)


def _not_here(error: BaseException | None) -> bool:
    """Whether it, or what it came from, says that the fault does not apply."""
    while error is not None and not isinstance(error, NotHereError):
        error = error.__cause__
    return error is not None


def _said(fault: Fault, least: str, report: Report, sound: Report) -> tuple[Said, str]:
    known = set(_keys(sound.findings))
    fresh = [f for f in report.findings if not known >= set(_keys([f]))]
    mine = [f for f in fresh if f.code == fault.code]
    again = [f for f in report.findings if f.code == fault.code and f.severity.rank <= Severity(least).rank]
    if not mine and again:
        raise NotHereError("the untouched model says so too")
    if not mine:
        why = [one.why for one in report.skipped if one.what.startswith(fault.code) and one not in sound.skipped]
        return ("not told", why[0]) if why else ("missed", _codes(fresh) or "nothing new")
    first = mine[0]
    if first.severity.rank > Severity(least).rank:
        return "mild", f"{first.severity.value} in place of {least}"
    others = {code for code, severity, _ in known if severity == first.severity.value} | fault.also
    front = [f for f in fresh[: fresh.index(first)] if f.severity is first.severity and f.code not in others]
    return ("behind", _codes(front)) if front else ("found", "")


def _keys(findings: Iterable[Finding]) -> Iterator[tuple[str, str, str]]:
    """Code, severity and place of each; of findings with several places, each."""
    for finding in findings:
        for place in finding.every_place:
            yield finding.code, finding.severity.value, place


def _codes(findings: Iterable[Finding]) -> str:
    return ", ".join(f"{f.code} {f.severity.value} at {f.where}" for f in findings)
