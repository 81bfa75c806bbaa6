"""Put changes that were written down into a model as it is built. This file goes into checkpoints: torch alone.

A change is the record of one module, with these keys where they apply:

    path         of the module, "" for the root
    module       {"kind": name, "values": {…}}: a new module of this class; null: there is none any more
    from         path of the module that is moved here
    class        name of the class that it gets in place of its own
    layers       names of the layers over its class, lowest first
    values       attributes by name
    gone         names of attributes, parameters and buffers that it no longer has
    parameters   name: [shape, dtype, number] of parameters that it did not have, or has apart now; they hold the
                 number until values are loaded
    absent       names of parameters that the class knows and this module has not
    buffers      name: [shape, dtype, numbers or null]; with numbers it is none of the saved state
    computed     name: [dtype, {"kind": …, "values": …}, …]: weights computed by torch's parametrisation
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from normprobe.rewrites.swap import Layer, over

_NUMBERS = "normprobe_numbers"  # of buffers that are none of the saved state, by name


class Restored:
    """Stands before a class of transformers: a model that is built with the changes of its configuration."""

    normprobe_kinds: Mapping[str, type[Any]] = {}

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        restore(self, config.normprobe["changes"], self.normprobe_kinds)  # type: ignore[arg-type]

    def _init_weights(self, module: nn.Module) -> None:
        """As the class below; and what no file holds, which building without memory has lost, gets its values."""
        super()._init_weights(module)  # type: ignore[misc]
        for name, numbers in module.__dict__.get(_NUMBERS, {}).items():
            buffer = module.get_buffer(name)
            buffer.copy_(torch.tensor(numbers, dtype=buffer.dtype).reshape(buffer.shape))


def restore(model: nn.Module, changes: Sequence[Mapping[str, Any]], kinds: Mapping[str, type[Any]]) -> None:
    """Change `model`, which is built as it was before the rewrite; its values are loaded afterwards.

    Args:
        model: with parameters on any device.
        changes: as above.
        kinds: the classes that changes name.

    Raises:
        AttributeError: the model is another one: it lacks a module that a change names.
    """
    same: dict[int, Any] = {}
    moved = {change["path"]: model.get_submodule(change["from"]) for change in changes if "from" in change}
    for change in changes:
        _place(model, change, moved, kinds, same)
    for change in changes:
        if change.get("module", True) is not None:
            _change(model.get_submodule(change["path"]), change, kinds, same)


def decoded(value: Any, kinds: Mapping[str, type[Any]], same: dict[int, Any]) -> Any:
    """The value that was written down as `value`; objects that were one are one again."""
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(decoded(each, kinds, same) for each in value["tuple"])
    if "range" in value:
        return tuple(range(*value["range"]))
    if "list" in value:
        return [decoded(each, kinds, same) for each in value["list"]]
    if "dict" in value:
        return {key: decoded(each, kinds, same) for key, each in value["dict"]}
    if value["id"] not in same:
        held = {name: decoded(each, kinds, same) for name, each in value["values"].items()}
        same[value["id"]] = kinds[value["kind"]](**held)
    return same[value["id"]]


def _place(
    model: nn.Module,
    change: Mapping[str, Any],
    moved: Mapping[str, nn.Module],
    kinds: Mapping[str, type[Any]],
    same: dict[int, Any],
) -> None:
    """Put a module where it belongs, if it is not there."""
    if "module" not in change and "from" not in change:
        return
    parent, _, own = change["path"].rpartition(".")
    holder = model.get_submodule(parent)
    made = moved.get(change["path"]) if "from" in change else change["module"]
    holder._modules[own] = _made(made, kinds, same) if isinstance(made, Mapping) else made


def _made(row: Mapping[str, Any], kinds: Mapping[str, type[Any]], same: dict[int, Any]) -> nn.Module:
    """A module of the class that `row` names, without its constructor, with the attributes that it had."""
    module: nn.Module = object.__new__(kinds[row["kind"]])
    nn.Module.__init__(module)
    module.__dict__.update({name: decoded(value, kinds, same) for name, value in row["values"].items()})
    return module


def _change(module: nn.Module, change: Mapping[str, Any], kinds: Mapping[str, type[Any]], same: dict[int, Any]) -> None:
    for name in change.get("gone", ()):
        for held in (module._parameters, module._buffers, module.__dict__):
            if name in held:
                del held[name]
    for name, (shape, dtype, number) in change.get("parameters", {}).items():
        filled = torch.full(shape, number, dtype=getattr(torch, dtype))
        module._parameters[name] = nn.Parameter(filled, requires_grad=filled.is_floating_point())
    module._parameters.update(dict.fromkeys(change.get("absent", ())))
    for name, (shape, dtype, values) in change.get("buffers", {}).items():
        kind = getattr(torch, dtype)
        buffer = torch.zeros(shape, dtype=kind) if values is None else torch.tensor(values, dtype=kind).reshape(shape)
        module.register_buffer(name, buffer, persistent=values is None)
        if values is not None:
            module.__dict__.setdefault(_NUMBERS, {})[name] = values
    for name, value in change.get("values", {}).items():
        module.__dict__[name] = decoded(value, kinds, same)
    if "class" in change:
        module.__class__ = kinds[change["class"]]
    for name in change.get("layers", ()):
        layer: type[Layer] = kinds[name]
        module.__class__ = over(layer, type(module))
    for name, rows in change.get("computed", {}).items():
        for row in rows:
            parametrize.register_parametrization(module, name, _made(row, kinds, same))
