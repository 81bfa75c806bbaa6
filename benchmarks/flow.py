"""Readers and writers held against the model itself, and the proof that a model has no residual stream.

A branch's writers are all that carries it into the stream: with them at zero, noise on its readers must not move
the output by a bit; with them in place it must, with the weights that the model has or with noisier ones (a softmax
over a single key hides its query). What reaches what is followed by storage in `Taint`.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from normprobe.capture.invoke import Inputs, split
from normprobe.records import Anatomy, Branch

PICKS = 3  # branches of each stream that are tried
DRAWS = 3  # other weights that readers without effect are tried with
ROUNDING = 1e-12  # relative; zero in all but name, as a zeroed branch adds exact zeros
LIGHT = (
    "aten::mul",
    "aten::div",
    "aten::_to_copy",
    "aten::clone",
    "aten::copy_",
    "aten::native_dropout",
    "aten::dropout",
    "aten::constant_pad_nd",
    "aten::cat",
    "aten::mul_",
    "aten::div_",
    "aten::_unsafe_view",
    "aten::index_select",
)
ADDS = ("aten::add", "aten::sub", "aten::rsub", "aten::lerp", "aten::addcmul", "aten::addcdiv")


@dataclass
class Held:
    """The outcome of the check: what does not hold (None: all does), and how many branches reach no output."""

    fault: str | None = None
    tried: int = 0
    unreachable: list[str] = field(default_factory=list)


class Taint(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows what is computed from the tensors `sources`, by storage, and notes the sums that could be residual adds.

    Such a sum adds a tensor, seen through views, copies and scaling, to something computed from that same tensor.
    With `discrete=False` whole numbers computed from the sources (a comparison, a choice) are not followed further.
    """

    def __init__(self, sources: Iterable[Tensor], discrete: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.discrete = discrete
        self._alive: list[Tensor] = list(sources)  # a freed storage's address would be given to another
        self._root = {self._key(t): i for i, t in enumerate(self._alive)}
        self._behind = {i: frozenset({i}) for i in self._root.values()}  # the roots that a root was computed from
        self.skips: list[str] = []
        self.read = self.used = False

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor was computed from a source."""
        return self._key(tensor) in self._root

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        hot = [t for t in given if self.holds(t)]
        if hot:
            self.read = True
            self._note_skip(func, given)
            made = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
            self._follow(func, hot, [*made, *(given[:1] if func._schema.is_mutable else [])])
        return out

    def _note_skip(self, func: Any, given: list[Tensor]) -> None:
        name = func._schema.name
        terms = [t for t in given[:2] if t.is_floating_point() and self.holds(t)]
        if name.removesuffix("_") in ADDS and len(terms) == 2 and terms[0].shape == terms[1].shape:
            a, b = (self._root[self._key(t)] for t in terms)
            if a in self._behind[b] or b in self._behind[a]:
                self.skips.append(f"{name} of two {tuple(terms[0].shape)}")

    def _follow(self, func: Any, hot: list[Tensor], made: list[Tensor]) -> None:
        roots = [self._root[self._key(t)] for t in hot]
        light = func.is_view or func._schema.name in LIGHT
        if light and len(set(roots)) == 1:
            root = roots[0]
        else:
            root = len(self._behind)
            self._behind[root] = frozenset({root}).union(*(self._behind[r] for r in roots))
        for tensor in (t for t in made if self.discrete or t.is_floating_point() or t.is_complex()):
            self._alive.append(tensor)
            self._root[self._key(tensor)] = root


def skips(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[str]:
    """The sums of a forward that could be residual adds; a model without any has no residual stream."""
    taint = Taint(inputs.values())
    run(model, inputs, taint)
    return taint.skips


def first_output(output: Any) -> Tensor:
    """The logits of an output, else its first floating-point tensor.

    Raises:
        TypeError: there is no such tensor.
    """
    logits = getattr(output, "logits", None)
    leaves = [logits] if isinstance(logits, Tensor) else pytree.tree_leaves(_plain(output))
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf
    raise TypeError(f"no floating-point tensor in an output of type {type(output).__name__}")


def _plain(output: Any) -> Any:
    return list(output.values()) if isinstance(output, Mapping) else output


def run(model: nn.Module, inputs: Inputs, mode: Taint | None = None) -> Tensor:
    """The model's first output in float64, with the seed reset, so that random steps repeat."""
    torch.manual_seed(1)
    args, kwargs = split(inputs)
    cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            if mode is None:
                return first_output(model(*args, **(cache | kwargs))).double()
            with mode:
                output = first_output(model(*args, **(cache | kwargs)))
            mode.used = mode.holds(output)
            return output.double()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def holds(model: nn.Module, inputs: Inputs, anatomy: Anatomy, picks: int = PICKS) -> Held:
    """Try up to `picks` seeded branches of each stream; the model's parameters are put back. A mixer without weights
    has nothing to try."""
    held = Held()
    branches = [branch for stream in anatomy.streams for branch in stream.branches]
    if not branches:
        return Held(fault="a stream without branches")
    for stream in anatomy.streams:
        weighted = [branch for branch in stream.branches if branch.readers or branch.writers]
        for branch in random.Random(0).sample(weighted, min(picks, len(weighted))):
            held.tried += 1
            held.fault = _fault(model, inputs, branch, branches, held)
            if held.fault is not None:
                return held
    return held


def _fault(model: nn.Module, inputs: Inputs, branch: Branch, branches: list[Branch], held: Held) -> str | None:
    params = dict(model.named_parameters(remove_duplicate=False))
    place = f"{branch.block} ({branch.kind}, add in {branch.path})"
    for side, names in (("readers", branch.readers), ("writers", branch.writers)):
        if not names:
            return f"{place}: no {side}"
        for name in names:
            if name not in params:
                return f"{place}: no parameter {name} among the {side}"
    family = [other for other in branches if set(other.readers) & set(branch.readers)]
    writers: dict[int, Tensor] = {id(params[name]): params[name] for other in family for name in other.writers}
    # A branch that is one linear map reads and writes with the same parameters.
    readers: list[Tensor] = [params[name] for name in dict.fromkeys(branch.readers)]
    readers = [reader for reader in readers if id(reader) not in writers] or readers
    moved, still, shift = _effects(model, inputs, readers, list(writers.values()))
    if moved == 0.0 == still and shift > 0.0:
        moved, still = _redrawn(model, inputs, readers, list(writers.values()))
    if not still <= ROUNDING:
        return f"{place}: with its writers zeroed its readers still move the output, by {still:.1e}"
    if moved > ROUNDING:
        return None
    if shift == moved == 0.0 and not _reaches(model, inputs, list(writers.values())):
        held.unreachable.append(place)
        return None
    return f"{place}: its readers move the output by {moved:.1e} only; zeroing its writers moves it by {shift:.1e}"


def _redrawn(model: nn.Module, inputs: Inputs, readers: list[Tensor], writers: list[Tensor]) -> tuple[float, float]:
    """What the readers move, with the writers as they are and at zero, under the first of some noisier weights with
    which they move anything."""
    kept = [p.detach().clone() for p in model.parameters()]
    moved = still = 0.0
    try:
        for draw in range(DRAWS):
            with torch.no_grad():
                for param in (p for p in model.parameters() if p.is_floating_point()):
                    _noise(param, seed=draw)
            moved, still, _ = _effects(model, inputs, readers, writers)
            if moved != 0.0 or still != 0.0:
                break
    finally:
        with torch.no_grad():
            for param, value in zip(model.parameters(), kept, strict=True):
                param.copy_(value)
    return moved, still


def _effects(
    model: nn.Module, inputs: Inputs, readers: list[Tensor], writers: list[Tensor]
) -> tuple[float, float, float]:
    """Relative moves of the output: noise on readers, the same with writers zeroed, zeroing the writers alone."""
    base = run(model, inputs)
    moved = _with(model, inputs, readers, _noise, base)
    ids = {id(w) for w in writers}
    readers = [r for r in readers if id(r) not in ids]
    kept = [w.detach().clone() for w in writers]
    with torch.no_grad():
        for writer in writers:
            writer.zero_()
        try:
            zeroed = run(model, inputs)
            still = _with(model, inputs, readers, _noise, zeroed)
        finally:
            for writer, value in zip(writers, kept, strict=True):
                writer.copy_(value)
    return moved, still, _distance(zeroed, base)


def _with(
    model: nn.Module, inputs: Inputs, params: list[Tensor], change: Callable[[Tensor], None], base: Tensor
) -> float:
    kept = [p.detach().clone() for p in params]
    with torch.no_grad():
        try:
            for param in params:
                change(param)
            return _distance(run(model, inputs), base)
        finally:
            for param, value in zip(params, kept, strict=True):
                param.copy_(value)


def _distance(found: Tensor, base: Tensor) -> float:
    if found.shape != base.shape:
        return float("inf")
    return ((found - base).abs().max() / base.abs().max().clamp_min(1e-12)).item()


def _noise(param: Tensor, seed: int = 3) -> None:
    spread = param.float().std().item() if param.numel() > 1 else 0.0
    noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)) * 2 * (spread or 1.0)
    param.add_(noise.to(param.dtype))


def _reaches(model: nn.Module, inputs: Inputs, writers: list[Tensor]) -> bool:
    """Whether numbers computed from the writers enter the output, other than by choices (a router's, a boundary's).

    Also true where no operation reads the writers: then they are none.
    """
    taint = Taint(writers, discrete=False)
    run(model, inputs, taint)
    return taint.used or not taint.read
