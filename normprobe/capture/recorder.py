"""Record one forward: every ATen call becomes a node, every module run a call, in-place writes new values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.jit import ScriptModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from normprobe.capture.calls import CallSpec
from normprobe.capture.composites import arguments_of, without_modes
from normprobe.capture.guard import compiles, untouched
from normprobe.capture.invoke import Inputs, invoke, refuse_lazy
from normprobe.capture.leaves import dotted, replaced, tensors
from normprobe.capture.onlooker import Onlooker
from normprobe.capture.operators import Operators
from normprobe.capture.outputs import named_tensors
from normprobe.capture.reporting import Functions, Operations
from normprobe.capture.shadows import Shadows, on_meta
from normprobe.capture.storage import ValueTable, put_in_place, sources
from normprobe.capture.trace import Call, Node, Ref, Trace, Value
from normprobe.capture.unseen import Unseen
from normprobe.capture.wrappers import wrapped_forwards
from normprobe.capture.writes import Keeper, written

HELD = 1 << 18  # elements; copies of larger inputs and constants are not kept


def record(model: nn.Module, inputs: Inputs, onlooker: Onlooker | None = None) -> Trace:
    """Run `model` once on `inputs` in eval mode without gradients and return the recorded data flow.

    The model is left bit for bit as it was, also when its forward raises (that error passes through). What it computes
    is what it computes unrecorded, bit for bit.

    Raises:
        InputError: if a parameter of a lazy module has no values yet, or the inputs cannot be passed.
    """
    refuse_lazy(model)
    compiled = compiles()
    try:
        trace = _record(model, inputs, onlooker)
    except Exception:
        if compiled or not compiles():
            raise
    else:
        if compiled or not compiles():
            return trace
    # The model has compiled something, which from now on runs as it was written.
    return _record(model, inputs, onlooker)


def _record(model: nn.Module, inputs: Inputs, onlooker: Onlooker | None) -> Trace:
    plain = torch.inference_mode(False)  # inference mode shows other operations for the same layer
    with plain, untouched(model) as keeper, torch.no_grad():
        recorder = _Recorder(model, keeper)
        with wrapped_forwards(model, recorder.around):
            with (
                onlooker.beside() if onlooker else nullcontext(),
                recorder.functions,
                recorder.dispatch,
                recorder.unseen.functions(),
            ):
                output = invoke(model, inputs, recorder.place, recorder.root(model))
            recorder.finish(output)
        if onlooker:
            onlooker.gave(output)
        recorder.trace.wrote = keeper.wrote
    return recorder.trace


class _Recorder:
    """Builds a `Trace` while the two modes and the forward wrapper report to it."""

    def __init__(self, model: nn.Module, keeper: Keeper) -> None:
        self.trace = Trace()
        self.keeper = keeper
        self.table = ValueTable()
        self.shadows = Shadows(self.assume) if on_meta(model) else None
        self.stack: list[int] = []
        self.runs: defaultdict[str, int] = defaultdict(int)
        self.ordinals: defaultdict[tuple[int, str], int] = defaultdict(int)
        self.sources = sources(model)
        self.operators = Operators()
        self.dispatch = Operations(self)
        self.functions = Functions(self)
        self.unseen = Unseen(self.trace, self.read, self._emit)

    # ---- calls

    def around(self, path: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with DisableTorchFunction():
            call = self.open(path, type(module).__name__, args, kwargs)
            call.spec = CallSpec.of(args, kwargs, self.shadows.known if self.shadows else None)
        for name, tensor in put_in_place(self.sources, path, module):
            self._emit("parameter", (), [tensor], name=name)
        try:
            output = forward(*args, **kwargs)
            with DisableTorchFunction():
                self.unseen.fill(call.first_node, lambda: [*tensors((args, kwargs)), *module.parameters()], output)
        finally:
            self.stack.pop()
        with DisableTorchFunction():
            return self.close(call, output)

    def root(self, model: nn.Module) -> Callable[..., Any]:
        """The model as it is run; one in TorchScript does not tell by itself."""
        if not isinstance(model, ScriptModule):
            return model
        return lambda *args, **kwargs: self.around(".", model, model, args, kwargs)

    def open(self, path: str, class_name: str, args: Any, kwargs: Any) -> Call:
        """Begin a call; the values of its tensor arguments are read now."""
        if not self.stack:
            self._name_inputs(args, kwargs)
        parent = self.stack[-1] if self.stack else -1
        call = Call(len(self.trace.calls), parent, path, self.runs[path], class_name)
        call.inputs = tuple(self.read(t) for t in tensors((args, kwargs)))
        call.first_node = len(self.trace.nodes)
        self.runs[path] += 1
        self.trace.calls.append(call)
        self.stack.append(call.id)
        return call

    def close(self, call: Call, output: Any) -> Any:
        call.outputs = tuple(self.read(t) for _, t in named_tensors(output))
        call.last_node = len(self.trace.nodes)
        return output

    def composite(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Record a torch function as one call and one operation, under the path of the module that called it; what it
        dissolves into differs between devices and is not looked at."""
        call = self.open(self._path(), "", args, kwargs)
        self.runs[call.path] -= 1
        call.composite = str(function.__name__)
        call.execution = self._ordinal(call.parent, call.composite)
        with _disable_current_modes():
            bound = arguments_of(function, args, kwargs)
        call.arguments = replaced(bound, lambda t: Ref(self.read(t)))
        try:
            with _disable_current_modes():
                if self.shadows is not None:
                    args, kwargs = self.shadows.together(args, kwargs)
                output = function(*args, **kwargs)
            self._emit(f"torch.{call.composite}", call.inputs, tensors(output))
        finally:
            self.stack.pop()
        return self.close(call, output)

    def product(self, function: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Record a linear map whose weight consists of several tensors as one product, like that of a plain weight."""
        shape = weight.shape[::-1]
        turned = partial(without_modes, torch.empty, shape, device="meta")
        factors = (x, self.operation(torch.ops.aten.t.default, (weight,), {}, turned))
        run = partial(without_modes, function, x, weight, bias)
        if bias is None:
            return self.operation(torch.ops.aten.mm.default, factors, {}, run)
        return self.operation(torch.ops.aten.addmm.default, (bias, *factors), {}, run)

    def finish(self, output: Any) -> None:
        """Name the returned tensors by their place in the output."""
        self.trace.outputs = [(name, self.read(tensor)) for name, tensor in named_tensors(output)]
        if not self.trace.outputs:
            self.trace.notes.append("the forward returned no tensor")

    def assume(self, function: Any, answer: Any) -> None:
        """Note that a result on the meta device was computed from assumed values."""
        is_operator = isinstance(function, torch._ops.OpOverload)
        done = f"ran {function if is_operator else function.__name__} on some, ones were assumed"
        if isinstance(answer, (bool, int, float)):
            done = f"read one, {answer} was assumed"
        note = f"the meta device holds no values: {self._path()} {done}"
        if note not in self.trace.notes:
            self.trace.notes.append(note)

    def place(self, tensor: Tensor) -> Tensor:
        """An argument of the model where the model is: for one on the meta device, its values are remembered."""
        return tensor if self.shadows is None else self.shadows.to_meta(tensor)

    # ---- values

    def read(self, tensor: Tensor) -> int:
        """The value that `tensor` holds now; a tensor never seen before becomes a source."""
        value = self.table.get(tensor)
        if value is None:
            value = self._source(tensor)
        later = self.table.later_writes(tensor, value)
        if later:
            value = self._emit("normprobe.alias", (value, *later), [tensor])
        return value

    def operation(self, function: Any, args: Any, kwargs: Any, run: Callable[[], Any] | None = None) -> Any:
        """Record one ATen call; `run` stands for it where its arguments are not those of the model."""
        given: list[Tensor] = []
        inputs: list[int] = []

        def ref(tensor: Tensor) -> Ref:
            given.append(tensor)
            inputs.append(self.read(tensor))
            return Ref(inputs[-1])

        refs = replaced((args, kwargs), ref)
        known = self.operators.of(function)
        changed = written(function, args, kwargs) if known.writes else []
        if changed:
            self.keeper.before_write(changed)
        if run is None and self.shadows is not None:
            run = partial(self.shadows.run, function, args, kwargs, given, changed)
        output = run() if run is not None else function(*args, **kwargs)
        made = [t for t in tensors(output) if not changed or not any(t is w for w in changed)]
        if made or changed:
            self._emit(known.name, tuple(inputs), made, refs, function, changed)
        return output

    def _emit(
        self,
        op: str,
        inputs: tuple[int, ...],
        made: Sequence[Tensor],
        refs: Any = ((), {}),
        function: Any = None,
        changed: Sequence[Tensor] = (),
        name: str = "",
    ) -> int:
        call = self.stack[-1] if self.stack else 0
        ordinal = self._ordinal(call, op)
        args, keywords = refs
        node = Node(len(self.trace.nodes), op, inputs, (), call, ordinal, args, keywords, function, name)
        self.trace.nodes.append(node)
        first = len(self.trace.values)
        for index, tensor in enumerate((*made, *changed)):
            self.trace.values.append(Value(first + index, node.id, index, tuple(tensor.shape), tensor.dtype))
            settle = self.table.bind if index < len(made) else self.table.wrote
            settle(tensor, first + index)
        node.outputs = tuple(range(first, len(self.trace.values)))
        return first

    def _source(self, tensor: Tensor) -> int:
        known = self.sources.get(id(tensor))
        kind, name = known[1:] if known is not None and known[0] is tensor else ("constant", "")
        number = kind == "constant" and tensor.numel() == 1 and tensor.device.type == "cpu"
        if not number:
            value = self._emit(kind, (), [tensor], name=name)
            return self._hold(value, tensor) if kind == "constant" else value
        with _disable_current_modes():
            held = tensor.item()
        return self._emit(kind, (), [tensor], ((held,), {}))

    def _name_inputs(self, args: Any, kwargs: Any) -> None:
        for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]:
            if isinstance(leaf, Tensor) and self.table.get(leaf) is None and id(leaf) not in self.sources:
                self._hold(self._emit("input", (), [leaf], name=dotted(path[1:])), leaf)

    def _hold(self, value: int, tensor: Tensor) -> int:
        """Keep a copy of a small tensor that comes from outside the model, where its values are known."""
        known = tensor if self.shadows is None else self.shadows.known(tensor)
        if type(known) is Tensor and not known.is_meta and known.numel() <= HELD:
            with _disable_current_modes():
                self.trace.held[value] = known.detach().clone()
        return value

    def _ordinal(self, call: int, op: str) -> int:
        self.ordinals[call, op] += 1
        return self.ordinals[call, op] - 1

    def _path(self) -> str:
        return self.trace.calls[self.stack[-1]].path if self.stack else "."
