"""What a new checkpoint folder holds besides its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normprobe.checkpoints.carried import carry
from normprobe.checkpoints.names import plural
from normprobe.checkpoints.opened import Opened
from normprobe.checkpoints.weights import INDEXES
from normprobe.patching.built import Subject
from normprobe.patching.configured import NAME as CONFIG
from normprobe.patching.configured import changed_fields, write_config
from normprobe.patching.manifest import NAME, Became, Manifest, Source, Step, hashes_of, header_hash, stated_path
from normprobe.report.report import Report
from normprobe.rewrites import Plan, Proof, Rewrite
from normprobe.rewrites.base import Sites
from normprobe.structure.field import FIELD
from normprobe.structure.modelling import MODULE, base_of, record_of, state_record, write_modelling
from normprobe.targets.quiet import quiet
from normprobe.version import versions

REPORTS = ("audit-before.json", "audit-after.json")
PLANS = "normprobe-plan.txt"


@dataclass(frozen=True)
class Told:
    """What was found while the folder was filled: whether it needs code, the hashes of its tensors by file, what stayed
    behind, and which architecture it became."""

    code: bool
    tensors: dict[str, dict[str, str]]
    left: tuple[str, ...]
    became: Became | None = None


def replaced(out: Path) -> tuple[str, ...]:
    """What is lost where a new folder takes the place of `out`, in a line; none where nothing is there."""
    if not out.is_dir():
        return ()
    sizes = [os.lstat(os.path.join(place, name)).st_size for place, _, names in os.walk(out) for name in names]
    what = "a patched checkpoint" if (out / NAME).is_file() else f"a folder without {NAME}"
    return (f"replaced {out}, {what}: {plural(len(sizes), 'file')}, {sum(sizes):,} bytes",)


def add_code(part: Path, subject: Subject, changes: Sequence[Mapping[str, Any]]) -> bool:
    """Let the configuration list the changes, those of an earlier patch included, and write the class that has them.

    Returns:
        Whether there are any.
    """
    model: Any = subject.model
    if not changes and getattr(model.config, FIELD, None) is None:
        return False
    base = base_of(model)
    record = record_of(model, changes, changed_fields(subject.config, model.config.to_dict()))
    state_record(model.config, base, record)
    write_modelling(part, base, record["changes"])
    return True


def add_config(part: Path, subject: Subject, *, fresh: bool = False) -> None:
    """That of the source with what changed, or a `fresh` one of another architecture; of a file that holds all in one,
    what it says of itself."""
    path, model = subject.path / CONFIG, subject.model
    config: Any = model.config
    if path.is_file() and fresh:
        with quiet():
            config.save_pretrained(part)
        return
    if path.is_file():
        write_config(path, part, subject.config, config.to_dict())
        return
    for each in filter(None, (config, getattr(model, "generation_config", None), subject.tokenizer)):
        each.save_pretrained(part)


def add_files(part: Path, subject: Subject, source: Opened) -> tuple[str, ...]:
    """The files of the source that come along.

    Returns:
        Those that stay behind, since they hold weights as they were; the weights that were patched are not among them.
    """
    if not subject.path.is_dir():
        return ()
    own = (*REPORTS, PLANS, NAME, f"{MODULE}.py")  # of an earlier patch
    made = (*own, *(path.name for path in part.iterdir()))
    replaced = {*(path.name for path in source.files), *INDEXES}
    return tuple(name for name in carry(subject.path, part, frozenset(made)) if name not in replaced)


def add_reports(part: Path, reports: Sequence[Report | None], plans: Sequence[Plan]) -> None:
    """The audits before and after, and the plans with every place."""
    (part / PLANS).write_text("\n\n".join(map(str, plans)) + "\n", encoding="utf-8")
    for name, report in zip(REPORTS, reports, strict=True):
        if report is not None:
            report.save(part / name)


def add_manifest(
    part: Path,
    subject: Subject,
    source_sum: str,
    plans: Sequence[Plan],
    proof: Proof | None,
    told: Told,
) -> Manifest:
    """What the folder says of itself; the last file."""
    manifest = Manifest(
        versions=versions(),
        source=Source(name=subject.name, revision=subject.revision, xxh3_128=source_sum),
        steps=tuple(_step(rewrite, found) for plan in plans for rewrite, found in plan.steps),
        inputs=subject.described,
        proof=proof,
        became=told.became,
        loads="code" if told.code else "plain",
        left_out=tuple(stated_path(Path(name)) for name in told.left),
        tensors=told.tensors,
        headers={name: header_hash(part / name) for name in told.tensors},
        files=hashes_of(part, told.tensors),
    )
    (part / NAME).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return manifest


def _step(rewrite: Rewrite, found: Sites) -> Step:
    refused = {each.path: each.why for each in found.refused}
    return Step(rewrite=rewrite.to_dict(), effect=rewrite.effect.value, sites=len(found.sites), refused=refused)
