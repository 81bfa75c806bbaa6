"""Gradients of a loss by depth."""

from __future__ import annotations

from normprobe.records.base import Record
from normprobe.records.basis import Basis
from normprobe.records.non_finite import NonFinite


class KindGradients(Record):
    """The branches of one kind in one stream, first to last: like with like, as attention and MLP differ at any depth.

    Attributes:
        branches: how many have parameters.
        span: how many writes lie from its first to its last; branches that are merged before the add are one write.
        last_to_first: ratio of the parameter norms of its last to its first branch; NaN with one branch, or a first
            norm of 0.
        expected: the same by the closed form, e^(slope · span); None where there is none.
    """

    kind: str
    branches: int
    span: int
    last_to_first: float
    expected: float | None = None


class GradientLaw(Record):
    """What a closed form says of the parameter gradients of a stack at initialisation, beside what was measured.

    A measured slope above it: the early branches get less of the gradient than their placement explains; below it:
    more. After training it says nothing.

    Attributes:
        slope: of ln norm, a write.
        last_to_first: the geometric mean of `KindGradients.expected`, as that of the measure is of the measured ratios.
        branch_rms: RMS of a branch over that of the trunk that went into it; 1 where it was not measured.
        source: the citation.
    """

    slope: float
    last_to_first: float
    branch_rms: float
    source: str


class BranchGradient(Record):
    """Gradient of one branch: L2 norm over all its parameters, and RMS of the gradient that reaches its add
    over the tokens that are no padding; NaN where none is `traced` there, as autograd does not know the add.

    `weight_norm` is the L2 norm of these parameters. For the learning rate of the measure, `update_ratio` is
    lr · parameter_norm / weight_norm, a step of gradient descent as a share of the weights, and `adam_ratio`
    lr · √parameters / weight_norm, Adam's first step, in which every entry moves by lr (Kingma & Ba 2015, sec. 2.1).
    None without a learning rate or where all weights are 0.
    `cut` says that autograd knows the trunk before this add and the write, but not the trunk as an operand of the add:
    the skip is detached; `cut_whole` that no earlier state of the stream gets a gradient from the write either: the
    branch reads a detached stream as well. `cut_norms` are the norms at its ends that ran and whose gain no gradient
    comes to.
    """

    stream: str
    branch: int
    path: str
    kind: str
    parameter_norm: float
    activation_rms: float
    traced: bool = True
    parameters: int
    weight_norm: float | None = None
    update_ratio: float | None = None
    adam_ratio: float | None = None
    cut: bool = False
    cut_whole: bool = False
    cut_norms: tuple[str, ...] = ()


class LayerGradient(Record):
    """Gradient by the output of the product with one weight, over all its entries: `output_norm` is its L2 norm."""

    parameter: str
    output_norm: float


class GradientMeasure(Record):
    """Gradients of `loss` by depth.

    Attributes:
        stream: the stream with most branches, which the next six are of; None where there is none.
        until: the last of its branches that is compared, by index: the first behind whose add the output takes features
            off the stream. There the gradient comes in from the side, so that later ones say nothing of the way. None
            where all are.
        kinds: its branches with parameters, by kind.
        last_to_first: geometric mean of the ratios of its kinds that have two branches or more; NaN where none has.
        slope: of ln norm, a write: least squares with one slope for all kinds and a level for each. NaN where no kind
            has two branches at different writes, or a norm is 0 or not finite.
        interval: the 95 % interval of the slope; None where there is no slope, or no branch more than it takes.
        layers: of a model without a stream, in order of first use.
        expected: the closed form for its placement; None where there is none, there is no slope, or the weights were
            not found to be those of an initialisation.
        lr: the learning rate that was given.
        first_non_finite: looked for where a gradient is not finite.
        non_finite_parameters: those whose gradient is not finite, in or outside the branches.
    """

    loss: str
    value: float
    basis: Basis
    branches: tuple[BranchGradient, ...]
    stream: str | None = None
    until: int | None = None
    kinds: tuple[KindGradients, ...] = ()
    last_to_first: float
    slope: float
    interval: tuple[float, float] | None = None
    layers: tuple[LayerGradient, ...] = ()
    expected: GradientLaw | None = None
    lr: float | None = None
    first_non_finite: NonFinite | None = None
    non_finite_parameters: tuple[str, ...] = ()

    def compared(self) -> tuple[BranchGradient, ...]:
        """The branches of `stream` up to `until`."""
        end = len(self.branches) if self.until is None else self.until
        return tuple(b for b in self.branches if b.stream == self.stream and b.branch <= end)
