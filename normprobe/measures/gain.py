"""Gain of every block, forward and backward, and what it makes over the whole depth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from normprobe.measures.chains import Chain, State, differentiable, held, rms
from normprobe.measures.extra import Extra, Subject
from normprobe.measures.loss import loss_of
from normprobe.measures.stand_ins import UndifferentiableError, differentiated
from normprobe.records import Basis, Skipped
from normprobe.records.extras import ExtraName
from normprobe.records.gain import BlockGain, ChainGain, Compounded, GainMeasure


class Gain(Extra):
    """Forward gain RMS(out) / RMS(in) and backward gain RMS(∂loss/∂in) / RMS(∂loss/∂out) of every block.

    RMS: √(mean of the squares over all features of the tokens that are no padding), in the signal's own unit, so
    that the mean of squares of a state multiplies from block to block. "in" and "out" are the states of the
    residual stream before the block's first add and after its last; in post-norm stacks a block therefore
    begins with the norm that follows the add before it. Without a stream they are the inputs of one layer and
    of the next, so that a norm or an activation between the two layers counts to the first. Over L blocks the
    gains multiply to g^L with their geometric mean g: away from 1 it grows or vanishes exponentially with depth.

    Source: He et al. 2015, sec. 2.2, for the products of the forward and the backward gain over depth.
    """

    name: ClassVar[ExtraName] = "gain"

    def measure(self, subject: Subject) -> tuple[GainMeasure | None, tuple[Skipped, ...]]:
        """One forward and one backward."""
        why = differentiable(subject.model)
        if why is not None:
            return None, (Skipped(what="gain", why=why),)
        try:
            return _measured(subject)
        except UndifferentiableError as reason:
            return None, (Skipped(what="gain", why=str(reason)),)


def _measured(subject: Subject) -> tuple[GainMeasure | None, tuple[Skipped, ...]]:
    with held(subject) as seen:
        if not seen.chains:
            why = "no two states of the signal follow from each other"
            return None, (*seen.skipped, Skipped(what="gain", why=why))
        with torch.enable_grad():
            value, loss = loss_of(seen.output, subject.inputs, subject.anatomy, subject.loss)
        with differentiated("loss"):
            chains = tuple(_chain(chain, value) for chain in seen.chains)
    return GainMeasure(loss=loss, streams=chains), seen.skipped


def _chain(chain: Chain, value: Tensor) -> ChainGain:
    states: dict[GradientEdge, State] = {s.edge: s for step in chain.steps for s in (step.start, step.end)}
    gradients = torch.autograd.grad([value], list(states), retain_graph=True, allow_unused=True)
    sizes = {edge: _size(g, states[edge]) for edge, g in zip(states, gradients, strict=True)}
    blocks = tuple(
        BlockGain(
            block=step.block,
            execution=step.execution,
            until=step.until,
            rms_in=step.start.rms,
            rms_out=step.end.rms,
            gradient_in=sizes[step.start.edge],
            gradient_out=sizes[step.end.edge],
            forward=_ratio(step.end.rms, step.start.rms),
            backward=_ratio(sizes[step.start.edge], sizes[step.end.edge]),
        )
        for step in chain.steps
    )
    first = chain.steps[0].start
    return ChainGain(
        stream=chain.name,
        basis=Basis(unit="1", dtype=str(first.dtype).removeprefix("torch."), count=first.count),
        blocks=blocks,
        forward=_compounded([block.forward for block in blocks]),
        backward=_compounded([block.backward for block in blocks]),
    )


def _size(gradient: Tensor | None, state: State) -> float:
    """0 where the loss does not depend on the state."""
    return 0.0 if gradient is None else rms(gradient, state.trunk)


def _ratio(above: float, below: float) -> float | None:
    return above / below if below != 0 else None


def _compounded(gains: Sequence[float | None]) -> Compounded | None:
    known = [gain for gain in gains if gain is not None]
    if len(known) < len(gains):
        return None
    if not all(gain > 0 for gain in known):  # 0 has no logarithm, and NaN stays NaN
        product = math.prod(known)
        return Compounded(total=product, per_block=product, blocks=len(known))
    logs = math.fsum(map(math.log, known))
    return Compounded(total=_exp(logs), per_block=_exp(logs / len(known)), blocks=len(known))


def _exp(x: float) -> float:
    return math.exp(x) if x < 709 else math.inf
