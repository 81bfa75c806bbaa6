"""One forward with samples of what its norms, writes and streams hold, and the reductions it ran in half precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from normprobe.capture.invoke import Inputs
from normprobe.capture.modes import DispatchMode
from normprobe.capture.outputs import named_tensors
from normprobe.capture.watch import Handler, watch
from normprobe.capture.wrappers import wrapped_forwards
from normprobe.measures.finite import floats
from normprobe.measures.padding import counted, padding_masks, sampled
from normprobe.records import Anatomy, Branch, OpSite

SAMPLED = 16384  # elements kept of each tensor
HALF = (torch.float16, torch.bfloat16)
_EXACT = frozenset({"amax", "amin", "aminmax", "max", "min"})  # reductions that round nothing
_NO_WRITE = "the write is no tensor of its own: this operation makes it and the sum at once"
_SOFTMAX = frozenset({"_softmax", "_log_softmax", "_safe_softmax", "cumsum"})  # sums inside, but of the input's shape

Kind = Literal["norm", "write", "stream", "output"]


class Place(NamedTuple):
    """Which tensor: what it is, where it is, which of several there, and the add that wrote it or its stream."""

    kind: Kind
    path: str
    execution: int
    add: OpSite | None = None


@dataclass(frozen=True)
class Sample:
    """Elements of one tensor, float64 on the CPU, with what is known of all `total` of them."""

    values: Tensor
    total: int
    dtype: str
    largest: float


class Reduced(NamedTuple):
    """A reduction in half precision: the module it runs in, the operation, the dtype."""

    path: str
    op: str
    dtype: str


@dataclass
class Snapshots:
    """What came of one forward, in order of time; `missed` are adds whose write or sum was not
    seen, with the reason."""

    seed: int
    padding: tuple[Tensor, ...] = ()
    samples: dict[Place, Sample] = field(default_factory=dict)
    reductions: Counter[Reduced] = field(default_factory=Counter)
    missed: dict[OpSite, str] = field(default_factory=dict)

    def keep(self, kind: Kind, path: str, x: Tensor, add: OpSite | None = None) -> None:
        """Take a seeded sample without padding, the same elements of every tensor of this shape."""
        execution = sum(1 for place in self.samples if place[:2] == (kind, path))
        chosen, total = sampled(x.shape, self.seed, SAMPLED, self.padding)
        if total == 0:
            return
        values, seen = x.detach().reshape(-1)[chosen.to(x.device)], counted(self.padding, x.shape)
        low, high = (x.detach() if seen is None else x.detach()[seen.to(x.device).expand_as(x)]).aminmax()
        largest = float(torch.maximum(low.abs(), high.abs()))
        place, dtype = Place(kind, path, execution, add), str(x.dtype).removeprefix("torch.")
        self.samples[place] = Sample(values.cpu().double(), total, dtype, largest)


def take(model: nn.Module, inputs: Inputs, anatomy: Anatomy, seed: int) -> Snapshots:
    """Run `model` once as it is and look at every norm that is a module, every write, and the outputs."""
    found = Snapshots(seed, padding_masks(inputs))
    norms = {norm.path for norm in anatomy.norms if norm.module}
    inside = ["."]

    def around(path: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        inside.append(path)
        try:
            output = forward(*args, **kwargs)
        finally:
            inside.pop()
        given = floats(output) if path in norms else []
        if given:
            with _disable_current_modes():
                found.keep("norm", path, given[0])
        return output

    sites = {b.add: _Write(found, b) for stream in anatomy.streams for b in stream.branches}
    with wrapped_forwards(model, around), _Reductions(found, inside):
        watched = watch(model, inputs, sites)
    found.missed |= {site: why for site in sites if (why := watched.reason(site)) is not None}
    for name, tensor in named_tensors(watched.output):
        if tensor.is_floating_point():
            found.keep("output", name, tensor)
    return found


class _Write(Handler):
    """Keeps what is added, before an operation in place overwrites it, and the sum."""

    def __init__(self, found: Snapshots, branch: Branch) -> None:
        self.found, self.branch = found, branch

    def before(self, arguments: Mapping[str, Any]) -> None:
        """Keep the operand that is not the trunk, where the operation has one."""
        branch, operands = self.branch, [value for value in arguments.values() if isinstance(value, Tensor)]
        if len(operands) == 2 and branch.apart:
            self.found.keep("write", branch.path, operands[1 - branch.trunk], branch.add)
        else:
            self.found.missed[branch.add] = _NO_WRITE

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        """Keep the sum."""
        self.found.keep("stream", self.branch.path, output, self.branch.add)


class _Reductions(DispatchMode):
    """Counts the operations that sum half-precision numbers and give half precision back."""

    def __init__(self, found: Snapshots, inside: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found, self.inside = found, inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else ""
        if name in _SOFTMAX or (name not in _EXACT and torch.Tag.reduction in getattr(func, "tags", ())):
            dtypes = {t.dtype for t in floats((args, output))}
            if dtypes and all(dtype in HALF for dtype in dtypes):
                self.found.reductions[Reduced(self.inside[-1], name, str(dtypes.pop())[6:])] += 1
        return output
