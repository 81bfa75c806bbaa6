"""Attributes as plain values that JSON holds; `restore.decoded` is the way back."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, final

from normprobe.errors import CheckpointError
from normprobe.structure.kinds import VALUES

_PLAIN = (bool, int, str, type(None))


@final
class Encoder:
    """Writes values down; an object that is met twice gets one number."""

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}
        self._held: list[Any] = []  # keeps the objects, and with them their ids, alive

    def encoded(self, value: Any, where: str) -> Any:
        """`value` for JSON.

        Raises:
            CheckpointError: it is none of the plain values, nor made of them; `where` is named.
        """
        if isinstance(value, _PLAIN) or (isinstance(value, float) and math.isfinite(value)):
            return value
        if isinstance(value, tuple):
            return self._tuple(value, where)
        if isinstance(value, list):
            return {"list": [self.encoded(each, where) for each in value]}
        if isinstance(value, dict):
            return {"dict": [[key, self.encoded(each, where)] for key, each in value.items()]}
        if type(value) in VALUES:
            return self._object(value, where)
        expected, found = "numbers, texts, and tuples of them", type(value).__name__
        raise CheckpointError(f"{where} cannot be written down", expected=expected, found=found)

    def _tuple(self, value: tuple[Any, ...], where: str) -> Any:
        """Numbers that follow one another, which features of a head are, as their range; ranges of one length and
        distance, which heads are, as their number."""
        run, runs = _run(value), [_run(each) for each in value]
        if run is not None:
            return {"range": [run.start, run.stop]}
        if len(runs) > 2 and None not in runs and len({len(each) for each in runs if each}) == 1:
            first, apart = value[0][0], value[1][0] - value[0][0]
            if [each[0] for each in value] == [first + apart * number for number in range(len(value))]:
                return {"ranges": [first, len(value[0]), apart, len(value)]}
        return {"tuple": [self.encoded(each, where) for each in value]}

    def _object(self, value: Any, where: str) -> Any:
        if id(value) not in self._ids:
            self._held.append(value)
            self._ids[id(value)] = len(self._ids)
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        held = {name: self.encoded(each, f"{where}.{name}") for name, each in fields.items()}
        return {"kind": type(value).__name__, "id": self._ids[id(value)], "values": held}


def _run(value: Any) -> range | None:
    """Numbers of a tuple that follow one another; None where they do not."""
    if not isinstance(value, tuple) or len(value) < 3 or not all(type(each) is int for each in value):
        return None
    run = range(value[0], value[0] + len(value))
    return run if value == tuple(run) else None
