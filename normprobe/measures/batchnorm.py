"""Batch norms: the statistics of this batch against the stored ones, and what the outputs owe to either."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from normprobe import theory
from normprobe.capture.calls import CallSpec
from normprobe.capture.guard import untouched
from normprobe.capture.invoke import invoke
from normprobe.capture.wrappers import wrapped_forwards
from normprobe.measures.batchnorm_gaps import PASSES, batch_size, gaps
from normprobe.measures.extra import Extra, Subject
from normprobe.measures.finite import floats
from normprobe.norms.running import Running, running
from normprobe.records import Basis, NormSite, Skipped
from normprobe.records.batchnorm import BatchNormMeasure, BatchNormSite, KeptStatistics
from normprobe.records.extras import ExtraName


class BatchNorm(Extra):
    """Batch norms, in three passes: in eval mode, in train mode, and in train mode with the batch in halves."""

    name: ClassVar[ExtraName] = "batchnorm"

    def measure(self, subject: Subject) -> tuple[BatchNormMeasure | None, tuple[Skipped, ...]]:
        """Every batch norm that is a module; stored statistics and train flags are as before afterwards."""
        norms = [norm for norm in subject.anatomy.norms if norm.kind == "batchnorm" and norm.executed]
        if not norms:
            return None, (Skipped(what=self.name, why="the model runs no batch norm"),)
        before = {name: buffer.detach().clone() for name, buffer in subject.model.named_buffers()}
        with untouched(subject.model) as keeper, torch.no_grad(), keeper.mode():
            subject.tell(self.name, 0, PASSES)
            seen, output = _eval_pass(subject, [norm for norm in norms if norm.module])
            modules = {path: subject.model.get_submodule("" if path == "." else path) for path in seen}
            axes = {norm.path: norm.axes for norm in norms}
            found = {path: running(module, seen[path].call, axes[path]) for path, module in modules.items()}
            sites = [_site(modules[n.path], n, seen[n.path], found[n.path]) for n in norms if n.path in found]
            train_eval, halves, unseen = gaps(subject, found, floats(output))
        skipped = tuple(_skips(norms, found))
        if not sites:
            return None, skipped
        basis = Basis(unit="1", dtype=seen[sites[0].path].dtype, count=batch_size(subject.inputs) or 1)
        measure = BatchNormMeasure(
            basis=basis,
            sites=tuple(sites),
            train_eval_gap=train_eval,
            halves_gap=halves,
            untouched=all(_same(before[name], buffer) for name, buffer in subject.model.named_buffers()),
        )
        return measure, (*skipped, *unseen)


def _same(before: Tensor, after: Tensor) -> bool:
    """Whether two buffers hold the same numbers, NaN in the same places."""
    return before.shape == after.shape and bool(((before == after) | ((before != before) & (after != after))).all())


def _skips(norms: Sequence[NormSite], found: Mapping[str, Running]) -> Iterator[Skipped]:
    for norm in norms:
        if norm.path not in found:
            why = "its forward was not called" if norm.module else "it is no module; its statistics are not known"
            yield Skipped(what=f"batch norm {norm.path}", why=why)


class _Moments(NamedTuple):
    """Of each channel over the values seen so far: their number, mean, and sum of squared deviations; float64."""

    values: int
    mean: Tensor
    squares: Tensor

    def joined(self, other: _Moments) -> _Moments:
        """Those of both sets of values (Chan, Golub and LeVeque 1983)."""
        values, step = self.values + other.values, other.mean - self.mean
        squares = self.squares + other.squares + step**2 * (self.values * other.values / values)
        return _Moments(values, self.mean + step * (other.values / values), squares)


@dataclass
class _Seen:
    """What passed one batch norm."""

    call: CallSpec
    dtype: str
    moments: _Moments


def _eval_pass(subject: Subject, norms: Sequence[NormSite]) -> tuple[dict[str, _Seen], Any]:
    """Moments of the inputs of `norms`, and the model's output, both in eval mode."""
    axes = {norm.path: norm.axes for norm in norms}
    seen: dict[str, _Seen] = {}

    def around(path: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = floats((args, kwargs)) if path in axes else []
        if given:
            moments, known = _moments(given[0], axes[path]), seen.get(path)
            if known is None:
                dtype = str(given[0].dtype).removeprefix("torch.")
                seen[path] = _Seen(CallSpec.of(args, kwargs), dtype, moments)
            else:
                known.moments = known.moments.joined(moments)
        return forward(*args, **kwargs)

    with wrapped_forwards(subject.model, around):
        return seen, invoke(subject.model, subject.inputs)


def _moments(x: Tensor, axes: Sequence[int]) -> _Moments:
    wide = x.detach().double() if x.device.type != "mps" else x.detach().float()
    variance, mean = torch.var_mean(wide, tuple(axes), correction=0)
    count = x.numel() // max(1, mean.numel())
    return _Moments(count, mean.flatten().cpu().double(), variance.flatten().cpu().double() * count)


@dataclass(frozen=True)
class _Stored:
    """The stored statistics of one module, flat on the CPU in float64; None where it keeps no such one."""

    mean: Tensor | None
    variance: Tensor | None
    tracked: int | None

    @classmethod
    def of(cls, module: nn.Module, found: Running) -> _Stored:
        buffers = dict(module.named_buffers())

        def flat(name: str | None) -> Tensor | None:
            return buffers[name].detach().flatten().cpu().double() if name in buffers else None

        return cls(flat(found.mean), flat(found.variance), int(buffers[found.counter]) if found.counter else None)

    def below(self, eps: float | None) -> int | None:
        """How many variances are smaller than eps, or 0 where there is none; None where no variance is stored."""
        if self.variance is None:
            return None
        return int(((self.variance == 0) | (self.variance < (eps or 0.0))).sum())

    @property
    def finite(self) -> bool | None:
        if self.mean is None and self.variance is None:
            return None
        whole = all(bool(t.isfinite().all()) for t in (self.mean, self.variance) if t is not None)
        return whole and (self.variance is None or bool((self.variance >= 0).all()))

    @property
    def default(self) -> bool | None:
        if self.mean is None and self.variance is None:
            return None
        starts = (self.mean, 0.0), (self.variance, 1.0)
        return all(bool((t == start).all()) for t, start in starts if t is not None)


def _site(module: nn.Module, norm: NormSite, seen: _Seen, found: Running) -> BatchNormSite:
    stored = _Stored.of(module, found)
    steps = None if found.momentum is None else stored.tracked
    return BatchNormSite(
        path=norm.path,
        channels=len(seen.moments.mean),
        count=seen.moments.values,
        keeps="none" if stored.finite is None else "moving" if found.moves else "fixed",
        default=stored.default,
        finite=stored.finite,
        below_eps=stored.below(norm.eps),
        momentum=found.momentum,
        tracked=stored.tracked,
        initial_share=None if steps is None or found.momentum is None else (1 - found.momentum) ** steps,
        kept=_kept(stored, seen.moments, norm) if stored.finite else None,
    )


def _kept(stored: _Stored, batch: _Moments, norm: NormSite) -> KeptStatistics | None:
    """Stored statistics against those of the batch; an eps of another placement than the variance's counts as 0."""
    if stored.mean is None or stored.variance is None or batch.values < 2:
        return None
    eps = norm.eps if norm.eps is not None and norm.eps_placement == "inside_sqrt" else 0.0
    variance = stored.variance + eps
    shift = (batch.mean - stored.mean) / variance.sqrt()
    ratio = (batch.squares / (batch.values - 1) + eps) / variance
    pairs = zip(shift.tolist(), ratio.tolist(), strict=True)
    divergence = torch.tensor([theory.gaussian_divergence(s, r) for s, r in pairs], dtype=torch.float64)
    worst = int(divergence.argmax())
    return KeptStatistics(
        mean_shift=float(shift.abs().quantile(0.5)),
        mean_shift_max=float(shift.abs().amax()),
        variance_ratio=float(ratio.quantile(0.5)),
        variance_ratio_min=float(ratio.amin()),
        variance_ratio_max=float(ratio.amax()),
        divergence=float(divergence.quantile(0.5)),
        divergence_max=float(divergence[worst]),
        worst_channel=worst,
    )
