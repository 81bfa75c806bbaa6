"""Settings from a file: `normprobe.toml`, or the table `[tool.normprobe]` of a `pyproject.toml`."""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from normprobe.checks.judging import chosen_checks
from normprobe.errors import SettingError
from normprobe.records import Settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OWN, SHARED = "normprobe.toml", "pyproject.toml"
_FIELDS = {name.replace("_", "-"): name for name in Settings.model_fields if name != "source"}


def load_settings(path: str | os.PathLike[str] | None = None) -> Settings:
    """The settings of a file.

    Args:
        path: a TOML file; in one called pyproject.toml the table `[tool.normprobe]` counts. None looks in the current
            folder and those above it for a `normprobe.toml`, or a `pyproject.toml` with that table; the nearest counts.

    Returns:
        The settings; those of a report without a file where none was found.

    Raises:
        SettingError: there is no such file, it is no TOML, or a key or value in it is unknown.
    """
    if path is None:
        return _nearest(Path.cwd())
    table = _table(Path(path))
    if table is None:
        raise SettingError(f"no settings in {path}", expected="a table [tool.normprobe]", found="none")
    return _settings(table, str(path), Path(path).name == SHARED)


def _nearest(start: Path) -> Settings:
    for folder in (start, *start.parents):
        for path in (folder / OWN, folder / SHARED):
            if path.is_file() and (table := _table(path)) is not None:
                return _settings(table, os.path.relpath(path, start), path.name == SHARED)
    return Settings()


def _table(path: Path) -> dict[str, Any] | None:
    """The settings in a file as they stand there; None where a pyproject.toml has none."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        found = error.strerror or str(error)
        raise SettingError(f"cannot read the settings in {path}", expected="a file", found=found) from error
    except ValueError as error:  # no TOML, or no UTF-8
        raise SettingError(f"{path} is no TOML", found=str(error), hint="--isolated leaves it out") from error
    if path.name != SHARED:
        return document
    tools = document.get("tool")
    table = tools.get("normprobe") if isinstance(tools, dict) else None
    if table is not None and not isinstance(table, dict):
        raise SettingError(f"`tool.normprobe` in {path} is no table", expected="[tool.normprobe]", found=repr(table))
    return table


def _settings(table: dict[str, Any], source: str, shared: bool) -> Settings:
    prefix = "tool.normprobe." if shared else ""
    for key in table:
        if key not in _FIELDS:
            near = difflib.get_close_matches(key.replace("_", "-"), _FIELDS, n=1)
            raise SettingError(
                f"unknown key `{prefix}{key}` in {source}",
                expected=", ".join(_FIELDS),
                found=key,
                hint=f"did you mean {near[0]}?" if near else None,
            )
    try:
        settings = Settings.model_validate({_FIELDS[key]: value for key, value in table.items()} | {"source": source})
    except ValidationError as error:
        raise _refusal(error, prefix, source) from None
    chosen_checks(settings)
    return settings


def _refusal(error: ValidationError, prefix: str, source: str) -> SettingError:
    first = error.errors()[0]
    field, *inside = map(str, first["loc"])
    key = prefix + ".".join([field.replace("_", "-"), *inside])
    expected = first["msg"].removeprefix("Input should be ")
    return SettingError(
        f"`{key}` in {source} has a value of the wrong kind", expected=expected, found=repr(first["input"])
    )
