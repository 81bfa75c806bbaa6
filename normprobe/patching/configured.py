"""The configuration of a patched checkpoint: that of the source with the fields that changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normprobe.checkpoints.weights import read_json

NAME = "config.json"


def write_config(source: Path, out: Path, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Write `config.json` into the folder `out`: the file `source` with what differs between two states, to the letter
    where nothing does."""
    stated = read_json(source)
    if _merge(stated, before, after):
        (out / NAME).write_text(json.dumps(stated, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    else:
        shutil.copyfile(source, out / NAME)


def _merge(stated: dict[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether anything differs; fields that are as they were stay out of `stated` where they are not stated."""
    changed = False
    for name, value in after.items():
        had, inner = before.get(name), stated.get(name)
        if value == had:
            continue
        changed = True
        if isinstance(value, Mapping) and isinstance(had, Mapping) and isinstance(inner, dict):
            _merge(inner, had, value)
        else:
            stated[name] = value
    return changed
