"""Patch a checkpoint: read it, rewrite the model, write the new folder, and say what was done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from normprobe.checkpoints.carried import carry
from normprobe.checkpoints.opened import Opened, opened, source_hash
from normprobe.checkpoints.staging import check_place, recover, staged
from normprobe.patching.built import Subject, build
from normprobe.patching.configured import write_config
from normprobe.patching.manifest import NAME, Manifest, Source, Step, hashes_of
from normprobe.patching.structure.modelling import FIELD, PREFIX, auto_map, base_of, write_modelling
from normprobe.patching.structure.snapshot import Structure
from normprobe.patching.writing import Writing
from normprobe.probing import probe
from normprobe.records import Level
from normprobe.report.report import Report
from normprobe.rewrites import Plan, Proof, Rewrite, make_plan
from normprobe.rewrites.base import Sites, Survey
from normprobe.rewrites.proof import Baseline
from normprobe.targets.options import TargetOptions
from normprobe.version import __version__, versions

REPORTS = ("audit-before.json", "audit-after.json")
Tell = Callable[[str, int, int], object]  # stage, bytes done, bytes in all


@dataclass(frozen=True)
class PatchOptions:
    """How a checkpoint is patched.

    Attributes:
        overwrite: whether the new folder may take the place of one that exists.
        max_shard_bytes: of a weight file; None keeps the files of the source.
        level: of the audits before and after; None for none.
        target: how the checkpoint is read, and which inputs are made for it.
    """

    overwrite: bool = False
    max_shard_bytes: int | None = None
    level: Level | None = "forward"
    target: TargetOptions = field(default_factory=TargetOptions)


@dataclass(frozen=True)
class Patched:
    """What came of it.

    Attributes:
        out: the new folder.
        plans: as text, each as it was applied.
        before: the audit of the checkpoint; None where none was asked for.
        after: the audit of what it became.
        manifest: as it lies in the folder.
        notes: what was found on the way.
    """

    out: Path
    plans: tuple[str, ...]
    before: Report | None
    after: Report | None
    manifest: Manifest
    notes: tuple[str, ...]


def patch(
    checkpoint: Path,
    out: Path,
    rewrites: Sequence[Rewrite],
    options: PatchOptions | None = None,
    tell: Tell | None = None,
) -> Patched:
    """Write a patched copy of `checkpoint` to `out`, whole or not at all; the checkpoint itself is never written to.

    Args:
        checkpoint: a folder with config.json and weights.
        out: the new folder.
        rewrites: applied in this order, each planned on what the one before left.
        options: how.
        tell: called as `tell(stage, bytes done, bytes in all)`.

    Raises:
        CheckpointError: the place or the checkpoint is refused, or the disk is; nothing is left of the new folder.
        TargetError: the checkpoint cannot be read.
        RewriteError: a rewrite has no place, did not take, or could not be proven.
    """
    options, told = options or PatchOptions(), tell or (lambda stage, done, total: None)
    notes = recover(out)
    check_place(out, checkpoint, overwrite=options.overwrite)
    with opened(checkpoint, allow_pickle=options.target.allow_pickle) as source:
        subject = build(checkpoint, source, options.target)
        before = audit(subject, options.level)
        with staged(out, overwrite=options.overwrite) as part:
            run = _Run(subject, source, part, options, told)
            with run.writing() as writing:
                structure = Structure.of(subject.model)
                plans, proof = run.rewritten(rewrites, writing)
                after = audit(subject, options.level)
                changes = structure.changes(subject.model)
                tensors = writing.finish()
            left = run.add_the_rest(changes, before, after)
            manifest = run.manifest(plans, proof, "code" if changes else "plain", tensors, left)
            (part / NAME).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return Patched(out, tuple(map(str, plans)), before, after, manifest, (*notes, *subject.notes))


def planned(checkpoint: Path, rewrites: Sequence[Rewrite], options: PatchOptions | None = None) -> tuple[Plan, ...]:
    """What `patch` would change; nothing is written.

    Raises:
        As `patch`, but for what concerns the new folder.
    """
    options = options or PatchOptions()
    plans = []
    with opened(checkpoint, allow_pickle=options.target.allow_pickle) as source:
        subject = build(checkpoint, source, options.target)
        for number, rewrite in enumerate(rewrites, 1):
            plans.append(make_plan(subject.model, [rewrite], subject.inputs))
            if number < len(rewrites):
                plans[-1].apply(done=lambda site: None, room=room())
    return tuple(plans)


def audit(subject: Subject, level: Level | None) -> Report | None:
    """The report of the model as it is now; None where none is asked for."""
    return None if level is None else probe(subject.model, subject.inputs, level=level)


def room() -> int:
    """Bytes of memory that a copy of the model may take to prove a rewrite: a quarter of what is free."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # a system that does not say
        return 0
    return free // 4


