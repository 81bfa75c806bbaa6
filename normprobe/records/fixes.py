"""What mends a finding: rewrites by name, with their settings."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from normprobe.records.base import Record


class Fix(Record):
    """A rewrite that mends a finding: its name, and its settings where they are not the rewrite's own. `at_places` says
    that it is told the places of the finding (`only=`), and changes nothing elsewhere."""

    rewrite: str
    settings: dict[str, str | int | float | bool | tuple[str, ...]] = Field(default_factory=dict)
    at_places: bool = False

    def given(self, places: tuple[str, ...]) -> dict[str, Any]:
        """The settings for a finding at these places."""
        return {**self.settings, "only": places} if self.at_places else dict(self.settings)

    def call(self, places: tuple[str, ...] = ()) -> str:
        """The Python call that makes the rewrite for a finding at these places; as a rule where there are none."""
        only = list(places) if len(places) > 1 else next(iter(places), "…")
        told = {**self.settings, "only": only} if self.at_places else self.settings
        return f"{self.rewrite}({', '.join(f'{name}={_literal(value)}' for name, value in told.items())})"


def _literal(value: object) -> str:
    """The value as Python, strings in double quotes."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
