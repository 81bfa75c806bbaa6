"""The first tensor that two models return, each in its own dtype.

Dims: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from normprobe.capture.guard import untouched
from normprobe.capture.invoke import invoke
from normprobe.diffing.signal import Side, floating_outputs
from normprobe.diffing.sketch import arranged, bare
from normprobe.records import Skipped
from normprobe.records.diff import OutputDiff
from normprobe.rewrites.agreement import next_tokens

_WHAT = "outputs"


def compare_outputs(a: Side, b: Side) -> tuple[OutputDiff | None, tuple[Skipped, ...]]:
    """Run both models as they are and compare what they return first; one forward each.

    Where vocabularies are of different sizes the ids that both have are compared.
    """
    found = [_tried(name, side) for name, side in (("A", a), ("B", b))]
    why = next((one for one in found if isinstance(one, str)), None)
    if why is not None:
        return None, (Skipped(what=_WHAT, why=why),)
    one, other = (each for each in found if not isinstance(each, str))
    pair = _alike(one.values, other.values.to(one.values.device))
    if pair is None:
        why = f"they cannot be laid alike: {tuple(one.values.shape)} in A, {tuple(other.values.shape)} in B"
        return None, (Skipped(what=_WHAT, why=why),)
    given = [t for t in pytree.tree_leaves(a.inputs) if isinstance(t, Tensor) and not t.is_floating_point()]
    if a.anatomy.head is None:  # hidden states are no logits
        given = []
    return _compared(one, other, pair, tuple(tuple(t.shape) for t in given)), ()


class _Output(NamedTuple):
    """The first floating tensor that a model returned."""

    name: str
    values: Tensor

    @property
    def dtype(self) -> str:
        return str(self.values.dtype).removeprefix("torch.")


def _compared(a: _Output, b: _Output, pair: tuple[Tensor, Tensor], ids: tuple[tuple[int, ...], ...]) -> OutputDiff:
    change, largest = _largest(pair[1].double() - pair[0].double()), _largest(pair[0].double())
    facts = next_tokens(pair[0], pair[1], ids)
    if pair[0].shape != a.values.shape or a.values.numel() != b.values.numel():
        facts.pop("kl", None)  # of a part of the vocabulary there is none
    return OutputDiff(
        a=a.name,
        b=b.name,
        dtype_a=a.dtype,
        dtype_b=b.dtype,
        shape=tuple(pair[0].shape),
        shape_a=tuple(a.values.shape),
        shape_b=tuple(b.values.shape),
        max_abs=change,
        max_rel=0.0 if change == 0 else change / largest if 0 < largest < math.inf else math.inf,
        **facts,
    )


def _tried(name: str, side: Side) -> _Output | str:
    """What a model returns first, or why there is nothing to compare."""
    try:
        found = _first(side)
    except Exception as error:  # a forward that ran while recording may still refuse, and says why itself
        return f"{name} does not run: {type(error).__name__}: {error}"
    return f"{name} returned no floating point tensor" if found is None else _Output(*found)


def _first(side: Side) -> tuple[str, Tensor] | None:
    with untouched(side.model) as keeper, torch.no_grad(), keeper.mode():
        found = floating_outputs(invoke(side.model, side.inputs))
        return (found[0][0], found[0][1].detach().clone()) if found else None


def _alike(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """Both outputs in the layout of A; of two vocabularies the part that both have."""
    laid = arranged(b, bare(a.shape))
    if laid is not None:
        return a, laid.reshape(a.shape)
    if a.dim() == b.dim() and a.dim() > 1 and a.shape[:-1] == b.shape[:-1]:
        common = min(a.shape[-1], b.shape[-1])
        return a[..., :common], b[..., :common]
    return None


def _largest(x: Tensor) -> float:
    found = float(x.abs().amax())
    return math.inf if math.isnan(found) else found
