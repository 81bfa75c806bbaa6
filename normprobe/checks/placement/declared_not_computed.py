"""NP212."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Needs, Outcome, Unit, limit
from normprobe.checks.placement.declared_facts import READERS, Told
from normprobe.records import Declared, Finding, ReportData, Severity


@final
@dataclass(frozen=True)
class DeclaredNotComputed(Check):
    """The configuration states something about norms, attention or readout that the data flow lacks.

    ## What it measures

    What the configuration of a module states (soft-caps of attention and final logits, the factors on
    embeddings, residual branches, q·kᵀ and logits, tied weights, QK-Norm, a sliding window, branches side by
    side, norms before branches or on sums), against the same facts as read from the recorded data flow.
    Reported only where the flow was read to the end and says something else. What it could not tell, or the
    recorded input is too short for, is skipped with that reason. Fields that state no such fact are not looked
    at.

    ## Why it matters

    Whoever ports, serves or continues a model goes by its configuration. An attention kernel without soft-cap,
    a head that was copied and lost its tie, a flag that an implementation ignores: each runs without an error
    and computes another model than the one that was trained.

    ## What to do

    Find out what the model was trained with, and make code and configuration say it.

    ## When to ignore it

    When nothing reads the field. Then delete it.

    ## References

    The configuration, and the recorded data flow.
    """

    code, name, severity, since = "NP212", "declared-not-computed", Severity.WARNING, "0.1.0"
    needs = Needs.STRUCTURE | Needs.CONFIG

    max_difference: float = limit(
        0.01, unit=Unit.RATIO, source="choice: beyond the rounding of factors that were multiplied in half precision"
    )

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for every statement that the data flow contradicts."""
        anatomy = data.anatomy
        if not (anatomy.streams or anatomy.attention or anatomy.head):
            yield self.skip("no stream, no attention and no head was found")
        for declared in data.declared:
            read = READERS.get(declared.fact)
            told = read(declared, data) if read is not None else None
            if told is None:
                continue
            if told.unknown:
                yield self.skip(told.unknown, told.places)
            elif told.value is None or self._differs(told.value, declared.value):
                yield self._found(declared, told)

    def _differs(self, found: float | bool, said: float | bool) -> bool:
        if isinstance(said, bool) or isinstance(found, bool):
            return found is not said
        return self.exceeds(found / said - 1, self.max_difference, least=-self.max_difference)

    def _found(self, declared: Declared, told: Told) -> Finding:
        return self.finding(
            told.places[0],
            f"the configuration says {declared.field} = {declared.stated}, {told.text}",
            value=None if told.value is None else float(told.value),
            bound=float(declared.value),
            source=f"{declared.field} of the configuration",
            places=told.places,
            about=declared.field,
        )