@dataclass(frozen=True)
class _Run:
    """One folder in the making."""

    subject: Subject
    source: Opened
    part: Path
    options: PatchOptions
    tell: Tell

    @contextmanager
    def writing(self) -> Iterator[Writing]:
        """The weight files, open until the end of the block."""
        total, done = 2 * self.source.nbytes, 0

        def told(count: int) -> None:
            nonlocal done
            done += count
            self.tell("write", min(done, total), total)

        made = Writing(self.part, self.subject.model, self.source, self.options.max_shard_bytes, told)
        try:
            yield made
        finally:
            made.close()

    def rewritten(self, rewrites: Sequence[Rewrite], writing: Writing) -> tuple[tuple[Plan, ...], Proof | None]:
        """Apply one rewrite after the other; what all of them together did to the outputs."""
        model, inputs, plans = self.subject.model, self.subject.inputs, []
        worst = max((rewrite.effect for rewrite in rewrites), key=lambda effect: effect.rank)
        several = len(rewrites) > 1
        baseline = Baseline.of(model, inputs, worst, Survey.of(model, inputs).anatomy, room()) if several else None
        for rewrite in rewrites:
            self.tell(rewrite.name, 0, 0)
            plan = make_plan(model, [rewrite], inputs)
            plans.append(plan.apply(done=writing.changed, room=room()))
            if type(rewrite).fit is not Rewrite.fit:
                writing.fitted(tuple(site for _, found in plan.steps for site in found.sites))
        return tuple(plans), baseline.compare(model, inputs) if baseline else plans[0].proof

    def add_the_rest(
        self, changes: list[dict[str, Any]], before: Report | None, after: Report | None
    ) -> tuple[str, ...]:
        """The configuration, the code that `changes` need, both reports, and the files that come along.

        Returns:
            The files that stay behind.
        """
        model: Any = self.subject.model
        if changes:
            base = base_of(model)
            every = [*(getattr(model.config, FIELD, None) or {}).get("changes", ()), *changes]
            setattr(model.config, FIELD, {"version": __version__, "base": base.__name__, "changes": every})
            model.config.auto_map = auto_map(base)
            model.config.architectures = [PREFIX + base.__name__]
            write_modelling(self.part, base, every)
        write_config(self.subject.folder, self.part, self.subject.config, model.config.to_dict())
        for name, report in zip(REPORTS, (before, after), strict=True):
            if report is not None:
                report.save(self.part / name)
        made = (*REPORTS, NAME, *(path.name for path in self.part.iterdir()))
        return carry(self.subject.folder, self.part, frozenset(made))

    def manifest(
        self,
        plans: Sequence[Plan],
        proof: Proof | None,
        loads: Literal["plain", "code"],
        tensors: dict[str, dict[str, str]],
        left: tuple[str, ...],
    ) -> Manifest:
        """What the folder says of itself."""
        return Manifest(
            versions=versions(),
            source=Source(name=str(self.subject.folder), sha256=source_hash(self.source)),
            steps=tuple(_step(rewrite, found) for plan in plans for rewrite, found in plan.steps),
            inputs=self.subject.described,
            proof=proof,
            loads=loads,
            left_out=left,
            tensors=tensors,
            files=hashes_of(self.part, tensors),
        )


def _step(rewrite: Rewrite, found: Sites) -> Step:
    return Step(
        rewrite=rewrite.to_dict(),
        effect=rewrite.effect.value,
        sites=len(found.sites),
        refused={each.path: each.why for each in found.refused},
    )
