"""NP205."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Outcome, Unit, limit
from normprobe.checks.placement.trunk_norms import unscaled_post
from normprobe.records import Finding, Fix, ReportData, Severity, Stream


@final
@dataclass(frozen=True)
class DeepPostNorm(Check):
    """A post-norm stream is deeper than such streams train without scaled skips or branches.

    ## What it measures

    The number of writes to a stream on which every sum is normed, where neither the trunk has a factor
    (DeepNorm, Admin) nor the branches have one (LayerScale, ReZero). A stream in which any of them is scaled
    is not judged. A model whose weights look trained gets a note: it did train.

    ## Why it matters

    Every norm on the trunk shrinks the gradient on its way down: at initialisation that of the last layer is
    larger than that of the first by a factor that grows with depth, and a step that the last layers survive
    does nothing to the first. Warm-up hides that up to a depth; beyond it training diverges or stops at a
    high loss.

    ## What to do

    Norm inside the branches and add a final norm (pre-norm), or scale the trunk and the initialisation as
    DeepNorm does: α = (2N)^¼ and β = (8N)^-¼ for N blocks of an encoder or a decoder alone.

    ## When to ignore it

    When the stack is known to train as it is, or is fine-tuned from a trained checkpoint.

    ## References

    Xiong et al. 2020, sec. 3.3 (gradients of Post-LN at the last layer); Wang et al. 2022 (DeepNet), sec. 4.1
    and 5; Liu et al. 2020 (Admin); Devlin et al. 2019 (BERT), sec. 3.
    """

    code, name, severity, since = "NP205", "deep-post-norm", Severity.WARNING, "0.1.0"
    fixes = (
        Fix(rewrite="ScaleResidual", settings={"kind": "deepnorm"}),
        Fix(rewrite="Initialise", settings={"scheme": "deepnorm"}),
    )

    max_writes: float = limit(
        48.0,
        unit=Unit.ONE,
        source="choice: BERT-large (Devlin et al. 2019, sec. 3) has 24 post-norm blocks of two writes and is known to "
        "train with warm-up",
    )

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for every unscaled post-norm stream with too many writes."""
        if not data.anatomy.streams:
            yield self.skip("no residual stream was found")
        for stream in data.anatomy.streams:
            if unscaled_post(stream) and self.exceeds(float(stream.depth), self.max_writes):
                yield self._found(stream, data)

    def _found(self, stream: Stream, data: ReportData) -> Finding:
        init = data.measurements.init
        trained = init is not None and init.trained is True
        after = "; its weights look trained" if trained else ""
        return self.finding(
            stream.name,
            f"{stream.depth} writes, each sum normed as a whole, and neither trunk nor branches are scaled{after}",
            value=float(stream.depth),
            against="max_writes",
            severity=Severity.NOTE if trained else None,
            fixes=() if trained else None,
        )
