"""A module as the subject of identification: copies of it, the recorded call replayed, one tensor varied."""

from __future__ import annotations

import copy
import numbers
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normprobe.capture.calls import CallSpec, TensorSpec
from normprobe.capture.modes import DispatchMode
from normprobe.errors import UnreadableAnatomyError
from normprobe.norms.rebuild import floating_tensors, rebuild
from normprobe.norms.subject import Instance, NotComparableError, draw

SIDE = 32.0  # other floating arguments; in float32 SiLU, GELU and ReLU map it to 32, sigmoid and tanh to 1
EXACT = (torch.float64, torch.float32)  # dtypes for kind and gain, best first
_PLAIN = (str, bytes, numbers.Number, torch.dtype, torch.device, torch.Size, type(None))


@dataclass(frozen=True)
class Tail:
    """The operation that a module ends in; its argument number `position` is what the module had made before."""

    function: Any
    position: int


class _Before(DispatchMode):
    """Keeps what the last call of a tail's operation was given."""

    def __init__(self, tail: Tail) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tail, self.seen = tail, torch.empty(0, device="cpu")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is self.tail.function:
            self.seen = args[self.tail.position].clone()  # the operation may write in place
        return function(*args, **(kwargs or {}))


class ModuleSubject:
    """A module under its recorded call: the first floating tensor argument is varied, others are constants.

    Axes that match no tensor of the module are shortened, so that a large call costs no more than a small
    one, and those of one element widened, which would hide what is reduced; where the module refuses the
    new shape the recorded one is used. In half precision its tensors stay in float32 where it refuses a
    cast of them.

    Args:
        module: never touched; hooks are not copied.
        call: how it was called.
        side: value of the other floating tensor arguments.
        tail: the activation that the module ends in, where what comes before it is meant.

    Raises:
        NotComparableError: no floating tensor argument, or no output that corresponds to it.
        UnreadableAnatomyError: the module could not be rebuilt, or its copy could not be run.
    """

    def __init__(self, module: nn.Module, call: CallSpec, side: float = SIDE, tail: Tail | None = None) -> None:
        self._module, self._side, self._tail = module, side, tail
        self._leaves, self._tree = pytree.tree_flatten((call.args, call.kwargs))
        floating = [i for i, leaf in enumerate(self._leaves) if _is_floating(leaf)]
        if not floating:
            raise NotComparableError("no floating tensor argument")
        self._varied, self.sides, self._result = floating[0], len(floating) - 1, call.result
        self._recorded: TensorSpec = self._leaves[self._varied]
        self._tensors, self._parameters = floating_tensors(module)
        self.dtype, self.recorded_shape = self._recorded.dtype, self._recorded.shape
        self.device = self._home()
        self.shape = self._settle()

    def instance(self, dtype: torch.dtype, seed: int | None, train: bool = False) -> Instance:
        """A fresh copy in `dtype`, in train or eval mode, its tensors drawn anew where a seed is given."""
        values = {} if seed is None else draw(self._tensors.items(), self._parameters, seed)
        instance = self._copy(dtype, dtype, values, train)
        if dtype.itemsize > 2 or not self._tensors:
            return instance
        try:
            instance.call(torch.ones(self.shape, dtype=dtype, device=self.device))
        except RuntimeError:  # such as a fused kernel with its weight in float32 on purpose
            return self._copy(dtype, torch.float32, values, train)
        return self._copy(dtype, dtype, values, train) if train else instance

    def _copy(self, dtype: torch.dtype, held: torch.dtype, values: dict[str, Tensor], train: bool) -> Instance:
        """A copy for inputs of `dtype` that holds its tensors in `held`."""
        twin = self._rebuild(held, values)
        twin.train(train)
        tensors, parameters = floating_tensors(twin)
        others = [self._other(leaf, dtype) for leaf in self._leaves]

        def call(x: Tensor) -> Tensor:
            leaves = list(others)
            leaves[self._varied] = x.clone()
            args, kwargs = pytree.tree_unflatten(leaves, self._tree)
            if self._tail is None:
                return _corresponding(twin(*args, **kwargs), x, self._result)
            with _Before(self._tail) as before:
                twin(*args, **kwargs)
            return _corresponding(before.seen, x)

        return Instance(call, tensors, parameters, dtype)

    def _rebuild(self, dtype: torch.dtype, values: dict[str, Tensor]) -> nn.Module:
        try:
            return rebuild(self._module, dtype, self.device, values)
        except Exception as error:
            raise UnreadableAnatomyError(
                f"cannot rebuild a copy of a {type(self._module).__name__}",
                expected="a module that can be deep-copied",
                found=f"{type(error).__name__}: {error}",
                hint="give the module a __deepcopy__ that works",
            ) from error

    def _home(self) -> torch.device:
        found = next(iter(self._tensors.values())).device if self._tensors else self._recorded.device
        return torch.device("cpu") if found.type in ("meta", "mps") else found

    def _settle(self) -> tuple[int, ...]:
        """The smallest shape that the module accepts."""
        recorded = self._recorded.shape
        failure: Exception | None = None
        for shape in dict.fromkeys((*self._shortened(), (max(2, recorded[0]), *recorded[1:]), recorded)):
            for dtype in EXACT:
                self.shape = shape
                try:
                    instance = self.instance(dtype, seed=0)
                    instance.call(torch.ones(shape, dtype=dtype, device=self.device))
                except (NotComparableError, UnreadableAnatomyError):
                    raise
                except Exception as error:  # a foreign forward may raise anything; kept for the message below
                    failure = error
                else:
                    return shape
        raise UnreadableAnatomyError(
            f"cannot run a copy of a {type(self._module).__name__} outside its model",
            expected=f"a forward that accepts one tensor of shape {recorded}",
            found=f"{type(failure).__name__}: {failure}",
        ) from failure

    def _shortened(self) -> list[tuple[int, ...]]:
        """Shapes to try, smallest first: those axes are kept that agree with the size of a tensor."""
        recorded = self._recorded.shape
        rank = len(recorded)
        if rank < 2:
            return []
        sizes = {size for t in self._tensors.values() for size in (*t.shape, t.numel()) if size > 1}
        agree = [axis for axis in range(1, rank) if recorded[axis] in sizes]
        keeps = [{agree[-1]}, {agree[0]}, set(agree)] if agree else [{rank - 1, *([1] if rank > 3 else [])}]
        rows = 2 if rank > 2 else 4
        return [
            (rows, *[n if axis in keep else min(n, 4) if n > 1 else 2 for axis, n in enumerate(recorded)][1:])
            for keep in keeps
        ]

    def _other(self, leaf: Any, dtype: torch.dtype) -> Any:
        if not isinstance(leaf, TensorSpec):
            return leaf if isinstance(leaf, _PLAIN) else copy.deepcopy(leaf)
        shape = self._fitted(leaf.shape)
        if leaf.dtype.is_floating_point:
            return torch.full(shape, self._side, dtype=dtype, device=self.device)
        if leaf.value is None:
            return torch.zeros(shape, dtype=leaf.dtype, device=self.device)
        value = leaf.value.to(self.device)
        return value[tuple(slice(0, size) for size in shape)].expand(shape).clone()

    def _fitted(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """`shape` with the axes that agree with the recorded input's resized as the input is."""
        old, new = self._recorded.shape, self.shape if hasattr(self, "shape") else self._recorded.shape
        agree = [a == b for a, b in zip(shape, old, strict=False)]
        return tuple(new[i] if i < len(agree) and agree[i] else size for i, size in enumerate(shape))


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, TensorSpec) and leaf.dtype.is_floating_point and len(leaf.shape) > 0


def _corresponding(output: Any, x: Tensor, result: int = 0) -> Tensor:
    """The floating tensor of the output with number `result` of those shaped as x, or the only one with as many
    elements in the same order."""
    tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    same = [t for t in tensors if t.shape == x.shape]
    if len(same) > result:
        return same[result]
    if not same and len(tensors) == 1 and tensors[0].numel() == x.numel():
        return tensors[0].reshape(x.shape)
    raise NotComparableError(f"output shapes {[tuple(t.shape) for t in tensors]}, input {tuple(x.shape)}")
