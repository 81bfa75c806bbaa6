"""Which weights `only=` means: roles in the data flow, or patterns of parameter names."""

from __future__ import annotations

from collections.abc import Mapping

from normprobe.errors import RewriteError
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


def choice(only: object) -> str | tuple[str, ...] | None:
    """The choice as it is kept, a list as a tuple.

    Raises:
        RewriteError: it is neither text nor a list of texts, or empty.
    """
    if only is None or (isinstance(only, str) and only):
        return only
    if isinstance(only, (list, tuple)) and only and all(isinstance(word, str) and word for word in only):
        return tuple(only)
    expected = f"only: {' | '.join(ROLES)}, a pattern such as 'h.*.mlp.*', or several of these"
    raise RewriteError("a choice of weights cannot be read", expected=expected, found=repr(only))


def meant(parameter: str, roles: tuple[str, ...], only: str | tuple[str, ...] | None) -> bool:
    """Whether a parameter with these roles is meant."""
    words = (only,) if isinstance(only, str) else only
    return words is None or any(ROLES[w] in roles if w in ROLES else chosen(parameter, w) for w in words)
