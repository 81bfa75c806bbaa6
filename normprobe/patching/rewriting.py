"""Apply rewrites to a model whose parameters go to the disk as they change."""

from __future__ import annotations

from collections.abc import Sequence

from normprobe.capture.invoke import Inputs
from normprobe.errors import RewriteError
from normprobe.mending import mend
from normprobe.patching.built import Subject
from normprobe.patching.options import PatchOptions, Tell, room
from normprobe.patching.writing import Writing
from normprobe.rewrites import Effect, Plan, Proof, Rewrite, Site, make_plan
from normprobe.rewrites.base import Survey
from normprobe.rewrites.proof import Baseline


def rewritten(
    subject: Subject, rewrites: Sequence[Rewrite], writing: Writing, options: PatchOptions, tell: Tell
) -> tuple[tuple[Plan, ...], Proof | None]:
    """Apply one rewrite after the other, then what findings name.

    Returns:
        The plans, applied for good, and what all of them together did to the outputs.

    Raises:
        RewriteError: a rewrite has no place, did not take or could not be proven, or there was nothing to do at all.
    """
    together = len(rewrites) > 1 or options.mend is not None
    baseline = _baseline(subject, rewrites, options) if together else None
    plans = [_applied(subject, rewrite, writing, tell) for rewrite in rewrites]
    if options.mend is not None:
        tell("mend", 0, 0)
        plans += _mended(subject, options.mend, writing)
    if not plans and options.as_type is None:
        hint = "normprobe audit says what is found"
        raise RewriteError("nothing could be mended, so that nothing is written", hint=hint)
    if baseline is not None:
        return tuple(plans), baseline.compare(subject.model, subject.inputs)
    return tuple(plans), plans[0].proof if plans else None


def _baseline(subject: Subject, rewrites: Sequence[Rewrite], options: PatchOptions) -> Baseline:
    effects = [rewrite.effect for rewrite in rewrites] + ([Effect(options.mend)] if options.mend else [])
    worst = max(effects, key=lambda effect: effect.rank)
    inputs: Inputs = subject.inputs
    anatomy = Survey.of(subject.model, inputs).anatomy
    return Baseline.of(subject.model, inputs, worst, anatomy, room())


def _applied(subject: Subject, rewrite: Rewrite, writing: Writing, tell: Tell) -> Plan:
    tell(rewrite.name, 0, 0)
    plan = make_plan(subject.model, [rewrite], subject.inputs)
    left = sum(len(found.sites) for _, found in plan.steps)

    def done(site: Site) -> None:
        nonlocal left
        writing.changed(site)
        left -= 1
        if not left:
            writing.settle()
            tell("proof", 0, 0)

    plan.apply(done=done, room=room())
    if type(rewrite).fit is not Rewrite.fit:
        writing.noted(site for _, found in plan.steps for site in found.sites)
    return plan


def _mended(subject: Subject, allow: str, writing: Writing) -> list[Plan]:
    plans = [each.plan for each in mend(subject.model, subject.inputs, allow=allow).mended]
    writing.noted(site for plan in plans for _, found in plan.steps for site in found.sites)
    return plans
