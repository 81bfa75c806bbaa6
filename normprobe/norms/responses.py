"""Response norms, which keep the input's scale or divide by a window: GRN and LRN."""

from __future__ import annotations

from normprobe.norms.subject import Instance, Subject
from normprobe.records import NormSpec


def identify(subject: Subject, exact: Instance) -> NormSpec | None:
    return None
