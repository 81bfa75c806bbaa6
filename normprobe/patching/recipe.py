"""A recipe: rewrites by name, from a file or from words, checked before anything is read.

[[rewrite]]
name = "AddQKNorm"
start = "calibrated"

[[rewrite]]
name = "Initialise"
scheme = "gpt2"
only = ["h.*.mlp.*"]
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from normprobe.checks.toml_lines import dotted, line_of
from normprobe.errors import NormprobeError, RewriteError, SettingError
from normprobe.rewrites import ALL, Rewrite
from normprobe.rewrites.settings import check_value

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TABLES = "rewrite"


@dataclass(frozen=True)
class _Refused(Exception):
    """A rewrite that cannot be made; the caller knows where it was asked for.

    Attributes:
        key: the setting, None where it is the rewrite itself.
        what: what is wrong.
        expected, found, hint: as of an error.
    """

    key: str | None
    what: str
    expected: str | None = None
    found: str | None = None
    hint: str | None = None


def read_recipe(path: Path) -> tuple[Rewrite, ...]:
    """The rewrites of a recipe file, in its order.

    Raises:
        SettingError: it cannot be read, is no TOML, or has an unknown key or value; line and key are named.
    """
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{path}: the recipe cannot be read", found=str(error)) from None
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"{path}: no valid TOML", found=str(error)) from None
    rows = document.get(_TABLES)
    for key in document:
        if key != _TABLES:
            raise _at(path, text, (key,), _Refused(key, f"unknown key {key}", expected=f"[[{_TABLES}]]"))
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise _at(path, text, (_TABLES,), _no_rewrites(rows))
    return tuple(_row(path, text, number, row) for number, row in enumerate(rows))


def _no_rewrites(rows: object) -> _Refused:
    """What stands where there should be a list of tables."""
    expected = f"[[{_TABLES}]] tables, each with a name"
    if isinstance(rows, dict):
        hint = f"double brackets, [[{_TABLES}]]: a recipe may have several"
        return _Refused(_TABLES, "no rewrites", expected, f"[{_TABLES}], one table", hint)
    return _Refused(_TABLES, "no rewrites", expected, "nothing" if rows is None else f"{rows!r:.80}")


def read_words(words: str) -> Rewrite:
    """One rewrite as it is called, such as `ToDyT` or `SetEps(eps=1e-5)`.

    Raises:
        SettingError: there is no such rewrite, or it has no such setting or value.
    """
    try:
        name, values = _called(ast.parse(words.strip(), mode="eval").body)
        return made(name, values)
    except (SyntaxError, ValueError):
        expected = "Name or Name(setting=value, …)"
        raise SettingError("a rewrite cannot be read", expected=expected, found=words) from None


def made(name: str, values: Mapping[str, Any]) -> Rewrite:
    """The rewrite `name` with these settings.

    Raises:
        SettingError: there is no such rewrite, or it has no such setting or value.
    """
    try:
        return _made(name, values)
    except _Refused as error:
        raise SettingError(error.what, expected=error.expected, found=error.found, hint=error.hint) from None


def _row(path: Path, text: str, number: int, row: Mapping[str, Any]) -> Rewrite:
    values = {key: value for key, value in row.items() if key != "name"}
    try:
        if not isinstance(row.get("name"), str):
            raise _Refused(None, "a rewrite without a name", expected='name = "SetEps", say')
        return _made(row["name"], values)
    except _Refused as error:
        key = "name" if error.key is None and "name" in row else error.key
        raise _at(path, text, (_TABLES, number, *([] if key is None else [key])), error) from None


def _at(path: Path, text: str, place: tuple[str | int, ...], error: _Refused) -> SettingError:
    line = line_of(text, place)
    where = f"{path}" if line is None else f"{path}, line {line}"
    key = f", key {dotted(place[-1:])}" if isinstance(place[-1], str) and line is not None else ""
    return SettingError(f"{where}{key}: {error.what}", expected=error.expected, found=error.found, hint=error.hint)


def _called(tree: ast.expr) -> tuple[str, dict[str, Any]]:
    """Name and settings of `Name` or `Name(setting=value)`."""
    if isinstance(tree, ast.Name):
        return tree.id, {}
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.args:
        return tree.func.id, {str(word.arg): ast.literal_eval(word.value) for word in tree.keywords}
    raise ValueError("no name and no call")


def _made(name: str, values: Mapping[str, Any]) -> Rewrite:
    kinds = {each.name.lower(): each for each in ALL}
    kind = kinds.get(name.lower())
    if kind is None:
        raise _Refused(None, f"there is no rewrite {name}", *_meant(name, [each.name for each in ALL]))
    known = [each.name for each in dataclasses.fields(kind)]
    for key in values:
        if key not in known:
            raise _Refused(key, f"{kind.name} has no setting {key}", *_meant(key, known))
    for key, value in values.items():
        _check_kind(kind, key, value)
    try:
        return kind(**values)
    except NormprobeError as error:
        which = next((each for each in values if each in (error.expected or "")), None)
        raise _Refused(which, error.message, error.expected, error.found, error.hint) from error


def _check_kind(kind: type[Rewrite], key: str, value: object) -> None:
    """Refuse a text for a number, and the like."""
    try:
        check_value(kind, key, value)
    except RewriteError as error:
        raise _Refused(key, error.message, error.expected, error.found, error.hint) from error


def _meant(word: str, known: Sequence[str]) -> tuple[str, str, str | None]:
    """What is known, what was found, and which of the known is near."""
    lower = {each.lower(): each for each in known}
    near = get_close_matches(word.lower(), lower, 1)
    return ", ".join(known), word, f"did you mean {lower[near[0]]}?" if near else None
