"""The numbers of attention and residual stream again, in float64 and by definition, from a running SmolLM2.

Dims: S tokens, C features, H heads, K key heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

SATURATED = 0.99
Rows = list[dict[str, Any]]  # one a layer or a write; numbers, or a list with one a head


class Attention(TorchFunctionMode):
    """Looks at the q and k of every causal attention inside; computes it by its definition, if `own`."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.own = own
        self.layers: Rows = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        q, k, v = (names[name] for name in ("query", "key", "value"))
        share = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        logits, weights = causal(q[0].double(), k[0].double())
        self.layers.append(head_numbers(q[0].double(), k[0].double(), logits, weights))
        return (weights @ v[0].double()).to(q.dtype)[None] if self.own else func(*args, **kwargs)


def causal(q_HSD: Tensor, k_HSD: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, with NaN for those that are masked, and weights."""
    tokens, width = q_HSD.shape[1:]
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    logits = q_HSD @ k_HSD.mT / math.sqrt(width)
    return logits.masked_fill(hidden, math.nan), logits.masked_fill(hidden, -math.inf).softmax(-1)


def head_numbers(q_HSD: Tensor, k_HSD: Tensor, logits: Tensor, weights: Tensor) -> dict[str, list[float]]:
    """What `HeadLogits` tells, of all rows."""
    seen = ~logits.isnan()
    keys = torch.arange(1, q_HSD.shape[1] + 1, dtype=torch.float64)
    mean = logits.nanmean((1, 2), keepdim=True)
    entropy = torch.special.entr(weights).sum(-1)[:, 1:] / keys[1:].log()
    longest = (x.norm(dim=-1).amax(-1) for x in (q_HSD, k_HSD))
    found = {
        "sampled_max": logits.nan_to_num(-math.inf).amax((1, 2)),
        "std": ((logits - mean).square().nan_to_num(0.0).sum((1, 2)) / seen.sum((1, 2))).sqrt(),
        "entropy": entropy.mean(-1),
        "saturated": (weights[:, 1:].amax(-1) > SATURATED).double().mean(-1),
        "first_token": weights[..., 0].mean(-1),
        "bound": math.prod(longest) / math.sqrt(q_HSD.shape[-1]),
        "q_rms": q_HSD.square().mean((1, 2)).sqrt(),
        "k_rms": k_HSD.square().mean((1, 2)).sqrt(),
    }
    return {name: values.tolist() for name, values in found.items()}


@contextmanager
def writes(model: Any) -> Iterator[Rows]:
    """The numbers of every write of a forward inside; what is yielded is filled in as blocks run."""
    found: Rows = []
    held: dict[str, Tensor] = {}

    def write(name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            branch = output[0] if isinstance(output, tuple) else output
            trunk = held["trunk"]
            held["trunk"] = trunk + branch  # in the model's dtype, as the block adds
            found.append(write_numbers(trunk[0].double(), branch[0].double(), held["trunk"][0].double()))

        return hook

    def enter(module: Any, inputs: Any) -> None:
        held["trunk"] = inputs[0]

    handles = []
    for layer in model.model.layers:
        handles.append(layer.register_forward_pre_hook(enter))
        handles += [getattr(layer, name).register_forward_hook(write(name)) for name in ("self_attn", "mlp")]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def write_numbers(trunk_SC: Tensor, write_SC: Tensor, after_SC: Tensor) -> dict[str, float]:
    """What `StreamState` tells of the state, the write and the trunk before it."""
    rms = after_SC.square().mean(-1).sqrt()
    units = after_SC / after_SC.norm(dim=-1, keepdim=True)
    tokens = len(units)
    sizes = [x.norm(dim=-1) for x in (trunk_SC, write_SC, after_SC)]
    ratios = {
        "write_ratio": sizes[1] / sizes[0],
        "write_share": sizes[1] / sizes[2],
        "write_cosine": (trunk_SC * write_SC).sum(-1) / (sizes[0] * sizes[1]),
        "angle": ((trunk_SC * after_SC).sum(-1) / (sizes[0] * sizes[2])).clamp(-1, 1).acos(),
    }
    found = {
        "rms_median": rms.quantile(0.5),
        "rms_p99": rms.quantile(0.99),
        "rms_max": rms.max(),
        "abs_max": after_SC.abs().max(),
        "mean": after_SC.mean(),
        "std": after_SC.std(correction=0),
        "token_cosine": (units.sum(0).square().sum() - tokens) / (tokens * (tokens - 1)),
        "write_rms": write_SC.square().mean(-1).sqrt().quantile(0.5),
        **{name: values.quantile(0.5) for name, values in ratios.items()},
    }
    return {name: float(value) for name, value in found.items()}
