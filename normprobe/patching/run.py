"""Patch a checkpoint: read it, rewrite the model, write the new folder, and hold that against the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from torch import Tensor, nn

from normprobe.checkpoints.opened import Opened, hashing
from normprobe.checkpoints.staging import check_place, named, recover, staged
from normprobe.checkpoints.weights import read_json
from normprobe.errors import CheckpointError
from normprobe.patching import folder
from normprobe.patching.alike.configuration import config_class
from normprobe.patching.alike.tokens import check_tokens
from normprobe.patching.built import Subject
from normprobe.patching.configured import NAME as CONFIG
from normprobe.patching.load import load
from normprobe.patching.manifest import Manifest
from normprobe.patching.options import PatchOptions, Tell
from normprobe.patching.rewriting import Foreseen, foreseen, rewritten
from normprobe.patching.said import Said, say
from normprobe.patching.same import same_model
from normprobe.patching.scratch import Scratch
from normprobe.patching.source import located, read_subject
from normprobe.patching.writing import Writing
from normprobe.probing import probe
from normprobe.report.report import Report
from normprobe.rewrites import Plan, Rewrite
from normprobe.structure.restore import main_dtype
from normprobe.structure.snapshot import Structure
from normprobe.targets.config import own_code
from normprobe.targets.inputs import check_text_file
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
        InputError: no inputs can be made for it, or it rejects them.
        RewriteError: a rewrite has no place, did not take, or could not be proven.
        SettingError: `options.as_type` is no architecture.
    """
    options, told = options or PatchOptions(), tell or (lambda stage, done, total: None)
    if options.as_type is not None:
        config_class(options.as_type)
    check_text_file(options.target)
    out = named(out)
    notes = recover(out)
    check_place(out, Path(checkpoint).expanduser(), overwrite=options.overwrite)  # before anything is fetched
    check_place(out, located(checkpoint, options.reading())[0], overwrite=options.overwrite)
    notes += folder.replaced(out)
    with (
        staged(out, overwrite=options.overwrite) as part,
        read_subject(checkpoint, rewrites, options, Scratch(part)) as (subject, source),
    ):
        found = _Run(part, subject, source, options, told).patched(out, rewrites)
    return replace(found, notes=(*notes, *found.notes))


@dataclass(frozen=True)
class _Run:
    """A patch under way.

    Attributes:
        part: the folder that is filled.
        subject: what is patched.
        source: its weights.
        options, tell: as of `patch`.
    """

    part: Path
    subject: Subject
    source: Opened
    options: PatchOptions
    tell: Tell

    def patched(self, out: Path, rewrites: Sequence[Rewrite]) -> Patched:
        """Fill the folder, which will be `out`."""
        with hashing(self.source) as source_sum:
            structure, known = Structure.of(self.subject.model), foreseen(self.subject, rewrites)
            with closing(self._writing(known)) as writing:
                before = self._audit(self.subject.model)
                done = rewritten(self.subject, rewrites, known, writing, self.options, self.tell)
                said = say(self.subject, structure, writing, self.options, self.tell)
                tensors = writing.finish()
            told = self._beside(said, tensors)
            outputs = done.outputs if said.subject.model is self.subject.model else None
            after = self._audit(self._loaded(said.subject.model, outputs))
            folder.add_reports(self.part, (before, after), done.plans)
            manifest = folder.add_manifest(self.part, self.subject, source_sum.result(), done.plans, done.proof, told)
        return Patched(out, done.plans, before, after, manifest, self.subject.notes)

    def _writing(self, known: Foreseen) -> Writing:
        """The new weight files, for which the disk has to have room before anything long is done."""
        unsure = not known.whole or self.options.mend is not None or self.options.as_type is not None
        told, most = _counted(2 * self.source.nbytes, self.tell), self.options.max_shard_bytes
        return Writing(self.part, self.subject.model, self.source, most, told, sites=known.sites, unsure=unsure)

    def _beside(self, said: Said, tensors: dict[str, dict[str, str]]) -> folder.Told:
        """Add what is no weights, so that the folder can be loaded."""
        code = folder.add_code(self.part, said.subject, said.changes)
        folder.add_config(self.part, said.subject, fresh=said.became is not None)
        left = folder.add_files(self.part, self.subject, self.source)
        if said.became is not None:
            check_tokens(self.part, self.subject.tokenizer, trust=self.options.target.trust_remote_code)
        return folder.Told(code, tensors, left, said.became)

    def _loaded(self, model: nn.Module, outputs: Sequence[Tensor] | None) -> nn.Module:
        """The model as it is loaded from the new folder, which gives the `outputs` that `model` gave if they are known.

        Raises:
            CheckpointError: it holds other values than `model`, which was rewritten, or gives other outputs.
        """
        self.tell("check", 0, 0)
        with quiet(), Scratch(self.part).placing(like=model):
            loaded = _load(self.part, model)
        if not same_model(loaded, model, self.subject.inputs, outputs):
            what = "what was written holds or gives other numbers than the rewritten model, and was removed"
            raise CheckpointError(what, hint="this is a fault of normprobe: please report it with the command")
        return loaded

    def _audit(self, model: nn.Module) -> Report | None:
        if self.options.level is None:
            return None
        self.tell("audit", 0, 0)
        return probe(model, self.subject.inputs, level=self.options.level)


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


def _counted(total: int, tell: Tell) -> Callable[[int], Any]:
    """What is told of bytes, one after the other."""
    done, lock = 0, Lock()

    def told(count: int) -> None:
        nonlocal done
        with lock:  # files are read back side by side
            done += count
            tell("write", min(done, total), total)

    return told
