"""The two modes that report to a recorder what a forward runs."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from torch.overrides import TorchFunctionMode

from normprobe.capture.composites import COMPOSITES, is_product_of_parts, opened
from normprobe.capture.modes import DispatchMode
from normprobe.capture.operators import Operators
from normprobe.capture.shadows import READERS, Shadows


class Recorder(Protocol):
    """Runs what it is told of, and returns what that gives."""

    operators: Operators
    shadows: Shadows | None

    def composite(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Of a function that is one operation."""

    def operation(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Of an ATen call."""

    def product(self, function: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Of a linear map whose weight consists of several tensors."""


class Operations(DispatchMode):
    """Sees every ATen call."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder, kwargs = self.recorder, kwargs or {}
        record = recorder.composite if recorder.operators.of(func).composite else recorder.operation
        return record(func, args, kwargs)


class Functions(TorchFunctionMode):
    """Sees torch functions that dissolve into other operations on some devices, and records them as wholes."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in COMPOSITES:
            return self.recorder.composite(func, args, kwargs or {})
        if self.recorder.shadows is not None and func in READERS and args[0].is_meta:
            return self.recorder.shadows.read(func, args, kwargs or {})
        if is_product_of_parts(func, args):
            return self.recorder.product(func, *args, **(kwargs or {}))
        inside = opened(func)
        if inside is None:
            return func(*args, **(kwargs or {}))
        with self:
            return inside(*args, **(kwargs or {}))
