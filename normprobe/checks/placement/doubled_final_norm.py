"""NP202."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Outcome, number
from normprobe.records import Finding, Fix, NormSite, ReportData, Severity, Stream


@final
@dataclass(frozen=True)
class DoubledFinalNorm(Check):
    """The end of a residual stream is normed twice in a row.

    ## What it measures

    Whether the final norm of a stream reads another norm's output, or is read by another norm, with nothing
    but moves and constant factors between the two, in the recorded data flow. Both take their statistics of
    the same elements, and nothing else reads what lies between them. Where a forward was measured, also what
    the second one changes, ‖y − x‖ / ‖x‖ of its output and input.

    ## Why it matters

    The second norm undoes the scale of the first: of a layer norm with its initial gain and offset it changes
    nothing, so the two differ from one by a product of gains that training splits between them in an arbitrary
    way. Folding, fusing and ports that expect one final norm drop or misplace one of them. A warning where a
    pre-norm stream ends in two norms, or in one that is called twice, which nobody intends. A note where the last
    block is post-norm and ends in its own norm: torch.nn.Transformer always creates a final norm, and models
    trained with it need both.

    ## What to do

    In a new model, leave out one of the two: of a post-norm stack the final norm (`norm=None` of
    torch.nn.TransformerEncoder). In a trained one keep both, or let
    `RemoveNorms` merge them.

    ## When to ignore it

    When the model was trained with both norms. An L2 norm behind the final norm is not reported: unit length is
    what it is there for.

    ## References

    Xiong et al. 2020, table 1: Pre-LN has one final norm, Post-LN has none; the documentation of
    torch.nn.Transformer.
    """

    code, name, severity, since = "NP202", "doubled-final-norm", Severity.WARNING, "0.1.0"
    fixes = (Fix(rewrite="RemoveNorms", at_places=True),)

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for every stream that ends in two norms in a row."""
        if not data.anatomy.streams:
            yield self.skip("no residual stream was found")
        for stream in data.anatomy.streams:
            second = at_the_end(stream, data.anatomy.norms)
            if second is not None:
                yield self._found(stream, second, data)

    def _found(self, stream: Stream, second: NormSite, data: ReportData) -> Finding:
        itself = second.path == second.follows
        post = second.path == stream.final_norm and not itself
        own = "the last block is post-norm and ends in" if post else "the final norm is"
        between = "it is called twice" if itself else f"{own} {second.follows}"
        return self.finding(
            second.path,
            f"norms the stream {stream.name} again: {between}, and nothing lies between the two"
            f"{change_of(second, data)}",
            value=second.follows,
            source="Xiong et al. 2020, table 1",
            severity=Severity.NOTE if post else None,
            fixes=() if itself else None,
        )


def change_of(norm: NormSite, data: ReportData) -> str:
    """By how much a norm changes what the norm before it made, in words; nothing where that was not measured."""
    measure = next((one for one in data.measurements.repeated_norms if one.path == norm.path), None)
    return "" if measure is None else f"; it changes its input by {number(100 * measure.change)} %"


def at_the_end(stream: Stream, norms: tuple[NormSite, ...]) -> NormSite | None:
    """The second of two norms in a row at the end of a stream; None where there is one norm or none."""
    known = {norm.path: norm for norm in norms}
    end = stream.final_norm or (stream.branches[-1].post_norm if stream.branches else None)
    if end is None:
        return None
    after = next((norm for norm in norms if norm.follows == end and repeats(norm)), None)
    last = known.get(end)
    return after or (last if last is not None and repeats(last) else None)


def repeats(norm: NormSite) -> bool:
    """Whether a norm stands right behind another one, and not to give a normed vector the length 1."""
    return norm.follows is not None and norm.kind != "l2norm"
