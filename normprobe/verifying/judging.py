"""The one place where a measured number of a classic result is compared with the expected one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from normprobe.records.verification import Verified


@dataclass(frozen=True)
class Claim:
    """One number of a classic result, before it is measured; the fields are those of `Verified`."""

    id: str
    result: str
    claim: str
    expected: float
    tolerance: float
    source: str

    def judged(self, measured: float, note: str = "") -> Verified:
        """The claim with what was measured; a number that is not finite is never ok."""
        ok = math.isfinite(measured) and abs(measured - self.expected) <= self.tolerance
        return Verified(
            id=self.id,
            result=self.result,
            claim=self.claim,
            measured=measured,
            expected=self.expected,
            tolerance=self.tolerance,
            ok=ok,
            source=self.source,
            note=note,
        )
