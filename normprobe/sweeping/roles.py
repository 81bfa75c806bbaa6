"""Which axes of each parameter grow with the width, and what that makes of it: read off two widths of one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from normprobe.capture.guard import untouched
from normprobe.capture.invoke import Inputs, invoke
from normprobe.capture.rejections import rejections
from normprobe.errors import SettingError
from normprobe.rewrites.mup import Place

_NOT_CALLED = "its module was not called"


@dataclass
class Faces:
    """Sizes of the last or the channel axis that a module was given and gave, by number of the tensor."""

    given: list[tuple[int, ...]] = field(default_factory=list)
    gave: list[tuple[int, ...]] = field(default_factory=list)


def places(model: nn.Module, base: nn.Module, inputs: Inputs, base_inputs: Inputs) -> dict[str, Place]:
    """The place of every parameter of `model`, by name, told by comparing it with `base`, the same model at another
    width, and by which sizes their modules read and give in one forward each.

    Raises:
        SettingError: the two have other parameters, or no parameter differs in shape.
        InputError: one of them rejected its inputs.
    """
    names, wide, narrow = _checked(model, base)
    with rejections(model):
        seen = faces(model, inputs)
    with rejections(base):
        base_seen = faces(base, base_inputs)
    found: dict[str, list[Place]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            full = f"{path}.{name}".lstrip(".")
            if parameter is None:
                continue
            place = _place(tuple(parameter.shape), narrow[full], seen.get(path), base_seen.get(path))
            if place.role == "readout":
                place = replace(place, readout=path)
            found.setdefault(names[id(parameter)], []).append(place)
    return {name: _merged(found[name]) for name in wide}


def _checked(model: nn.Module, base: nn.Module) -> tuple[dict[int, str], list[str], dict[str, tuple[int, ...]]]:
    mine = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    theirs = {name: tuple(p.shape) for name, p in base.named_parameters(remove_duplicate=False)}
    odd = sorted(mine.keys() ^ theirs.keys()) + [n for n in mine if n in theirs and len(mine[n]) != len(theirs[n])]
    if odd:
        raise SettingError("the base is another model", expected="the same parameters at another width", found=odd[0])
    if mine == theirs:
        raise SettingError("the base has the same width", expected="a model of another width", found="equal shapes")
    names = {id(p): name for name, p in model.named_parameters()}
    return names, list(names.values()), theirs


def faces(model: nn.Module, inputs: Inputs, run: Callable[[nn.Module, Inputs], Any] = invoke) -> dict[str, Faces]:
    """What each module was given and gave at its first call; `run` runs the model."""
    found: dict[str, Faces] = {}

    def seen(path: str, args: Any, kwargs: Any, output: Any) -> None:
        if path not in found:
            found[path] = Faces(_shapes((args, kwargs)), _shapes(output))

    with untouched(model) as keeper, torch.no_grad(), keeper.mode():
        handles = [
            module.register_forward_hook(
                lambda _, args, kwargs, output, path=path: seen(path, args, kwargs, output), with_kwargs=True
            )
            for path, module in model.named_modules()
        ]
        try:
            run(model, inputs)
        finally:
            for handle in handles:
                handle.remove()
    return found


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _place(shape: tuple[int, ...], base: tuple[int, ...], mine: Faces | None, theirs: Faces | None) -> Place:
    growing = [axis for axis, (a, b) in enumerate(zip(shape, base, strict=True)) if a != b]
    if not growing:
        return Place("fixed")
    ratios = [shape[axis] / base[axis] for axis in growing]
    if len(shape) == 1:
        return Place("input", fan_out=ratios[0])
    if len(growing) > 2:
        return Place("unknown", why=f"{len(growing)} axes grow with the width")
    if len(growing) == 2 and ratios[0] == ratios[1]:
        return Place("hidden", ratios[0], ratios[1])
    if mine is None or theirs is None:
        return Place("unknown", why=_NOT_CALLED)
    read = _grown(mine.given, theirs.given)
    gave = _grown(mine.gave, theirs.gave)
    if len(growing) == 2:
        ends = [i for i, axis in enumerate(growing) if (shape[axis], base[axis]) in read]
        if len(ends) != 1:
            return Place("unknown", why="its fan-in axis was not seen")
        return Place("hidden", ratios[ends[0]], ratios[1 - ends[0]])
    pair = (shape[growing[0]], base[growing[0]])
    if (pair in read) == (pair in gave):
        return Place("unknown", why="whether its module reads or gives features of the width was not seen")
    return Place("readout", ratios[0]) if pair in read else Place("input", fan_out=ratios[0])


def _grown(mine: list[tuple[int, ...]], theirs: list[tuple[int, ...]]) -> set[tuple[int, int]]:
    """The sizes, with those of the base, of all axes that differ."""
    pairs = zip(mine, theirs, strict=False)
    return {(a, b) for one, other in pairs for a, b in zip(one, other, strict=False) if a != b}


def _merged(found: list[Place]) -> Place:
    """The place of a parameter that several modules hold; modules that were not called say nothing where others do."""
    found = [place for place in found if place.why != _NOT_CALLED] or found
    roles = {place.role for place in found}
    if len(roles) == 1:
        return found[0]
    if roles == {"input", "readout"}:
        readout = next(place for place in found if place.role == "readout")
        given = next(place for place in found if place.role == "input")
        return replace(readout, role="shared", fan_out=given.fan_out, why="it is embedding and readout in one")
    return Place("unknown", why=f"it serves as {' and '.join(sorted(roles))}")


def by_role(found: Mapping[str, Place]) -> Iterator[tuple[Place, list[str]]]:
    """The names of the parameters of each role and ratio."""
    bare = {name: replace(place, why="", readout="") for name, place in found.items()}
    for place in dict.fromkeys(bare.values()):
        yield place, [name for name, one in bare.items() if one == place]
