"""The residual stream after every write: token RMS, largest entry, share of the write, growth."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normprobe import stats
from normprobe.capture.watch import Handler, Watched
from normprobe.measures import massive
from normprobe.measures.tokens import as_tokens, peak, token_rms
from normprobe.records import Basis, Branch, OpSite, Skipped, Stream, StreamMeasure, StreamState


@dataclass(frozen=True)
class WrittenState:
    """Numbers of the stream after one write, before they are given their place."""

    shape: tuple[int, ...]
    dtype: str
    rms: stats.Summary
    peak: stats.Peak
    massive: tuple[massive.Entry, ...]


class WriteHandler(Handler):
    """Measures one residual add: the operands before it runs, its output after.

    `entry` is the median token RMS of the trunk operand, `ratio` the median over tokens of RMS(write) /
    RMS(trunk operand), both with the operation's own factors (`alpha`, `beta`); NaN where it has no operand
    of its own for the write and the output is half precision or overwrites the trunk.
    """

    def __init__(self, stream: Stream, branch: Branch) -> None:
        self.axis = stream.feature_axis
        self.trunk, self.op = branch.trunk, branch.add.op
        self.entry = self.ratio = math.nan
        self.state: WrittenState | None = None

    def before(self, arguments: Mapping[str, Any]) -> None:
        """Compare the operands; an add in place will overwrite one of them."""
        operands = _operands(arguments)
        if len(operands) == 2:
            a, b = (self._rms(x) * abs(f) for x, f in zip(operands, self._factors(arguments), strict=True))
            self._compare(a, b)

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        """Take the statistics of the stream as it is now."""
        if len(_operands(arguments)) != 2:
            self._accumulated(arguments, output)
        tokens = as_tokens(self._checked(output), self.axis)
        largest = peak(tokens)
        self.state = WrittenState(
            tuple(output.shape),
            str(output.dtype).removeprefix("torch."),
            stats.summary(token_rms(tokens)),
            largest,
            massive.find(tokens, largest.abs_max),
        )

    def _accumulated(self, arguments: Mapping[str, Any], output: Tensor) -> None:
        """`addmm` and its kin: the first operand is added to a product that is not there by itself."""
        accumulator, beta = arguments["self"], float(arguments.get("beta", 1))
        if output.dtype not in (torch.float32, torch.float64) or accumulator.shape != output.shape:
            return
        if accumulator.data_ptr() != output.data_ptr():
            self._compare(self._rms(accumulator) * abs(beta), self._rms(output - beta * accumulator))

    def _compare(self, a: Tensor, b: Tensor) -> None:
        """Take entry and ratio from the token RMS of both operands; tokens with 0 in both are left out."""
        trunk, write = (b, a) if self.trunk else (a, b)
        self.entry = stats.quantiles(trunk, (0.5,))[0]
        some = (trunk != 0) | (write != 0)
        if bool(some.any()):
            self.ratio = stats.quantiles(write[some] / trunk[some], (0.5,))[0]

    def _factors(self, arguments: Mapping[str, Any]) -> tuple[float, float]:
        """Factors of the two operands; `rsub(a, b)` is b − alpha·a, all others scale the second."""
        alpha = float(arguments.get("alpha", 1))
        return (alpha, 1.0) if "rsub" in self.op else (1.0, alpha)

    def _rms(self, x: Tensor) -> Tensor:
        return token_rms(as_tokens(self._checked(x), self.axis))

    def _checked(self, x: Tensor) -> Tensor:
        if x.dim() <= max(self.axis, 0) or not x.is_floating_point():
            raise ValueError(
                f"expected floating point features on axis {self.axis}, found {x.dtype} of shape {tuple(x.shape)}"
            )
        return x


def _operands(arguments: Mapping[str, Any]) -> list[Tensor]:
    return [value for value in arguments.values() if isinstance(value, Tensor)]


def write_handlers(stream: Stream) -> dict[OpSite, WriteHandler]:
    """One handler for each add of `stream`, in order; branches that are merged before an add share it."""
    return {branch.add: WriteHandler(stream, branch) for branch in stream.branches}


def read_stream(
    stream: Stream,
    handlers: Mapping[OpSite, WriteHandler],
    watched: Watched,
    lengths: Collection[int] = (),
) -> tuple[StreamMeasure | None, tuple[Skipped, ...]]:
    """The measure of one stream from what its handlers saw.

    Args:
        stream: the stream.
        handlers: those of `write_handlers(stream)`, told of one forward.
        watched: that forward.
        lengths: lengths of query sequences of the model's attention, which tell a sequence-first layout.

    Returns:
        The measure (None where no write was seen), and the writes that were not. The exponent is NaN where a
        write is missing.
    """
    skipped = [
        Skipped(what=f"residual stream {stream.name}, write {site.path}#{site.op}:{site.ordinal}", why=why)
        for site, handler in handlers.items()
        if (why := _missing(site, handler, watched)) is not None
    ]
    seen = [(site, handler, handler.state) for site, handler in handlers.items() if handler.state is not None]
    if not seen:
        return None, tuple(skipped)
    shape, axis = seen[0][2].shape, stream.feature_axis
    medians = [math.nan if h.state is None else h.state.rms.median for h in handlers.values()]
    measure = StreamMeasure(
        stream=stream.name,
        basis=Basis(unit="1", dtype=seen[0][2].dtype, count=math.prod(shape) // shape[axis]),
        entry_rms=next(iter(handlers.values())).entry,
        states=tuple(_placed(stream, *one, lengths) for one in seen),
        growth=stats.growth(medians),
        massive=massive.merge(
            [state.massive for _, _, state in seen], lambda token: position(token, shape, axis, lengths)
        ),
    )
    return measure, tuple(skipped)


def _missing(site: OpSite, handler: WriteHandler, watched: Watched) -> str | None:
    """Why the write at `site` was not measured; None where it was."""
    why = watched.reason(site)
    return "no output was seen" if why is None and handler.state is None else why


def _placed(
    stream: Stream, site: OpSite, handler: WriteHandler, state: WrittenState, lengths: Collection[int]
) -> StreamState:
    merged = [i for i, branch in enumerate(stream.branches) if branch.add == site]
    last = stream.branches[merged[-1]]
    return StreamState(
        branch=merged[-1],
        path=last.path,
        block=last.block,
        kind="+".join(dict.fromkeys(stream.branches[i].kind for i in merged)),
        rms_median=state.rms.median,
        rms_p99=state.rms.p99,
        rms_max=state.rms.max,
        rms_argmax=state.rms.argmax,
        position=position(state.rms.argmax, state.shape, stream.feature_axis, lengths),
        abs_max=state.peak.abs_max,
        abs_argmax_channel=state.peak.channel,
        write_ratio=handler.ratio,
        finite=math.isfinite(state.peak.abs_max),
    )


def position(token: int, shape: Sequence[int], feature_axis: int, lengths: Collection[int] = ()) -> int:
    """The place along the sequence of the token with this flat index.

    The first axis of three or more counts as the batch, except where attention runs over sequences as long as
    the first axis and over none as long as the second. The others, of maps too, are counted in one flat
    index.
    """
    axes = list(shape)
    del axes[feature_axis]
    if len(axes) < 2:
        return token
    if len(axes) == 2 and feature_axis == -1 and axes[0] in lengths and axes[1] not in lengths:
        return token // axes[1]
    return token % math.prod(axes[1:])
