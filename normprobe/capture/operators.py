"""What modes need to know of an operator at every call, looked up once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from normprobe.capture.composites import COMPOSITES
from normprobe.capture.writes import written_arguments


@dataclass(frozen=True, slots=True)
class Operator:
    """The name of an operator as the recorder spells it, whether it writes in place, and whether it is one of those
    that are recorded as a whole."""

    name: str
    writes: bool
    composite: bool


class Operators(dict[int, Operator]):
    """Operators by id: each lives as long as torch does, and its own hash and name are made in Python."""

    def of(self, function: Any) -> Operator:
        """What there is to know of an operator."""
        found = self.get(id(function))
        if found is None:
            found = Operator(str(function), bool(written_arguments(function)), function in COMPOSITES)
            self[id(function)] = found
        return found
