"""What branches without a norm give to their first weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from normprobe import stats
from normprobe.capture.watch import Handler
from normprobe.measures.products import factor_names
from normprobe.records import Anatomy, Entry, OpSite


class EntryHandler(Handler):
    """Keeps the standard deviation over all entries of what one product is given beside its weights."""

    def __init__(self, entry: Entry) -> None:
        self._operand = entry.operand
        self._std: Tensor | None = None

    def before(self, arguments: Mapping[str, Any]) -> None:
        """Take it before anything else writes there; it stays on the device of the model."""
        signal = arguments[factor_names(arguments)[self._operand]]
        self._std = stats.widen(signal.detach()).std(correction=0)

    @property
    def std(self) -> float | None:
        """What was seen; None where the product did not run."""
        return None if self._std is None else float(self._std)


def entry_handlers(anatomy: Anatomy) -> dict[OpSite, EntryHandler]:
    """A handler for the first product of every branch of the streams that constants hold at their scale."""
    return {
        branch.entry.site: EntryHandler(branch.entry)
        for stream in anatomy.streams
        if anatomy.held_by_constants(stream)
        for branch in stream.branches
        if branch.entry is not None
    }
