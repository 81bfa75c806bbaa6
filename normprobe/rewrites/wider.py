"""What a copy of a model in the next wider dtype gives, or why none does."""

from __future__ import annotations

from collections import Counter
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normprobe.capture.guard import untouched
from normprobe.capture.invoke import Inputs
from normprobe.capture.modes import DispatchMode
from normprobe.norms.rebuild import rebuild
from normprobe.records import Anatomy
from normprobe.rewrites.choices import Given
from normprobe.rewrites.ran import Ran, Running

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


def wider(model: nn.Module) -> torch.dtype:
    """The next wider dtype than most of the numbers have: a few, as those of a router, may be wide already."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in filter(Tensor.is_floating_point, model.parameters()):
        sizes[parameter.dtype] += parameter.numel()
    return _WIDER.get(sizes.most_common(1)[0][0], torch.float64) if sizes else torch.float32


def wide_outputs(model: nn.Module, inputs: Inputs, anatomy: Anatomy, given: Given) -> list[Tensor] | str:
    """Outputs of a copy in the next wider dtype, which calls the hooks of the model itself; else why there are none."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1:
        return f"parameters lie on {len(devices)} devices" if devices else "there are no parameters"
    if not dtypes <= _WIDER.keys():
        return f"parameters are {', '.join(sorted(str(dtype)[6:] for dtype in dtypes))}"
    wide, watched = wider(model), _Watched()
    try:
        moved: Inputs = pytree.tree_map_only(Tensor, lambda t: t.to(wide) if t.is_floating_point() else t, inputs)
        with untouched(model):  # a hook may write to what it holds of the model
            made = rebuild(model, wide, devices.pop(), {}, hooked=True)
            with watched:
                return Ran.of(made, Running(lambda: given).alone(made, moved), moved, anatomy).outputs
    except Exception as error:  # a foreign model may refuse another dtype in any way
        return f"{watched.raised(error)} in {str(wide)[6:]}"


@final
class _Watched(DispatchMode):
    """Notes which operation raised."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._last: tuple[BaseException, str] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """As torch calls it."""
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self._last = error, str(func).removesuffix(".default")
            raise

    def raised(self, error: BaseException) -> str:
        """That the operation, or the code around it, which raised this does not run."""
        if self._last is not None and self._last[0] is error:
            return f"{self._last[1]} does not run"
        return f"the code of the model does not run ({type(error).__name__})"
