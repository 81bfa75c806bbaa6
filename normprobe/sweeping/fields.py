"""Which fields of a configuration carry the width or the depth: found by building on meta and seeing what changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normprobe.capture.experts import valueless_experts
from normprobe.capture.recorder import record
from normprobe.errors import SettingError
from normprobe.inputs import inputs_from_config
from normprobe.inputs.given import on_device
from normprobe.records.sweep import Axis
from normprobe.sweeping.roles import Faces, faces

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
    features do that one product gives and the next one takes; a vocabulary lengthens one side alone. The main one is
    that which widens what the most modules give. Fields are taken by that and by how many axes they lengthen, where
    they share none with those taken before and the model still runs with all of them doubled. Depth is the field that
    adds the most parameters and changes the shape of none.

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
    chosen = _chosen(build, config, found, axis)
    if not chosen:
        raise SettingError(f"no field of {type(config).__name__} carries the {axis}", found=", ".join(names))
    return Sizing(build, config, tuple((name, getattr(config, name)) for name in chosen))


def _chosen(build: Callable[[Any], nn.Module], config: Any, found: dict[str, Dims], axis: Axis) -> list[str]:
    """The fields that are varied together, the main one first."""
    plain = _given(build, config, ())
    wider = {name: _widened(plain, _given(build, config, (name,))) for name in found}
    chosen: list[str] = []
    for name in sorted(found, key=lambda name: (-wider[name], -len(found[name]))):
        if any(found[name] & found[other] for other in chosen) or (axis == "depth" and chosen):
            continue
        if plain is None or _given(build, config, (*chosen, name)) is not None:
            chosen.append(name)
    return chosen


def _given(build: Callable[[Any], nn.Module], config: Any, doubled: Sequence[str]) -> dict[str, Faces] | None:
    """What every module is given and gives in one forward on meta with some fields doubled; None where none runs."""
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=()):
            model = build(changed(config, {name: 2 * getattr(config, name) for name in doubled}))
            inputs, _ = inputs_from_config(model, batch=2, seed=0, tokens=8)
        with valueless_experts(model):
            return faces(model, on_device(model, inputs), record)
    except Exception:  # a forward that these sizes, or the lack of values, make impossible
        return None


def _widened(plain: dict[str, Faces] | None, wide: dict[str, Faces] | None) -> int:
    """How many modules give something wider."""
    if plain is None or wide is None:
        return 0
    return sum(plain[path].gave != now.gave for path, now in wide.items() if path in plain)


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
    rows = {(n, place) for n, place in lengthened if len(old[n]) > 1 and place in _ends(old[n], 0)}
    columns = {(n, place) for n, place in lengthened if place in _ends(old[n], 1)}
    both = rows and columns and len(rows | columns) > 1
    return lengthened if old.keys() == new.keys() and both else frozenset()


def _ends(shape: tuple[int, ...], end: int) -> set[int]:
    """The axes that may be those of rows (0) or columns (1); a third axis may be a kernel's or count matrices."""
    return {end, end + 1} if len(shape) == 3 else {end}


def _lengthened(old: Shapes, new: Shapes) -> Iterator[tuple[str, int]]:
    for name, shape in old.items():
        for place, (a, b) in enumerate(zip(shape, new.get(name, shape), strict=False)):
            if a != b:
                yield name, place


def _shapes(build: Callable[[Any], nn.Module], config: Any) -> Shapes:
    with torch.device("meta"), torch.random.fork_rng(devices=()):
        return {name: tuple(p.shape) for name, p in build(config).named_parameters()}
