"""Which fields of a configuration carry the width or the depth: found by building on meta and seeing what changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normprobe.errors import SettingError
from normprobe.records.sweep import Axis

Shapes = dict[str, tuple[int, ...]]
Dims = frozenset[tuple[str, int]]  # parameter, axis; a parameter that is new counts with axis -1


@dataclass(frozen=True)
class Sizing:
    """Builds a model at other sizes.

    Attributes:
        build: makes a model of a configuration.
        config: the configuration that is changed.
        fields: the fields that carry the size, the main one first, with their values there.
    """

    build: Callable[[Any], nn.Module]
    config: Any
    fields: tuple[tuple[str, int], ...]

    def __call__(self, size: int) -> nn.Module:
        """A model whose main field is `size`, the others in proportion.

        Raises:
            SettingError: another field would be no whole number, or no model can be built.
        """
        main = self.fields[0][1]
        odd = next((name for name, value in self.fields if value * size % main), None)
        if odd is not None:
            step = next(step for step in range(1, main + 1) if not any(v * step % main for _, v in self.fields))
            raise SettingError(
                f"no model of size {size}: {odd} would be no whole number",
                expected=f"a multiple of {step}",
                found=str(size),
            )
        try:
            return self.build(changed(self.config, {name: value * size // main for name, value in self.fields}))
        except Exception as error:
            raise SettingError(
                f"no model can be built with {self.fields[0][0]} = {size}", found=f"{type(error).__name__}: {error}"
            ) from error

    def described(self, axis: Axis) -> str:
        """One line that says which fields are varied."""
        names = [name for name, _ in self.fields]
        with_others = f", and {', '.join(names[1:])} in proportion" if names[1:] else ""
        return f"{axis}: {names[0]} ({self.fields[0][1]} in the configuration){with_others}"


def sizing(model: nn.Module, axis: Axis) -> Sizing:
    """How to build `model` at other widths or depths, from its own configuration; its values do not matter.

    A field carries width where doubling it keeps all parameters and lengthens rows of some and columns of others, as
    features do that one product gives and the next one takes; a vocabulary lengthens one side alone. Fields are taken
    by how many axes they lengthen, where they share none with those taken before. Depth is the field that adds the
    most parameters and changes the shape of none.

    Raises:
        SettingError: the model has no configuration, or no field of it carries the size.
    """
    config = getattr(model, "config", None)
    build: Any = type(model)
    if config is None or not hasattr(config, "to_dict"):
        hint = f"a factory that takes the {axis}: def factory({axis}): return model, inputs"
        raise SettingError("the model has no configuration to vary", found=type(model).__name__, hint=hint)
    names = [name for name, value in config.to_dict().items() if type(value) is int and value > 1]
    found = {name: dims for name in names if (dims := _dims(build, config, name, axis))}
    chosen: list[str] = []
    for name in sorted(found, key=lambda name: -len(found[name])):
        if not any(found[name] & found[other] for other in chosen) and (axis == "width" or not chosen):
            chosen.append(name)
    if not chosen:
        raise SettingError(f"no field of {type(config).__name__} carries the {axis}", found=", ".join(names))
    return Sizing(build, config, tuple((name, getattr(config, name)) for name in chosen))


def changed(config: Any, fields: dict[str, int]) -> Any:
    """A configuration with other values; lists with one entry for each layer are left for it to make anew."""
    old = {name: getattr(config, name) for name in fields}
    values = {
        name: value
        for name, value in config.to_dict().items()
        if not (isinstance(value, list) and len(value) in old.values() and name not in ("architectures",))
    }
    return type(config).from_dict(values | fields)


def _dims(build: Callable[[Any], nn.Module], config: Any, name: str, axis: Axis) -> Dims:
    """What doubling a field lengthens or adds, where that is what the axis is; empty otherwise."""
    try:
        old, new = _shapes(build, config), _shapes(build, changed(config, {name: 2 * getattr(config, name)}))
    except Exception:  # a field that cannot be doubled by itself carries no size
        return frozenset()
    lengthened = frozenset(_lengthened(old, new))
    if axis == "depth":
        return (
            frozenset((n, -1) for n in new.keys() - old.keys())
            if old.keys() <= new.keys() and not lengthened
            else frozenset()
        )
    rows = any(place == 0 and len(old[n]) > 1 for n, place in lengthened)
    columns = any(place == 1 for _, place in lengthened)
    return lengthened if old.keys() == new.keys() and rows and columns else frozenset()


def _lengthened(old: Shapes, new: Shapes) -> Iterator[tuple[str, int]]:
    for name, shape in old.items():
        for place, (a, b) in enumerate(zip(shape, new.get(name, shape), strict=False)):
            if a != b:
                yield name, place


def _shapes(build: Callable[[Any], nn.Module], config: Any) -> Shapes:
    with torch.device("meta"), torch.random.fork_rng(devices=()):
        return {name: tuple(p.shape) for name, p in build(config).named_parameters()}
