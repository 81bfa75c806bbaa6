"""NP602."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome, Unit, limit, number
from normprobe.checks.initialisation.drawn import NEEDS, DrawnCheck
from normprobe.records import Initialisation, ReportData, Severity, Stream


@final
@dataclass(frozen=True)
class UnscaledWriters(DrawnCheck):
    """The weights that write to a deep stream are drawn as large as all others, and it grows by them.

    ## What it measures

    For each stream of many writes whose sum is not normed: whether the weights that write to it are drawn with
    the same fixed standard deviation as those that read it, none by a recipe that knows the depth; and how often
    its RMS at the end is that at the entry. A note: most models since 2020 begin so and train well.

    ## Why it matters

    N equal writes make the sum √N times as large, so that a later block adds a smaller share of it than the first
    ones, and the first blocks get the largest gradients. GPT-2 divides by √N, so that all writes together are as
    large as one.

    ## What to do

    Draw the weights that write to the stream with std/√N, 1/√(2L) for L layers of two branches; or a scale on
    each branch that starts small.

    ## When to ignore it

    When the recipe is chosen, as in the Llama family: warm-up and weight decay handle what is left.

    ## References

    Radford et al. 2019 (GPT-2), sec. 2.3; Shoeybi et al. 2019 (Megatron-LM), sec. 4; Xiong et al. 2020, lemma 2;
    Takase et al. 2023 (Spike No More), sec. 4.
    """

    code, name, severity, since = "NP602", "unscaled-writers", Severity.NOTE, "0.1.0"
    needs = NEEDS

    min_writes: float = limit(
        24.0, unit=Unit.ONE, source="choice: twelve layers of two branches, the smallest model of Radford et al. 2019"
    )
    max_growth: float = limit(
        2.0, unit=Unit.RATIO, source="choice: writes together outweigh the entry; √2 where they are as large as it"
    )

    def judge(self, init: Initialisation, data: ReportData) -> Outcome:
        """Yield one note for each stream that grows by unscaled writers."""
        for index, stream in enumerate(data.anatomy.streams):
            std = _unscaled(index, init, data)
            growth = _growth(stream, data)
            if stream.placement in ("post", "deepnorm") or std is None or growth is None:
                continue
            writes = len(stream.branches)
            if writes >= self.min_writes and self.exceeds(growth, self.max_growth):
                yield self.finding(
                    stream.name,
                    f"all {writes} writes come from weights drawn with a standard deviation of {number(std)} like the "
                    f"readers', and the RMS of the stream grows to {number(growth)} times that at the entry; "
                    f"divided by √{writes} it would be {number(std / writes**0.5)}",
                    value=growth,
                    against="max_growth",
                )


def _unscaled(stream: int, init: Initialisation, data: ReportData) -> float | None:
    """The standard deviation that writers and readers of a stream share by a fixed recipe; None where they do not."""
    roles = {site.parameter: site.roles for site in data.anatomy.weights if site.stream == stream}
    held = [w for w in init.weights if w.parameter in roles]
    fixed = {role: [w for w in held if role in w.roles] for role in ("writer", "reader")}
    if not fixed["writer"] or not fixed["reader"]:
        return None
    names = [{name for name in w.recipes if name.startswith("fixed_")} for group in fixed.values() for w in group]
    deep = any(name.endswith("_depth") for w in fixed["writer"] for name in w.recipes)
    return None if deep or not set.intersection(*names) else fixed["writer"][0].std


def _growth(stream: Stream, data: ReportData) -> float | None:
    """RMS at the end over that at the entry, as measured."""
    measured = next((one for one in data.measurements.residual if one.stream == stream.name), None)
    if measured is None or not measured.states or not measured.entry_rms > 0:
        return None
    return measured.states[-1].rms_median / measured.entry_rms
