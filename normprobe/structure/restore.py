"""Put changes that were written down into a model as it is built. This file goes into checkpoints: torch alone.

A change is the record of one module, with these keys where they apply:

    path         of the module, "" for the root
    module       {"kind": name, "values": {…}}: a new module of this class; null: there is none any more
    from         path of the module that is moved here
    class        name of the class that it gets in place of its own
    layers       names of the layers that are laid over its class, lowest first
    values       attributes by name
    gone         names of attributes, parameters and buffers that it no longer has
    parameters   name: [shape, dtype or null, number or null] of parameters that it did not have, or has apart now;
                 they hold the number that all of one was, 1 where it was several, until values are loaded; null is the
                 dtype that most of the model's numbers have
    absent       names of parameters that the class knows and this module has not
    buffers      name: [shape, dtype or null, numbers or null]; with numbers it is none of the saved state
    computed     name: [{"kind": …, "values": …}, …]: weights computed by torch's parametrisation
    patch        which patch of a checkpoint that was patched before it is of, from 1; those of the first have none
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from normprobe.rewrites.swap import Layer, laid

_NUMBERS = "normprobe_numbers"  # by name: of buffers that are none of the saved state, and of what was added


class Restored:
    """Stands before a class of transformers: a model that is built with the changes of its configuration."""

    normprobe_kinds: Mapping[str, type[Any]] = {}

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        config = copy.copy(config)  # models with other heads may be built from it too
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        config.normprobe = fitted(self, _below(type(self)).__name__, config.normprobe)  # type: ignore[arg-type]
        restore(self, config.normprobe["changes"], self.normprobe_kinds)  # type: ignore[arg-type]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """What transformers knows by the name of the class below, it knows by this one: how files name its weights."""
        super().__init_subclass__(**kwargs)
        from transformers.conversion_mapping import (
            get_checkpoint_conversion_mapping,
            register_checkpoint_conversion_mapping,
        )

        renamed = get_checkpoint_conversion_mapping(_below(cls).__name__)
        if renamed is not None:
            register_checkpoint_conversion_mapping(cls.__name__, renamed, overwrite=True)

    def _get_name(self) -> str:
        """That of the class below, which Trainer goes by for the loss with smoothed labels."""
        return _below(type(self)).__name__

    @classmethod
    def is_custom_code(cls) -> bool:
        """Custom code gets weights by the names that files have; this gets them by those of the class below."""
        return False

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """transformers reads this and the next in the file of a class; the modules are in that of the class below."""
        return bool(_below(cls)._can_set_attn_implementation())

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return bool(_below(cls)._can_set_experts_implementation())

    def initialize_weights(self) -> None:
        """As the class below; what no file holds, and building without memory has lost, gets its numbers. Models inside
        this one, such as that below a head, have `_init_weights` of their own."""
        super().initialize_weights()  # type: ignore[misc]
        for module in self.modules():  # type: ignore[attr-defined]
            for name, numbers in module.__dict__.get(_NUMBERS, {}).items():
                held = module._parameters.get(name, module._buffers.get(name))
                if held is not None and not getattr(held, "_is_hf_initialized", False):
                    values = torch.tensor(_start(numbers), dtype=held.dtype, device=held.device)
                    held.data.copy_(values.expand(held.shape) if values.dim() == 0 else values.reshape(held.shape))


def _below(kind: type[Any]) -> type[Any]:
    """The class that `Restored` stands before."""
    line = kind.__mro__
    return line[line.index(Restored) + 1]


def part_of(model: Any) -> str:
    """Path of the model below the head, which classes with other heads have too; "" where it is the whole."""
    prefix: str = getattr(model, "base_model_prefix", "")
    return prefix if prefix in model._modules else ""


def fitted(model: nn.Module, name: str, record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record of a patched model for a class with another head: the changes of what both have, where that is here.

    Args:
        model: of the class, unchanged.
        name: of the class.
        record: "base": name of the class that was patched, "part": its `part_of`, "changes": as above.

    Raises:
        ValueError: no change has a place in this class.
    """
    if name == record["base"]:
        return record
    known = {path for path, _ in model.named_modules(remove_duplicate=False)}
    here, there = part_of(model), record["part"]
    kept = []
    for change in record["changes"]:
        paths = {key: _moved(change[key], there, here) for key in ("path", "from") if key in change}
        needed = paths.get("from", _parent(paths["path"]) if "module" in change else paths["path"])
        if None not in paths.values() and needed in known:
            known.add(paths["path"])
            kept.append({**change, **paths})
    if not kept:
        raise ValueError(f"what was changed in {record['base']} has no place in {name}: load it as {record['base']}")
    return {**record, "base": name, "part": here, "changes": kept}


