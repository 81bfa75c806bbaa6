"""Models with facts about them that were read by hand elsewhere, where their folder lies beside the repository."""

from __future__ import annotations

import importlib.util
import logging
import sys
import warnings
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parent.parent.parent / "shared" / "truth"
here = pytest.mark.skipif(not FOLDER.is_dir(), reason="no folder `shared` beside the repository")


@cache
def entries() -> dict[str, Any]:
    """What is known of each model, by its id; nothing where the folder is missing."""
    texts = [FOLDER / name for name in ("text.yaml", "media.yaml")] if FOLDER.is_dir() else []
    loaded = [yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader) for path in texts]
    return {entry["id"]: entry for text in loaded for entry in text}


@cache
def checker() -> tuple[ModuleType, Any]:
    """The script that compares, imported without the settings that it makes for all of the process, and its names."""
    path = FOLDER / "check_truth.py"
    spec = importlib.util.spec_from_file_location("check_truth", path)
    assert spec is not None
    assert spec.loader is not None
    module, disabled, search = importlib.util.module_from_spec(spec), logging.root.manager.disable, list(sys.path)
    with warnings.catch_warnings():
        spec.loader.exec_module(module)
        names = module.names(path.parent)
    logging.disable(disabled)
    sys.path[:] = search
    return module, names


def build(name: str) -> tuple[Any, Any]:
    """One of the models, and inputs for it."""
    module, names = checker()
    model, inputs = module.build(entries()[name], names)
    return model, inputs
