"""The configuration of another architecture that says what a model's own says."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from normprobe.errors import CheckpointError, SettingError
from normprobe.records import Anatomy
from normprobe.structure.field import FIELD

_OF_THE_CLASS = {"model_type", "architectures", "auto_map", "transformers_version", "_name_or_path", FIELD}
_LIMITS = ("sliding_window", "attention_chunk_size")  # tokens that a query sees: short inputs do not show it


def config_class(model_type: str) -> type[Any]:
    """The configuration class of an architecture of transformers.

    Raises:
        SettingError: it has none of that name.
    """
    from difflib import get_close_matches

    from transformers import CONFIG_MAPPING

    known = {*CONFIG_MAPPING}
    if model_type in known:
        found: type[Any] = CONFIG_MAPPING[model_type]
        return found
    near = ", ".join(get_close_matches(model_type, sorted(known)))
    raise SettingError("--as names no architecture", expected=near or "llama, qwen3, …", found=repr(model_type))


def retyped(config: Any, kind: type[Any], anatomy: Anatomy) -> tuple[Any, dict[str, Any]]:
    """A configuration of `kind` with every field that it shares with `config`; the sizes of attention that `config`
    leaves open are read from the data flow.

    Returns:
        It, and the fields of `config` that it has no place for and that are not as they are by default.

    Raises:
        CheckpointError: `kind` cannot be made so, or a limit on what attention sees would be lost.
    """
    if type(config) is kind:
        return _own(config), {}
    default = kind()
    fields = {**_sizes(anatomy, default), **dict(_shared(config, default))}
    fields |= {name: None for name in _LIMITS if hasattr(default, name) and not hasattr(config, name)}
    try:
        made = kind(**fields)
    except Exception as error:  # each class checks its fields in a way of its own; the reason is shown
        what = f"no configuration of {kind.model_type} can be made from that of {config.model_type}"
        raise CheckpointError(what, found=f"{type(error).__name__}: {error}") from error
    _check_limits(config, made)
    return made, _dropped(config, made)


def _own(config: Any) -> Any:
    """The same without what an earlier patch put there."""
    made = copy.deepcopy(config)
    for name in (FIELD, "auto_map"):
        if name in vars(made):
            delattr(made, name)
    return made


def _shared(config: Any, default: Any) -> Iterator[tuple[str, Any]]:
    """Each field of `default` that `config` has, by this or another of its names."""
    for name in default.to_dict().keys() - _OF_THE_CLASS:
        aliases = (alias for alias, held in default.attribute_map.items() if held == name)
        known = next((each for each in (name, *aliases) if hasattr(config, each)), None)
        if known is None:
            continue
        value, usual = getattr(config, known), getattr(default, name, None)
        if hasattr(usual, "to_diff_dict") and hasattr(value, "to_diff_dict"):
            of: Any = type(usual)
            value = value if type(value) is of else of(**dict(_shared(value, usual)))
        yield name, value


def _sizes(anatomy: Anatomy, default: Any) -> dict[str, int]:
    """Numbers and sizes of heads, where all attention sites have the same, by the names of the new configuration."""
    read = {"num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "head_dim": "head_dim"}
    found = {}
    for name, field in read.items():
        sizes = {getattr(site, field) for site in anatomy.attention}
        held = default.attribute_map.get(name, name)
        if len(sizes) == 1 and hasattr(default, held):
            found[held] = sizes.pop()
    return found


def _check_limits(config: Any, made: Any) -> None:
    for name in _LIMITS:
        had, has = getattr(config, name, None), getattr(made, name, None)
        layers = [list(getattr(each, "layer_types", None) or ()) for each in (config, made)]
        if had is not None and (had != has or layers[0] != layers[1]):
            what = f"{config.model_type} is no {made.model_type}: its attention is limited by {name}={had}"
            found = f"{name}={has}, or in other layers"
            raise CheckpointError(what, expected=f"the same limit in {made.model_type}", found=found)


def _dropped(config: Any, made: Any) -> dict[str, Any]:
    usual: Mapping[str, Any] = type(config)().to_dict()
    return {
        name: value
        for name, value in config.to_dict().items()
        if not (name.startswith("_") or name in _OF_THE_CLASS) and value != usual.get(name) and not hasattr(made, name)
    }
