"""Apply rewrites to a model whose parameters go to the disk as they change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from normprobe.checkpoints.names import plural
from normprobe.errors import NormprobeError, RewriteError
from normprobe.mending import mend
from normprobe.patching.built import Subject
from normprobe.patching.options import PatchOptions, Tell, room
from normprobe.patching.writing import Writing
from normprobe.records import Anatomy
from normprobe.rewrites import Effect, Plan, Proof, Rewrite, Site
from normprobe.rewrites.base import Survey
from normprobe.rewrites.choices import Noted
from normprobe.rewrites.plan import plan_on
from normprobe.rewrites.proof import Baseline
from normprobe.rewrites.ran import Running
from normprobe.rewrites.unrun import found_by


@dataclass(frozen=True)
class Foreseen:
    """What is known of rewrites before any is applied.

    Attributes:
        anatomy: of the model as it is.
        first: the plan of the first of them; None where there is none.
        sites: those of all, as far as the model as it is has them.
        ran: the forward that all this is known from.
        whole: whether it has some of each of them; else their places come with those before.
    """

    anatomy: Anatomy
    first: Plan | None
    sites: tuple[Site, ...]
    ran: Running[Noted]
    whole: bool


def foreseen(subject: Subject, rewrites: Sequence[Rewrite]) -> Foreseen:
    """What `rewrites` would change, from one recorded forward.

    Raises:
        RewriteError: the first of them has no place, or another number than it expects.
    """
    ran = Running(Noted)
    survey = Survey.of(subject.model, subject.inputs, ran)
    first = plan_on(survey, rewrites[:1]) if rewrites else None
    if first is not None:
        first.check()
    sites, whole = [site for _, found in (first.steps if first else ()) for site in found.sites], True
    for rewrite in rewrites[1:]:
        found: tuple[Site, ...] = ()
        with suppress(NormprobeError):  # its places may come with those before it; its own plan says so if not
            found = found_by(rewrite, survey).sites
        sites += found
        whole = whole and bool(found)
    return Foreseen(survey.anatomy, first, tuple(sites), ran, whole)


@dataclass(frozen=True)
class Rewritten:
    """What was done to a model.

    Attributes:
        plans: applied for good.
        proof: what all of them together did to the outputs; None where nothing was done.
        gave: what the model gave for the proof.
    """

    plans: tuple[Plan, ...]
    proof: Proof | None = None
    gave: Mapping[str, Tensor] | None = None

    @property
    def outputs(self) -> list[Tensor] | None:
        """The floating outputs of the model as it is now; None where it ran with choices of the original."""
        if self.gave is None or self.proof is None or self.proof.choices_given:
            return None
        return [tensor for tensor in self.gave.values() if tensor.is_floating_point()]


def rewritten(
    subject: Subject,
    rewrites: Sequence[Rewrite],
    known: Foreseen,
    writing: Writing,
    options: PatchOptions,
    tell: Tell,
) -> Rewritten:
    """Apply one rewrite after the other, then what findings name.

    Raises:
        RewriteError: a rewrite has no place, did not take or could not be proven, or there was nothing to do at all.
    """
    together = len(rewrites) > 1 or options.mend is not None
    baseline = _baseline(subject, rewrites, known, options) if together else None
    plans: list[Plan] = []
    for rewrite in rewrites:
        tell(rewrite.name, 0, 0)
        plan = None if plans else known.first
        plan = plan or plan_on(Survey.of(subject.model, subject.inputs, Running(Noted)), [rewrite])
        plans.append(_applied(plan, writing, tell))
    if options.mend is not None:
        tell("mend", 0, 0)
        plans += _mended(subject, options.mend, writing)
    refuse_nothing(plans, options)
    if baseline is None:
        return Rewritten(tuple(plans), plans[0].proof, plans[0].gave) if plans else Rewritten(())
    after = baseline.rewritten().alone(subject.model, subject.inputs)
    return Rewritten(tuple(plans), baseline.compare(subject.model, subject.inputs, after), after.outputs)


def refuse_nothing(plans: Sequence[Plan], options: PatchOptions) -> None:
    """Refuse to write what is the checkpoint itself.

    Raises:
        RewriteError: nothing was changed, and no other architecture was asked for.
    """
    if not plans and options.as_type is None:
        hint = "normprobe audit says what is found"
        raise RewriteError("nothing could be mended, so that nothing is written", hint=hint)


def _baseline(subject: Subject, rewrites: Sequence[Rewrite], known: Foreseen, options: PatchOptions) -> Baseline:
    effects = [rewrite.effect for rewrite in rewrites] + ([Effect(options.mend)] if options.mend else [])
    worst = max(effects, key=lambda effect: effect.rank)
    return Baseline.of(subject.model, subject.inputs, worst, known.anatomy, room(), known.ran)


def _applied(plan: Plan, writing: Writing, tell: Tell) -> Plan:
    left = sum(len(found.sites) for _, found in plan.steps)

    def done(site: Site) -> None:
        nonlocal left
        writing.changed(site)
        left -= 1
        if not left:
            writing.settle()
            tell("proof", 0, 0)

    try:
        plan.apply(done=done, room=room())
    except RewriteError as error:
        unproven = plan.proof is not None and plan.proof.holds is False
        narrow = writing.narrowed(site for _, found in plan.steps for site in found.sites) if unproven else ()
        if not narrow:
            raise
        wide = str(writing.model.get_parameter(narrow[0]).dtype)[6:]
        raise _stored_narrow(error, narrow, wide) from error
    if any(type(rewrite).fit is not Rewrite.fit for rewrite, _ in plan.steps):
        writing.noted(site for _, found in plan.steps for site in found.sites)
    return plan


def _stored_narrow(error: RewriteError, names: Sequence[str], wide: str) -> RewriteError:
    """That what could not be proven may be the rounding of files that hold fewer bits than the model."""
    changed = f"{plural(len(names), 'changed weight')}, {names[0]} the first"
    save = f'from_pretrained(…, dtype="{wide}").save_pretrained(…)'
    hint = f"the files hold {changed}, in less than {wide}, and round what changes: {save} stores all alike first"
    return RewriteError(error.message, expected=error.expected, found=error.found, hint=hint)


def _mended(subject: Subject, allow: str, writing: Writing) -> list[Plan]:
    plans = [each.plan for each in mend(subject.model, subject.inputs, allow=allow).mended]
    writing.noted(site for plan in plans for _, found in plan.steps for site in found.sites)
    return plans
