"""NP201."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Outcome, number
from normprobe.checks.placement.misplaced_final_norm import misplaced
from normprobe.records import Finding, Fix, NormSite, ReportData, Severity, Stream, StreamMeasure


@final
@dataclass(frozen=True)
class MissingFinalNorm(Check):
    """A pre-norm residual stream reaches the head without a final norm.

    ## What it measures

    Whether every path from the last residual add of a stream to the head passes a norm, read off the recorded
    data flow. The head is the path to the logits, else to the first returned tensor; where there is no head,
    the message says what reads the stream. The value is the RMS of the stream that is read there (median over
    tokens), where it was measured; the message adds the largest token and the growth since the stream's entry,
    and a norm of that width that was built and is not called. A model that returns the raw stream itself leaves
    the norm to its reader, which is not seen: that is a note. Where the head reads nothing but a mean or sum over
    the tokens, as classifiers do, or the stream has one block, as in a decoder of queries, and no norm lies idle,
    it is a warning: some are built so on purpose, and the data flow of one that lost its norm is the same. So it is
    where the head has several layers and norms what the first of them makes of the raw stream behind an activation
    (the transform of a masked language model); a norm right behind weights alone cancels the stream's scale and is
    skipped. A stream whose branches have norms inside alone, as ConvNeXt's, is judged by the other streams of the
    model with such branches: where all of them, two at least, end in a norm, and it is pooled or returned, it needs
    one; a head that reads such a stage place by place may have no norm. It is a warning, too, where
    the head reads the stream through its final norm and another head (a value, a reward), a product with
    weights that makes an output of the model, reads it raw. Features that are returned raw are no heads.

    ## Why it matters

    Where the norms sit inside the branches, the sum itself is never normalised and grows with depth, about
    with the root of the number of writes at init. Without a final norm the head reads it raw: the logits'
    scale then depends on depth and differs from token to token. A checkpoint that was trained with a final
    norm and converted without it still writes plausible text, with worse perplexity.

    ## What to do

    Add the norm between the last block and the head. In a converted model, look for the norm's weights among
    the keys that were dropped.

    ## When to ignore it

    When the stream is read raw on purpose and its reader has learned that scale, as a classifier on averaged
    patches that was trained with them. Post-norm and DeepNorm streams end every block in a norm and need none.
    Where it cannot be told whether the last add is read, as with features taken at an inner layer, the stream is
    skipped with that reason. A stream that is normed before its last writes instead of behind them is NP203's.

    ## References

    Radford et al. 2019 (GPT-2), sec. 2.3; Xiong et al. 2020, table 1 (the final norm of Pre-LN).
    """

    code, name, severity, since = "NP201", "missing-final-norm", Severity.ERROR, "0.1.0"
    fixes = (Fix(rewrite="AddFinalNorm"),)

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for every stream that needs a final norm and has none."""
        if not data.anatomy.streams:
            yield self.skip("no residual stream was found")
        for stream in data.anatomy.streams:
            if stream.final_norm is not None and stream.raw_heads:
                yield self._beside(stream, data)
            if undecided(stream):
                reason = stream.final_norm_reason or "it could not be decided whether the head reads it"
                yield self.skip(reason, [stream.name])
            elif _open(stream) and stream.needs_final_norm and misplaced(stream) is None:
                yield self._found(stream, data)

    def _found(self, stream: Stream, data: ReportData) -> Finding:
        measure = _measured(stream, data)
        text = self._reading(stream, data)
        if measure is not None:
            last, entry = measure.states[-1], measure.entry_rms
            text += (
                f": its RMS is {number(last.rms_median)} (median token) to {number(last.rms_max)} (largest), "
                f"against {number(entry)} at the entry"
            )
        idle = _idle(stream, data)
        if idle is not None:
            text += f"; {idle.path} was built for it, as it seems, and is not called (NP208)"
        return self.finding(
            stream.name,
            text,
            value=measure.states[-1].rms_median if measure else None,
            source="Radford et al. 2019, sec. 2.3; Xiong et al. 2020, table 1",
            severity=_severity(stream, idle),
        )

    def _beside(self, stream: Stream, data: ReportData) -> Finding:
        """That a second head reads what the first one reads through a norm."""
        heads = " and ".join(stream.raw_heads)
        return self.finding(
            stream.name,
            f"an output is made of the raw stream by {heads}, after {stream.depth} writes; the head reads it through "
            f"{stream.final_norm}",
            value=measure.states[-1].rms_median if (measure := _measured(stream, data)) else None,
            source="Radford et al. 2019, sec. 2.3; Xiong et al. 2020, table 1",
            severity=Severity.WARNING,
            about="another head",
            fixes=(),
        )

    @staticmethod
    def _reading(stream: Stream, data: ReportData) -> str:
        """Who reads the raw stream: what the Anatomy says of it, else the head where there is one."""
        writes, reason = f"after {stream.depth} write{'' if stream.depth == 1 else 's'}", stream.final_norm_reason
        end = stream.raw_end
        if end is not None and end.returned:
            unseen = "what reads it there is not seen and has to norm it"
            return f"the stream is returned raw as {end.reader}, {writes}; {unseen}"
        if end is not None:
            what = "a mean or sum over the tokens of the raw stream" if end.pooled else "the raw stream"
            after = f"; the next norm, {end.later}, stands behind what that makes of it" if end.later else ""
            return f"{what} is read without a norm by {end.reader}, {writes}{after}"
        if reason or data.anatomy.head is None:
            return f"no norm follows the stream {writes} ({reason or 'no head was found'})"
        return f"the head reads the raw stream, without a norm, {writes}"


def _measured(stream: Stream, data: ReportData) -> StreamMeasure | None:
    return next((m for m in data.measurements.residual if m.stream == stream.name and m.states), None)


def _severity(stream: Stream, idle: NormSite | None) -> Severity:
    """By who reads the raw stream: someone outside, a head that pools it or norms it later, or one that reads token by
    token; and by whether blocks are stacked at all. A norm built for the end and not called leaves no doubt."""
    end, blocks = stream.raw_end, {(branch.block, branch.layer) for branch in stream.branches}
    if end is not None and end.returned:
        return Severity.NOTE
    open_ = len(blocks) == 1 or (end is not None and (end.pooled or end.later is not None))
    return Severity.WARNING if open_ and idle is None else Severity.ERROR


def _idle(stream: Stream, data: ReportData) -> NormSite | None:
    """A norm of the stream's width outside its blocks that nothing calls; None where there is none, or several."""
    blocks = {branch.block for branch in stream.branches}
    idle = [norm for norm in data.anatomy.norms if not norm.executed and norm.size in stream.widths]
    outside = [norm for norm in idle if not any(norm.path.startswith(f"{block}.") for block in blocks)]
    return outside[0] if len(outside) == 1 else None


def undecided(stream: Stream) -> bool:
    """Whether it could not be told if this stream lacks a final norm."""
    return _open(stream) and stream.needs_final_norm is None


def _open(stream: Stream) -> bool:
    """Whether no norm is known to end the stream."""
    return stream.final_norm is None and stream.placement not in ("post", "deepnorm")
