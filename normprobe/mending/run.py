"""`mend(model)`: apply the rewrites that findings name, as far as allowed, and probe again after each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from normprobe.capture.invoke import Inputs
from normprobe.capture.subject import check_model
from normprobe.errors import SettingError
from normprobe.inputs import or_made
from normprobe.mending.attempt import Attempts
from normprobe.mending.probed import Probed
from normprobe.probing import probe
from normprobe.records import Finding
from normprobe.report.report import Report
from normprobe.report.wording import mend_text, plural
from normprobe.rewrites import Effect, Plan


@dataclass(frozen=True)
class Left:
    """A finding that is still there, and why."""

    finding: Finding
    why: str


@dataclass(frozen=True)
class Mended:
    """A plan that stays applied, and the findings that it mended, at some of their places at least."""

    plan: Plan
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        count = sum(len(found.sites) for _, found in self.plan.steps)
        names = ", ".join(rewrite.name for rewrite, _ in self.plan.steps)
        told = [f"mended by {names}, {plural(count, 'site')}, {self.plan.effect.value}:"]
        told += [f"  {_named(finding)}" for finding in self.findings]
        return "\n".join(told + ([] if self.plan.proof is None else [f"  proof: {self.plan.proof}"]))


@dataclass(frozen=True)
class Mending:
    """What `mend` did.

    Attributes:
        before: the report before anything was changed.
        after: the report at the end; the same object where nothing was changed.
        mended: what stays applied, in order, each with its findings.
        left: what is still found, and findings that could not be looked at again, each with the reason.
    """

    before: Report
    after: Report
    mended: tuple[Mended, ...]
    left: tuple[Left, ...]

    @property
    def applied(self) -> tuple[Plan, ...]:
        """The plans that stay applied, in order, each with its proof."""
        return tuple(each.plan for each in self.mended)

    def undo(self) -> None:
        """Take every applied plan back, the last one first."""
        for each in reversed(self.applied):
            each.undo()

    def __str__(self) -> str:
        rows = [f"{plural(len(self.before.findings), 'finding')} before, {len(self.left)} left"]
        rows += [str(each) for each in self.mended]
        for each in self.left:
            rows.append(f"left: {_named(each.finding)}")
            rows.append(f"  {each.why}")
            if call := mend_text([each.finding]):
                rows.append(f"  {call}")
        return "\n".join(rows)


def mend(
    model: nn.Module,
    inputs: Inputs | None = None,
    report: Report | None = None,
    allow: str = "exact",
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Optimizer | None = None,
) -> Mending:
    """Apply the rewrites that the findings name, as far as allowed, and probe again after each.

    Findings that ask for the same rewrite with the same settings are mended together; where that fails, each by itself.
    A rewrite stays only where it mends one of its findings, and none is new, worse or out of sight; else it is taken
    back. The model is probed again at the level of `report`, under its autocast, with its further measures and by its
    settings.

    Args:
        model: changed in place.
        inputs: as for `probe`; None where the model's config says enough.
        report: a report of this model on these inputs; None to make one.
        allow: "exact", "calibrated" or "breaking": the worst effect that a rewrite may have.
        loss: as for `probe`, which `report` was made with; for reports of level "backward".
        optimizer: the same.

    Raises:
        SettingError: `model` is no module, an unknown `allow`, or a report of another model.
        InputError: no inputs could be made, or the model rejected them.
    """
    check_model(model)
    if allow not in [effect.value for effect in Effect]:
        expected = " | ".join(effect.value for effect in Effect)
        raise SettingError(f"unknown effect {allow!r}", expected=expected, found=repr(allow))
    values = or_made(model, inputs)
    before = probe(model, values, optimizer=optimizer) if report is None else _checked(model, report)
    probed = Probed(model, values, before, loss if before.data.level == "backward" else None, optimizer)
    work = Attempts(model, values, Effect(allow), probed)
    work.run()
    left = tuple(Left(finding, work.why(finding)) for finding in work.open)
    return Mending(before, work.report, tuple(Mended(plan, found) for plan, found in work.applied), left)


def _checked(model: nn.Module, report: Any) -> Report:
    if not isinstance(report, Report):
        given = f"{type(report).__name__}: {report!r:.60}"
        raise SettingError("report is none", expected="what normprobe.probe returned, or None", found=given)
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


def _named(finding: Finding) -> str:
    more = len(finding.every_place) - 1
    return f"{finding.code} {finding.name} at {finding.where}" + (f" and {more} more" if more else "")
