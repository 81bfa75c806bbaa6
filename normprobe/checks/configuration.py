"""Settings from a file: `normprobe.toml`, or the table `[tool.normprobe]` of a `pyproject.toml`."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from normprobe.checks.judging import chosen_checks
from normprobe.checks.toml_lines import dotted, line_of
from normprobe.errors import SettingError
from normprobe.records import Settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OWN, SHARED = "normprobe.toml", "pyproject.toml"
_TABLE = ("tool", "normprobe")
_KINDS = {  # what is expected where the parser finds something of another kind, by its name for that
    "dict_type": "a table",
    "tuple_type": "a list of names, or a text with commas between them",
    "string_type": "a text",
    "float_type": "a number",
    "finite_number": "a finite number",
}
_FIELDS = {name.replace("_", "-"): name for name in Settings.model_fields if name != "source"}


@dataclass(frozen=True)
class _File:
    """A file with settings: its text, their table in it, and how it is called in messages."""

    text: str
    table: dict[str, Any]
    source: str
    above: tuple[str, ...]

    def line(self, path: Sequence[str | int]) -> str:
        """`, line 3` for a key of the settings; empty where none says it."""
        found = line_of(self.text, (*self.above, *path))
        return "" if found is None else f", line {found}"

    def place(self, path: Sequence[str | int]) -> str:
        """A key of the settings as a message names it."""
        return f"`{dotted((*self.above, *path))}` in {self.source}{self.line(path)}"


def load_settings(path: str | os.PathLike[str] | None = None) -> Settings:
    """The settings of a file.

    Args:
        path: a TOML file; in one called pyproject.toml the table `[tool.normprobe]` counts. None looks in the current
            folder and those above it for a `normprobe.toml`, or a `pyproject.toml` with that table; the nearest counts.

    Returns:
        The settings; those of a report without a file where none was found.

    Raises:
        SettingError: there is no such file, it is no TOML, or a key or value in it is unknown. A pyproject.toml that is
            no TOML and does not name normprobe is passed over where none was asked for.
    """
    if path is None:
        return _nearest(Path.cwd())
    file = _read(Path(path), str(path))
    if file is None:
        raise SettingError(f"no settings in {path}", expected="a table [tool.normprobe]", found="none")
    return _settings(file)


def _nearest(start: Path) -> Settings:
    for folder in (start, *start.parents):
        for path in (folder / OWN, folder / SHARED):
            if not path.exists() or (path.name == SHARED and not _names_us(path)):
                continue
            if (file := _read(path, os.path.relpath(path, start))) is not None:
                return _settings(file)
    return Settings()


def _names_us(path: Path) -> bool:
    """Whether settings of ours can be in a file of all tools: what is wrong elsewhere in it is not ours to say."""
    return _TABLE[-1].encode() in _bytes(path)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        found = error.strerror or str(error)
        raise SettingError(f"cannot read the settings in {path}", expected="a file", found=found) from error


def _read(path: Path, source: str) -> _File | None:
    """The settings in a file as they stand there; None where a pyproject.toml has none."""
    try:
        text = _bytes(path).decode("utf-8-sig")
        document = tomllib.loads(text)
    except ValueError as error:  # no TOML, or no UTF-8
        raise SettingError(f"{path} is no TOML", found=str(error), hint="--isolated leaves it out") from error
    if path.name != SHARED:
        return _File(text, document, source, ())
    tools = document.get(_TABLE[0])
    table = tools.get(_TABLE[1]) if isinstance(tools, dict) else None
    if table is not None and not isinstance(table, dict):
        raise SettingError(f"`tool.normprobe` in {path} is no table", expected="[tool.normprobe]", found=repr(table))
    return None if table is None else _File(text, table, source, _TABLE)


def _settings(file: _File) -> Settings:
    for key in file.table:
        if key not in _FIELDS:
            near = difflib.get_close_matches(key.replace("_", "-"), _FIELDS, n=1)
            raise SettingError(
                f"unknown key {file.place((key,))}",
                expected=", ".join(_FIELDS),
                found=key,
                hint=f"did you mean {near[0]}?" if near else None,
            )
    values = {_FIELDS[key]: value for key, value in file.table.items()}
    try:
        settings = Settings.model_validate(values | {"source": file.source})
    except ValidationError as error:
        raise _refusal(error, file) from None
    chosen_checks(settings, line=file.line)
    return settings


def _refusal(error: ValidationError, file: _File) -> SettingError:
    first = error.errors()[0]
    field, *inside = first["loc"]
    path = (str(field).replace("_", "-"), *inside)
    expected = _KINDS.get(first["type"], first["msg"].removeprefix("Input should be "))
    return SettingError(
        f"{file.place(path)} has a value of the wrong kind", expected=expected, found=repr(first["input"])
    )