def _moved(path: str, there: str, here: str) -> str | None:
    """A path below `there` as one below `here`; None for one elsewhere."""
    if there and path != there and not path.startswith(there + "."):
        return None
    return ".".join(filter(None, (here, path[len(there) :].lstrip("."))))


def _parent(path: str | None) -> str | None:
    return None if path is None else path.rpartition(".")[0]


def main_dtype(model: nn.Module) -> torch.dtype:
    """The dtype that most of the floating numbers of a model have."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return max(sizes, key=sizes.__getitem__) if sizes else torch.get_default_dtype()


@torch.inference_mode(False)  # what is made there could never be trained
def restore(model: nn.Module, changes: Sequence[Mapping[str, Any]], kinds: Mapping[str, type[Any]]) -> None:
    """Change `model`, which is built as it was before the rewrite; its values are loaded afterwards.

    Args:
        model: with parameters on any device.
        changes: as above.
        kinds: the classes that changes name.

    Raises:
        AttributeError: the model is another one: it lacks a module that a change names.
    """
    dtype = main_dtype(model)
    for patch in sorted({change.get("patch", 0) for change in changes}):
        rows = [change for change in changes if change.get("patch", 0) == patch]
        same: dict[int, Any] = {}
        moved = {change["path"]: model.get_submodule(change["from"]) for change in rows if "from" in change}
        for change in rows:
            _place(model, change, moved, kinds, same)
        for change in rows:
            if change.get("module", True) is not None:
                _tensors(model, change, dtype)
                _change(model.get_submodule(change["path"]), change, kinds, same)


def decoded(value: Any, kinds: Mapping[str, type[Any]], same: dict[int, Any]) -> Any:
    """The value that was written down as `value`; objects that were one are one again."""
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(decoded(each, kinds, same) for each in value["tuple"])
    if "range" in value:
        return tuple(range(*value["range"]))
    if "ranges" in value:
        first, length, apart, count = value["ranges"]
        return tuple(tuple(range(start, start + length)) for start in (first + apart * n for n in range(count)))
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
    holder._modules[own] = _made(made, kinds, same).train(holder.training) if isinstance(made, Mapping) else made


def _made(row: Mapping[str, Any], kinds: Mapping[str, type[Any]], same: dict[int, Any]) -> nn.Module:
    """A module of the class that `row` names, without its constructor, with the attributes that it had."""
    module: nn.Module = object.__new__(kinds[row["kind"]])
    nn.Module.__init__(module)
    module.__dict__.update({name: decoded(value, kinds, same) for name, value in row["values"].items()})
    return module


def _tensors(model: nn.Module, change: Mapping[str, Any], most: torch.dtype) -> None:
    """Take away and add parameters and buffers of one module; new ones come to where those around them are."""
    module = model.get_submodule(change["path"])
    place: dict[str, Any] = {"device": _device(model, change["path"])}
    for name in change.get("gone", ()):
        for held in (module._parameters, module._buffers, module.__dict__):
            if name in held:
                del held[name]
    for name, (shape, dtype, number) in change.get("parameters", {}).items():
        filled = torch.full(shape, _start(number), dtype=getattr(torch, dtype) if dtype else most, **place)
        module._parameters[name] = nn.Parameter(filled, requires_grad=filled.is_floating_point())
        module.__dict__.setdefault(_NUMBERS, {})[name] = number
    module._parameters.update(dict.fromkeys(change.get("absent", ())))
    for name, (shape, dtype, values) in change.get("buffers", {}).items():
        module._parameters.pop(name, None)  # an earlier change may have added it as one
        place["dtype"] = getattr(torch, dtype) if dtype else most
        buffer = torch.zeros(shape, **place) if values is None else torch.tensor(values, **place).reshape(shape)
        module.register_buffer(name, buffer, persistent=values is None)
        if values is not None:
            module.__dict__.setdefault(_NUMBERS, {})[name] = values


def _start(numbers: Any) -> Any:
    """What a parameter or buffer holds until its values are loaded."""
    return 1.0 if numbers is None else numbers


def _device(model: nn.Module, path: str) -> torch.device:
    """That of the module at `path`, or of the nearest around it that has parameters."""
    found = next(model.get_submodule(path).parameters(), None)
    if found is not None:
        return found.device
    return _device(model, path.rpartition(".")[0]) if path else torch.empty(0).device


def _change(module: nn.Module, change: Mapping[str, Any], kinds: Mapping[str, type[Any]], same: dict[int, Any]) -> None:
    for name, value in change.get("values", {}).items():
        module.__dict__[name] = decoded(value, kinds, same)
    if "class" in change:
        module.__class__ = kinds[change["class"]]
    for name in change.get("layers", ()):
        layer: type[Layer] = kinds[name]
        module.__class__ = laid(type(module), layer)
    for name, rows in change.get("computed", {}).items():
        for row in rows:
            parametrize.register_parametrization(module, name, _made(row, kinds, same))
