"""In which dtype the statistic is reduced, and whether the gain is multiplied before the cast back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from normprobe.capture.modes import DispatchMode
from normprobe.norms.fit import Fit
from normprobe.norms.subject import Instance
from normprobe.records.norms import Reduction, WeightMultiply

HALF = (torch.float16, torch.bfloat16)
FUSED = frozenset(
    {
        "native_layer_norm",
        "_fused_rms_norm",
        "native_group_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_no_training",
        "_batch_norm_with_update",
        "_batch_norm_no_update",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "batch_norm",
    }
)
NAMESPACES = frozenset({"aten", "prims", "prim", "_c10d_functional", "normprobe"})  # of torch's own operations
_SQUARING = frozenset({"pow", "square", "var", "var_mean", "std", "std_mean", "norm", "linalg_vector_norm"})
_WIDE_INSIDE = frozenset({"linalg_vector_norm", "norm", "std", "std_mean"})  # squares inside one kernel
_REDUCING = frozenset({"mean", "sum", "bmm", "mm", "matmul"})
_VIEWS = frozenset({"view", "_unsafe_view", "clone", "detach", "alias", "t", "transpose", "permute", "unsqueeze"})
OVERFLOWING = 300.0  # its square is beyond float16's largest number, 65504


@dataclass(frozen=True)
class Op:
    """One recorded operation: its name, the dtypes of its floating inputs, which arguments are tensors, its numbers."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    given: tuple[bool, ...]
    same: bool
    numbers: tuple[float, ...] = ()
    foreign: bool = False

    @property
    def takes_gain(self) -> bool:
        """Whether a fused kernel was given a gain."""
        if self.foreign:
            return sum(self.given) > 1
        place = 1 if "batch_norm" in self.name or "group_norm" in self.name else 2
        return place < len(self.given) and self.given[place]


class _Recorder(DispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = [t for t in pytree.tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)]
        dtypes = tuple(t.dtype for t in leaves if t.is_floating_point())
        same = len(leaves) == 2 and leaves[0] is leaves[1]
        given = tuple(isinstance(a, Tensor) for a in args)
        numbers = tuple(float(a) for a in pytree.tree_leaves((args, kwargs or {})) if type(a) in (int, float))
        foreign = func.namespace not in NAMESPACES
        self.ops.append(Op(func.overloadpacket.__name__, dtypes, given, same, numbers, foreign))
        return func(*args, **(kwargs or {}))


def operations(instance: Instance, x: Tensor) -> list[Op]:
    """The operations that one call runs, composite ones taken apart."""
    recorder = _Recorder()
    with recorder:
        instance.call(x)
    return recorder.ops


def fused_op(ops: Sequence[Op]) -> Op | None:
    """The first fused norm kernel among `ops`, else the first operation that is not torch's own."""
    return next((op for op in ops if op.name in FUSED), next((op for op in ops if op.foreign), None))


def unseen(ops: Sequence[Op]) -> bool:
    """Whether only memory was allocated and viewed: what was computed in it went past the dispatcher."""
    return all("empty" in op.name or op.name in _VIEWS for op in ops)


def _statistic_op(ops: Sequence[Op]) -> Op | None:
    """The operation that squares, else the one that reduces."""
    for op in ops:
        if op.dtypes and (op.name in _SQUARING or (op.name == "mul" and op.same)):
            return op
    return next((op for op in ops if op.name in _REDUCING and op.dtypes), None)


