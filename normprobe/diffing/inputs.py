"""One input for both models, also where they call their arguments by other names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normprobe.capture.invoke import Inputs
from normprobe.errors import InputError
from normprobe.inputs.face import Face
from normprobe.inputs.given import given_inputs

_MASKS = ("attention_mask",)


def shared_inputs(
    a: nn.Module, b: nn.Module, inputs: Any, tokenizer: Any, seed: int
) -> tuple[Inputs, Inputs, str, tuple[str, ...]]:
    """Inputs of A and of B that hold the same values, words for them, and what is to be said of it.

    Inputs are those of the caller, else made from the configuration of A, or of B where A says too little; ids are
    below the vocabularies of both where both configurations tell them.

    Raises:
        InputError: none could be made for either model.
    """
    notes: list[str] = []
    try:
        values, words = given_inputs(a, inputs, tokenizer, seed)
    except InputError:
        if inputs is not None:
            raise
        values, words = given_inputs(b, None, tokenizer, seed)
        notes.append("inputs were made from the configuration of B, as A tells too little")
    if inputs is None:
        refuse_unlike(values, _own(b, seed))
        values, said = within_vocabularies(values, a, b)
        notes += said
    of_a, of_b = (_called(model, values, name, notes) for model, name in ((a, "A"), (b, "B")))
    return _typed(a, b, of_a, "A", notes), _typed(b, a, of_b, "B", notes), words, tuple(notes)


def _own(model: nn.Module, seed: int) -> Inputs | None:
    """Inputs made from the configuration of `model`; None where it tells too little."""
    try:
        return given_inputs(model, None, None, seed)[0]
    except InputError:
        return None


def refuse_unlike(a: Inputs | None, b: Inputs | None) -> None:
    """Refuse to hand the inputs of A to B where B takes others: images in the place of ids, say.

    Args:
        a: what A takes.
        b: what B takes by its own configuration or target.

    Raises:
        InputError: both are by keyword, have no name in common, and the first are ids in one model alone.
    """
    if not isinstance(a, Mapping) or not isinstance(b, Mapping) or a.keys() & b.keys():
        return
    firsts = [t for each in (a, b) for t in [v for v in each.values() if isinstance(v, Tensor)][:1]]
    if {t.is_floating_point() for t in firsts} == {True, False}:
        raise InputError(
            "A and B take different inputs",
            expected="two models of one input, or inputs for each",
            found=f"A: {', '.join(a)}; B: {', '.join(b)}",
            hint="normprobe.diff(a, b, inputs, inputs_b=...) takes one for each",
        )


def _typed(model: nn.Module, other: nn.Module, inputs: Inputs, name: str, notes: list[str]) -> Inputs:
    """`inputs` in the dtype of `model`, where the other model is in another one and takes them as they are."""
    own, others = (frozenset(p.dtype for p in m.parameters() if p.is_floating_point()) for m in (model, other))
    given = {t.dtype for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor) and t.is_floating_point()}
    if own == others or len(own) != 1 or not given or given == own or given != others:
        return inputs
    dtype = next(iter(own))
    notes.append(f"the inputs of {name} were cast to {str(dtype).removeprefix('torch.')}, the dtype of its weights")
    typed: Inputs = pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)
    return typed


def within_vocabularies(values: Inputs, a: nn.Module, b: nn.Module) -> tuple[Inputs, tuple[str, ...]]:
    """Made inputs with ids that both vocabularies hold, and what is to be said of it."""
    sizes = _vocabulary(a), _vocabulary(b)
    if sizes[0] is None or sizes[1] is None or not isinstance(values, Mapping):
        return values, ()
    least = min(size for size in sizes if size is not None)
    ids = {name: v for name, v in values.items() if name.endswith("input_ids") and isinstance(v, Tensor)}
    if not any(bool((v >= least).any()) for v in ids.values() if v.numel() and not v.is_meta):
        return values, ()
    note = f"the vocabularies hold {sizes[0]} ids in A and {sizes[1]} in B; all ids were taken modulo {least}"
    return dict(values) | {name: v % least for name, v in ids.items()}, (note,)


def _vocabulary(model: nn.Module) -> int | None:
    try:
        return Face.of(model).vocabulary()
    except InputError:
        return None


def _called(model: nn.Module, inputs: Inputs, name: str, notes: list[str]) -> Inputs:
    """`inputs` as the forward of `model` takes them: by keyword where it has these names, else by position.

    Masks that hide nothing are left out where a forward has no such argument, as they change nothing.
    """
    if not isinstance(inputs, Mapping):
        return inputs
    parameters = _parameters(model)
    if parameters is None or set(inputs) <= set(parameters):
        return inputs
    kept = {key: v for key, v in inputs.items() if key in parameters or not _hides_nothing(key, v)}
    if set(kept) <= set(parameters):
        return kept
    first = next(iter(kept.values()))
    if len(kept) > 1 or not parameters:
        return inputs  # its own error says which argument it does not know
    notes.append(f"{name} takes its input by position: its forward has no argument {next(iter(kept))}")
    return (first,)


def _parameters(model: nn.Module) -> tuple[str, ...] | None:
    """The arguments of the forward; None where it takes any."""
    try:
        found = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # a forward written in C has no signature to read
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found):
        return None
    return tuple(p.name for p in found if p.kind is not inspect.Parameter.VAR_POSITIONAL)


def _hides_nothing(name: str, value: Any) -> bool:
    return name.endswith(_MASKS) and isinstance(value, Tensor) and bool(torch.all(value == 1))
