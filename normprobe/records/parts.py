"""Names of parts of parameters: `gains[2]` is the third row of `gains`, `gains[:, 2]` its third column.

A parameter may be called so as a whole (`nn.ParameterDict({"gains[2]": …})`): what is held under a name comes first.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import TypeAlias

Cut: TypeAlias = int | slice  # of one axis
_PART = re.compile(r"(.+)\[((?:\d+:\d+|\d+|:)(?:, (?:\d+:\d+|\d+|:))*)\]")


def part_name(name: str, cuts: Sequence[Cut]) -> str:
    """The name of a part of the tensor `name`, with one cut for each of its axes; `name` where nothing is cut."""
    kept = list(cuts)
    while kept and kept[-1] == slice(None):
        kept.pop()
    return f"{name}[{', '.join(map(_text, kept))}]" if kept else name


def cuts_of(name: str, held: Container[str]) -> tuple[str, tuple[Cut, ...]]:
    """The name of the whole tensor, and how it is cut; `held` has the names of whole tensors."""
    told = None if name in held else _PART.fullmatch(name)
    return (name, ()) if told is None else (told[1], tuple(_cut(text) for text in told[2].split(", ")))


def whole(name: str, held: Container[str]) -> str:
    """The name of the tensor that `name` is, or is a part of; `held` has the names of whole tensors."""
    return cuts_of(name, held)[0]


def _text(cut: Cut) -> str:
    if not isinstance(cut, slice):
        return str(cut)
    return ":" if cut == slice(None) else f"{cut.start}:{cut.stop}"


def _cut(text: str) -> Cut:
    first, colon, last = text.partition(":")
    if not colon:
        return int(first)
    return slice(int(first), int(last)) if first else slice(None)
