"""Which weights `only=` means: roles in the data flow, or patterns of parameter names."""

from __future__ import annotations

from collections.abc import Mapping

from normprobe.rewrites.edits import chosen

ROLES: Mapping[str, str] = {
    "readers": "reader",
    "writers": "writer",
    "inner": "inner",
    "embeddings": "embedding",
    "head": "head",
    "norms": "norm",
    "others": "other",
}


def meant(parameter: str, roles: tuple[str, ...], only: str | tuple[str, ...] | None) -> bool:
    """Whether a parameter with these roles is meant."""
    words = (only,) if isinstance(only, str) else only
    return words is None or any(ROLES[w] in roles if w in ROLES else chosen(parameter, w) for w in words)
