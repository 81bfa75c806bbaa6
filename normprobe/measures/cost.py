"""What the norms cost: operations, reductions and bytes of each, and their share of the time of a forward."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normprobe.capture.guard import untouched
from normprobe.capture.invoke import Inputs, invoke
from normprobe.capture.modes import DispatchMode
from normprobe.capture.wrappers import wrapped_forwards
from normprobe.measures.extra import Extra, Subject
from normprobe.norms.precision import FUSED
from normprobe.records import Basis, NormSite, Skipped
from normprobe.records.cost import CostMeasure, NormCost
from normprobe.records.extras import ExtraName

_TIMED = 5  # forwards, after one that is not timed
_UNCUT = "only token ids are cut to one token: tables [batch, tokens], all inputs of one size"
_ALLOCATING = ("empty", "new_empty")


class Cost(Extra):
    """Every norm that is a module: one forward that counts, and six that are timed at each of two lengths."""

    name: ClassVar[ExtraName] = "cost"

    def measure(self, subject: Subject) -> tuple[CostMeasure | None, tuple[Skipped, ...]]:
        """Counts are exact; times are those of this machine."""
        executed = [norm for norm in subject.anatomy.norms if norm.executed]
        norms = [norm for norm in executed if norm.module]
        if not norms:
            return None, (Skipped(what=self.name, why="the model runs no norm that is a module"),)
        model, inputs = subject.model, subject.inputs
        paths = frozenset(norm.path for norm in norms)
        with untouched(model) as keeper, torch.no_grad():
            subject.tell(self.name, 0, 3)
            with keeper.mode():  # what is written here is kept for the timed forwards too, which run without
                counted = _count(model, inputs, paths)
            subject.tell(self.name, 1, 3)
            whole = _timed(model, inputs, paths)
            subject.tell(self.name, 2, 3)
            single = one_token(inputs)
            short = None if single is None else _tried(model, single, paths)
        skipped = [_unseen(norm) for norm in executed if norm.path not in counted]
        if short is None:
            why = _UNCUT if single is None else "the model does not run on one token"
            skipped.append(Skipped(what="cost of one token", why=why))
        rows = tuple(_row(norm, counted[norm.path], whole) for norm in norms if norm.path in counted)
        return CostMeasure(
            basis=Basis(unit="s", dtype=norms[0].dtype, count=_TIMED),
            device=_device(model).type,
            norms=rows,
            forward_seconds=whole.forward,
            share=whole.share,
            one_token_seconds=None if short is None else short.forward,
            one_token_share=None if short is None else short.share,
        ), tuple(skipped)


def _unseen(norm: NormSite) -> Skipped:
    why = "its forward was not called" if norm.module else "it is no module"
    return Skipped(what=f"cost of norm {norm.path}", why=why)


@dataclass
class _Count:
    calls: int = 0
    operations: int = 0
    reductions: int = 0
    moved: int = 0
    needed: int = 0


@dataclass(frozen=True)
class _Times:
    """Seconds of one forward, and in it of each norm without the norms inside it."""

    forward: float
    norms: Mapping[str, float]

    @property
    def share(self) -> float:
        return math.fsum(self.norms.values()) / self.forward


def _row(norm: NormSite, count: _Count, times: _Times) -> NormCost:
    return NormCost(
        path=norm.path,
        calls=count.calls,
        operations=count.operations,
        reductions=count.reductions,
        bytes_moved=count.moved,
        bytes_needed=count.needed,
        fused=norm.fused,
        seconds=times.norms.get(norm.path, 0.0),
    )


def _size(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


class _Counter(DispatchMode):
    """Counts the operations of the norm that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside: list[_Count] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        if self.inside and not getattr(func, "is_view", False) and not name.startswith(_ALLOCATING):
            count = self.inside[-1]
            count.operations += 1
            count.reductions += name in FUSED or torch.Tag.reduction in getattr(func, "tags", ())
            count.moved += _size((args, kwargs)) + _size(output)
        return output


def _count(model: nn.Module, inputs: Inputs, paths: frozenset[str]) -> dict[str, _Count]:
    counter, found = _Counter(), defaultdict[str, _Count](_Count)

    def around(path: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if path not in paths:
            return forward(*args, **kwargs)
        count = found[path]
        count.calls += 1
        counter.inside.append(count)
        try:
            output = forward(*args, **kwargs)
        finally:
            counter.inside.pop()
        count.needed += _size((args, kwargs)) + _size(output)
        count.needed += _size((list(module.parameters()), [b for b in module.buffers() if b.is_floating_point()]))
        return output

    with wrapped_forwards(model, around), counter:
        invoke(model, inputs)
    return dict(found)


def _tried(model: nn.Module, inputs: Inputs, paths: frozenset[str]) -> _Times | None:
    try:
        return _timed(model, inputs, paths)
    except Exception:  # the user's forward on inputs that it was not given for
        return None


def _timed(model: nn.Module, inputs: Inputs, paths: frozenset[str]) -> _Times:
    """The fastest of the timed forwards, as other work of the machine only adds: all figures of one forward, so that
    they add up."""
    runs = [_time_once(model, inputs, paths) for _ in range(_TIMED + 1)][1:]
    return min(runs, key=lambda run: run.forward)


def _time_once(model: nn.Module, inputs: Inputs, paths: frozenset[str]) -> _Times:
    spent = dict.fromkeys(paths, 0.0)
    inside: list[float] = []  # of each norm that runs, the time of the norms that ran in it
    device = _device(model)

    def around(path: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if path not in paths:
            return forward(*args, **kwargs)
        inside.append(0.0)
        start = _now(device)
        try:
            return forward(*args, **kwargs)
        finally:
            took = _now(device) - start
            spent[path] += took - inside.pop()
            if inside:
                inside[-1] += took

    with wrapped_forwards(model, around):
        start = _now(device)
        invoke(model, inputs)
        return _Times(_now(device) - start, spent)


def _device(model: nn.Module) -> torch.device:
    tensors: Iterator[Tensor] = iter([*model.parameters(), *model.buffers()])
    return next((t.device for t in tensors), torch.device("cpu"))


def _now(device: torch.device) -> float:
    """The clock, once the device has done what it was given."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def one_token(inputs: Inputs) -> Inputs | None:
    """The first token of the first sample, where all input tensors are tables [batch, tokens] of one size."""
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    shapes: Sequence[torch.Size] = list({leaf.shape for leaf in leaves})
    if len(shapes) != 1 or len(shapes[0]) != 2 or any(leaf.is_floating_point() for leaf in leaves):
        return None
    cut: Inputs = pytree.tree_map_only(Tensor, lambda t: t[:1, :1], inputs)
    return cut
