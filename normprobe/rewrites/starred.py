"""Names in which the numbers of modules are stars, so that places of one kind read the same."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # of a module in a list, as a part of a path
_PATH = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")


def starred(path: str) -> str:
    """`h.*.attn` for `h.0.attn`."""
    return _NUMBER.sub("*", path)


def starred_text(text: str) -> str:
    """The same of every path in a text; other numbers stay."""
    return _PATH.sub(lambda found: starred(found[0]), text)
