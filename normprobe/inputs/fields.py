"""Reading a configuration: fields by their usual names, in the part that describes the modality at hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

TEXT = ("text", "decoder", "language", "llm")
VISION = ("vision", "backbone", "image", "encoder")
AUDIO = ("audio", "speech", "encoder")


def parts(config: Any) -> Iterator[tuple[str, Any]]:
    """The configurations nested in `config`, with the names they have there, outer ones first."""
    nested = [(name, value) for name, value in vars(config).items() if _is_config(value)]
    yield from nested
    for _, part in nested:
        yield from parts(part)


def _is_config(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "__dict__") and not isinstance(value, type)


def part(config: Any, words: tuple[str, ...]) -> Any | None:
    """The first nested configuration whose name holds one of `words`, earlier words first."""
    for word in words:
        for name, value in parts(config):
            if word in name:
                return value
    return None


def field(config: Any, names: tuple[str, ...], words: tuple[str, ...] = ()) -> Any | None:
    """The first field of `names` that is set: in the part named by `words`, then on top, then anywhere."""
    own = part(config, words) if words else None
    places = [place for place in (own, config) if place is not None]
    for place in [*places, *(value for _, value in parts(config))]:
        for name in names:
            value = getattr(place, name, None)
            if value is not None:
                return value
    return None


def number(config: Any, names: tuple[str, ...], words: tuple[str, ...] = ()) -> int | None:
    """The first positive whole number under `names`, as `field` looks for it."""
    value = field(config, names, words)
    if isinstance(value, list | tuple) and value:
        value = value[0]
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def text_part(config: Any) -> Any:
    """The part of the configuration that describes the text model, the whole where there is no such part."""
    return part(config, TEXT) or config


def special_ids(config: Any) -> set[int]:
    """Every id that the configuration or a part of it names: `…_token_id`, `…_ids`, `…_index`."""
    found: set[int] = set()
    for place in [config, *(value for _, value in parts(config))]:
        for name, value in vars(place).items():
            if name.endswith(("_token_id", "_token_ids", "_token_index")):
                values = value if isinstance(value, list | tuple) else [value]
                found.update(v for v in values if isinstance(v, int))
    return found
