"""The settings of a rewrite are of the kinds that its fields declare; else they are refused by name."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from normprobe.errors import RewriteError

_WORDS: Mapping[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "None",
}


def check_fields(rewrite: Any) -> None:
    """Hold every field that is declared as a plain value or a choice of words against what it was given.

    Raises:
        RewriteError: one has a value of another kind; names the field, what it takes and what it was given.
    """
    for field in dataclasses.fields(rewrite):
        check_value(type(rewrite), field.name, getattr(rewrite, field.name))


def check_value(kind: Any, name: str, value: object) -> None:
    """Hold one value against the field of a rewrite that it is for.

    Raises:
        RewriteError: it is of another kind.
    """
    hint = _hints(kind)[name]
    if not _fits(hint, value):
        what = f"{kind.__name__} cannot be made"
        raise RewriteError(what, expected=f"{name}: {_words(hint)}", found=repr(value))


def check_seed(rewrite: Any) -> None:
    """Refuse a seed that 31 bits do not hold.

    Raises:
        RewriteError: they do not.
    """
    if not 0 <= rewrite.seed < 2**31:
        what = f"{type(rewrite).__name__} cannot be made"
        raise RewriteError(what, expected="0 <= seed < 2**31", found=repr(rewrite.seed))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(hint: Any, value: object) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(one, value) for one in get_args(hint))
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if hint in (int, float) and isinstance(value, bool):
        return False
    if hint is float:
        return isinstance(value, (int, float))
    return not isinstance(hint, type) or isinstance(value, hint)


def _words(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_words(one) for one in get_args(hint))
    if get_origin(hint) is Literal:
        return " | ".join(get_args(hint))
    return _WORDS.get(hint, str(hint))
