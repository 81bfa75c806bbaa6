"""In which line of a TOML text a key stands; the parser of the standard library does not tell."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def line_of(text: str, path: Sequence[str | int]) -> int | None:
    """The line, from 1, in which the statement that says `path` begins; None where no statement does.

    The text is read line by line further: the statement with which the key appears first says it.

    Args:
        text: a whole TOML document.
        path: keys, and places in arrays.
    """
    lines = text.splitlines(keepends=True)
    begin = 0
    for end in range(1, len(lines) + 1):
        try:
            document = tomllib.loads("".join(lines[:end]))
        except tomllib.TOMLDecodeError:
            continue  # in the middle of a statement over several lines
        if _holds(document, path):
            return begin + 1
        begin = end
    return None


def dotted(path: Sequence[str | int]) -> str:
    """`path` as one key, parts that TOML takes with quotes alone in quotes."""
    return ".".join(part if _BARE.fullmatch(part) else repr(part) for part in map(str, path))


def _holds(document: Any, path: Sequence[str | int]) -> bool:
    for key in path:
        if isinstance(document, dict):
            if key not in document:
                return False
            document = document[key]
        elif isinstance(document, list) and isinstance(key, int):
            if key >= len(document):
                return False
            document = document[key]
        else:
            return True  # a value of another kind than the path goes into
    return True
