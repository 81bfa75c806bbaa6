"""Patch a checkpoint: read it, rewrite the model, write the new folder, and hold that against the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

from torch import nn

from normprobe.checkpoints.opened import Opened, hashing
from normprobe.checkpoints.staging import check_place, named, recover, staged
from normprobe.checkpoints.weights import read_json
from normprobe.errors import CheckpointError
from normprobe.patching import folder
from normprobe.patching.alike.configuration import config_class
from normprobe.patching.alike.model import alike, switched
from normprobe.patching.alike.tokens import check_tokens
from normprobe.patching.built import Subject, with_inputs
from normprobe.patching.configured import NAME as CONFIG
from normprobe.patching.expressed import expressed, numbers_of, same_model
from normprobe.patching.load import load
from normprobe.patching.manifest import Became, Manifest
from normprobe.patching.options import PatchOptions, Tell, room
from normprobe.patching.rewriting import rewritten
from normprobe.patching.scratch import Scratch
from normprobe.patching.source import located, opened_subject
from normprobe.patching.writing import Writing
from normprobe.probing import probe
from normprobe.records import Level
from normprobe.report.report import Report
from normprobe.rewrites import Plan, Rewrite, Site, make_plan
from normprobe.structure.restore import main_dtype
from normprobe.structure.snapshot import Structure
from normprobe.targets.config import own_code
from normprobe.targets.quiet import quiet


@dataclass(frozen=True)
class Patched:
    """What came of it.

    Attributes:
        out: the new folder.
        plans: each as it was applied.
        before: the audit of the checkpoint; None where none was asked for.
        after: the audit of the new folder, as it is loaded from there.
        manifest: as it lies in the folder.
        notes: what was found on the way.
    """

    out: Path
    plans: tuple[Plan, ...]
    before: Report | None
    after: Report | None
    manifest: Manifest
    notes: tuple[str, ...]

    @property
    def size(self) -> str:
        """Its weights in a line."""
        files = self.manifest.tensors
        total = sum((self.out / name).stat().st_size for name in files)
        tensors = sum(map(len, files.values()))
        return f"{tensors} tensors in {len(files)} file{'' if len(files) == 1 else 's'}, {total:,} bytes"

    @property
    def loading(self) -> str:
        """How it is loaded."""
        if self.manifest.loads == "plain":
            trust = ", trust_remote_code=True" if own_code(read_json(self.out / CONFIG)) else ""
            return f'from_pretrained("{self.out}"{trust})'
        return f'from_pretrained("{self.out}", trust_remote_code=True), or normprobe.load("{self.out}")'


def patch(
    checkpoint: str,
    out: Path,
    rewrites: Sequence[Rewrite],
    options: PatchOptions | None = None,
    tell: Tell | None = None,
) -> Patched:
    """Write a patched copy of `checkpoint` to `out`, whole or not at all; the checkpoint itself is never written to.

    Args:
        checkpoint: a folder, a hub id or a .gguf file.
        out: the new folder.
        rewrites: applied in this order, each planned on what the one before left.
        options: how.
        tell: called as `tell(stage, bytes done, bytes in all)`.

    Raises:
        CheckpointError: the place or the checkpoint is refused, or the disk is; nothing is left of the new folder.
        TargetError: the checkpoint cannot be read.
        RewriteError: a rewrite has no place, did not take, or could not be proven.
        SettingError: `options.as_type` is no architecture.
    """
    options, told = options or PatchOptions(), tell or (lambda stage, done, total: None)
    if options.as_type is not None:
        config_class(options.as_type)
    out = named(out)
    notes = recover(out)
    check_place(out, Path(checkpoint).expanduser(), overwrite=options.overwrite)  # before anything is fetched
    check_place(out, located(checkpoint, options.reading())[0], overwrite=options.overwrite)
    with (
        staged(out, overwrite=options.overwrite) as part,
        _read(checkpoint, rewrites, options, part) as (subject, source),
        hashing(source) as source_sum,
    ):
        before = _audit(subject.model, subject, options.level, told)
        plans, after, manifest = _made(part, subject, source, source_sum, rewrites, before, options, told)
    return Patched(out, plans, before, after, manifest, (*notes, *subject.notes))


def planned(checkpoint: str, rewrites: Sequence[Rewrite], options: PatchOptions | None = None) -> Iterator[Plan]:
    """What `patch` would change, one plan after the other before the next is made on it; nothing is written.

    Raises:
        As `patch`, but for what concerns the new folder.
    """
    options = options or PatchOptions()
    with (
        TemporaryDirectory(prefix="normprobe-") as place,
        _read(checkpoint, rewrites, options, Path(place)) as (subject, _),
    ):
        for number, rewrite in enumerate(rewrites, 1):
            plan = make_plan(subject.model, [rewrite], subject.inputs)
            yield plan
            plan.check()
            if number < len(rewrites):
                plan.apply(done=partial(_put_away, subject.model, Scratch(Path(place))), room=room())


def _put_away(model: nn.Module, scratch: Scratch, site: Site) -> None:
    """What was changed at a site goes to the disk, so that no more than one place of the model is held in memory."""
    held = dict(model.named_parameters(remove_duplicate=False))
    for parameter in (held[name] for name in site.touched if name in held):
        parameter.data = scratch.placed(parameter.data)


@contextmanager
def _read(
    checkpoint: str, rewrites: Sequence[Rewrite], options: PatchOptions, scratch: Path
) -> Iterator[tuple[Subject, Opened]]:
    """The model with inputs; what is converted as it is loaded goes into the folder `scratch`."""
    with opened_subject(checkpoint, options.reading(), Scratch(scratch)) as (subject, source):
        yield with_inputs(subject, options.inputs_for(rewrites, source.nbytes)), source


def _made(
    part: Path,
    subject: Subject,
    source: Opened,
    source_sum: Future[str],
    rewrites: Sequence[Rewrite],
    before: Report | None,
    options: PatchOptions,
    tell: Tell,
) -> tuple[tuple[Plan, ...], Report | None, Manifest]:
    """Fill the folder `part`."""
    structure = Structure.of(subject.model)
    writing = Writing(part, subject.model, source, options.max_shard_bytes, _counted(2 * source.nbytes, tell))
    try:
        plans, proof = rewritten(subject, rewrites, writing, options, tell)
        subject, changes, became = _said(subject, structure, writing, options, tell)
        tensors = writing.finish()
    finally:
        writing.close()
    code = folder.add_code(part, subject.model, changes)
    folder.add_config(part, subject, fresh=became is not None)
    left = folder.add_files(part, subject, source)
    if became is not None:
        check_tokens(part, subject.tokenizer, trust=options.target.trust_remote_code)
    loaded = _loaded(part, subject, tell)
    after = _audit(loaded, subject, options.level, tell)
    folder.add_reports(part, (before, after), plans)
    told = folder.Told(code, tensors, left, became)
    manifest = folder.add_manifest(part, subject, source_sum.result(), plans, proof, told)
    return plans, after, manifest


def _said(
    subject: Subject, structure: Structure, writing: Writing, options: PatchOptions, tell: Tell
) -> tuple[Subject, list[dict[str, Any]], Became | None]:
    """How the new folder says what changed.

    Returns:
        The model as it will be loaded, the changes that need code, and the architecture that it became.
    """
    changes = structure.changes(subject.model)
    values = [change for change in changes if change.keys() == {"path", "values"}]
    given = (subject.inputs, numbers_of(structure, values) or {})
    if options.as_type is None:
        said = not changes or expressed(subject.model, structure, changes, subject.inputs) is not None
        if not said:
            _refuse_own_code(subject.model)
        found, became = None if said else switched(subject.model, *given), None
        if found is None:
            return subject, [] if said else changes, None
    else:
        tell(f"as {options.as_type}", 0, 0)
        found = alike(subject.model, options.as_type, *given)
        became = Became(model_type=options.as_type, proof=found.proof, dropped=found.dropped)
    writing.become(found.model, found.origins)
    return replace(subject, model=found.model), [], became


def _refuse_own_code(model: Any) -> None:
    if own_code(vars(model.config)):
        what = "the patch needs code, and the model is Python code that came with the checkpoint (auto_map)"
        hint = "normprobe.rewrite changes it in place; or what changes weights and stated numbers alone"
        raise CheckpointError(what, expected="a model of transformers", found=type(model).__name__, hint=hint)


def _loaded(part: Path, subject: Subject, tell: Tell) -> nn.Module:
    """The model as it is loaded from the new folder.

    Raises:
        CheckpointError: it holds other values than the model that was rewritten, or gives other outputs.
    """
    tell("check", 0, 0)
    with quiet(), Scratch(part).placing(like=subject.model):
        model = _load(part, subject.model)
    if not same_model(model, subject.model, subject.inputs):
        what = "what was written holds or gives other numbers than the rewritten model, and was removed"
        raise CheckpointError(what, hint="this is a fault of normprobe: please report it with the command")
    return model


def _load(part: Path, model: Any) -> nn.Module:
    """By the class that was patched where that came with the checkpoint, else by transformers."""
    dtype = main_dtype(model)
    made: nn.Module
    if own_code(vars(model.config)):
        config = type(model.config).from_pretrained(part, local_files_only=True)
        made = type(model).from_pretrained(part, config=config, dtype=dtype, local_files_only=True).eval()
    else:
        made = load(part, dtype=dtype)
    return made


def _audit(model: nn.Module, subject: Subject, level: Level | None, tell: Tell) -> Report | None:
    if level is None:
        return None
    tell("audit", 0, 0)
    return probe(model, subject.inputs, level=level)


def _counted(total: int, tell: Tell) -> Callable[[int], Any]:
    """What is told of bytes, one after the other."""
    done, lock = 0, Lock()

    def told(count: int) -> None:
        nonlocal done
        with lock:  # files are read back side by side
            done += count
            tell("write", min(done, total), total)

    return told
