"""Mean squared singular value of the Jacobian of every block, of the whole stack, and of the model's output."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from normprobe.measures.chains import Chain, Held, State, depends, differentiable, held
from normprobe.measures.extra import Extra, Subject
from normprobe.measures.padding import counted, padding_masks
from normprobe.measures.stand_ins import UndifferentiableError, differentiated
from normprobe.records import Basis, Skipped
from normprobe.records.extras import ExtraName
from normprobe.records.jacobian import BlockJacobian, ChainJacobian, JacobianMeasure, MeanSquare

PROBES = 8


class Jacobian(Extra):
    """Mean squared singular value tr(JᵀJ) / n of Jacobians J [m, n] at the inputs that were given.

    J leads from all n entries of one state (every token of every sample) to all m entries of another. For u with
    independent entries ±1, E|Jᵀu|² = tr(JJᵀ) = tr(JᵀJ), the same that E|Jv|² is for random v; products with Jᵀ need
    one backward through the stretch between the two states, and every kernel that can be trained has them.
    `value` is the mean of |Jᵀu|² / n over the probes, unbiased, and `standard_error` that of this mean. 1: lengths are
    kept on average. Padding is left out at both ends. The mean of ln σ² is what a depth multiplies; it is not larger
    than the logarithm of this mean.

    Source: Pennington, Schoenholz & Ganguli 2017 (dynamical isometry); the trace: Hutchinson 1990.
    """

    name: ClassVar[ExtraName] = "jacobian"

    def measure(self, subject: Subject) -> tuple[JacobianMeasure | None, tuple[Skipped, ...]]:
        """One forward, and a backward through everything for each of `PROBES` probes, twice: blocks, and ends."""
        why = differentiable(subject.model)
        if why is not None:
            return None, (Skipped(what="jacobian", why=why),)
        try:
            return _measured(subject)
        except UndifferentiableError as reason:
            return None, (Skipped(what="jacobian", why=str(reason)),)


def _measured(subject: Subject) -> tuple[JacobianMeasure | None, tuple[Skipped, ...]]:
    with held(subject) as seen, differentiated("model"):
        probes = _Probes(subject, sum(len(chain.steps) for chain in seen.chains))
        streams = tuple(_chain(chain, probes) for chain in seen.chains)
        output = tuple(_output(seen, probes))
    if not streams and not output:
        none = Skipped(what="jacobian", why="no two states of the signal follow from each other")
        return None, (*seen.skipped, none)
    return JacobianMeasure(probes=PROBES, mode="reverse", streams=streams, output=output), seen.skipped


class _Probes:
    """Draws the probes and tells how far the measure is."""

    def __init__(self, subject: Subject, blocks: int) -> None:
        self.generator = torch.Generator().manual_seed(subject.seed)
        self.tell, self.done, self.total = subject.tell, 0, blocks
        self.padding = padding_masks(subject.inputs)
        self.known: dict[tuple[Any, ...], list[float]] = {}

    def square(self, names: tuple[str, str], start: State, end: State) -> MeanSquare:
        """Of the Jacobian from `start` to `end`; the same one has the same probes, whatever it is called."""
        inputs, seen = self._count(start), counted(self.padding, start.shape)
        key = (start.edge.node, start.edge.output_nr, end.edge.node, end.edge.output_nr)
        if key not in self.known:
            self.known[key] = [_squared(end, start, self._signs(end), seen) / inputs for _ in range(PROBES)]
        found = self.known[key]
        spread = statistics.stdev(found) if all(map(math.isfinite, found)) else math.nan
        return MeanSquare(
            start=names[0],
            end=names[1],
            value=math.fsum(found) / PROBES,
            standard_error=spread / math.sqrt(PROBES),
            inputs=inputs,
            outputs=self._count(end),
        )

    def _count(self, state: State) -> int:
        """How many entries are no padding."""
        seen = counted(self.padding, state.shape)
        return state.shape.numel() if seen is None else int(seen.expand(state.shape).sum())

    def _signs(self, end: State) -> Tensor:
        bits = torch.randint(0, 2, end.shape, generator=self.generator, dtype=torch.int8, device="cpu")
        seen = counted(self.padding, end.shape)
        signs = (2 * bits - 1).to(end.device, end.dtype)
        return signs if seen is None else signs * seen.to(end.device)

    def block(self) -> None:
        self.done += 1
        self.tell("jacobian", self.done, self.total)


def _squared(end: State, start: State, probe: Tensor, seen: Tensor | None) -> float:
    """|Jᵀu|² over the entries that are `seen`; 0 where nothing leads from `start` to `end`."""
    (found,) = torch.autograd.grad([end.edge], [start.edge], [probe], retain_graph=True, allow_unused=True)
    return 0.0 if found is None else _square(found, seen)


def _square(x: Tensor, seen: Tensor | None) -> float:
    chosen = x if seen is None else x[seen.to(x.device).expand_as(x)]
    return float(chosen.double().square().sum())


def _chain(chain: Chain, probes: _Probes) -> ChainJacobian:
    blocks = []
    for step in chain.steps:
        square = probes.square((f"before {step.block}", step.ends), step.start, step.end)
        blocks.append(BlockJacobian(block=step.block, execution=step.execution, until=step.until, square=square))
        probes.block()
    first, last = chain.steps[0], chain.steps[-1]
    dtype = str(first.start.dtype).removeprefix("torch.")
    return ChainJacobian(
        stream=chain.name,
        basis=Basis(unit="1", dtype=dtype, count=PROBES, exact=False),
        blocks=tuple(blocks),
        whole=probes.square((f"before {first.block}", last.ends), first.start, last.end),
    )


def _output(seen: Held, probes: _Probes) -> Iterator[MeanSquare]:
    if seen.target is None:
        return
    starts = [(f"before {chain.steps[0].block}", chain.steps[0].start) for chain in seen.chains]
    for name, start in starts if seen.source is None else [("input", seen.source)]:
        if depends(seen.target.edge, start.edge):
            yield probes.square((name, "output"), start, seen.target)
