"""Models that reproduce publicly reported faults; they lie beside the repository, and tests skip where they do not."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import normprobe
from normprobe import Report

FOLDER = Path(__file__).parents[3] / "shared" / "cases"


def case(name: str) -> ModuleType:
    """The case whose file begins with `name`; its `build` makes the model and its inputs."""
    found = sorted(FOLDER.glob(f"{name}_*.py"))
    if not found:
        pytest.skip(f"no cases in {FOLDER}")
    spec = importlib.util.spec_from_file_location(f"field_{name}", found[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(name: str, *args: Any, level: str = "forward", **kwargs: Any) -> Report:
    """The report on a case that was built with these arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch on what it does not do for a norm-first encoder
        model, inputs = case(name).build(*args, **kwargs)
    return normprobe.probe(model, inputs, level=level)  # type: ignore[arg-type]


def codes(found: Report, *severities: str) -> set[str]:
    """The codes of all findings, or of those of these severities."""
    return {f.code for f in found.findings if not severities or f.severity.value in severities}


def only(found: Report, code: str) -> Any:
    """The one finding with this code."""
    (finding,) = (f for f in found.findings if f.code == code)
    return finding
