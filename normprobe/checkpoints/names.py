"""Counts and lists of names as messages show them."""

from __future__ import annotations

SHOWN = 8  # names in a note or an error; Loaded.missing and Loaded.unexpected hold all


def listed(names: tuple[str, ...]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(shown, names[:SHOWN])) + more


def shown(name: str) -> str:
    """A name on one line, whatever signs it has: what cannot be printed is escaped."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in name)


def plural(count: int, what: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{count} {what}" + ("" if count == 1 else "s")
