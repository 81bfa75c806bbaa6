"""Torch functions that are recorded as one operation: what they dissolve into differs between devices."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

_FLEX = torch.ops.higher_order.flex_attention
_OPERANDS = ("query", "key", "value")
COMPOSITES: Mapping[Callable[..., Any], tuple[str, ...]] = {
    F.scaled_dot_product_attention: (*_OPERANDS, "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    _FLEX: (*_OPERANDS, "score_mod", "block_mask", "scale", "options", "score_buffers", "mask_buffers"),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), ()),
    **dict.fromkeys((torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell), ()),
}
_LARGEST = 1 << 18  # places of a mask that are computed
_PROBES = (0.0, 0.01, 0.02, 1e4, 1e6, -1e6)  # logits whose way through a score function is looked at


def scores(arguments: Mapping[str, Any], rows: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
    """The logits of some query rows of flex attention, −inf where its mask hides, and its scaled q·kᵀ: [B, H, R, T].

    Args:
        arguments: of the call, by name.
        rows: indices of the query rows, [R].
        heads: which query heads, the H of the result; with all that share their key heads.
    """
    query, key = arguments["query"], arguments["key"]
    group = query.shape[1] // key.shape[1]
    shared = key[:, heads.start // group : heads.stop // group].float()
    some = query[:, heads].index_select(2, rows).float()
    grouped = some.reshape(len(some), shared.shape[1], -1, some.shape[-1])
    scaled = (grouped @ shared.mT * arguments["scale"]).view(*some.shape[:3], -1)
    samples, columns = (torch.arange(n, device=rows.device) for n in (len(query), key.shape[2]))
    places = samples, torch.arange(heads.start, heads.stop, device=rows.device), rows, columns
    made = _over_all(arguments["score_mod"], arguments.get("score_buffers", ()), 1)(scaled, *places)
    shown = _over_all(arguments["block_mask"][-1], arguments.get("mask_buffers", ()), 0)(*places)
    return made.masked_fill(~shown, -torch.inf), scaled


def _over_all(function: Any, buffers: Any, first: int) -> Any:
    """`function(sample, head, row, column, *buffers)` over all of them, after so many tensors that have these axes."""

    def call(*places: Tensor) -> Any:
        return function(*places, *buffers)

    for axis in (3, 2, 1, 0):
        call = torch.vmap(call, in_dims=(*(0,) * first, *(0 if axis == i else None for i in range(4))))
    return call


def is_product_of_parts(function: Any, args: Any) -> bool:
    """Whether a linear map has a weight of several tensors (a quantised one, say), and so is no product by itself."""
    return function is F.linear and len(args) > 1 and is_traceable_wrapper_subclass(args[1])


def without_modes(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function whose inner operations are not to be seen."""
    with _disable_current_modes():
        return function(*args, **kwargs)


def arguments_of(function: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of a composite by name; functions among them as the mask and the soft cap that they stand for."""
    bound = dict(zip(COMPOSITES[function], args, strict=False)) | kwargs
    return _plain(bound) if function is _FLEX else bound


@cache
def opened(function: Any) -> Any:
    """`function` so that a function mode sees the torch functions inside it.

    Multi-head attention, written in Python, asks first whether a mode is on and hands itself over; the copy does not
    ask, and can run while the mode is on.
    """
    if function is not F.multi_head_attention_forward:
        return None
    own = {**function.__globals__, "has_torch_function": lambda tensors: False}
    copy = types.FunctionType(function.__code__, own, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _plain(bound: dict[str, Any]) -> dict[str, Any]:
    query, key = bound["query"], bound["key"]
    scale, cap = bound["scale"], None
    with torch.no_grad():
        try:
            mask = _added(bound, query, key)
            slope, cap = _shape(bound, query)
            scale = None if slope is None else scale * slope
        except Exception:  # functions of the model's own, on tensors that may hold no values
            mask = torch.empty(query.shape[-2], key.shape[-2], device="meta")
    operands = {name: bound[name] for name in _OPERANDS}
    return operands | {"scale": scale, "attn_mask": mask, "softcap": cap}


def _added(bound: dict[str, Any], query: Tensor, key: Tensor) -> Tensor:
    """What the functions add to logits of zero, by sample, query and key of the first head; −inf where hidden."""
    sizes = (query.shape[0], query.shape[-2], key.shape[-2])
    if torch.Size(sizes).numel() > _LARGEST:
        raise ValueError("the mask is too large to be computed")
    device = torch.device("cpu") if query.is_meta else query.device
    sample, row, column = (torch.arange(n, device=device) for n in sizes)
    head, zero = torch.tensor(0, device=device), torch.zeros((), device=device)
    shown = _over_places(bound["block_mask"][-1], bound.get("mask_buffers", ()))
    score = _over_places(bound["score_mod"], bound.get("score_buffers", ()), zero)
    added: Tensor = score(sample, head, row, column)
    places = shown(sample, head, row, column)
    return added.masked_fill(~places, -torch.inf)[:, None]


def _over_places(function: Any, buffers: Any, *first: Tensor) -> Any:
    """`function(*first, sample, head, row, column, *buffers)` over all samples, rows and columns."""

    def call(*places: Tensor) -> Any:
        return function(*first, *places, *buffers)

    for axes in ((None, None, None, 0), (None, None, 0, None), (0, None, None, None)):
        call = torch.vmap(call, in_dims=axes)
    return call


def _shape(bound: dict[str, Any], query: Tensor) -> tuple[float | None, float | None]:
    """Slope at zero and height of the score function on the first place: (1, None) where it leaves logits alone."""
    device = torch.device("cpu") if query.is_meta else query.device
    place = torch.tensor(0, device=device)
    logits = torch.tensor(_PROBES, dtype=torch.float64, device=device)
    found = [float(bound["score_mod"](x, *(place,) * 4, *bound.get("score_buffers", ()))) for x in logits]
    zero, small, twice, large, larger, lowest = found
    slope = (small - zero) / _PROBES[1]
    if abs(large - larger) < 1e-6 * abs(larger) and abs(larger + lowest) < 1e-6 * abs(larger):
        cap = larger - zero
        return math.atanh((small - zero) / cap) * cap / _PROBES[1], cap
    straight = abs(twice - zero - 2 * (small - zero)) < 1e-6 and abs(larger - zero - slope * _PROBES[4]) < 1
    return (slope if straight else None), None
