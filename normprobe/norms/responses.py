"""Response norms, which do not fix the scale of their output: global (GRN) and local (LRN) response norm."""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

from normprobe.norms.affine import Affine, describe, match
from normprobe.norms.eps import Eps, recover
from normprobe.norms.fit import evaluate, odd_parts, rows
from normprobe.norms.layout import moved
from normprobe.norms.reference import lrn
from normprobe.norms.subject import Instance, Subject
from normprobe.records import NormSpec

SEED = 1
HOLDS = 1e-4  # relative error below which a closed form holds
_SPACES: dict[int, tuple[tuple[int, ...], ...]] = {4: ((2, 3), (1, 2)), 3: ((1,), (2,))}  # by rank, axes of space


def identify(subject: Subject, exact: Instance) -> NormSpec | None:
    """`grn` or `lrn` where the closed form holds, else None."""
    for space in _SPACES.get(len(subject.shape), ()):
        found = _global(subject, exact, space)
        if found is not None:
            return found
    return _local(subject, exact) if len(subject.shape) > 2 else None


def _response(x: Tensor, space: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Each channel's L2 norm over space, and its mean over the channels."""
    channels = next(axis for axis in range(1, x.ndim) if axis not in space)
    response = x.square().sum(space, keepdim=True).sqrt()
    return response, response.mean(channels, keepdim=True)


def _global(subject: Subject, exact: Instance, space: tuple[int, ...]) -> NormSpec | None:
    parts = odd_parts(exact, 16 * rows(subject.shape, SEED), subject.device)
    if parts is None:
        return None
    forms = [_response(x, space) for x in parts.inputs]
    scaled = torch.stack([x * n / m for x, (n, m) in zip(parts.inputs, forms, strict=True)])
    added = parts.odd - parts.inputs
    gain = (added * scaled).sum((0, 1), keepdim=True) / scaled.square().sum((0, 1), keepdim=True)
    if float((added - gain * scaled).abs().amax()) > HOLDS * float(added.abs().amax()):
        return None
    offset = parts.even[:1]
    affine = describe(match(gain[0], exact.tensors), offset, 1.0, exact.tensors)
    shrink = _Shrink(subject, gain[0], affine.bias, space)
    eps = recover(shrink.at, torch.float32, lambda: _zeros(subject))
    return _global_spec(subject, affine, eps, space)


def _global_spec(subject: Subject, affine: Affine, eps: Eps, space: tuple[int, ...]) -> NormSpec:
    told = f"output fits x + gain · x · n / mean(n), n the L2 norm over axes {space}; {affine.note}"
    return NormSpec(
        kind="grn",
        subtracts_mean=False,
        affine=affine.form,
        eps=eps.value,
        eps_placement=eps.placement,
        axes=space,
        weight=affine.weight,
        bias=affine.bias,
        weight_multiply="unknown",
        device=subject.device.type,
        evidence=(told, eps.note),
    )


def _zeros(subject: Subject) -> bool:
    zeros = torch.zeros(subject.shape, dtype=torch.float32, device=subject.device)
    return bool(subject.instance(torch.float32, SEED).call(zeros).isfinite().all())


class _Shrink:
    """How the response falls with the scale of the input, in float32."""

    def __init__(self, subject: Subject, gain: Tensor, bias: str | None, space: tuple[int, ...]) -> None:
        self.gain, self.space, self.device = gain, space, subject.device
        self.instance = subject.instance(torch.float32, SEED)
        if bias is not None:  # it would swamp small inputs
            self.instance.tensors[bias].zero_()
        base = rows(subject.shape, SEED)[0]
        self.base = base / _response(base, space)[1]

    def at(self, scale: float) -> tuple[float, float]:
        """Square of the mean response, and the response term over the one without eps."""
        x = (scale * self.base).float().double()
        response, mean = _response(x, self.space)
        added = evaluate(self.instance, x[None], self.device)[0] - x
        wanted = self.gain * x * response / mean
        return float(mean.mean()) ** 2, float((added * wanted).sum() / wanted.square().sum())


def _local(subject: Subject, exact: Instance) -> NormSpec | None:
    """LRN: k, alpha and beta follow from very small and very large inputs; then the closed form must hold."""
    place = tuple(n // 2 for n in subject.shape)
    x = rows(subject.shape, SEED)[0]
    indices = moved(exact.call, x.to(device=subject.device, dtype=exact.dtype), place)
    size = len(indices)
    elsewhere = indices[:, [0, *range(2, len(place))]]
    if size < 2 or bool((elsewhere != elsewhere[0]).any()):
        return None
    small, large, larger = evaluate(exact, torch.stack([x * 1e-9, x * 1e9, x * 8e9]), subject.device)
    beta = (1 - log(abs(float((larger / large).median()))) / log(8.0)) / 2
    if not 0.05 < beta < 5:
        return None
    k = abs(float((x * 1e-9 / small).median())) ** (1 / beta)
    limit = lrn(x * 1e9, size, alpha=1.0, beta=1.0, k=0.0)
    alpha = float(((x * 1e9 / large).abs() ** (1 / beta) / (x * 1e9 / limit)).median())
    error = _local_error(subject, exact, x, (size, alpha, beta, k))
    if not error <= HOLDS:
        return None
    told = f"output fits x / (k + alpha · m)^beta within {error:.1g}: size {size}"
    told += f", alpha {alpha:.4g}, beta {beta:.4g}, k {k:.4g}"
    return NormSpec(
        kind="lrn", subtracts_mean=False, axes=(1,), size=size, device=subject.device.type, evidence=(told,)
    )


def _local_error(subject: Subject, exact: Instance, x: Tensor, constants: tuple[int, float, float, float]) -> float:
    size, alpha, beta, k = constants
    medium = x * (k / alpha) ** 0.5
    wanted = lrn(medium, size, alpha, beta, k)
    got = evaluate(exact, medium[None], subject.device)[0]
    return float((got - wanted).abs().amax() / wanted.abs().amax())
