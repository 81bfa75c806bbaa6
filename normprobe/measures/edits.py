"""What is changed at the adds of a stream while a forward runs, in one copy of the batch or in all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normprobe.capture.watch import Handler
from normprobe.measures.writes import factors
from normprobe.records import Branch


@dataclass(frozen=True)
class Part:
    """The rows of one of several copies of a batch that run as one batch, along the first axis."""

    copy: int = 0
    copies: int = 1

    def of(self, x: Tensor, whole: Sequence[int] | None = None) -> Tensor:
        """A view of these rows of `x`.

        Raises:
            ValueError: if `whole`, the shape that one copy has alone, says that the rows lie otherwise.
        """
        if self.copies == 1:
            return x
        if whole is not None and (not whole or x.shape != (self.copies * whole[0], *whole[1:])):
            raise ValueError(f"{self.copies} copies have shape {tuple(x.shape)}, one has {tuple(whole)}")
        return x.tensor_split(self.copies)[self.copy]


WHOLE = Part()


class Edit(Handler):
    """One change at one operation; `why` says why it was not made there, None where it was."""

    why: str | None = None


class Several(Handler):
    """All that is changed at one operation, in order."""

    def __init__(self) -> None:
        self.handlers: list[Edit] = []

    def before(self, arguments: Mapping[str, Any]) -> None:
        """Each looks at the operands."""
        for handler in self.handlers:
            handler.before(arguments)

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        """Each changes the output."""
        for handler in self.handlers:
            handler.after(arguments, output)


class Shape(Handler):
    """Notes the shape of an output."""

    def __init__(self) -> None:
        self.seen: torch.Size | None = None

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        """Note it."""
        self.seen = output.shape


class WithoutWrite(Edit):
    """Makes the output of an add what it would be without the branch, in the rows of `part`."""

    def __init__(self, branch: Branch, part: Part, whole: Sequence[int]) -> None:
        self.op, self.operand, self.apart = branch.add.op, branch.trunk, branch.apart
        self.part, self.whole = part, whole
        self.alone: Tensor | None = None

    def before(self, arguments: Mapping[str, Any]) -> None:
        """Keep the trunk, which an add in place will overwrite."""
        operands = [value for value in arguments.values() if isinstance(value, Tensor)]
        own = self.apart or len(operands) != 2
        if not own or not any(word in self.op for word in ("add", "sub")):
            self.why = f"{self.op} has no operand of its own for the write"
        elif len(operands) == 2:
            self.alone = operands[self.operand] * factors(self.op, arguments)[self.operand]
        else:
            self.alone = arguments["self"] * arguments.get("beta", 1)

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        """Write the trunk over the sum."""
        alone, self.alone = self.alone, None
        if alone is not None:
            self.part.of(output, self.whole).copy_(self.part.of(alone.expand_as(output), self.whole))


class Kept(Edit):
    """Keeps the state after one add, in the rows of `part`."""

    def __init__(self, part: Part, whole: Sequence[int]) -> None:
        self.part, self.whole = part, whole
        self.state: Tensor | None = None

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        """Copy the state."""
        self.state = self.part.of(output, self.whole).clone()


class InPlaceOfLast(Edit):
    """Writes an earlier state over the last one, in the same rows."""

    def __init__(self, kept: Kept, whole: Sequence[int]) -> None:
        self.kept, self.whole = kept, whole

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        """Write the earlier state over the last one; `why` says so where it was not seen or has another shape."""
        state, self.kept.state = self.kept.state, None
        last = self.kept.part.of(output, self.whole)
        if state is None:
            self.why = "the earlier state was not seen before the last one"
        elif state.shape != last.shape:
            self.why = f"the last state has shape {tuple(last.shape)}, the earlier one {tuple(state.shape)}"
        else:
            last.copy_(state)
