"""What a team wants to be told: which checks speak, where, by which limits, and what fails a run."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, Strict

from normprobe.records.base import Record

FailOn: TypeAlias = Literal["error", "warning", "note", "never"]


def _words(value: Any) -> Any:
    """A text with commas as the words between them."""
    return tuple(word.strip() for word in value.split(",") if word.strip()) if isinstance(value, str) else value


Words: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_words)]
Value: TypeAlias = Annotated[float, Strict(), Field(allow_inf_nan=False)]


class Settings(Record):
    """Which checks run, where they speak, their limits, and from which severity on a run fails.

    A check is named by its code (NP201), its name (missing-final-norm) or the start of codes (NP2: all of placement).

    Attributes:
        select: the checks that run; empty for all.
        ignore: the checks of these that do not run.
        per_path_ignores: the checks that are silent at a place, by a pattern of module paths (`*`, `?`, `[0-9]`; a
            module that matches covers what is inside it). A finding is left out when all its places are covered, and
            speaks of the others where some are.
        limits: values in place of the checks' own, by check and name of the limit, in the limit's unit.
        fail_on: the mildest severity that fails a run.
        source: the file they come from; empty where there is none.
    """

    select: Words = ()
    ignore: Words = ()
    per_path_ignores: dict[str, Words] = Field(default_factory=dict)
    limits: dict[str, dict[str, Value]] = Field(default_factory=dict)
    fail_on: FailOn = "error"
    source: str = ""
