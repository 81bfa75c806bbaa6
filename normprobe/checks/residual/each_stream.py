"""What the checks share that judge every measured stream by itself."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from normprobe.checks.additions import Additions
from normprobe.checks.base import Check, Outcome
from normprobe.records import ReportData, Severity, Stream, StreamMeasure, StreamState


@dataclass(frozen=True)
class Measured:
    """A stream with what was measured of it.

    Attributes:
        stream: as the Anatomy has it; None where it has none of this name.
        measure: its numbers, of at least one write.
        trained: what the weights say of the model; None where they do not tell.
        added: what tells additions to layers.
    """

    stream: Stream | None
    measure: StreamMeasure
    trained: bool | None
    added: Additions

    @property
    def states(self) -> tuple[StreamState, ...]:
        """The states after each write that was measured."""
        return self.measure.states

    @property
    def plain(self) -> bool:
        """Whether the stream is a sum of its writes alone: trunks that are normed, scaled, gated or projected are
        not."""
        stream = self.stream
        return (
            stream is not None
            and stream.topology == "ordinary"
            and len(set(stream.widths)) <= 1
            and all(b.placement not in ("post", "deepnorm", "postact", "unknown") for b in stream.branches)
            and all(b.skip == "identity" and b.skip_scale == 1.0 for b in stream.branches)
        )

    def learned(self, state: StreamState) -> bool:
        """Whether a learned factor or gate scales this write, which may start at 0 on purpose."""
        branches = () if self.stream is None else self.stream.branches
        return state.branch < len(branches) and branches[state.branch].branch_scale.kind not in ("none", "constant")

    def block(self, state: StreamState) -> tuple[str, int | None]:
        """The block that a state lies in."""
        branches = () if self.stream is None else self.stream.branches
        return state.block, branches[state.branch].layer if state.branch < len(branches) else None

    def by_kind(self) -> dict[str, list[StreamState]]:
        """The states whose write was seen, with others of their kind: writes that are built alike."""
        found: dict[str, list[StreamState]] = {}
        for state in self.states:
            if math.isfinite(state.write_rms) and math.isfinite(state.write_max):
                found.setdefault(state.kind, []).append(state)
        return found


@dataclass(frozen=True)
class EachStreamCheck(Check):
    """Base of a check that judges every measured stream by itself."""

    def check(self, data: ReportData) -> Outcome:
        """Yield what `judge` says of each stream, and a skip for each of which nothing was measured."""
        if not data.measurements.residual:
            yield self.skip("no residual stream was measured")
        init = data.measurements.init
        streams = {stream.name: stream for stream in data.anatomy.streams}
        for measure in data.measurements.residual:
            if not measure.states:
                yield self.skip("no write to the stream was measured", [measure.stream])
                continue
            trained = None if init is None else init.trained
            yield from self.judge(Measured(streams.get(measure.stream), measure, trained, Additions.of(data)))

    @abstractmethod
    def judge(self, seen: Measured) -> Outcome:
        """Yield what was found in one stream, and what could not be told."""

    def unseen(self, seen: Measured) -> Iterator[StreamState]:
        """States that are finite and whose write was not seen apart from the trunk."""
        return (state for state in seen.states if state.finite and not math.isfinite(state.write_rms))


def unless_trained(seen: Measured, severity: Severity) -> Severity:
    """`severity`, or a note where the model is trained and works with what it has."""
    return Severity.NOTE if seen.trained else severity
