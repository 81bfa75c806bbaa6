"""The loss whose gradients are measured: the user's, the model's own, or one made from its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normprobe import stats
from normprobe.capture.invoke import Inputs, split
from normprobe.capture.outputs import named_tensors
from normprobe.errors import InputError
from normprobe.measures.finite import floats
from normprobe.records import Anatomy

LossFunction = Callable[[Any, Inputs], Tensor]

_NEXT = "cross-entropy of the next token"
_SAME = "cross-entropy of every token itself: attention is not causal, so that the model sees the next one"
_MEAN_SQUARE = "mean square of the first output"
_FROM_NOISE = "mean squared distance of the first output from unit normal noise"
_IGNORED = -100  # the target index that torch's cross-entropy leaves out


def loss_of(output: Any, inputs: Inputs, anatomy: Anatomy, given: LossFunction | None) -> tuple[Tensor, str]:
    """A scalar loss with its name.

    In this order: `given(output, inputs)`; the output's own `loss` where the inputs hold labels; where the output has
    logits of every input token the cross-entropy of the next token, or, where the last self-attention is not causal,
    of each token itself, which is what a masked language model learns; the mean square of the first floating point
    tensor that depends on a parameter.

    Args:
        output: what the model returned, with gradients.
        inputs: what it was called with.
        anatomy: tells whether the first output comes from a head, and whether attention is causal.
        given: the user's loss, or None.

    Raises:
        InputError: if `given` returns no scalar tensor with a gradient, or no output has a gradient.
    """
    found = _known(output, inputs, anatomy, given)
    return (_first(output).square().mean(), _MEAN_SQUARE) if found is None else found


def training_loss_of(output: Any, inputs: Inputs, anatomy: Anatomy, given: LossFunction | None) -> tuple[Tensor, str]:
    """As `loss_of`, but in the place of the mean square the mean squared distance from unit normal noise, the same at
    every step: a target of zero would be met by a vanishing output."""
    found = _known(output, inputs, anatomy, given)
    if found is not None:
        return found
    first = _first(output)
    noise = torch.randn(first.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(first.device)
    return (first - noise).square().mean(), _FROM_NOISE


def told_loss(output: Any, inputs: Inputs, anatomy: Anatomy) -> tuple[float, str] | None:
    """The loss that labels or tokens of the inputs imply, with its name; no gradients are needed. None without them."""
    found = _told(output, inputs, anatomy, learns=False)
    return None if found is None else (float(found[0].detach()), found[1])


def _known(output: Any, inputs: Inputs, anatomy: Anatomy, given: LossFunction | None) -> tuple[Tensor, str] | None:
    """A loss that someone chose, or that follows from labels or tokens."""
    if given is not None:
        return _scalar(given(output, inputs)), "given"
    return _told(output, inputs, anatomy, learns=True)


def _told(output: Any, inputs: Inputs, anatomy: Anatomy, learns: bool) -> tuple[Tensor, str] | None:
    """The loss that follows from labels or tokens; where it `learns`, one that depends on a parameter."""
    own = dict(named_tensors(output)).get("loss")
    if own is not None and own.numel() == 1 and (own.requires_grad or not learns):
        return own.sum(), "the model's own"
    logits = _logits(output, anatomy)
    if logits is None or (learns and not logits.requires_grad):
        return None
    ids = _token_ids(inputs)
    if ids is not None and _fit(logits, ids):
        same = _sees_all(anatomy)
        return _of_tokens(logits, ids, inputs, 0 if same else 1), _SAME if same else _NEXT
    return None


def _first(output: Any) -> Tensor:
    """The first output that depends on a parameter, float32 or wider."""
    found = next((t for t in floats(output) if t.requires_grad and t.numel()), None)
    if found is None:
        raise InputError("no output of the model depends on a parameter", hint="pass loss=")
    return stats.widen(found)


def _sees_all(anatomy: Anatomy) -> bool:
    """Whether the last self-attention, the nearest to the logits, is known to see later tokens."""
    sites = [site for site in anatomy.attention if not site.cross]
    return bool(sites) and sites[-1].causal is False


def _scalar(loss: object) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss.sum()
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    if isinstance(loss, Tensor) and not loss.requires_grad:
        found += " without a gradient"
    raise InputError(
        "the given loss cannot be differentiated",
        expected="loss(output, inputs) that returns a scalar tensor computed from the output",
        found=found,
    )


def _logits(output: Any, anatomy: Anatomy) -> Tensor | None:
    """The output's logits [B, T, V]; where they have no name, the first output if it comes from a head."""
    named = dict(named_tensors(output)).get("logits")
    found = named if named is not None else next(iter(floats(output)), None)
    if found is None or found.dim() != 3:
        return None
    return found if found is named or anatomy.head is not None else None


def _token_ids(inputs: Inputs) -> Tensor | None:
    """Token ids [B, T]: those of the decoder where there are some, else the first integer matrix."""
    args, kwargs = split(inputs)
    named = [kwargs[n] for n in ("decoder_input_ids", "input_ids") if kwargs.get(n) is not None]
    candidates = named or [*args, *kwargs.values()]
    return next((t for t in candidates if _is_ids(t)), None)


def _is_ids(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32)


def _fit(logits: Tensor, ids: Tensor) -> bool:
    batch, tokens, vocabulary = logits.shape
    fits = tuple(ids.shape) == (batch, tokens) and tokens > 1
    return fits and bool(((ids >= 0) & (ids < vocabulary)).all())


def _of_tokens(logits: Tensor, ids: Tensor, inputs: Inputs, ahead: int) -> Tensor:
    """Mean over all tokens that are no padding and have a target `ahead` of them, in nats, float32 or wider."""
    targets = ids[:, ahead:].long()
    mask = split(inputs)[1].get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == ids.shape and bool(mask[:, ahead:].any()):
        targets = targets.masked_fill(mask[:, ahead:] == 0, _IGNORED)
    scores = stats.widen(logits[:, : logits.shape[1] - ahead]).flatten(0, 1)
    return F.cross_entropy(scores, targets.to(logits.device).flatten(), ignore_index=_IGNORED)
