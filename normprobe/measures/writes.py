"""One residual add as it runs: numbers of the trunk before it, of the write, and of the stream after it.

Dims: B batch, S tokens of a sample, N = B·S tokens, K tokens that count, R sampled tokens, C features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from normprobe import stats
from normprobe.anatomy.flow.sums import accumulates
from normprobe.capture.watch import Handler
from normprobe.measures import massive
from normprobe.measures.moments import sums
from normprobe.measures.together import Together
from normprobe.measures.tokens import PIECE, norms, peaks, row, rows_at
from normprobe.measures.trunk import Trunk
from normprobe.measures.written import Norms, Operands, Seen, Written
from normprobe.records import Branch

_SMALL = 1e-2  # of one side that much smaller than the other the norms in float32 do not tell the cosine to 1e-4


class WriteHandler(Handler):
    """Measures one residual add: the operands before it runs, its output after.

    Numbers of operands include the operation's own factors (`alpha`, `beta`); they are NaN where the operation has
    no operand of its own for the write and the output is half precision or overwrites the trunk.
    """

    def __init__(self, shared: Trunk, together: Together[Seen, Written], branch: Branch) -> None:
        self.shared, self.together = shared, together
        self.trunk, self.op, self.apart = branch.trunk, branch.add.op, branch.apart
        self._written: Written | None = None
        self.failed: str | None = None
        self._sides: Norms | None = None
        self._operands: Operands | None = None

    def before(self, arguments: Mapping[str, Any]) -> None:
        """Compare the operands, one of which the operation may overwrite."""
        self._sides = self._operands = None
        given = operands(arguments)
        if len(given) != 2 or not self.apart:
            return
        scales = factors(self.op, arguments)
        trunk, write = given[self.trunk], given[1 - self.trunk]
        if trunk.shape != write.shape:
            shape = torch.broadcast_shapes(trunk.shape, write.shape)  # type: ignore[no-untyped-call]
            trunk, write = trunk.expand(shape), write.expand(shape)
        self._compare(trunk, write, scales[self.trunk], scales[1 - self.trunk])

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        """Take the numbers of the stream as it is now."""
        if self.trunk == 0 and accumulates(self.op):
            self._accumulated(arguments, output)
        x_BSC, keep = self.shared.states(output), self.together.keep
        norms_N = keep("norms", self.shared.norms(output))
        self.shared.wrote(output, norms_N)
        tokens = self.shared.tokens(x_BSC)
        tops = peaks(x_BSC)
        if tokens.kept is not None:
            tops = tops.where(tokens.weights > 0, 0.0)
        top = int(tops.argmax())  # NaN counts as the largest
        sampled = keep("sampled", stats.widen(rows_at(x_BSC, tokens.sample)))
        abs_max = float(tops[top])
        seen = Seen(
            shape=tuple(output.shape),
            dtype=output.dtype,
            tokens=tokens,
            norms=norms_N,
            abs_max=abs_max,
            top=keep("top", row(x_BSC, top)),
            massive=massive.find(x_BSC, tops, abs_max, norms_N, sampled),
            sampled=sampled,
            sums=sums(x_BSC, norms_N, tokens, keep),
            sides=self._sides,
            operands=self._operands,
        )
        self.together.add(seen, self._tell, self._refuse)

    def _tell(self, written: Written) -> None:
        self._written = written

    def _refuse(self, why: str) -> None:
        self.failed = why

    def written(self) -> Written | None:
        """The numbers; None where the write was not seen, or could not be told for the reason `failed`."""
        self.together.finish()
        return self._written

    def _accumulated(self, arguments: Mapping[str, Any], output: Tensor) -> None:
        """`addmm` and its kin: the trunk is added to a product that is not there by itself."""
        accumulator, beta = arguments["self"], float(arguments.get("beta", 1))
        if output.dtype not in (torch.float32, torch.float64) or accumulator.shape != output.shape:
            return
        if accumulator.data_ptr() != output.data_ptr():
            self._compare(accumulator, output - beta * accumulator, beta, 1.0)

    def _compare(self, trunk: Tensor, write: Tensor, skip: float, factor: float) -> None:
        """Keep the norms of trunk and write, and what bfloat16 would lose of their sum."""
        t_BSC, w_BSC = self.shared.states(trunk), self.shared.states(write)
        skipped, added = _times(self.shared.norms(trunk), skip), _times(norms(w_BSC), factor)
        product = None
        exact = trunk.dtype in (torch.float32, torch.float64)
        less, more = torch.minimum(skipped, added), torch.maximum(skipped, added)
        unclear = less < _SMALL * more if exact else torch.ones_like(skipped, dtype=torch.bool)
        if bool(unclear.any()):
            product = torch.full_like(skipped, math.nan)
            for some in torch.split(unclear.nonzero().flatten(), max(1, PIECE // t_BSC.shape[-1])):
                products = stats.widen(rows_at(t_BSC, some)) * stats.widen(rows_at(w_BSC, some))
                product[some] = products.sum(-1).to(product.dtype) * (skip * factor)
        keep, sample = self.together.keep, self.shared.tokens(t_BSC).sample
        self._sides = Norms(
            keep("trunk", skipped), keep("write", added), None if product is None else keep("product", product)
        )
        rows = keep("trunk rows", rows_at(t_BSC, sample)), keep("write rows", rows_at(w_BSC, sample))
        self._operands = Operands(*rows, skip, factor)


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


def _times(norms_N: Tensor, factor: float) -> Tensor:
    return norms_N if abs(factor) == 1 else norms_N * abs(factor)


def operands(arguments: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation reads."""
    return [value for name, value in arguments.items() if isinstance(value, Tensor) and name != "out"]
