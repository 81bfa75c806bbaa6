"""What is known of a model's trunks: the residual adds, and where two states of one trunk meet again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from normprobe.anatomy.flow.steps import Flow, Step
from normprobe.anatomy.flow.walk import Link
from normprobe.anatomy.streams.moves import kept
from normprobe.anatomy.streams.parts import Part

Way = Literal["light", "projected", "gated", "mixed"]
State = tuple[Link, tuple[int, ...]]  # an earlier state of a trunk, and the ids of the writes behind it


@dataclass(frozen=True)
class Write:
    """One residual add.

    Attributes:
        step: the add.
        trunk: which of its inputs is the trunk, 0 or 1.
        source: the value from which the branch reads: where it parts from the trunk, or the state of another trunk.
        skip_scale: constant factor on the trunk; None where it is not constant.
        whole: everything between `source` and this add.
        parts: the independent branches that `whole` is the sum of, in order of time (mostly `whole` alone).
        over: earlier residual adds that lie between `source` and this add: it is parallel to them.
        way: how the trunk comes to the add: by light steps alone, or by a projection or pooling, a gate, a mixture too.
        crossed: the add of another trunk from which the branch reads.
    """

    step: Step
    trunk: int
    source: int
    skip_scale: float | None
    whole: Part
    parts: tuple[Part, ...]
    over: tuple[int, ...] = ()
    way: Way = "light"
    crossed: int | None = None

    @property
    def trunk_input(self) -> int:
        """The stream as it comes to the add."""
        return self.step.inputs[self.trunk]

    @property
    def output(self) -> int:
        """The stream after this write."""
        return self.step.outputs[0]


@dataclass
class Trunks:
    """What is known of the trunks so far: the residual adds, also by the values that they add; the sums of two states
    of one trunk with the later state (a long skip, an average over depth); the weights that draw two states put side by
    side into one, with the later state; and the choices between states of one trunk, element by element, with the
    latest state (tokens that skip a block, rows written in place); and what is taken out of a concatenation again, with
    the tensor that it is. `refused` are sums that a trunk enters with a negative factor."""

    writes: dict[int, Write] = field(default_factory=dict)
    ends: dict[int, list[int]] = field(default_factory=dict)
    merges: dict[int, int] = field(default_factory=dict)
    drawn: dict[int, int] = field(default_factory=dict)
    choices: dict[int, int] = field(default_factory=dict)
    pieces: dict[int, int] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)

    def kept(self, flow: Flow, step: Step) -> int | None:
        """The input that a step goes on from along the trunk."""
        return self.choices[step.id] if step.id in self.choices else kept(flow, step)
