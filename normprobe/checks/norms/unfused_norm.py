"""NP116."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import COST, Check, Needs, Outcome, Unit, limit, number
from normprobe.records import Fix, NormSite, ReportData, Severity

_SAME = {
    "layernorm": ("F.layer_norm", {"none", "weight", "weight+bias"}),
    "rmsnorm": ("F.rms_norm", {"none", "weight"}),
}


@final
@dataclass(frozen=True)
class UnfusedNorm(Check):
    """Norms that one kernel of torch would compute are run operation by operation, and it costs time.

    ## What it measures

    The share of a forward's time that is spent in norms of several operations each which compute what
    `F.layer_norm` or `F.rms_norm` computes in one: over the last axes, by n, eps inside the root, with a gain as
    it is stored. It takes the measure `cost`: most published models write their RMS norm out, and where
    that costs little it is no fault.

    ## Why it matters

    A norm does few operations for each number that it moves. Written out it reads and writes its input once for
    each of them, and starts a kernel each time; fused it does so once. On short inputs, as in decoding one token
    at a time, the starts alone are what a norm takes.

    ## What to do

    `FuseNorms` computes it by `torch.nn.functional.rms_norm` or `layer_norm`, in the same order of gain and cast. Or
    run the model under `torch.compile`, which fuses what is written out. On a CPU torch runs its own `rms_norm` in
    several operations too, so that RMS norms are not judged there.

    ## When to ignore it

    When the model is compiled or exported before it serves, or is served elsewhere: times are those of this
    machine and of this input.

    ## References

    Ivanov et al. 2021 (Data Movement Is All You Need), tab. 1 (norms and softmax take a quarter of the time of
    training BERT, for under one per cent of its operations).
    """

    code, name, severity, since = "NP116", "unfused-norm", Severity.NOTE, "0.1.0"
    needs = Needs.STRUCTURE | Needs.FORWARD
    fixes = (Fix(rewrite="FuseNorms", at_places=True),)

    most: float = limit(
        0.1, unit=Unit.RATIO, source="choice: a tenth of the time, of which one kernel would give most back"
    )

    def check(self, data: ReportData) -> Outcome:
        """Yield one note for all norms that one kernel could compute, where they take time."""
        cost = data.measurements.cost
        found = [norm for norm in data.anatomy.norms if norm.executed and _has_kernel(norm)]
        sites = {norm.path: norm for norm in found if not _none_on_cpu(norm)}
        if cost is not None and len(sites) < len(found):
            where = [norm.path for norm in found if norm.path not in sites]
            yield self.skip("torch has no kernel for an RMS norm on a CPU: measure it where it will run", where)
        if not data.anatomy.norms:
            yield self.skip("no norm was found")
        if cost is None and sites:
            why = 'what norms cost was not measured: ask for the measure "cost"'
            yield self.skip(why, sites, unasked=COST)
        if cost is None:
            return
        plain = [(row, sites[row.path]) for row in cost.norms if row.path in sites]
        share = sum(row.seconds for row, _ in plain) / cost.forward_seconds
        if not plain or not self.exceeds(share, self.most):
            return
        names = " and ".join(dict.fromkeys(_SAME[norm.kind][0] for _, norm in plain))
        many = sum(row.operations for row, _ in plain) / sum(row.calls for row, _ in plain)
        moved = sum(row.bytes_moved for row, _ in plain) / sum(row.bytes_needed for row, _ in plain)
        worst = max(plain, key=lambda pair: pair[0].seconds)[1]
        yield self.finding(
            worst.path,
            f"{number(100 * share)} % of the forward is spent in norms of {number(many)} operations each, which move "
            f"{number(moved)} times the bytes that one kernel would: {names} computes the same",
            value=share,
            against="most",
            places=[norm.path for _, norm in plain],
        )


def _none_on_cpu(norm: NormSite) -> bool:
    """Whether torch itself runs this norm in several operations, as it does RMS norms on a CPU."""
    return norm.kind == "rmsnorm" and norm.device == "cpu"


def _has_kernel(norm: NormSite) -> bool:
    """Whether one kernel of torch computes what `norm` computes in several operations."""
    if norm.fused or norm.kind not in _SAME or norm.unbiased or norm.batch_dependent or norm.frozen:
        return False
    last = tuple(range(-len(norm.axes), 0))
    inside = norm.eps_placement in ("inside_sqrt", "none")
    return norm.affine in _SAME[norm.kind][1] and inside and bool(norm.axes) and tuple(sorted(norm.axes)) == last
