"""Classic results 1 to 3: norms from scratch against torch's, the shift test, BatchNorm in train and eval mode."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from normprobe.capture.calls import CallSpec
from normprobe.norms import reference
from normprobe.norms.identify import identify_module
from normprobe.probing import probe
from normprobe.records import NormSpec
from normprobe.records.verification import Verified
from normprobe.verifying import forms
from normprobe.verifying.judging import Claim
from normprobe.verifying.models import LayerNormByHand, RMSNormByHand

_ROWS, _WIDTH, _EPS, _SHIFT = 64, 1024, 1e-5, 3.0
_MEAN, _STD, _MOMENTUM, _BATCHES = 3.0, 2.0, 0.1, 100
_SCRATCH, _SHIFTS = "norms from scratch", "the shift test"
_BATCH = "BatchNorm in train and eval mode"
_ROUNDING = 1e-12  # relative, in float64


def norms() -> Iterator[Verified]:
    """LayerNorm and RMSNorm written out against torch's: as numbers, and as normprobe reads them."""
    x = _normal(_ROWS, _WIDTH)
    pairs = {
        "layernorm": (LayerNormByHand(_WIDTH, _EPS), nn.LayerNorm(_WIDTH, eps=_EPS), "Ba et al. 2016, eq. 3 and 4"),
        "rmsnorm": (RMSNormByHand(_WIDTH, _EPS), nn.RMSNorm(_WIDTH, eps=_EPS), "Zhang and Sennrich 2019, eq. 4"),
    }
    for kind, (by_hand, by_torch, source) in pairs.items():
        by_hand, by_torch = _drawn(by_hand), _drawn(by_torch)
        same = Claim(
            f"{kind}-from-scratch", _SCRATCH, f"{kind} from scratch against torch's, relative", 0.0, _ROUNDING, source
        )
        yield same.judged(change(by_hand(x), by_torch(x)))
        read = Claim(
            f"{kind}-read-alike", _SCRATCH, f"facts that normprobe reads otherwise of either {kind}", 0.0, 0.0, source
        )
        yield read.judged(float(sum(_misread(norm, kind) for norm in (by_hand, by_torch))))


def shifts() -> Iterator[Verified]:
    """A norm that subtracts the mean does not see a shift of all features; one that does not has a known answer."""
    x = _normal(_ROWS, _WIDTH)
    source = "derived in verifying.forms; Zhang and Sennrich 2019, sec. 4"
    expected = {"layernorm": (0.0, _ROUNDING), "rmsnorm": (forms.rmsnorm_shift_change(_SHIFT), 0.01)}
    for norm, (kind, (value, tolerance)) in zip((nn.LayerNorm, nn.RMSNorm), expected.items(), strict=True):
        claim = f"relative change of {kind}'s output when {_SHIFT:g} is added to every feature"
        plain = norm(_WIDTH, eps=_EPS).double()
        yield Claim(f"{kind}-shift", _SHIFTS, claim, value, tolerance, source).judged(
            change(plain(x + _SHIFT), plain(x))
        )


def _misread(norm: nn.Module, kind: str) -> int:
    """How many facts about `norm` its identification by behaviour gets wrong."""
    spec = identify_module(norm, CallSpec.of((_normal(_ROWS, _WIDTH),), {}))
    if spec is None:
        return len(NormSpec.model_fields)
    centred = kind == "layernorm"
    wanted = {
        "kind": kind,
        "subtracts_mean": centred,
        "affine": "weight+bias" if centred else "weight",
        "eps": _EPS,
        "eps_placement": "inside_sqrt",
        "axes": (-1,),
    }
    return sum(getattr(spec, field) != value for field, value in wanted.items())


def batchnorm() -> Iterator[Verified]:
    """BatchNorm against its closed forms in both modes, and how far apart the modes are before statistics settle."""
    norm = nn.BatchNorm1d(_ROWS, eps=_EPS, momentum=_MOMENTUM).double()
    x = _MEAN + _STD * _normal(16 * _WIDTH, _ROWS)
    trained = norm.train()(x)
    yield from _modes(norm, x, trained, norm.eval()(x))
    yield _gap(norm, x, 1)
    norm.train()
    for _ in range(_BATCHES - 1):
        norm(x)
    yield _gap(norm, x, _BATCHES)


def _gap(norm: nn.BatchNorm1d, x: Tensor, batches: int) -> Verified:
    """The gap that the measure `batchnorm` finds, after as many batches."""
    measured = probe(norm, x, measures=["batchnorm"]).data.measurements.batchnorm
    gap = measured.train_eval_gap if measured is not None else None
    after = "1 batch" if batches == 1 else f"{batches} batches"
    claim = f"distance of train from eval output, relative, after {after} of mean {_MEAN:g} and std {_STD:g}"
    source = "derived in verifying.forms from Ioffe and Szegedy 2015, algorithms 1 and 2"
    expected = forms.batchnorm_gap(_MEAN, _STD, _MOMENTUM, batches)
    return Claim(f"batchnorm-gap-{batches}", _BATCH, claim, expected, 0.01, source).judged(
        math.nan if gap is None else gap
    )


def _modes(norm: nn.BatchNorm1d, x: Tensor, trained: Tensor, known: Tensor) -> Iterator[Verified]:
    mean, variance = norm.running_mean, norm.running_var
    assert mean is not None
    assert variance is not None
    forms = {
        "train": (trained, reference.batchnorm(x, _EPS), "Ioffe and Szegedy 2015, algorithm 1"),
        "eval": (known, reference.batchnorm_frozen(x, mean, variance, _EPS), "Ioffe and Szegedy 2015, algorithm 2"),
    }
    for mode, (output, form, source) in forms.items():
        claim = f"BatchNorm in {mode} mode against its closed form, relative"
        yield Claim(f"batchnorm-{mode}", _BATCH, claim, 0.0, _ROUNDING, source).judged(change(output, form))


def change(new: Tensor, old: Tensor) -> float:
    """‖new - old‖ / ‖old‖ over all elements."""
    return float((new - old).detach().norm() / old.detach().norm())


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _drawn(norm: nn.Module) -> nn.Module:
    """The norm in float64 with gain and offset that are not one and zero, the same for the same names."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(norm.named_parameters(), reverse=True):
            parameter.copy_(1 + torch.randn(parameter.shape, generator=generator) / 4)
    return norm.double()
