"""What the output loses when a branch is skipped, and what it would be if the stream ended earlier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from normprobe.capture.watch import Handler, watch
from normprobe.measures.chains import blocks_of
from normprobe.measures.distributions import Reading, compare
from normprobe.measures.extra import Extra, Subject
from normprobe.measures.padding import padding_masks
from normprobe.measures.writes import factors
from normprobe.records import Basis, Branch, OpSite, Skipped, Stream
from normprobe.records.depth import DepthMeasure, Readout, SkippedBranch
from normprobe.records.extras import ExtraName

MOST = 64  # writes that are skipped one by one; of more a seeded sample


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
        """One forward, one for each write that is skipped, one for each block that is read out."""
        if any(p.device.type == "meta" for p in subject.model.parameters()):
            return None, (Skipped(what="depth", why="tensors on the meta device hold no numbers"),)
        writes = [(stream, branch) for stream in subject.anatomy.streams for branch in _writes(stream)]
        if not writes:
            return None, (Skipped(what="depth", why="the model has no residual stream"),)
        return _Passes(subject, writes).run()


class _Passes:
    """Runs the forwards of the measure and keeps what they showed."""

    def __init__(self, subject: Subject, writes: Sequence[tuple[Stream, Branch]]) -> None:
        self.subject, self.writes = subject, len(writes)
        drawn = torch.randperm(len(writes), generator=torch.Generator().manual_seed(subject.seed))[:MOST]
        self.chosen = [writes[int(index)] for index in drawn.sort().values]
        ends = [(stream, block) for stream in subject.anatomy.streams for block in blocks_of(stream)]
        self.read = [(stream, block) for stream, block in ends if block.branches[-1].add != stream.branches[-1].add]
        self.done, self.total = 0, 1 + len(self.chosen) + len(self.read)
        self.skipped: list[Skipped] = []
        self.shape: torch.Size | None = None
        self.padding = padding_masks(subject.inputs)

    def run(self) -> tuple[DepthMeasure | None, tuple[Skipped, ...]]:
        reference = self.reading({})
        if reference is None:
            return None, (Skipped(what="depth", why="the model returned no floating point tensor"),)
        branches, readouts = tuple(self.branches(reference)), tuple(self.readouts(reference))
        basis = Basis(
            unit="nat" if reference.logits else "1",
            dtype=str(reference.rows.dtype).removeprefix("torch."),
            count=len(reference.rows),
            exact=len(self.chosen) == self.writes,
        )
        measure = DepthMeasure(basis=basis, writes=self.writes, branches=branches, readouts=readouts)
        return measure, tuple(self.skipped)

    def reading(self, handlers: Mapping[OpSite, Handler], what: str = "") -> Reading | None:
        """One forward under these handlers; None, and a reason kept, where one of them could not do its work."""
        watched = watch(self.subject.model, self.subject.inputs, handlers)
        self.done += 1
        self.subject.tell("depth", self.done, self.total)
        why = next((why for site in handlers if (why := watched.reason(site)) is not None), None)
        if why is not None:
            self.skipped.append(Skipped(what=what, why=why))
            return None
        found = Reading.of(watched.output, self.subject.anatomy, self.padding)
        self.shape = self.shape or (None if found is None else found.rows.shape)
        if found is not None and found.rows.shape != self.shape:
            self.skipped.append(Skipped(what=what, why="the output has another shape then"))
            return None
        return found

    def branches(self, reference: Reading) -> Iterator[SkippedBranch]:
        for stream, branch in self.chosen:
            merged = [each for each in stream.branches if each.add == branch.add]
            what = f"the write of {branch.path} to {stream.name} replaced by 0"
            found = self.reading({branch.add: _WithoutWrite(branch)}, what)
            if found is not None:
                yield SkippedBranch(
                    stream=stream.name,
                    branch=stream.branches.index(merged[-1]),
                    path=branch.path,
                    block=branch.block,
                    kind="+".join(dict.fromkeys(each.kind for each in merged)),
                    effect=compare(reference, found),
                )

    def readouts(self, reference: Reading) -> Iterator[Readout]:
        for stream, block in self.read:
            last, kept = stream.branches[-1].add, _Kept()
            what = f"{stream.name} read out after {block.name}"
            found = self.reading({block.branches[-1].add: kept, last: _InPlaceOfLast(kept)}, what)
            if found is not None:
                effect = compare(reference, found)
                yield Readout(stream=stream.name, block=block.name, execution=block.execution, effect=effect)


def _writes(stream: Stream) -> list[Branch]:
    """One branch for every add; those that are merged before it share it."""
    return list({branch.add: branch for branch in stream.branches}.values())


class _WithoutWrite(Handler):
    """Makes the output of an add what it would be without the branch."""

    def __init__(self, branch: Branch) -> None:
        self.op, self.operand, self.apart = branch.add.op, branch.trunk, branch.apart
        self.alone: Tensor | None = None

    def before(self, arguments: Mapping[str, Any]) -> None:
        """Keep the trunk, which an add in place will overwrite.

        Raises:
            ValueError: if the operation does not add a write of its own to the trunk.
        """
        operands = [value for value in arguments.values() if isinstance(value, Tensor)]
        own = self.apart or len(operands) != 2
        if not own or not any(word in self.op for word in ("add", "sub")):
            raise ValueError(f"{self.op} has no operand of its own for the write")
        if len(operands) == 2:
            self.alone = operands[self.operand] * factors(self.op, arguments)[self.operand]
        else:
            self.alone = arguments["self"] * arguments.get("beta", 1)

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        alone, self.alone = self.alone, None
        if alone is not None:
            output.copy_(alone)


class _Kept(Handler):
    """Keeps the state after one add."""

    def __init__(self) -> None:
        self.state: Tensor | None = None

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        self.state = output.clone()


class _InPlaceOfLast(Handler):
    """Writes an earlier state over the last one."""

    def __init__(self, kept: _Kept) -> None:
        self.kept = kept

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        """Raises:
        ValueError: if the earlier state was not seen, or has another shape.
        """
        state, self.kept.state = self.kept.state, None
        if state is None or state.shape != output.shape:
            found = "not seen before it" if state is None else f"of shape {tuple(state.shape)}"
            raise ValueError(f"the last state has shape {tuple(output.shape)}, the earlier one is {found}")
        output.copy_(state)
