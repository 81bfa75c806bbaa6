"""Leave no trace: what a forward can change in a model or in torch is saved before and put back after."""

from __future__ import annotations

import logging
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normprobe.capture.writes import Keeper, put_contents_back

Undo = Callable[[], object]

_DEPTH = 4  # containers and objects inside each other that are looked into; ends every cycle
_MANY = 2**16  # entries; a longer container is put back too, but not looked into
_NESTED = 16 * 2**20  # elements of tensors inside containers and objects that are copied; others before a write

_EMPTIED, _NUMBERS = frozenset({dict, OrderedDict, list, set}), frozenset({bool, int, float, str, type(None)})
_OPEN: ContextVar[Keeper | None] = ContextVar("keeper of the guard that is open", default=None)


@contextmanager
def untouched(model: nn.Module) -> Iterator[Keeper]:
    """While open the model is in eval mode, torch's fused encoder path is off and compiled functions run as they were
    written; afterwards all is as it was.

    Restored bit for bit, also when the body raises: buffers, train flags, attributes of every module with what is
    inside them (containers, plain objects such as a config, tensors), hooks, which parameters require gradients,
    their `.grad`, random states of Python, numpy (when loaded) and torch on every device. Objects and tensors keep
    their identity. Parameters and gradients are copied just before their first write; for that
    the body reports writes to the keeper, or runs under its mode.

    Not seen: writes to parameters that go past torch's dispatcher (numpy views, foreign kernels), numpy arrays,
    and what lies deeper than four containers or objects.

    Yields:
        The keeper. Where another guard is open already, that one's keeper keeps what it knows, to its own end.

    Raises:
        Exception: the first error of those that restoring met; all else is restored nevertheless.
    """
    keeper = Keeper(_OPEN.get())
    state = _State(model, keeper)
    token = _OPEN.set(keeper)
    try:
        with suppress(NotImplementedError):  # an exported program keeps the mode that it was exported in
            model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.compiler.set_stance("force_eager") if compiles() else nullcontext():
            yield keeper
    finally:
        _OPEN.reset(token)
        _run([*keeper.steps, *state.steps])


def without_autocast() -> AbstractContextManager[None]:
    """While open no operation is given fewer bits by automatic mixed precision, on any device."""
    guard: AbstractContextManager[None] = torch._C._DisableAutocast()
    return guard


def compiles() -> bool:
    """Whether torch's compiler is loaded: before that nothing was compiled, and asking it would load it."""
    return "torch._dynamo" in sys.modules


def _run(steps: Iterable[Undo]) -> None:
    """Take every step, also after one that failed; then raise the first error.

    One that was interrupted from the keyboard is taken anew: to put a thing back twice is to put it back.
    """
    left, errors = list(steps)[::-1], list[BaseException]()
    while left:
        try:
            while left:
                left[-1]()
                left.pop()
        except Exception as error:
            errors.append(error)
            left.pop()
        except BaseException as interrupt:
            errors.append(interrupt)
    if errors:
        raise errors[0]


