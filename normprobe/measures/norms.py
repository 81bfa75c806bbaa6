"""Norms at work: what each does to single elements, how near that is to tanh, and its gain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from normprobe.capture.guard import untouched
from normprobe.capture.invoke import invoke
from normprobe.capture.wrappers import wrapped_forwards
from normprobe.measures.curves import bend, grouped
from normprobe.measures.elementwise import Elementwise
from normprobe.measures.extra import Extra, Subject
from normprobe.measures.finite import floats
from normprobe.measures.padding import padding_masks
from normprobe.records import Basis, NormSite, Skipped
from normprobe.records.extras import ExtraName
from normprobe.records.norm_curves import CurvePoint, Gain, NormCurve, NormsMeasure

_POINTS = 32
_TINY = 0.01


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


def _pass(subject: Subject, norms: Sequence[NormSite]) -> dict[str, Elementwise]:
    parameters = {**dict(subject.model.named_buffers()), **dict(subject.model.named_parameters(remove_duplicate=False))}
    padding = padding_masks(subject.inputs)
    known = {norm.path: Elementwise.of(norm, parameters) for norm in norms}
    seen: dict[str, Elementwise] = {}

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


def _skips(norms: Sequence[NormSite], seen: Mapping[str, Elementwise]) -> Iterator[Skipped]:
    for norm in norms:
        if norm.path not in seen:
            why = "no output has the shape of its input" if norm.module else "it is no module"
            yield Skipped(what=f"curve of norm {norm.path}", why=why)


def _curve(norm: NormSite, seen: Elementwise) -> NormCurve:
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
