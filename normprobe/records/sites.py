"""Where operations happen."""

from __future__ import annotations

from normprobe.records.base import Record


class OpSite(Record):
    """Where an operation happens: the `ordinal`-th call of `op` directly inside the `execution`-th run of `path`.

    All three counts start at 0. A measured pass finds the same operation again by this key.
    """

    path: str
    op: str
    ordinal: int = 0
    execution: int = 0

    @property
    def place(self) -> str:
        """The site as a path: `module.path#op:k`."""
        return f"{self.path}#{self.op.removeprefix('aten.').partition('.')[0]}:{self.ordinal}"
