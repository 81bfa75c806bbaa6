"""Plan, rewrite and mend: the public face of the rewrites, with inputs made where none are given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from normprobe.capture.invoke import Inputs
from normprobe.capture.subject import check_model
from normprobe.errors import RewriteError, SettingError
from normprobe.inputs import or_made
from normprobe.probing import probe
from normprobe.records import Finding
from normprobe.report.report import Report
from normprobe.report.wording import plural
from normprobe.rewrites import Effect, Plan, Rewrite, find, make_plan
from normprobe.rewrites.plan import check_rewrites

_SLACK = 0.05  # choice: a finding that moves away from its limit by less is not called worse


def plan(model: nn.Module, rewrites: Rewrite | Sequence[Rewrite], inputs: Inputs | None = None) -> Plan:
    """What `rewrites` would change in `model`; print it, then `apply()` and `undo()` it.

    Args:
        model: any module; left bit for bit as it was.
        rewrites: one, or several that are applied in this order; each finds its sites in the model as it is now.
        inputs: a tensor, a tuple (positional) or a mapping (by keyword) that the Anatomy is read on and the proof
            stands on; None where the model's config says enough.

    Raises:
        SettingError: `model` is no module, or `rewrites` holds something else than rewrites.
        InputError: no inputs could be made.
        RewriteError: no rewrite was given, or two of them would change the same module.
    """
    check_model(model)
    return make_plan(model, check_rewrites(rewrites), or_made(model, inputs))


def rewrite(model: nn.Module, rewrites: Rewrite | Sequence[Rewrite], inputs: Inputs | None = None) -> Plan:
    """`plan(model, rewrites, inputs).apply()`.

    Raises:
        SettingError: `model` is no module, or `rewrites` holds something else than rewrites.
        InputError: no inputs could be made.
        RewriteError: a rewrite has no site or another number than it expects, did not take, or could not be proven;
            the model is then bit for bit as it was.
    """
    return plan(model, rewrites, inputs).apply()


@dataclass(frozen=True)
class Left:
    """A finding that is still there, and why."""

    finding: Finding
    why: str


@dataclass(frozen=True)
class Mending:
    """What `mend` did.

    Attributes:
        before: the report before anything was changed.
        after: the report at the end; the same object where nothing was changed.
        applied: the plans that stay applied, in order, each with its proof.
        left: findings of `after`, each with the reason.
    """

    before: Report
    after: Report
    applied: tuple[Plan, ...]
    left: tuple[Left, ...]

    def undo(self) -> None:
        """Take every applied plan back, the last one first."""
        for each in reversed(self.applied):
            each.undo()

    def __str__(self) -> str:
        rows = [f"{plural(len(self.before.findings), 'finding')} before, {len(self.after.findings)} after"]
        rows += [str(each) for each in self.applied]
        rows += [f"left: {each.finding.code} at {each.finding.where}: {each.why}" for each in self.left]
        return "\n".join(rows)


def mend(model: nn.Module, inputs: Inputs | None = None, report: Report | None = None, allow: str = "exact") -> Mending:
    """Apply the rewrites that the findings name, as far as allowed, and probe again after each.

    A rewrite stays only where its findings become fewer and no finding is new or worse; else it is taken back. The
    model is probed again at the level of `report`, under its autocast and by its settings. A report does not say which
    loss its gradients were of: at level "backward" the probes after a rewrite take the default loss, so a report with a
    loss of one's own is compared with gradients of another.

    Args:
        model: changed in place.
        inputs: as for `probe`; None where the model's config says enough.
        report: a report of this model on these inputs; None to make one.
        allow: "exact", "calibrated" or "breaking": the worst effect that a rewrite may have.

    Raises:
        SettingError: `model` is no module, an unknown `allow`, or a report of another model.
        InputError: no inputs could be made, or the model rejected them.
    """
    check_model(model)
    if allow not in [effect.value for effect in Effect]:
        expected = " | ".join(effect.value for effect in Effect)
        raise SettingError(f"unknown effect {allow!r}", expected=expected, found=repr(allow))
    values = or_made(model, inputs)
    before = _checked(model, report) if report is not None else probe(model, values)
    work = _Work(model, values, Effect(allow), before)
    names = dict.fromkeys(f.fix for f in sorted(before.findings, key=lambda f: f.severity.rank) if f.fix)
    for name in names:
        work.attempt(name)
    left = tuple(Left(finding, work.why(finding)) for finding in work.report.findings)
    return Mending(before, work.report, tuple(work.applied), left)


def _checked(model: nn.Module, report: Report) -> Report:
    found = (type(model).__name__, sum(p.numel() for p in model.parameters()))
    told = (report.target.class_name, report.target.parameters)
    if found != told:
        raise SettingError(
            "the report is of another model",
            expected=f"{found[0]} with {plural(found[1], 'parameter')}",
            found=f"{told[0]} with {plural(told[1], 'parameter')}",
            hint="leave report= out, and the model is probed",
        )
    return report


class _Work:
    """Tries one rewrite after another and keeps the last report."""

    def __init__(self, model: nn.Module, inputs: Inputs, allowed: Effect, report: Report) -> None:
        self.model, self.inputs, self.allowed, self.report = model, inputs, allowed, report
        self.applied: list[Plan] = []
        self.reasons: dict[str, str] = {}
        self.refused: dict[tuple[str, str], str] = {}

    def attempt(self, name: str) -> None:
        """Apply the rewrite `name`, or note why not."""
        kind = find(name)
        if kind is None:
            self.reasons[name] = f"its mend {name} does not exist yet"
            return
        rewrite = kind()
        effect = rewrite.effect
        if effect.rank > self.allowed.rank:
            self.reasons[name] = f"{name} is {effect.value} ({effect.meaning}); allowed: {self.allowed.value}"
        else:
            self._try(rewrite)

    def _try(self, rewrite: Rewrite) -> None:
        made = make_plan(self.model, [rewrite], self.inputs)
        self.refused |= {(rewrite.name, each.path): each.why for _, found in made.steps for each in found.refused}
        try:
            made.apply()
        except RewriteError as error:
            self.reasons[rewrite.name] = f"{rewrite.name} was not applied: {error}"
            return
        try:
            told = self.report.data
            autocast, settings = told.target.autocast, told.settings
            after = probe(self.model, self.inputs, level=told.level, autocast=autocast, settings=settings)
            verdict = _verdict(rewrite.name, self.report, after)
        except BaseException:
            made.undo()
            raise
        if verdict is not None:
            made.undo()
            self.reasons[rewrite.name] = f"{rewrite.name} was applied and taken back: {verdict}"
            self.refused = {place: why for place, why in self.refused.items() if place[0] != rewrite.name}
            return
        self.applied.append(made)
        self.reasons[rewrite.name] = f"still there after {rewrite.name}"
        self.report = after

    def why(self, finding: Finding) -> str:
        """Why a finding is left."""
        if finding.fix is None:
            return "no rewrite mends it"
        whys = (self.refused.get((finding.fix, place)) for _, place in sorted(_keys(finding)))
        refused = next((why for why in whys if why is not None), None)
        if refused is not None:
            return f"{finding.fix} refused it: {refused}"
        return self.reasons.get(finding.fix, f"it came up after {finding.fix} was tried")


def _verdict(name: str, before: Report, after: Report) -> str | None:
    """Why a rewrite must be taken back; None where it did good and no harm."""
    worse = [text for finding in after.findings if (text := _worse(finding, before)) is not None]
    if worse:
        return "; ".join(worse)
    meant = {key for f in before.findings if f.fix == name for key in _keys(f)}
    return None if meant - {key for f in after.findings for key in _keys(f)} else "it mended none of its findings"


def _keys(finding: Finding) -> set[tuple[str, str]]:
    """Code and place of everything that a finding stands for."""
    return {(finding.code, place) for place in finding.every_place}


def _worse(finding: Finding, before: Report) -> str | None:
    """How a finding is new or worse at one of its places; None where it is neither."""
    known = {key: f for f in before.findings for key in _keys(f)}
    for key in sorted(_keys(finding)):
        place, old = f"{finding.code} {finding.name} at {key[1]}", known.get(key)
        if old is None:
            return f"it raised {place}"
        if finding.severity.rank < old.severity.rank:
            return f"it made {place} worse, {finding.severity.value} instead of {old.severity.value}"
        was, now = _excess(old), _excess(finding)
        if was is not None and (now is None or not now <= was + _SLACK):
            return f"it moved {place} from {old.value} to {finding.value}"
    return None


def _excess(finding: Finding) -> float | None:
    """How far the value lies from its limit, as |ln(value / limit)|; None where that has no meaning."""
    numbers: list[Any] = [finding.value, finding.limit]
    if any(not isinstance(n, (int, float)) or not math.isfinite(n) or n <= 0 for n in numbers):
        return None
    return abs(math.log(numbers[0] / numbers[1]))
