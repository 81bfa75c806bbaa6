"""Forwards with one change each: where samples do not mix, many of them run as one, on copies of the batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from normprobe.capture.invoke import Inputs, split
from normprobe.capture.watch import Handler, watch
from normprobe.measures.batchnorm_gaps import batch_size
from normprobe.measures.distributions import Reading, compare
from normprobe.measures.edits import WHOLE, Edit, Part, Several, Shape
from normprobe.measures.extra import Subject
from normprobe.measures.padding import padding_masks
from normprobe.records import OpSite, Skipped
from normprobe.records.depth import Effect

ROOM = 1 << 20  # elements of a state or an output over all copies of the batch: more gain nothing from one pass
_FEWEST = 6  # copies, two of which stay as they are: fewer save nothing
_SAME = 1e-5  # relative change of an output that rounding alone explains: products of other sizes round otherwise


class Change(ABC):
    """One change of a forward: `what` names it, `sites` are the operations where it happens."""

    what: str
    sites: tuple[OpSite, ...]

    @abstractmethod
    def edits(self, part: Part, whole: Mapping[OpSite, torch.Size | None]) -> tuple[Edit, ...]:
        """One for each site, that change the rows of `part`; `whole` are the shapes that one copy has alone."""


class Trials:
    """Runs changes and keeps what they did, in order.

    Copies of the batch run together where all inputs have one axis of samples in front. The first and the last copy
    stay as they are: where their outputs are not those of the model alone, samples mix (statistics of the batch,
    another axis in front, a router with a capacity), and from then on every change has a forward of its own.

    Attributes:
        reference: what the unchanged model returned; None where that holds no floating point tensor.
        skipped: changes that could not be made, with the reason.
    """

    def __init__(self, subject: Subject, changes: Sequence[Change]) -> None:
        self.subject, self.changes = subject, changes
        self.padding, self.skipped = padding_masks(subject.inputs), list[Skipped]()
        args, kwargs = split(subject.inputs)
        self.inputs: Inputs = kwargs or args
        shapes = {site: Shape() for change in changes for site in change.sites}
        output, _ = self._pass(self.inputs, shapes)
        self.whole = {site: shape.seen for site, shape in shapes.items()}
        self.reference = self._read(output)
        self.copies = self._copies()

    def effects(self) -> Iterator[tuple[Change, Effect]]:
        """What each change did to the output."""
        waiting, passes = list(self.changes), 1 + len(self.changes)
        self.subject.tell("depth", 1, passes)
        while waiting and self.reference is not None:
            group = waiting[: max(1, self.copies - 2)]
            found = self._together(group) if self.copies else None
            if found is None:
                self.copies, group = 0, group[:1]
                found = [(self.reference, self._alone(group[0]))]
            waiting = waiting[len(group) :]
            self.subject.tell("depth", passes - len(waiting), passes)
            for change, (full, changed) in zip(group, found, strict=True):
                if isinstance(changed, str):
                    self.skipped.append(Skipped(what=change.what, why=changed))
                else:
                    yield change, compare(full, changed)

    def _copies(self) -> int:
        """How many copies of the batch may run together; 0 where they must not."""
        if self.reference is None or batch_size(self.inputs) is None:
            return 0
        sizes = [shape.numel() for shape in self.whole.values() if shape is not None]
        copies = min(ROOM // max(1, self.reference.rows.numel(), *sizes), len(self.changes) + 2)
        return copies if copies >= _FEWEST else 0

    def _pass(self, inputs: Inputs, handlers: Mapping[OpSite, Handler]) -> tuple[Any, list[str]]:
        """The output of one forward, and why handlers could not do their work."""
        watched = watch(self.subject.model, inputs, handlers, everywhere=self.subject.everywhere)
        return watched.output, [why for site in handlers if (why := watched.reason(site)) is not None]

    def _read(self, output: Any, part: Part = WHOLE) -> Reading | None:
        return Reading.of(output, self.subject.anatomy, self.padding, part)

    def _together(self, group: Sequence[Change]) -> list[tuple[Reading, Reading | str]] | None:
        """Outputs under several changes (or why one was not made) beside an unchanged one; None where samples mix."""
        copies = len(group) + 2
        many = pytree.tree_map_only(Tensor, lambda t: t.repeat(copies, *[1] * (t.dim() - 1)), self.inputs)
        made = [change.edits(Part(copy, copies), self.whole) for copy, change in enumerate(group, 1)]
        handlers: dict[OpSite, Several] = {}
        for change, edits in zip(group, made, strict=True):
            for site, edit in zip(change.sites, edits, strict=True):
                handlers.setdefault(site, Several()).handlers.append(edit)
        try:
            output, failed = self._pass(many, handlers)
        except Exception:  # the user's forward on a batch that it was not given; each change is then run by itself
            return None
        first, *parts, last = (self._read(output, Part(copy, copies)) for copy in range(copies))
        if failed or first is None or not (self._unchanged(first) and self._unchanged(last)):
            return None
        return [(first, self._judged(edits, part)) for edits, part in zip(made, parts, strict=True)]

    def _alone(self, change: Change) -> Reading | str:
        """The output under one change, or why it was not made."""
        edits = change.edits(WHOLE, self.whole)
        output, failed = self._pass(self.inputs, dict(zip(change.sites, edits, strict=True)))
        return failed[0] if failed else self._judged(edits, self._read(output))

    def _judged(self, edits: Sequence[Edit], found: Reading | None) -> Reading | str:
        why = next((edit.why for edit in edits if edit.why is not None), None)
        if why is None and found is not None and self.reference is not None:
            return found if found.rows.shape == self.reference.rows.shape else "the output has another shape then"
        return why or "the output holds no floating point tensor then"

    def _unchanged(self, part: Reading | None) -> bool:
        """Whether this is the output of the model alone."""
        if part is None or self.reference is None or part.rows.shape != self.reference.rows.shape:
            return False
        change = compare(self.reference, part).change
        return change is not None and change <= _SAME
