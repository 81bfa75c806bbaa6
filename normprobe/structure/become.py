"""Make a model that was built without the changes of a patched checkpoint one that saves them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from normprobe.structure.field import FIELD
from normprobe.structure.modelling import patched, state_record


def become_patched(model: Any, base: Any, config: Any, folder: Path) -> None:
    """Give a model the patched class, and configurations of its own that list the changes; its modules stay as they
    are.

    Args:
        model: of the class `base` of transformers, or of one over it.
        base: what was patched.
        config: that of the patched checkpoint, with the record and the fields that the patch changed.
        folder: the patched checkpoint, of which adapters say then that they lie on it.
    """
    copies: dict[int, Any] = {}
    own = copy.deepcopy(model.config, copies)  # other models may hold the one that it has
    for module in model.modules():
        held = {name: value for name, value in vars(module).items() if isinstance(value, _configurations())}
        vars(module).update({name: copy.deepcopy(value, copies) for name, value in held.items()})
    record = getattr(config, FIELD)
    state_record(own, base, record)
    # encoder and decoder may have one of the whole each
    wholes = {id(each): each for each in _held(model) if type(each) is type(own)}
    for field in record.get("fields", ()):
        for each in wholes.values():
            _copy_field(field, config, each)
    model.name_or_path = own._name_or_path = str(folder)
    kind: Any = type(model)
    model.__class__ = patched(base) if kind is base else patched(base, kind)


def _held(model: Any) -> Iterator[Any]:
    """The configurations of its modules."""
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, _configurations()))


def _copy_field(field: Sequence[str], source: Any, target: Any) -> None:
    """Give one configuration a field of another."""
    *inside, name = field
    had, holder = (reduce(_entry, inside, each) for each in (source, target))
    value = copy.deepcopy(_entry(had, name))
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)


def _entry(holder: Any, name: str) -> Any:
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


def _configurations() -> Any:
    from transformers import PretrainedConfig

    return PretrainedConfig