class _State:
    """The steps that put a model and torch back as they are now."""

    def __init__(self, model: nn.Module, keeper: Keeper) -> None:
        self.steps: list[Undo] = [
            partial(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()),
            partial(torch.set_grad_enabled, torch.is_grad_enabled()),
            *_random_states(model),
        ]
        self._keeper, self._room = keeper, _NESTED
        self._depths: dict[int, int] = {}  # by id: how deep a container or object has been looked into
        self._tensors: set[int] = set()
        self._empty: list[Any] = []
        self.steps.append(partial(_empty_again, self._empty))
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._parameter(parameter)
        for module in model.modules():
            self._module(module)

    def _module(self, module: nn.Module) -> None:
        own = module.__dict__
        self.steps.append(partial(_refill, own, own.copy()))
        for value in (*own.values(), *module._buffers.values()):
            if isinstance(value, Tensor):
                self._tensor(value)
        for value in own.values():
            if type(value) in _EMPTIED and not value:  # most hooks: none
                self._empty.append(value)
            elif type(value) not in _NUMBERS:
                self._nested(value, _DEPTH)

    def _parameter(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        self.steps.append(partial(_put_flags_back, parameter, parameter.requires_grad, gradient))
        self._written_later(parameter)
        if gradient is not None:
            self._written_later(gradient)

    def _nested(self, value: Any, depth: int) -> None:
        """Everything inside a container or a plain object."""
        if isinstance(value, Tensor):
            keep = self._tensor if self._fits(value) else self._written_later
            keep(value)
            return
        contents = _contents(value) if self._depths.get(id(value), 0) < depth else None
        if contents is None:
            return
        self._depths[id(value)] = depth
        if not isinstance(contents, tuple):
            self.steps.append(partial(_refill, contents, contents.copy()))
        if len(contents) <= _MANY:
            for inner in contents.values() if isinstance(contents, dict) else contents:
                self._nested(inner, depth - 1)

    def _fits(self, tensor: Tensor) -> bool:
        """Whether there is room for a copy of a nested tensor; takes that room."""
        if id(tensor) in self._tensors or is_lazy(tensor) or tensor.is_meta:
            return True
        if tensor.numel() > self._room:
            return False
        self._room -= tensor.numel()
        return True

    def _tensor(self, tensor: Tensor) -> None:
        """Copy a tensor's contents now."""
        memory = self._memory(tensor)
        if memory is not None and not tensor.is_meta:
            self.steps.append(partial(put_contents_back, memory, memory.clone()))

    def _written_later(self, tensor: Tensor) -> None:
        """Copy a tensor's contents when it is about to be written."""
        memory = self._memory(tensor)
        if memory is not None and not tensor.is_meta:
            self._keeper.hold(memory)

    def _memory(self, tensor: Tensor) -> Tensor | None:
        """Another tensor in the same memory, to which `tensor` is set back; None where it is looked after already."""
        if id(tensor) in self._tensors or is_lazy(tensor):
            return None
        self._tensors.add(id(tensor))
        memory = tensor.detach()
        self.steps.append(partial(_set_back, tensor, memory))
        return memory


def _empty_again(containers: Iterable[Any]) -> None:
    for container in containers:
        if container:
            container.clear()


def _contents(value: Any) -> Any:
    """A container itself, the dictionary of a plain object, None for anything else.

    Modules have a state of their own; what can be called, Python's modules and loggers belong to the process.
    """
    if isinstance(value, (dict, list, set, deque, tuple)):
        return value
    if callable(value) or isinstance(value, (ModuleType, logging.Logger)):
        return None
    own = getattr(value, "__dict__", None)
    return own if isinstance(own, dict) else None


def _refill(container: Any, copy: Any) -> None:
    """Give a container its old contents back where they differ, keeping its identity."""
    if isinstance(container, set):
        same = container == copy
    else:
        same = len(container) == len(copy) and all(map(_is, container, copy))
        if same and isinstance(container, dict):
            same = all(map(_is, container.values(), copy.values()))
    if same:
        return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(copy)
    else:
        container.update(copy)


def _is(a: object, b: object) -> bool:
    return a is b


def _set_back(tensor: Tensor, memory: Tensor) -> None:
    """Give a tensor its old memory, shape and dtype back where they were exchanged."""
    if memory.layout is not torch.strided:
        return
    form = (memory.shape, memory.dtype, memory.device)
    if (tensor.shape, tensor.dtype, tensor.device) != form or not (memory.is_meta or _same_memory(tensor, memory)):
        tensor.data = memory


def _same_memory(tensor: Tensor, memory: Tensor) -> bool:
    """Whether they are one memory; a subclass made of several tensors (quantised, sharded) does not tell."""
    try:
        return tensor.is_set_to(memory)
    except NotImplementedError:
        return True


def _put_flags_back(parameter: Tensor, requires_grad: bool, gradient: Tensor | None) -> None:
    """Only where they differ: parameters without values and inference tensors refuse it otherwise."""
    if parameter.requires_grad != requires_grad:
        parameter.requires_grad_(requires_grad)
    if parameter.grad is not gradient:
        parameter.grad = gradient


def _random_states(model: nn.Module) -> Iterator[Undo]:
    yield partial(random.setstate, random.getstate())
    yield partial(torch.set_rng_state, torch.get_rng_state())
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"].random
        yield partial(numpy.set_state, numpy.get_state())
    devices = {p.device for p in model.parameters()} | {b.device for b in model.buffers()}
    for device in devices - {torch.device("cpu"), torch.device("meta")}:
        backend = torch.get_device_module(device)
        yield partial(backend.set_rng_state, backend.get_rng_state(device), device)
