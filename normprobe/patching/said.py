"""How a new folder says what was changed: with values and fields of the configuration alone, or with code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from normprobe.errors import CheckpointError
from normprobe.patching.alike.model import Alike, alike, switched
from normprobe.patching.built import Subject
from normprobe.patching.expressed import expressed, numbers_of, stated_beside
from normprobe.patching.manifest import Became
from normprobe.patching.options import PatchOptions, Tell
from normprobe.patching.writing import Writing
from normprobe.structure.snapshot import Structure
from normprobe.targets.config import own_code


@dataclass(frozen=True)
class Said:
    """What the folder will hold.

    Attributes:
        subject: with the model as it will be loaded.
        changes: those that need code.
        became: the architecture that it is written as; None for its own.
    """

    subject: Subject
    changes: list[dict[str, Any]]
    became: Became | None = None


def say(subject: Subject, before: Structure, writing: Writing, options: PatchOptions, tell: Tell) -> Said:
    """Find the plainest way in which the rewritten model can be written down.

    Args:
        subject: with the rewritten model.
        before: what its model was.
        writing: gets the tensors of the model by which it is replaced, if it is.
        options: may name another architecture.
        tell: as of `patch`.

    Raises:
        CheckpointError: it is no model of the architecture that was asked for, or needs code that has no place.
    """
    changes = before.changes(subject.model)
    found: Alike | None
    became = None
    if options.as_type is not None:
        found, became = say_as(subject, before, options.as_type, tell)
    elif not changes or expressed(subject.model, before, changes, subject.inputs):
        return Said(subject, [])
    else:
        _refuse_own_code(subject.model)
        found = switched(subject.model, subject.inputs, numbers_of(before, changes))
    if found is None:
        stated_beside(subject.model, before, changes, subject.inputs)
        return Said(subject, changes)
    writing.become(found.model, found.origins)
    return Said(replace(subject, model=found.model), [], became)


def say_as(subject: Subject, before: Structure, model_type: str, tell: Tell) -> tuple[Alike, Became]:
    """The model of another architecture that computes what the rewritten one does, and what is told of it.

    Raises:
        CheckpointError: there is none.
    """
    tell(f"as {model_type}", 0, 0)
    numbers = numbers_of(before, before.changes(subject.model))
    found = alike(subject.model, model_type, subject.inputs, numbers)
    return found, Became(model_type=model_type, proof=found.proof, dropped=found.dropped)


def _refuse_own_code(model: Any) -> None:
    if own_code(vars(model.config)):
        what = "the patch needs code, and the model is Python code that came with the checkpoint (auto_map)"
        hint = "normprobe.rewrite changes it in place; or what changes weights and stated numbers alone"
        raise CheckpointError(what, expected="a model of transformers", found=type(model).__name__, hint=hint)
