"""Docstrings as Markdown: sections with a heading, their entries as a list, asterisks as they are."""

from __future__ import annotations

import inspect
import re

_TITLES = {"Attributes": "Settings", "Args": "Arguments", "Returns": "Returns", "Raises": "Raises"}
_LISTS = frozenset({"Attributes", "Args", "Raises"})


def as_markdown(name: str, thing: object) -> str:
    """The docstring of `thing` under its name."""
    text = re.sub(r"(`[^`]*`)|\*", lambda found: found[1] or r"\*", inspect.getdoc(thing) or "")
    rows, section = [f"# {name}", ""], ""
    for line in text.splitlines():
        title = line.removesuffix(":")
        if line.endswith(":") and title in _TITLES:
            section = title
            rows += [f"**{_TITLES[title]}**", ""]
        elif line and not line.startswith(" "):
            section = ""
            rows.append(line)
        elif section in _LISTS:
            rows.append(re.sub(r"^    (\w+):", r"- `\1`:", line))
        else:
            rows.append(line.removeprefix("    ") if section else line)
    return "\n".join(rows)
