"""Inputs that the caller gave, in the form that a forward takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normprobe.capture.invoke import Inputs
from normprobe.errors import InputError
from normprobe.inputs.make import inputs_from_config


def given_inputs(model: nn.Module, inputs: Any, tokenizer: Any, seed: int) -> tuple[Inputs, str]:
    """The inputs of a forward and what is said of them: those of the caller, a text's, or made from the config.

    Raises:
        InputError: none could be made, a text has no tokenizer or the tokenizer raised, or they are empty.
    """
    if inputs is None:
        return inputs_from_config(model, batch=1, seed=seed, tokens=None)
    if not isinstance(inputs, str):
        _refuse_empty(inputs)
        return inputs, "given by the caller: " + _shapes(inputs)
    if tokenizer is None:
        raise InputError("a text was given without a tokenizer", hint="pass tokenizer=…, or token ids as inputs")
    try:
        encoded = dict(tokenizer(inputs, return_tensors="pt"))
    except Exception as error:
        raise InputError(
            f"the tokenizer {type(tokenizer).__name__} raised",
            expected='tokenizer(text, return_tensors="pt") gives the arguments of the forward',
            found=f"{type(error).__name__}: {error}",
            hint="pass token ids as inputs",
        ) from error
    return encoded, f"text of {len(inputs)} characters: " + _shapes(encoded)


def or_made(model: nn.Module, inputs: Any) -> Inputs:
    """`inputs`, or one row of those that the model's configuration asks for.

    Raises:
        InputError: they are empty or a text; none were given, and the configuration says too little to make some.
    """
    if inputs is None:
        return inputs_from_config(model)[0]
    if isinstance(inputs, str):
        raise InputError(
            "a text was given as inputs",
            expected="a tensor, a tuple or a mapping of tensors",
            found=f"{inputs!r:.60}",
            hint='inputs=dict(tokenizer(text, return_tensors="pt"))',
        )
    _refuse_empty(inputs)
    found: Inputs = inputs
    return found


def _refuse_empty(inputs: Any) -> None:
    """Raise an InputError where no tensor among the inputs has an element: no signal passes the model."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if tensors and not any(map(Tensor.numel, tensors)):
        raise InputError(
            "the inputs are empty",
            expected="tensors with at least one element",
            found=_shapes(inputs),
            hint="pass a batch of at least one example",
        )


def _shapes(inputs: Any) -> str:
    named = inputs.items() if isinstance(inputs, Mapping) else [("", inputs)]
    rows = []
    for name, value in named:
        shapes = [" × ".join(map(str, t.shape)) for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
        rows.append(f"{name} {', '.join(shapes)}".strip())
    return "; ".join(row for row in rows if row)


def on_device(model: nn.Module, inputs: Inputs) -> Inputs:
    """The inputs on the model's device; where its parameters lie on several, accelerate's hooks move them, and for
    one on meta the recorder, which remembers their values.

    Raises:
        InputError: the inputs are on meta, and the model is not.
    """
    devices = {p.device for p in model.parameters()} or {b.device for b in model.buffers()}
    device = devices.pop() if len(devices) == 1 else None
    if device is None or device.type == "meta":
        return inputs
    if any(t.is_meta for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)):
        raise InputError(
            f"the inputs hold no values, but the model lies on {device}",
            expected=f"tensors with values, on {device} or another device",
            found="tensors on the meta device",
            hint='make inputs with values, or read a model on meta: model.to("meta")',
        )
    moved: Inputs = pytree.tree_map_only(Tensor, lambda t: t.to(device), inputs)
    return moved
