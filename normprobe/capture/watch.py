"""One forward in which chosen operations are watched: counted as when recording, and nothing is kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OperatorBase
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from normprobe.capture.composites import COMPOSITES, is_product_of_parts, opened, without_modes
from normprobe.capture.guard import untouched, without_autocast
from normprobe.capture.invoke import Inputs, invoke
from normprobe.capture.modes import DispatchMode
from normprobe.capture.operators import Operators
from normprobe.capture.wrappers import wrapped_forwards
from normprobe.capture.writes import Keeper, written
from normprobe.records import OpSite


class Handler:
    """What is told about one watched operation; arguments come by the names of the operator's schema.

    Tensors belong to the running forward: a handler reads them and keeps none. Its own operations are not
    watched, and automatic mixed precision, gradients and inference mode are off for them.
    """

    def before(self, arguments: Mapping[str, Any]) -> None:
        """The operation is about to run: operands that it will overwrite still hold their values."""

    def after(self, arguments: Mapping[str, Any], output: Any) -> None:
        """The operation has run."""

    def settled(self) -> None:
        """Autograd knows of the output too, and no later operation has changed it yet."""


_DEAF = frozenset({Handler.before, Handler.after, Handler.settled})  # do nothing, and need no preparation


@dataclass(frozen=True)
class Watched:
    """What came of a watched forward.

    Attributes:
        output: what the model returned.
        missed: watched sites that were not reached.
        failed: sites whose handler raised, with what it said.
    """

    output: Any
    missed: tuple[OpSite, ...]
    failed: Mapping[OpSite, str]

    def reason(self, site: OpSite) -> str | None:
        """Why nothing is known of `site`; None where it was seen."""
        if site in self.missed:
            return "the measured forward did not run this operation, though the recorded one did"
        return self.failed.get(site)


def watch(
    model: nn.Module,
    inputs: Inputs,
    handlers: Mapping[OpSite, Handler],
    *,
    grad: bool = False,
    everywhere: bool = True,
    place: Callable[[Tensor], Tensor] | None = None,
) -> Watched:
    """Run `model` once on `inputs` in eval mode and tell `handlers` of the operations at their sites.

    The model is left bit for bit as it was, also when its forward raises (that error passes through). An
    error in a handler does not stop the forward: it is kept in `failed`, and that handler is told nothing
    more.

    Args:
        model: any module.
        inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        handlers: one handler a site.
        grad: whether autograd records the forward.
        everywhere: False looks only inside the modules that run a watched operation, which costs less; writes of
            other modules into parameters are not seen then, so that a recorded forward must have shown none.
        place: called with each tensor among the copies of the inputs; what it returns takes that one's place. Its
            operations are not counted.
    """
    with untouched(model) as keeper, torch.set_grad_enabled(grad):
        watcher = Watcher(handlers, keeper, everywhere)
        with wrapped_forwards(model, watcher.around), watcher.modes(ALL):
            output = invoke(model, inputs, place and partial(without_modes, place))
        watcher.settle()
    return Watched(output, tuple(watcher.unseen), watcher.failed)


_Plan = dict[str, dict[int, OpSite]]  # operation, ordinal
_FUNCTIONS = frozenset(function.__name__ for function in COMPOSITES if not isinstance(function, OperatorBase))
_OFF, _WHOLE, ALL = 0, 1, 2  # what is seen: nothing, torch functions that count as a whole, every operation


@dataclass(slots=True)
class Frame:
    """One run of a module: what is watched directly inside it, and how often each such operation has run."""

    plan: _Plan
    counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def site(self, op: str) -> OpSite | None:
        """Counts a call of `op`; its site if that call is watched."""
        ordinals = self.plan.get(op)
        if ordinals is None:
            return None
        ordinal = self.counts[op]
        self.counts[op] = ordinal + 1
        return ordinals.get(ordinal)


class Watcher:
    """Keeps count while the two modes and the forward wrapper report to it."""

    def __init__(self, handlers: Mapping[OpSite, Handler], keeper: Keeper, everywhere: bool) -> None:
        self.keeper, self.everywhere = keeper, everywhere
        self.handlers = dict(handlers)
        self.unseen = dict.fromkeys(handlers)
        self.failed: dict[OpSite, str] = {}
        self.plans: defaultdict[tuple[str, int], _Plan] = defaultdict(dict)
        for site in handlers:
            self.plans[site.path, site.execution].setdefault(site.op, {})[site.ordinal] = site
        self.runs: defaultdict[str, int] = defaultdict(int)
        self.root = Frame(self.plans.get((".", 0), {}))
        self.frame = self.root  # operations outside every forward count towards the root's first run
        self.unsettled: list[OpSite] = []
        self.dispatch = _Dispatch(self)
        self.functions = _Functions(self)
        self.sees = _OFF

    def around(self, path: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One run of a module."""
        execution = self.runs[path]
        self.runs[path] = execution + 1
        first = path == "." and execution == 0
        frame = self.root if first else Frame(self.plans.get((path, execution), {}))
        sees = ALL if self.everywhere else _needed(frame.plan)
        if sees == self.sees:
            return self.within(frame, forward, args, kwargs)
        with self.modes(sees):
            return self.within(frame, forward, args, kwargs)

    @contextmanager
    def modes(self, sees: int) -> Iterator[None]:
        """Have those modes on that see so much, as before afterwards; none is left while it is not the innermost."""
        before = self.sees
        if sees == before or (sees < before and not self._innermost()):
            yield
            return
        self._switch(sees)
        try:
            yield
        finally:
            self._switch(before)

    def _innermost(self) -> bool:
        """Whether no other mode was entered since those of ours that are on."""
        inner = _get_current_function_mode(), _get_current_dispatch_mode()  # type: ignore[no-untyped-call]
        return inner[0] is self.functions and (self.sees != ALL or inner[1] is self.dispatch)

    def _switch(self, sees: int) -> None:
        before, self.sees = self.sees, sees
        modes: tuple[tuple[int, AbstractContextManager[Any]], ...] = (ALL, self.dispatch), (_WHOLE, self.functions)
        for least, mode in modes:
            if before < least <= sees:
                mode.__enter__()
            elif sees < least <= before:
                mode.__exit__(None, None, None)

    def within(self, frame: Frame, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `function`; the operations directly inside count towards `frame`."""
        outer, self.frame = self.frame, frame
        try:
            return function(*args, **kwargs)
        finally:
            self.frame = outer

    def composite(self, function: Any, names: Sequence[str], args: Any, kwargs: Any) -> Any:
        """A torch function that is watched as a whole: what it is made of is not counted."""
        site = self.frame.site(function.__name__)
        run = partial(self.within, Frame({}), function, args, kwargs)
        if site is None:
            return run()
        return self.operation(site, dict(zip(names, args, strict=False)) | kwargs, run)

    def operation(self, site: OpSite, arguments: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """Run a watched operation and tell its handler."""
        handler = self.handlers[site]
        self.unseen.pop(site, None)
        self._tell(site, handler.before, arguments)
        output = run()
        self._tell(site, handler.after, arguments, output)
        self.unsettled.append(site)
        return output

    def settle(self) -> None:
        """Tell the handlers of all operations since the last call that their outputs are settled."""
        sites, self.unsettled = self.unsettled, []
        for site in sites:
            self._tell(site, self.handlers[site].settled)

    def _tell(self, site: OpSite, method: Callable[..., None], *arguments: Any) -> None:
        if getattr(method, "__func__", None) in _DEAF or site in self.failed:
            return
        try:
            with self._alone(), without_autocast(), torch.inference_mode(False), torch.no_grad():
                method(*arguments)
        except Exception as error:  # what cannot be measured must not stop the forward; the caller reports it
            self.failed[site] = reason(error)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No mode sees a handler's own operations. To ask costs less than to take no modes off."""
        ours = _get_current_function_mode() is self.functions  # type: ignore[no-untyped-call]
        dispatched = torch._C._len_torch_dispatch_stack() > 0
        with (
            _pop_mode_temporarily() if ours else nullcontext(),
            _disable_current_modes() if dispatched else nullcontext(),
        ):
            yield


def reason(error: Exception) -> str:
    """Why something could not be looked at: the words of a `ValueError`, which are the handler's; others are named."""
    return str(error) if isinstance(error, ValueError) else f"looking at it raised {type(error).__name__}: {error}"


class _Dispatch(DispatchMode):
    supports_higher_order_operators = True

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watcher = watcher
        self.operators = Operators()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        watcher = self.watcher
        known = self.operators.of(func)
        if known.composite:
            return watcher.composite(func, COMPOSITES[func], args, kwargs)
        if watcher.unsettled:
            watcher.settle()
        if known.writes:
            watcher.keeper.before_write(written(func, args, kwargs))
        site = watcher.frame.site(known.name)
        if site is None:
            return func(*args, **kwargs)
        return watcher.operation(site, _by_name(func, args, kwargs), lambda: func(*args, **kwargs))


class _Functions(TorchFunctionMode):
    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = COMPOSITES.get(func)
        if names is not None:
            return self.watcher.composite(func, names, args, kwargs or {})
        if is_product_of_parts(func, args):
            return self.watcher.within(Frame({}), func, args, kwargs or {})
        inside = opened(func)
        if inside is None:
            return func(*args, **(kwargs or {}))
        with self:
            return inside(*args, **(kwargs or {}))


def _needed(plan: _Plan) -> int:
    """How much must be seen of a module to see what is watched directly inside it."""
    if not plan:
        return _OFF
    return _WHOLE if plan.keys() <= _FUNCTIONS else ALL


def _by_name(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an ATen call by the names of its schema, in its order."""
    names = [argument.name for argument in function._schema.arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)
