"""The stored gains and offsets of the norms: nothing runs for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from normprobe.capture.parts import Parts
from normprobe.measures.began import began
from normprobe.measures.own_init import own_weights
from normprobe.measures.values import plain
from normprobe.records import Anatomy, Elements, NormGain, NormSite, Skipped

_NORMAL = 2.0**-126  # float32's smallest normal number


def measure_gains(model: nn.Module, anatomy: Anatomy) -> tuple[tuple[NormGain, ...], tuple[Skipped, ...]]:
    """Gain and offset of every norm of `anatomy` that has one.

    Args:
        model: the model that `anatomy` was read from.
        anatomy: its norms.

    Returns:
        One record a norm in the order of the Anatomy, and the norms whose gain could not be read with the reason.
    """
    tensors = Parts({**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))})
    found: list[NormGain] = []
    given = began(model)
    unread: dict[str, list[str]] = {}
    for norm in anatomy.norms:
        why = _unreadable(norm, tensors)
        if why is not None:
            unread.setdefault(why, []).append(norm.path)
        elif norm.weight is not None or norm.bias is not None:
            found.append(_read(norm, tensors, given.get(norm.weight or "")))
    return tuple(_started(model, found)), tuple(_skipped(why, paths) for why, paths in unread.items())


def _unreadable(norm: NormSite, tensors: Mapping[str, Tensor]) -> str | None:
    """Why gain and offset cannot be read; None where they can, or there are none."""
    if norm.affine == "other":
        return "its gain is neither a parameter nor 1 plus one"
    names = [name for name in (norm.weight, norm.bias) if name is not None]
    if any(name not in tensors for name in names):
        return "the model has no parameter of this name any more"
    return None if all(plain(tensors[name]) for name in names) else "its values are no plain numbers of 16 bits or more"


def _skipped(why: str, paths: list[str]) -> Skipped:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return Skipped(what=f"gain of norm {paths[0]}{more}", why=why)


def _read(norm: NormSite, tensors: Mapping[str, Tensor], given: float | None) -> NormGain:
    one_plus = norm.affine.startswith("one_plus")
    gain, offset = (
        None if name is None else elements(name, tensors[name], plus)
        for name, plus in ((norm.weight, float(one_plus)), (norm.bias, 0.0))
    )
    start = None if given is None else given + one_plus
    if given is not None and gain is not None and gain.constant == given:
        start = given  # it was stored as it is applied then, or is now
    return NormGain(path=norm.path, one_plus=one_plus, began=start, gain=gain, offset=offset)


def _started(model: nn.Module, gains: Sequence[NormGain]) -> Iterator[NormGain]:
    """The gains, with what the model's own class starts with where 1 + w is one number other than 1."""
    odd = [g.path for g in gains if g.one_plus and g.gain is not None and g.gain.constant not in (None, 1.0)]
    own = Parts(own_weights(model, seed=0)[0] if odd else {})
    for known in gains:
        fresh = own.get(known.gain.parameter) if known.gain is not None and known.path in odd else None
        value = None if fresh is None or not plain(fresh) else elements("", fresh, 1.0).constant
        yield known.model_copy(update={"start": value})


def elements(name: str, stored: Tensor, plus: float = 0.0) -> Elements:
    """The statistics of `stored + plus`, in float64.

    Args:
        name: of the tensor.
        stored: plain numbers, at least one.
        plus: what is added where it is used.
    """
    raw = stored.detach().flatten().cpu().double()
    finite = raw.isfinite()
    x = (raw + plus)[finite]
    size = x.abs()
    empty = x.numel() == 0
    middle, typical = (math.nan, math.nan) if empty else (float(t.median()) for t in (x, size))
    low, high, peak = (math.nan,) * 3 if empty else (float(x.amin()), float(x.amax()), float(size.amax()))
    return Elements(
        parameter=name,
        dtype=str(stored.dtype).removeprefix("torch."),
        count=raw.numel(),
        non_finite=int((~finite).sum()),
        zeros=int((x == 0).sum()),
        negative=int((x < 0).sum()),
        stored_negative=int((raw < 0).sum()),
        subnormal=int(((raw != 0) & (raw.abs() < _NORMAL)).sum()),
        smallest=low,
        largest=high,
        median=middle,
        mean=float(x.mean()),
        std=float(x.std(correction=0)) if not empty else math.nan,
        typical=typical,
        peak=peak,
        peak_at=int(torch.where(finite, raw + plus, 0).abs().argmax()),
    )
