"""Norms at work: what each does to single elements, how near that is to tanh, and its gain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from normprobe.capture.guard import untouched
from normprobe.capture.invoke import invoke
from normprobe.capture.wrappers import wrapped_forwards
from normprobe.measures.curves import bend, grouped
from normprobe.measures.extra import Extra, Subject
from normprobe.measures.finite import floats
from normprobe.measures.padding import padding_masks, sampled
from normprobe.records import Basis, NormSite, Skipped
from normprobe.records.extras import ExtraName
from normprobe.records.norm_curves import CurvePoint, Gain, NormCurve, NormsMeasure

SAMPLED = 8192  # elements of each execution
_POINTS = 32
_TINY = 0.01
_CHANNELS = frozenset({"batchnorm", "groupnorm", "instancenorm"})


class Norms(Extra):
    """Every norm that is a module, in one forward."""

    name: ClassVar[ExtraName] = "norms"

    def measure(self, subject: Subject) -> tuple[NormsMeasure | None, tuple[Skipped, ...]]:
        """Sampled elements of what went in and came out, without padding; gain and offset are taken off where known."""
        norms = [norm for norm in subject.anatomy.norms if norm.executed]
        subject.tell(self.name, 0, 1)
        with untouched(subject.model) as keeper, torch.no_grad(), keeper.mode():
            seen = _pass(subject, [norm for norm in norms if norm.module])
        skipped = tuple(_skips(norms, seen))
        curves = tuple(_curve(norm, seen[norm.path]) for norm in norms if norm.path in seen)
        if not curves:
            return None, skipped or (Skipped(what=self.name, why="the model runs no norm"),)
        return NormsMeasure(norms=curves), skipped


@dataclass
class _Seen:
    """Sampled elements of one norm, over its executions; `gain` and `offset` where they are known."""

    gain: Tensor | None
    offset: Tensor | None
    channels_first: bool
    dtype: str = ""
    total: int = 0
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor, y: Tensor, seed: int, padding: Sequence[Tensor] = ()) -> None:
        """A seeded sample of elements, z = (y − offset) / gain; padding and elements whose gain is 0 are left out."""
        at, total = sampled(x.shape, seed, SAMPLED, padding)
        self.dtype, self.total = str(x.dtype).removeprefix("torch."), self.total + total
        here = at.to(x.device)
        inputs, outputs = (t.detach().reshape(-1)[here].cpu().double() for t in (x, y))
        if self.offset is not None:
            outputs = outputs - _per_element(self.offset, x.shape, self.channels_first)[at]
        if self.gain is not None:
            gain = _per_element(self.gain, x.shape, self.channels_first)[at]
            inputs, outputs = inputs[gain != 0], (outputs / gain)[gain != 0]
        self.inputs.append(inputs)
        self.outputs.append(outputs)


def _per_element(value: Tensor, shape: Sequence[int], channels_first: bool) -> Tensor:
    """A gain or offset for each element of a tensor of this shape."""
    if channels_first and value.numel() > 1:
        value = value.reshape(-1, *[1] * (len(shape) - 2))
    return value.expand(*shape).reshape(-1)


def _channels_first(norm: NormSite) -> bool:
    """Whether its gain lies along axis 1: its kind says so, or features are reduced there and not on the last axis."""
    return norm.kind in _CHANNELS or norm.axes == (1,)


def _pass(subject: Subject, norms: Sequence[NormSite]) -> dict[str, _Seen]:
    parameters = {**dict(subject.model.named_buffers()), **dict(subject.model.named_parameters(remove_duplicate=False))}
    padding = padding_masks(subject.inputs)
    known = {norm.path: _Seen(*_affine(norm, parameters), _channels_first(norm)) for norm in norms}
    seen: dict[str, _Seen] = {}

    def around(path: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = floats((args, kwargs)) if path in known else []
        x = given[0].detach().clone() if given else None  # the forward may write into it
        output = forward(*args, **kwargs)
        y = next((t for t in floats(output) if x is not None and t.shape == x.shape), None)
        if x is not None and y is not None:
            seen.setdefault(path, known[path]).add(x, y, subject.seed, padding)
        return output

    with wrapped_forwards(subject.model, around):
        invoke(subject.model, subject.inputs)
    return seen


def _affine(norm: NormSite, tensors: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Gain and offset, float64 on the CPU; None where there is none or its form is unknown."""
    if norm.affine in ("none", "other"):
        return None, None
    gain, offset = (
        tensors[name].detach().cpu().double() if name is not None and name in tensors else None
        for name in (norm.weight, norm.bias)
    )
    return gain + 1 if gain is not None and norm.affine.startswith("one_plus") else gain, offset


def _skips(norms: Sequence[NormSite], seen: Mapping[str, _Seen]) -> Iterator[Skipped]:
    for norm in norms:
        if norm.path not in seen:
            why = "no output has the shape of its input" if norm.module else "it is no module"
            yield Skipped(what=f"curve of norm {norm.path}", why=why)


def _curve(norm: NormSite, seen: _Seen) -> NormCurve:
    x, z = torch.cat(seen.inputs), torch.cat(seen.outputs)
    nearest = bend(x, z)
    return NormCurve(
        path=norm.path,
        kind=norm.kind,
        basis=Basis(unit="1", dtype=seen.dtype, count=len(x), exact=len(x) == seen.total),
        points=tuple(CurvePoint(input=a, output=b) for a, b in grouped(x, z, _POINTS)),
        alpha=nearest.alpha,
        scale=nearest.scale,
        tanh_fit=nearest.tanh_fit,
        linear_fit=nearest.linear_fit,
        gain=None if seen.gain is None else gain_of(seen.gain),
    )


def gain_of(gain: Tensor) -> Gain:
    """The statistics of one gain, float64."""
    size = gain.abs()
    return Gain(
        count=gain.numel(),
        mean=float(gain.mean()),
        std=float(gain.std(correction=0)),
        smallest=float(gain.amin()),
        largest=float(gain.amax()),
        negative=float((gain < 0).double().mean()),
        tiny=float((size < _TINY * size.flatten().quantile(0.5)).double().mean()),
    )
