"""NP602."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Outcome, Unit, limit, number
from normprobe.checks.initialisation.drawn import NEARLY, NEEDS, DrawnCheck, common
from normprobe.records import Fix, Initialisation, ReportData, Severity, Stream, WeightMeasure
from normprobe.records.weights import WeightRole

_BY_FANS = ("torch_default", "xavier", "lecun", "kaiming", "kaiming_fan_out")  # the narrowest first
_BY_DEPTH = ("ds_init", "deepnorm", "t_fixup_encoder", "t_fixup_decoder", "fixup", "wang_init", "zero")


@final
@dataclass(frozen=True)
class UnscaledWriters(DrawnCheck):
    """The weights that write to a deep stream are drawn without regard to its depth, and it grows.

    ## What it measures

    For each stream of many writes that no norm follows, on the write or on the sum: whether the weights that write to
    it are drawn without regard to its depth, and how often its RMS at the end is that at the entry. Without regard to
    depth are all writers by Xavier's, LeCun's, Kaiming's or torch's default recipe, or with one standard deviation
    that is also that of the weights that read the stream; and not by one recipe that knows the depth. A note: most
    models since 2020 begin so and train well.

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
    fixes = (Fix(rewrite="Initialise", settings={"scheme": "gpt2", "only": "writers"}),)
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
            held = _held(index, init, data)
            how = _unscaled(held["writer"], held["reader"])
            growth = _growth(stream, data)
            normed = any(b.output_norm or b.post_norm for b in stream.branches)
            if normed or how is None or growth is None:
                continue
            writes = len(stream.branches)
            if writes >= self.min_writes and self.exceeds(growth, self.max_growth):
                yield self.finding(
                    stream.name,
                    f"all {writes} writes come from weights drawn {how}, and the RMS of the stream grows to "
                    f"{number(growth)} times that at the entry; divided by √{writes}, {number(writes**0.5)}, they "
                    "would be as large together as one",
                    value=growth,
                    against="max_growth",
                )


def _held(stream: int, init: Initialisation, data: ReportData) -> dict[WeightRole, list[WeightMeasure]]:
    """The weights that write to a stream and those that read it."""
    roles = {site.parameter: site.roles for site in data.anatomy.weights if site.stream == stream}
    held = [weight for weight in init.weights if weight.parameter in roles]
    return {"writer": [w for w in held if "writer" in w.roles], "reader": [w for w in held if "reader" in w.roles]}


def _unscaled(writers: list[WeightMeasure], readers: list[WeightMeasure]) -> str | None:
    """How writers were drawn if their depth had no part in it, in words; None where it had, or that is not known."""
    if not writers or not readers or any(map(_knows_depth, common(writers))):
        return None
    every = [*writers, *readers]
    std = statistics.median(weight.std for weight in every)
    if sum(weight.interval[0] <= std <= weight.interval[1] for weight in every) >= NEARLY * len(every):
        return f"with a standard deviation of {number(std)} like the readers'"
    names = [next((name for name in _BY_FANS if name in weight.recipes), None) for weight in writers]
    told = [name for name in names if name is not None]
    return f"by {' and '.join(dict.fromkeys(told))}" if len(told) >= NEARLY * len(names) else None


def _knows_depth(recipe: str) -> bool:
    return recipe.endswith("_depth") or recipe in _BY_DEPTH


def _growth(stream: Stream, data: ReportData) -> float | None:
    """RMS at the end over that at the entry, as measured."""
    measured = next((one for one in data.measurements.residual if one.stream == stream.name), None)
    if measured is None or not measured.states or not measured.entry_rms > 0:
        return None
    return measured.states[-1].rms_median / measured.entry_rms
