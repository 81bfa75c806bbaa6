"""NP207."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Outcome
from normprobe.checks.placement.doubled_final_norm import at_the_end, change_of, repeats
from normprobe.records import Fix, ReportData, Severity


@final
@dataclass(frozen=True)
class NormTwice(Check):
    """A norm reads the output of another norm, with nothing between them.

    ## What it measures

    Two norms in a row, anywhere but at the end of a stream (NP202): the second reads the first one's output
    through moves and constant factors alone, takes its statistics of the same elements, and nothing else reads
    what lies between. Where a forward was measured, also what the second one changes, ‖y − x‖ / ‖x‖.

    ## Why it matters

    The second norm undoes the scale of the first, so that one of the two has no effect but that of its gain,
    which the other could hold as well. It costs a pass over the activations at every token. Often a sublayer
    that norms its own input was put behind a norm of the block. A note where the first is the norm that a
    post-norm block ends in, as at the end of a conformer's encoder.

    ## What to do

    In a new model, delete one of the two. In a trained one, keep both, or let `RemoveNorms` merge them,
    which is exact where neither subtracts a mean or adds an offset between them and the first has one gain for all.

    ## When to ignore it

    When the model was trained with both norms. An L2 norm behind another norm is not reported: unit length is
    what it is there for.

    ## References

    Zhang & Sennrich 2019 (RMSNorm), sec. 4.1: the norm's output does not depend on the scale of its input.
    """

    code, name, severity, since = "NP207", "norm-twice", Severity.WARNING, "0.1.0"
    fixes = (Fix(rewrite="RemoveNorms", at_places=True),)

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for every norm that stands right behind another one."""
        norms = data.anatomy.norms
        if not norms:
            yield self.skip("no norm was found")
        ends = [norm.path for stream in data.anatomy.streams if (norm := at_the_end(stream, norms)) is not None]
        for norm in norms:
            if repeats(norm) and norm.path not in ends:
                first = data.anatomy.norm(norm.follows or "")
                yield self.finding(
                    norm.path,
                    f"reads what {norm.follows} has normed, and nothing lies between the two{change_of(norm, data)}",
                    value=norm.follows,
                    source="Zhang & Sennrich 2019, sec. 3",
                    severity=Severity.NOTE if first is not None and first.role == "post" else None,
                )
