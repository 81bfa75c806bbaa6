"""The configuration of a patched checkpoint: that of the source with the fields that changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normprobe.checkpoints.weights import read_json

NAME = "config.json"


def write_config(source: Path, out: Path, before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """Write `config.json` into the folder `out`: the file `source` with what differs between two states.

    Returns:
        The fields that changed, dotted.
    """
    stated = read_json(source)
    changed = tuple(_merge(stated, before, after))
    text = json.dumps(stated, indent=2, ensure_ascii=False) + "\n"
    (out / NAME).write_text(text if changed else source.read_text(encoding="utf-8"), encoding="utf-8")
    return changed


def _merge(stated: dict[str, Any], before: Mapping[str, Any], after: Mapping[str, Any], at: str = "") -> list[str]:
    changed = []
    for name, value in after.items():
        had = before.get(name)
        if value == had:
            continue
        inner = stated.get(name)
        if isinstance(value, Mapping) and isinstance(had, Mapping) and isinstance(inner, dict):
            changed += _merge(inner, had, value, f"{at}{name}.")
        else:
            stated[name] = value
            changed.append(at + name)
    return changed
