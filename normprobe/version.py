"""Versions of normprobe and of what it ran with."""

from __future__ import annotations

import platform
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Versions of Python, normprobe and torch, and of transformers where it is loaded."""
    found = {"normprobe": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers"):
        if name in sys.modules:
            found[name] = _installed(name)
    return found


@cache
def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
