"""One batch norm: the moments of its inputs, and the statistics that it stores beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normprobe import theory
from normprobe.capture.calls import CallSpec
from normprobe.capture.composites import without_modes
from normprobe.capture.wrappers import wrapped_forwards
from normprobe.measures.finite import floats
from normprobe.norms.running import Running
from normprobe.records import NormSite, Skipped
from normprobe.records.batchnorm import BatchNormSite, KeptStatistics


class Moments(NamedTuple):
    """Of each channel over the values seen so far: their number, mean, and sum of squared deviations; float64."""

    values: int
    mean: Tensor
    squares: Tensor

    def joined(self, other: Moments) -> Moments:
        """Those of both sets of values (Chan, Golub and LeVeque 1983)."""
        values, step = self.values + other.values, other.mean - self.mean
        squares = self.squares + other.squares + step**2 * (self.values * other.values / values)
        return Moments(values, self.mean + step * (other.values / values), squares)


@dataclass
class Seen:
    """What passed one batch norm; `shape` is that of its first input."""

    call: CallSpec
    dtype: str
    shape: tuple[int, ...]
    moments: Moments


@contextmanager
def batch_norm_inputs(model: nn.Module, norms: Sequence[NormSite]) -> Iterator[dict[str, Seen]]:
    """While open, gathers the moments of what is given to the batch norms that are modules, of each as often as it ran
    in the recorded forward."""
    seen: dict[str, Seen] = {}
    with ExitStack() as stack:
        for norm in norms:
            if norm.module:
                module = model.get_submodule("" if norm.path == "." else norm.path)
                stack.enter_context(wrapped_forwards(module, _looking(norm, seen)))
        yield seen


def _looking(norm: NormSite, seen: dict[str, Seen]) -> Callable[..., Any]:
    left = norm.executions

    def around(path: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        nonlocal left
        given = floats((args, kwargs)) if path == "." and left else []
        if given:
            left -= 1
            without_modes(_note, seen, norm, given[0], args, kwargs)
        return forward(*args, **kwargs)

    return around


def _note(seen: dict[str, Seen], norm: NormSite, x: Tensor, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        moments, known = _moments(x, norm.axes), seen.get(norm.path)
    if known is None:
        dtype = str(x.dtype).removeprefix("torch.")
        seen[norm.path] = Seen(CallSpec.of(args, kwargs), dtype, tuple(x.shape), moments)
    else:
        known.moments = known.moments.joined(moments)


def unseen(norms: Sequence[NormSite], found: Mapping[str, Running]) -> Iterator[Skipped]:
    """Batch norms of which nothing is known, with the reason."""
    for norm in norms:
        if norm.path not in found:
            why = "its forward was not called" if norm.module else "it is no module; its statistics are not known"
            yield Skipped(what=f"batch norm {norm.path}", why=why)


def _moments(x: Tensor, axes: Sequence[int]) -> Moments:
    wide = x.detach().double() if x.device.type != "mps" else x.detach().float()
    variance, mean = torch.var_mean(wide, tuple(axes), correction=0)
    count = x.numel() // max(1, mean.numel())
    return Moments(count, mean.flatten().cpu().double(), variance.flatten().cpu().double() * count)


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
    def zeros(self) -> int | None:
        return None if self.variance is None else int((self.variance == 0).sum())

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


@dataclass(frozen=True)
class Flags:
    """How a batch norm was given: the train flag of its module, and whether any of its parameters requires a gradient
    (None where it has none)."""

    training: bool
    learns: bool | None

    @classmethod
    def of(cls, module: nn.Module) -> Flags:
        """Those of a module as it is now."""
        asked = [parameter.requires_grad for parameter in module.parameters()]
        return cls(module.training, any(asked) if asked else None)


def site_of(
    module: nn.Module, norm: NormSite, seen: Seen, found: Running, flags: Flags, masks: Sequence[Tensor]
) -> BatchNormSite:
    """The record of one batch norm, whose input may hold padding at the places of `masks` ([B, S] each)."""
    stored = _Stored.of(module, found)
    steps = None if found.momentum is None else stored.tracked
    return BatchNormSite(
        path=norm.path,
        channels=len(seen.moments.mean),
        count=seen.moments.values,
        shape=seen.shape,
        padding=_padding(seen.shape, norm, masks),
        training=flags.training,
        learns=flags.learns,
        synchronised=_synchronised(module),
        keeps="none" if stored.finite is None else "moving" if found.moves else "fixed",
        default=stored.default,
        finite=stored.finite,
        below_eps=stored.below(norm.eps),
        zero_variances=stored.zeros,
        momentum=found.momentum,
        tracked=stored.tracked,
        initial_share=None if steps is None or found.momentum is None else (1 - found.momentum) ** steps,
        kept=_kept(stored, seen.moments, norm) if stored.finite else None,
    )


def _padding(shape: Sequence[int], norm: NormSite, masks: Sequence[Tensor]) -> int:
    """How many of the places [B, S] that a mask calls padding the axes of a norm run over."""
    reduced = {axis % len(shape) for axis in norm.axes}
    if 0 not in reduced:
        return 0
    for mask in masks:
        batch, length = mask.shape
        apart = shape[0] == batch and any(axis and shape[axis] == length for axis in reduced)
        if apart or shape[0] == batch * length:
            return int(mask.sum())
    return 0


def _synchronised(module: nn.Module) -> bool | None:
    """Whether processes share its statistics: torch says so of its own classes, and of others it is not known."""
    if isinstance(module, nn.SyncBatchNorm):
        return True
    return False if isinstance(module, nn.modules.batchnorm._BatchNorm) else None


def _kept(stored: _Stored, batch: Moments, norm: NormSite) -> KeptStatistics | None:
    """Stored statistics against those of the batch; an eps of another placement than the variance's counts as 0."""
    if stored.mean is None or stored.variance is None or batch.values < 2:
        return None
    eps = norm.eps if norm.eps is not None and norm.eps_placement == "inside_sqrt" else 0.0
    variance = stored.variance + eps
    shift = (batch.mean - stored.mean) / variance.sqrt()
    ratio = (batch.squares / (batch.values - 1) + eps) / variance
    pairs = zip(shift.tolist(), ratio.tolist(), strict=True)
    divergence = torch.tensor([theory.gaussian_divergence(s, r) for s, r in pairs], dtype=torch.float64, device="cpu")
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
