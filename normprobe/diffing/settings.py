"""The dtype in which two models are compared, and the models in it; nothing is left of it afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normprobe.capture.guard import untouched
from normprobe.capture.invoke import Inputs

BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}  # of the significand


@dataclass(frozen=True)
class Setting:
    """How both models run to be compared.

    Attributes:
        dtype: of parameters and floating inputs; None for each model's own.
        narrow: what parameters and inputs are rounded to before, so that a port in half precision has the weights of
            its original; None where both models have the same dtypes.
        narrow_buffers: the same of floating buffers.
        spacing: relative distance of neighbouring numbers, of which the noise is made.
    """

    dtype: torch.dtype | None
    narrow: torch.dtype | None
    narrow_buffers: torch.dtype | None
    spacing: float


def settings(a: nn.Module, b: nn.Module) -> list[Setting]:
    """The setting that tells most, and a second one for models that refuse to run in it.

    First float32, or float64 where both models are in it: the functions then differ visibly where half precision
    would hide it. Else each model in its own dtype.
    """
    held = _dtypes(a.parameters()), _dtypes(b.parameters())
    both = held[0] | held[1]
    if not both:
        return [Setting(None, None, None, torch.finfo(torch.float32).eps)]
    narrow = _narrowest(*held)
    own = Setting(None, None, None, torch.finfo(min(both, key=BITS.__getitem__)).eps)
    dtype = torch.float64 if both == {torch.float64} else torch.float32
    coarse = {torch.float16, torch.bfloat16} <= both and narrow is not None  # neither rounds to the other
    spacing = torch.finfo(torch.bfloat16 if coarse else dtype).eps
    first = Setting(dtype, narrow, _narrowest(_dtypes(a.buffers()), _dtypes(b.buffers())), spacing)
    return [first] if both == {dtype} else [first, own]


def _dtypes(tensors: Iterable[Tensor]) -> set[torch.dtype]:
    return {t.dtype for t in tensors if t.dtype in BITS}


def _narrowest(a: set[torch.dtype], b: set[torch.dtype]) -> torch.dtype | None:
    """The narrower dtype of two sets that differ; None where they are the same, or one of them is empty."""
    return min(a | b, key=BITS.__getitem__) if a and b and a != b else None


@contextmanager
def in_setting(model: nn.Module, inputs: Inputs, setting: Setting, seed: int | None) -> Iterator[Inputs]:
    """While open the model is in the dtype of `setting`, without autocast; gives the inputs in it.

    Args:
        model: the model.
        inputs: of its forward.
        setting: the dtype.
        seed: moves every weight and every floating buffer by one spacing up or down, as this seed draws it; None
            leaves them. Buffers of whole numbers, as masks are, stay.
    """
    device = next((p.device.type for p in model.parameters()), "cpu")
    dtype = setting.dtype
    if dtype is not None:
        narrow = setting.narrow
        inputs = pytree.tree_map_only(Tensor, lambda t: _moved(t, narrow, dtype) if t.dtype in BITS else t, inputs)
    autocast = torch.is_autocast_enabled(device) and dtype is None
    with untouched(model), torch.no_grad(), torch.autocast(device, enabled=autocast):
        for parameter in model.parameters():
            if parameter.dtype in BITS:
                parameter.data = _moved(parameter.data, setting.narrow, dtype or parameter.dtype)
        for buffer in model.buffers():
            if buffer.dtype in BITS and dtype is not None:
                wider = max(buffer.dtype, dtype, key=BITS.__getitem__)
                buffer.data = _moved(buffer.data, setting.narrow_buffers, wider)
        if seed is not None:
            _disturb(model, setting, seed)
        yield inputs


def _moved(values: Tensor, narrow: torch.dtype | None, dtype: torch.dtype) -> Tensor:
    return (values if narrow is None else values.to(narrow)).to(dtype)


def _disturb(model: nn.Module, setting: Setting, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors: list[Tensor] = [p for p in model.parameters() if p.dtype in BITS]
    tensors += [b for b in model.buffers() if b.dtype in BITS and not bool((b == b.round()).all())]
    for tensor in tensors:
        spacing = max(setting.spacing, torch.finfo(tensor.dtype).eps)
        signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8).to(tensor.device) * 2 - 1
        tensor.data = tensor.data * (1 + spacing * signs.to(tensor.dtype))
