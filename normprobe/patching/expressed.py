"""Where the configuration of an architecture can say what a rewrite changed, no code has to come along."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from normprobe.capture.invoke import Inputs
from normprobe.patching.same import same_outputs
from normprobe.structure.modelling import base_of, patched, record_of, state_record
from normprobe.structure.restore import Restored, main_dtype
from normprobe.structure.snapshot import Structure
from normprobe.targets.config import own_code
from normprobe.targets.quiet import quiet


def expressed(model: Any, before: Structure, changes: Sequence[Mapping[str, Any]], inputs: Inputs) -> bool:
    """Change `model.config` so that a model built from it is what `model` has become.

    Fields from which a module has a number that became another are given that; what is built so has to hold the numbers
    of `model` and give its very outputs.

    Returns:
        Whether fields say all of it; otherwise the configuration is as it was.
    """
    return _are_numbers(before, changes) and _stated(model, built_by(model), before, changes, inputs)


def stated_beside(model: Any, before: Structure, changes: Sequence[Mapping[str, Any]], inputs: Inputs) -> None:
    """As `expressed`, of the numbers among changes that need code besides: who reads a field finds what is so."""
    base: Any = base_of(model)
    _stated(model, patched(base), before, changes, inputs)


def _stated(model: Any, kind: Any, before: Structure, changes: Sequence[Mapping[str, Any]], inputs: Inputs) -> bool:
    config = copy.deepcopy(model.config)
    if not state_numbers(built_by(model), config, model, numbers_of(before, changes)):
        return False
    listing = copy.deepcopy(config)
    if issubclass(kind, Restored):
        state_record(listing, base_of(model), record_of(model, changes, ()))
    made = _built(kind, model, listing)
    if _numbers(made) != _numbers(model) or not same_outputs(made, model, inputs):
        return False
    model.config = config
    return True


def _are_numbers(before: Structure, changes: Sequence[Mapping[str, Any]]) -> bool:
    """Whether nothing else than numbers changed."""
    alone = all(change.keys() == {"path", "values"} for change in changes)
    return alone and all(_is_number(before, change, name) for change in changes for name in change["values"])


def numbers_of(before: Structure, changes: Sequence[Mapping[str, Any]]) -> dict[float, float]:
    """The number that each number became; none where one became two."""
    found: dict[float, float] = {}
    for change in changes:
        for name in (name for name in change.get("values", ()) if _is_number(before, change, name)):
            value = change["values"][name]
            if found.setdefault(before.parts[_place(change)].values[name], value) != value:
                return {}
    return found


def _place(change: Mapping[str, Any]) -> str:
    """Where the module was before."""
    place: str = change.get("from", change["path"])
    return place


def _is_number(before: Structure, change: Mapping[str, Any], name: str) -> bool:
    """Whether this is the value of an attribute, and was and is a number."""
    had = before.parts.get(_place(change))
    held = (None if had is None else had.values.get(name), change.get("values", {}).get(name))
    return all(type(value) is float for value in held)


def state_numbers(kind: type[Any], config: Any, model: nn.Module, pairs: Mapping[float, float]) -> bool:
    """Change the fields of `config` from which a model of `kind` has the numbers that became others in `model`; another
    field may hold the same number and mean something else by it.

    Returns:
        Whether there are any.
    """
    wanted, found = _numbers(model), False
    off = _off(kind, config, wanted) if pairs else set()
    for holder, name in [*_holding(config, pairs)]:
        had = getattr(holder, name)
        setattr(holder, name, pairs[had])
        left = _off(kind, config, wanted)
        if left < off:  # some that were off, and no other
            off, found = left, True
        else:
            setattr(holder, name, had)
    return found


def set_numbers(config: Any, pairs: Mapping[float, float]) -> None:
    """Change every field of a configuration and of those inside it that holds one of the numbers."""
    for holder, name in [*_holding(config, pairs)]:
        setattr(holder, name, pairs[getattr(holder, name)])


def _holding(config: Any, pairs: Mapping[float, float]) -> Iterator[tuple[Any, str]]:
    """Each field that holds one of the numbers: the configuration that has it, and its name there."""
    for name, value in vars(config).items():
        if type(value) is float and value in pairs:
            yield config, name
        elif hasattr(value, "to_diff_dict"):
            yield from _holding(value, pairs)


def _numbers(model: nn.Module) -> dict[tuple[str, str], float]:
    """Every number that a module holds as an attribute, by its path and name."""
    modules = model.named_modules()
    return {(path, name): value for path, held in modules for name, value in vars(held).items() if type(value) is float}


def _off(kind: type[Any], config: Any, wanted: Mapping[tuple[str, str], float]) -> set[tuple[str, str]]:
    """The places of numbers that are others in a model that is built from `config`."""
    with quiet(), torch.device("meta"):
        held = _numbers(kind(copy.deepcopy(config)))
    return {place for place, value in wanted.items() if held.get(place, value) != value}


def built_by(model: Any) -> type[Any]:
    """The class that builds the model as it was before a patch: that of transformers, or what came with it."""
    return type(model) if own_code(vars(model.config)) else base_of(model)


def _built(kind: type[Any], model: Any, config: Any) -> nn.Module:
    """A model of `kind` and `config` that shares the weights of `model`."""
    with quiet():
        made: nn.Module = kind.from_pretrained(
            None, config=config, state_dict=model.state_dict(), dtype=main_dtype(model), local_files_only=True
        )
    return made.eval()
