"""Make a model that was built without the changes of a patched checkpoint one that saves them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import reduce
from typing import Any

from normprobe.structure.field import FIELD
from normprobe.structure.modelling import patched, state_record


def become_patched(model: Any, base: Any, config: Any) -> None:
    """Give a model the patched class, and a configuration of its own that lists the changes; its modules stay as they
    are.

    Args:
        model: of the class `base` of transformers, or of one over it.
        base: what was patched.
        config: that of the patched checkpoint, with the record and the fields that the patch changed.
    """
    copies: dict[int, Any] = {}
    own = copy.deepcopy(model.config, copies)  # other models may hold the one that it has
    record = getattr(config, FIELD)
    state_record(own, base, record)
    for field in record.get("fields", ()):
        _copy_field(field, config, own)
    for module in model.modules():
        held = {name: copies[id(value)] for name, value in vars(module).items() if id(value) in copies}
        vars(module).update({name: value for name, value in held.items() if isinstance(value, _configurations())})
    kind: Any = type(model)
    model.__class__ = patched(base) if kind is base else patched(base, kind)


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


def _configurations() -> type[Any]:
    from transformers import PretrainedConfig

    return PretrainedConfig
