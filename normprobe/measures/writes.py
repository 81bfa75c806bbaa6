"""One residual add as it runs: numbers of the trunk before it, of the write, and of the stream after it.

Dims: B batch, S tokens of a sample, N = B·S tokens, K tokens that count, R sampled tokens, C features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normprobe import stats
from normprobe.capture.watch import Handler
from normprobe.measures import massive
from normprobe.measures.moments import Moments, moments
from normprobe.measures.tokens import PIECE, norms, peaks, row
from normprobe.measures.trunk import Tokens, Trunk
from normprobe.records import Branch

_SMALL = 1e-2  # of a write that much smaller than its trunk the norms in float32 do not tell the cosine to 1e-4


class Sides(NamedTuple):
    """Medians over the tokens where trunk or write are not 0.

    Attributes:
        entry: token RMS of the trunk before the write.
        write: token RMS of the write.
        ratio: RMS(write) / RMS(trunk before it).
        share: RMS(write) / RMS(state after it).
        cosine: between write and trunk.
        angle: between the trunk before and the state after, in radians.
    """

    entry: float = math.nan
    write: float = math.nan
    ratio: float = math.nan
    share: float = math.nan
    cosine: float = math.nan
    angle: float = math.nan


_Norms = tuple[Tensor, Tensor, Tensor]  # of trunk and write, and their product; NaN where the norms tell it
_Operands = tuple[Tensor, Tensor, float, float]  # sampled tokens of trunk and write, and their factors


@dataclass(frozen=True)
class _Seen:
    """What one write shows at once; the large tensors are gone afterwards.

    Attributes:
        shape, dtype: of the state.
        tokens: how many tokens count.
        abs_max: largest |x|, at feature `channel`.
        massive: entries that stand out.
    """

    shape: tuple[int, ...]
    dtype: str
    tokens: int
    abs_max: float
    channel: int
    massive: tuple[massive.Entry, ...]


@dataclass(frozen=True)
class Written(_Seen):
    """Numbers of one write, before they are given their place. Unit: the stream's own.

    Attributes:
        rms: over the tokens that count, of the token RMS; `argmax` is a flat index over all tokens.
        stable_rank: of the matrix of the sampled tokens.
        rounding: what rounding the sum to bfloat16 loses, RMS over the sampled tokens, as a share of the write's RMS.
    """

    rms: stats.Summary
    stable_rank: float
    rounding: float
    moments: Moments
    sides: Sides


class WriteHandler(Handler):
    """Measures one residual add: the operands before it runs, its output after.

    Numbers of operands include the operation's own factors (`alpha`, `beta`); they are NaN where the operation has
    no operand of its own for the write and the output is half precision or overwrites the trunk.
    """

    def __init__(self, shared: Trunk, branch: Branch) -> None:
        self.shared = shared
        self.trunk, self.op, self.apart = branch.trunk, branch.add.op, branch.apart
        self._written: Written | None = None
        self._sides: _Norms | None = None
        self._operands: _Operands | None = None

    def before(self, arguments: Mapping[str, Any]) -> None:
        """Compare the operands; an add in place will overwrite one of them."""
        self._sides = self._operands = None
        operands = _operands(arguments)
        if len(operands) == 2 and self.apart:
            scales = factors(self.op, arguments)
            trunk, write = operands[self.trunk], operands[1 - self.trunk]
            if trunk.shape != write.shape:
                shape = torch.broadcast_shapes(trunk.shape, write.shape)  # type: ignore[no-untyped-call]
                trunk, write = trunk.expand(shape), write.expand(shape)
            self._compare(trunk, write, scales[self.trunk], scales[1 - self.trunk])

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        """Take the numbers of the stream as it is now."""
        if len(_operands(arguments)) != 2:
            self._accumulated(arguments, output)
        x_BSC, norms_N = self.shared.states(output), self.shared.norms(output)
        self.shared.wrote(output, norms_N)
        tokens = self.shared.tokens(x_BSC)
        tops = peaks(x_BSC)
        if tokens.kept is not None:
            tops = tops.where(tokens.weights > 0, 0.0)
        top = int(tops.argmax())  # NaN counts as the largest
        sampled = stats.widen(_rows(x_BSC, tokens.sample))
        rest = moments(x_BSC, norms_N, tokens)
        now = _Seen(
            shape=tuple(output.shape),
            dtype=str(output.dtype).removeprefix("torch."),
            tokens=len(tokens.first) + len(tokens.rest),
            abs_max=float(tops[top]),
            channel=int(row(x_BSC, top).abs().argmax()),
            massive=massive.find(x_BSC, tops, norms_N, sampled),
        )
        self.shared.later(partial(self._finish, now, norms_N, tokens, sampled, rest, self._sides, self._operands))

    def _finish(
        self,
        now: _Seen,
        norms_N: Tensor,
        tokens: Tokens,
        sampled_RC: Tensor,
        rest: Callable[[], Moments],
        sides: _Norms | None,
        operands: _Operands | None,
    ) -> None:
        rms = stats.summary(tokens.counted(norms_N) / math.sqrt(sampled_RC.shape[-1]))
        if tokens.kept is not None:
            rms = rms._replace(argmax=int(tokens.kept[rms.argmax]))
        self._written = Written(
            **vars(now),
            rms=rms,
            stable_rank=stats.stable_rank(sampled_RC),
            moments=rest(),
            rounding=_rounding(operands),
            sides=_against(sides, norms_N, tokens, math.sqrt(sampled_RC.shape[-1])),
        )

    def written(self) -> Written | None:
        """The numbers; None where the write was not seen."""
        self.shared.finish()
        return self._written

    def _accumulated(self, arguments: Mapping[str, Any], output: Tensor) -> None:
        """`addmm` and its kin: the first operand is added to a product that is not there by itself."""
        accumulator, beta = arguments.get("self", output), float(arguments.get("beta", 1))
        if output.dtype not in (torch.float32, torch.float64) or accumulator.shape != output.shape:
            return
        if accumulator.data_ptr() != output.data_ptr():
            self._compare(accumulator, output - beta * accumulator, beta, 1.0)

    def _compare(self, trunk: Tensor, write: Tensor, skip: float, factor: float) -> None:
        """Keep the norms of trunk and write, and what bfloat16 would lose of their sum."""
        t_BSC, w_BSC = self.shared.states(trunk), self.shared.states(write)
        skipped, added = self.shared.norms(trunk) * abs(skip), norms(w_BSC) * abs(factor)
        product = torch.full_like(skipped, math.nan)
        exact = trunk.dtype in (torch.float32, torch.float64)
        unclear = added < _SMALL * skipped if exact else torch.ones_like(skipped, dtype=torch.bool)
        for some in torch.split(unclear.nonzero().flatten(), max(1, PIECE // t_BSC.shape[-1])):
            products = stats.widen(_rows(t_BSC, some)) * stats.widen(_rows(w_BSC, some))
            product[some] = products.sum(-1).to(product.dtype) * (skip * factor)
        self._sides = skipped, added, product
        sample = self.shared.tokens(t_BSC).sample
        self._operands = _rows(t_BSC, sample), _rows(w_BSC, sample), skip, factor


def factors(op: str, arguments: Mapping[str, Any]) -> tuple[float, float]:
    """Factors of the two operands of an addition.

    `rsub(a, b)` is b − alpha·a, `sub` subtracts the second, `lerp(a, b, w)` is (1 − w)·a + w·b, the others scale it.
    """
    if "lerp" in op:
        return 1.0 - float(arguments["weight"]), float(arguments["weight"])
    alpha = float(arguments.get("alpha", 1))
    if "rsub" in op:
        return -alpha, 1.0
    return 1.0, -alpha if "sub" in op else alpha


def _rounding(operands: _Operands | None) -> float:
    """What rounding the sum to bfloat16 loses, as a share of the write."""
    if operands is None:
        return math.nan
    trunk, write, skip, factor = operands
    added = factor * stats.widen(write)
    total = skip * stats.widen(trunk) + added
    lost, size = (float(torch.linalg.vector_norm(x)) for x in (total.bfloat16().float() - total, added))
    return lost / size if size else math.nan


def _against(sides: _Norms | None, norms_N: Tensor, tokens: Tokens, root: float) -> Sides:
    if sides is None:
        return Sides()
    trunk, write, product, after = (tokens.counted(each).double() for each in (*sides, norms_N))
    product = product.where(~product.isnan(), (after.square() - trunk.square() - write.square()) / 2)
    some = (trunk != 0) | (write != 0)
    if not bool(some.all()):
        trunk, write, after, product = (side[some] for side in (trunk, write, after, product))
    if not trunk.numel():
        return Sides(entry=0.0, write=0.0)
    cosine = (product / (trunk * write)).clamp(-1, 1)
    angle = torch.atan2(write * (1 - cosine.square()).sqrt(), trunk + write * cosine).where(after > 0, math.nan)
    rows = (x.float() for x in (trunk / root, write / root, write / trunk, write / after, cosine, angle))
    return Sides(*stats.medians(torch.stack(list(rows))))


def _operands(arguments: Mapping[str, Any]) -> list[Tensor]:
    return [value for value in arguments.values() if isinstance(value, Tensor)]


def _rows(x_BSC: Tensor, tokens: Tensor) -> Tensor:
    """The features [R, C] of tokens given by their flat indices."""
    return x_BSC[tokens // x_BSC.shape[1], tokens % x_BSC.shape[1]]