def reduction(instance: Instance, fit: Fit, device: torch.device) -> tuple[Reduction, str]:
    """The dtype of the reduction: what the recorded operation says, confirmed by overflow in float16.

    Args:
        instance: a copy in float16.
        fit: its form, from wider arithmetic.
        device: where it runs.

    Returns:
        The reduction and a sentence; "unknown" where record and behaviour disagree.
    """
    x = _signs(fit.layout.shape).mul(OVERFLOWING).to(device=device, dtype=instance.dtype)
    recorder = _Recorder()
    with recorder:
        y = instance.call(x)
    overflows = not _agrees(y, x, fit)
    op = fused_op(recorder.ops) or _statistic_op(recorder.ops)
    if op is None and unseen(recorder.ops):
        told = "computed past the dispatcher, float16 at |x| = 300 "
        return ("unknown", told + "overflows") if overflows else ("native", told + "holds")
    if op is None:
        return "unknown", "no reduction among the recorded operations"
    half = op.dtypes[0] in HALF
    held = "overflows" if overflows else "holds"
    told = f"{op.name} on {str(op.dtypes[0])[6:]}, float16 at |x| = 300 {held}"
    if op.foreign or op.name in FUSED or op.name in _WIDE_INSIDE:
        if overflows:
            return ("input", told) if op.name in _WIDE_INSIDE and half else ("unknown", told)
        return ("native" if half else "float32"), told
    if half == overflows or fit.scaled is not None:  # with the largest element divided out nothing overflows
        return ("input" if half else "float32"), told
    return "unknown", told


def _signs(shape: tuple[int, ...]) -> Tensor:
    """Magnitudes around 1 with random signs, float64."""
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu").mul(0.4).add(0.8)
    return x * torch.randint(0, 2, shape, generator=generator, device="cpu").mul(2).sub(1)


def _ideal(x: Tensor, fit: Fit) -> Tensor:
    """z of the (rounded) input in float64, in the layout's view."""
    return fit.ideal(fit.layout.split(x.to("cpu", torch.float64)))


def _agrees(y: Tensor, x: Tensor, fit: Fit) -> bool:
    wanted = fit.gain * _ideal(x, fit) + fit.offset
    error = (fit.layout.split(y.to("cpu", torch.float64)) - wanted).abs().amax()
    return bool(error <= 0.05 * wanted.abs().amax())


def weight_multiply(instance: Instance, fit: Fit, device: torch.device, scale: float) -> tuple[WeightMultiply, str]:
    """Whether the gain is multiplied before or after the cast back, bit for bit in the instance's half dtype.

    Args:
        instance: a copy in bfloat16 or float16 with random gains.
        fit: its form, with a gain.
        device: where it runs.
        scale: scale of the input, large enough that eps does not count.
    """
    x = _signs(fit.layout.shape).mul(scale).to(device=device, dtype=instance.dtype)
    recorder = _Recorder()
    with recorder:
        y = instance.call(x).cpu()
    if y.dtype not in HALF:
        return "before_cast", f"the output stays {str(y.dtype)[6:]}"
    wide = any(dtype not in HALF for op in recorder.ops for dtype in op.dtypes)
    if not wide and not unseen(recorder.ops):
        return "after_cast", "all arithmetic is in the input's dtype, there is no cast"
    differ = _differences(fit.layout.split(y), _ideal(x, fit), fit, instance.dtype)
    told = ", ".join(f"{share:.2%} of elements differ from {name}" for name, share in differ.items())
    best, other = sorted(differ, key=lambda name: differ[name])
    if differ[best] <= 0.02 and differ[other] >= max(0.04, 4 * differ[best]):
        return best, told
    return "unknown", told


def _as_drawn(value: Tensor) -> Tensor:
    """A recovered value without its rounding errors, which would decide ties (see `draw`)."""
    nearest = (value * 128).round() / 128
    return nearest if bool((nearest - value).abs().amax() <= 1e-5 * value.abs().amax()) else value


def _differences(got: Tensor, z: Tensor, fit: Fit, half: torch.dtype) -> dict[WeightMultiply, float]:
    """Share of elements whose bits differ from what each order of multiplication and cast gives."""
    z, gain, offset = z.float(), _as_drawn(fit.gain).float(), _as_drawn(fit.offset).float()
    rounded = gain.to(half)
    before = [(z * g + offset).to(half) for g in (gain, rounded.float())]  # 1 + w may be rounded first
    after = z.to(half) * rounded
    if bool(offset.any()):
        after = after + offset.to(half)
    return {
        "before_cast": min(float((got != each).double().mean()) for each in before),
        "after_cast": float((got != after).double().mean()),
    }
