"""What a patch would change, found without a new folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

from normprobe.checkpoints.opened import Opened
from normprobe.errors import CheckpointError, NormprobeError, RewriteError
from normprobe.mending import mend
from normprobe.patching import folder
from normprobe.patching.alike.configuration import config_class
from normprobe.patching.alike.tokens import check_tokens
from normprobe.patching.built import Subject
from normprobe.patching.manifest import Became
from normprobe.patching.options import PatchOptions, Tell, room
from normprobe.patching.rewriting import refuse_nothing
from normprobe.patching.said import say_as
from normprobe.patching.scratch import Scratch
from normprobe.patching.source import read_subject
from normprobe.rewrites import Plan, Rewrite, Site, make_plan
from normprobe.structure.snapshot import Structure
from normprobe.targets.inputs import check_text_file


@dataclass(frozen=True)
class Planned:
    """What a patch would do.

    Attributes:
        plans: one for each rewrite, made on what those before it leave; those of findings are the last.
        became: the other architecture that it would be written as; None for its own.
        inputs: what the plans, and all that was measured for them, stand on.
        notes: what was found on the way.
        problem: why it would be refused, after these plans; None where it would not.
    """

    plans: tuple[Plan, ...]
    became: Became | None
    inputs: str
    notes: tuple[str, ...]
    problem: NormprobeError | None


def planned(
    checkpoint: str, rewrites: Sequence[Rewrite], options: PatchOptions | None = None, tell: Tell | None = None
) -> Planned:
    """What `patch` would change; nothing is written.

    Args:
        checkpoint, rewrites, options, tell: as of `patch`.

    Raises:
        As `patch` before it changes anything, but for what concerns the new folder.
    """
    options = options or PatchOptions()
    if options.as_type is not None:
        config_class(options.as_type)
    check_text_file(options.target)
    with (
        TemporaryDirectory(prefix="normprobe-") as place,
        read_subject(checkpoint, rewrites, options, Scratch(Path(place), alone=True)) as (subject, source),
    ):
        told = tell or (lambda stage, done, total: None)
        work, problem = _Planning(subject, source, options, Path(place), told), None
        try:
            work.run(rewrites)
        except (RewriteError, CheckpointError) as error:
            problem = error
        return Planned(tuple(work.plans), work.became, subject.described, subject.notes, problem)


@dataclass
class _Planning:
    """Plans under way.

    Attributes:
        subject, source: what would be patched.
        options, tell: as of `patch`.
        place: a folder for what is needed meanwhile.
        plans, became: as of `Planned`, so far.
    """

    subject: Subject
    source: Opened
    options: PatchOptions
    place: Path
    tell: Tell
    plans: list[Plan] = field(default_factory=list)
    became: Became | None = None

    def run(self, rewrites: Sequence[Rewrite]) -> None:
        """Plan each on the model as those before it leave it."""
        model, inputs, before = self.subject.model, self.subject.inputs, Structure.of(self.subject.model)
        further = self.options.mend is not None or self.options.as_type is not None
        for number, rewrite in enumerate(rewrites, 1):
            self.tell(rewrite.name, 0, 0)
            plan = make_plan(model, [rewrite], inputs)
            self.plans.append(plan)
            plan.check()
            if further or number < len(rewrites):
                plan.apply(done=partial(_put_away, model, Scratch(self.place)), room=room())
        if self.options.mend is not None:
            self.tell("mend", 0, 0)
            self.plans += [each.plan for each in mend(model, inputs, allow=self.options.mend).mended]
            refuse_nothing(self.plans, self.options)
        if self.options.as_type is not None:
            self.became = self._as(self.options.as_type, before)

    def _as(self, model_type: str, before: Structure) -> Became:
        """The architecture that the model can be written as, with the tokens that the tokeniser gives there."""
        found, became = say_as(self.subject, before, model_type, self.tell)
        part = self.place / "as"
        part.mkdir()
        folder.add_config(part, replace(self.subject, model=found.model), fresh=True)
        folder.add_files(part, self.subject, self.source)
        check_tokens(part, self.subject.tokenizer, trust=self.options.target.trust_remote_code)
        return became


def _put_away(model: nn.Module, scratch: Scratch, site: Site) -> None:
    """What was changed at a site goes to the disk, so that no more than one place of the model is held in memory."""
    held = dict(model.named_parameters(remove_duplicate=False))
    for parameter in (held[name] for name in site.touched if name in held):
        parameter.data = scratch.placed(parameter.data)
