"""What the output loses when a branch is skipped, and what it would be if the stream ended earlier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from normprobe.measures.edits import Edit, InPlaceOfLast, Kept, Part, WithoutWrite
from normprobe.measures.extra import Extra, Subject
from normprobe.measures.runs import Run, blocks_of
from normprobe.measures.trials import Change, Trials
from normprobe.records import Basis, Branch, OpSite, Skipped, Stream
from normprobe.records.depth import DepthMeasure, Effect, Readout, SkippedBranch
from normprobe.records.extras import ExtraName

MOST = 64  # writes that are skipped one by one; of more a seeded sample
Shapes = Mapping[OpSite, torch.Size | None]


class Depth(Extra):
    """KL(p ‖ q) of the model's distribution p against q with one change, in nats, mean over the rows of its logits.

    `branches`: one write to a residual stream is replaced by 0 at its add, and everything after it runs on (Veit et al.
    2016, sec. 4.1, delete single layers so). Near 0: the branch idles on these inputs. All writes, or a seeded sample
    of `MOST`. `readouts`: the state after a block takes the place of the state after the last write, so that the
    model's own final norm and head read it (the logit lens, nostalgebraist 2020). Small early: the later blocks idle.

    A model without a head over classes has no distribution; `change`, ‖y′ − y‖ / ‖y‖ of its first output, is always
    there.
    """

    name: ClassVar[ExtraName] = "depth"

    def measure(self, subject: Subject) -> tuple[DepthMeasure | None, tuple[Skipped, ...]]:
        """One forward as it is, one for each change; small ones together, on copies of the batch (`Trials`)."""
        if any(p.device.type == "meta" for p in subject.model.parameters()):
            return None, (Skipped(what="depth", why="tensors on the meta device hold no numbers"),)
        writes = [(stream, branch) for stream in subject.anatomy.streams for branch in _writes(stream)]
        if not writes:
            return None, (Skipped(what="depth", why="the model has no residual stream"),)
        generator = torch.Generator().manual_seed(subject.seed)
        drawn = torch.randperm(len(writes), generator=generator, device="cpu")[:MOST]
        skips = [_WithoutWrite(*writes[int(index)]) for index in drawn.sort().values]
        trials = Trials(subject, [*skips, *_early_ends(subject)])
        if trials.reference is None:
            return None, (Skipped(what="depth", why="the model returned no floating point tensor"),)
        found = list(trials.effects())
        basis = Basis(
            unit="nat" if trials.reference.logits else "1",
            dtype=str(trials.reference.rows.dtype).removeprefix("torch."),
            count=len(trials.reference.rows),
            exact=len(skips) == len(writes),
        )
        measure = DepthMeasure(
            basis=basis,
            writes=len(writes),
            branches=tuple(change.row(effect) for change, effect in found if isinstance(change, _WithoutWrite)),
            readouts=tuple(change.row(effect) for change, effect in found if isinstance(change, _EarlyEnd)),
        )
        return measure, tuple(trials.skipped)


def _writes(stream: Stream) -> list[Branch]:
    """One branch for every add; those that are merged before it share it."""
    return list({branch.add: branch for branch in stream.branches}.values())


def _early_ends(subject: Subject) -> list[_EarlyEnd]:
    ends = [(stream, block) for stream in subject.anatomy.streams for block in blocks_of(stream)]
    return [_EarlyEnd(s, block) for s, block in ends if block.branches[-1].add != s.branches[-1].add]


class _WithoutWrite(Change):
    """A write is replaced by 0."""

    def __init__(self, stream: Stream, branch: Branch) -> None:
        self.stream, self.branch = stream, branch
        self.what = f"the write of {branch.place} to {stream.name} replaced by 0"
        self.sites = (branch.add,)

    def edits(self, part: Part, whole: Shapes) -> tuple[Edit, ...]:
        return (WithoutWrite(self.branch, part, whole[self.branch.add] or ()),)

    def row(self, effect: Effect) -> SkippedBranch:
        merged = [each for each in self.stream.branches if each.add == self.branch.add]
        return SkippedBranch(
            stream=self.stream.name,
            branch=self.stream.branches.index(merged[-1]),
            path=self.branch.place,
            block=self.branch.block,
            kind="+".join(dict.fromkeys(each.kind for each in merged)),
            effect=effect,
        )


class _EarlyEnd(Change):
    """The state after a block takes the place of the last one."""

    def __init__(self, stream: Stream, block: Run) -> None:
        self.stream, self.block = stream, block
        self.what = f"{stream.name} read out after {block.name}"
        self.sites = (block.branches[-1].add, stream.branches[-1].add)

    def edits(self, part: Part, whole: Shapes) -> tuple[Edit, ...]:
        kept = Kept(part, whole[self.sites[0]] or ())
        return kept, InPlaceOfLast(kept, whole[self.sites[1]] or ())

    def row(self, effect: Effect) -> Readout:
        return Readout(stream=self.stream.name, block=self.block.name, execution=self.block.execution, effect=effect)
