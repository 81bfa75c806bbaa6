"""The configuration of a patched checkpoint: that of the source with the fields that changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from normprobe.checkpoints.weights import read_json

NAME = "config.json"


def write_config(source: Path, out: Path, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Write `config.json` into the folder `out`: the file `source` with what differs between two states, to the letter
    where nothing does."""
    stated, fields = read_json(source), tuple(changed_fields(before, after))
    for field in fields:
        _state(stated, field, after)
    if fields:
        (out / NAME).write_text(json.dumps(stated, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    else:
        shutil.copyfile(source, out / NAME)


def changed_fields(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The fields that differ between two states of a configuration: their names, behind those of what they lie in."""
    for name, value in after.items():
        had = before.get(name)
        if isinstance(value, Mapping) and isinstance(had, Mapping) and had.keys() <= value.keys():
            yield from ((name, *field) for field in changed_fields(had, value))
        elif value != had:
            yield (name,)


def _state(stated: dict[str, Any], field: Sequence[str], after: Mapping[str, Any]) -> None:
    """Put a field into `stated` as `after` has it; with all around it where that is not stated."""
    name, *inside = field
    if inside and isinstance(stated.get(name), dict):
        _state(stated[name], inside, after[name])
    else:
        stated[name] = after[name]
