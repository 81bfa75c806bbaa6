"""NP104."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Needs, Outcome, Unit, limit, number
from normprobe.checks.declarations import governs, stated
from normprobe.records import Declared, Finding, Fix, NormSite, ReportData, Severity
from normprobe.records.declared import EPS_AGREES
from normprobe.records.norms import ON_STREAMS

_KINDS = frozenset({"layernorm", "rmsnorm", "unknown"})


@final
@dataclass(frozen=True)
class EpsDiffersFromConfig(Check):
    """The norms of a stream compute with another eps than the configuration states.

    ## What it measures

    The eps that was found by feeding the norms of a residual stream small inputs, against rms_norm_eps,
    layer_norm_eps and their other spellings in the configuration of the module that holds them. Reported where
    no norm of the stream has a declared eps: where some have it and some not, the norms differ among
    themselves, which NP105 says. Norms elsewhere (on queries and keys, in stems and projectors) often have an
    eps of their own and are not compared.

    A note where the model's own class builds its norms so from this configuration: then it is the code that does not
    hand the field on, in every model of the class. Nothing, where the class does so and a norm in the readout has the
    stated eps, which is what the field is for.

    ## Why it matters

    Eps is in no checkpoint; it lives in the configuration or in the code. Whoever reads the configuration,
    another framework or a conversion, computes something else. The difference matters where the mean square
    of the input is near eps, which is customary right after the embedding.

    ## What to do

    Find out with which eps the model was trained, and put that number into configuration and code. `SetEps` sets
    the stated one.

    ## When to ignore it

    When nothing else reads the configuration. Statements of several different numbers are each taken as right.

    ## References

    The configuration; the documentation of torch.nn.LayerNorm and torch.nn.RMSNorm (eps).
    """

    code, name, severity, since = "NP104", "eps-differs-from-config", Severity.WARNING, "0.1.0"
    needs = Needs.STRUCTURE | Needs.CONFIG
    fixes = (Fix(rewrite="SetEps", at_places=True),)
    explains = ("NP103",)

    max_difference: float = limit(
        EPS_AGREES,
        unit=Unit.RATIO,
        source="choice: within it eps is recovered in every dtype; the eps in use differ by tens",
    )

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for every configuration whose eps no norm on a stream computes with."""
        every = stated(data, "eps")
        if not data.anatomy.norms:
            yield self.skip("no norm was found")
        for path in dict.fromkeys(declared.path for declared in every):
            declared = [one for one in every if one.path == path]
            norms = [norm for norm in data.anatomy.norms if _judged(norm) and governs(declared[0], norm.path, every)]
            readout = [norm for norm in data.anatomy.norms if norm.executed and norm.role == "head"]
            unknown = [norm.path for norm in norms if norm.eps is None and norm.eps_placement != "none"]
            if unknown:
                yield self.skip("eps could not be told", unknown)
            elif norms and not any(self._agrees(norm, one) for norm in norms for one in declared):
                own = all({norm.path for norm in norms} <= set(one.own) for one in declared)
                if not own or not any(self._agrees(norm, one) for norm in readout for one in declared):
                    yield self._found(norms, declared, own)

    def _agrees(self, norm: NormSite, declared: Declared) -> bool:
        return norm.eps is not None and not self.exceeds(
            norm.eps / declared.value - 1, self.max_difference, least=-self.max_difference
        )

    def _found(self, norms: list[NormSite], declared: list[Declared], own: bool) -> Finding:
        said = " and ".join(f"{one.field} = {one.stated}" for one in declared)
        each = ("no eps" if norm.eps is None else f"eps {number(norm.eps)}" for norm in norms)
        found = f"{' or '.join(dict.fromkeys(each))} in all {len(norms)} norms on the stream"
        more = ", which the model's own class does not hand on to them" if own else ""
        return self.finding(
            norms[0].path,
            f"{found}, where the configuration says {said}{more}",
            value=norms[0].eps or 0.0,
            bound=float(declared[0].value),
            source=f"{declared[0].field} of the configuration",
            severity=Severity.NOTE if own else None,
            fixes=() if own else _stated_eps(declared),
            places=[norm.path for norm in norms],
        )


def _stated_eps(declared: list[Declared]) -> tuple[Fix, ...]:
    """Sets the eps that is stated; nothing where several are."""
    values = {float(one.value) for one in declared}
    return (Fix(rewrite="SetEps", settings={"eps": values.pop()}, at_places=True),) if len(values) == 1 else ()


def _judged(norm: NormSite) -> bool:
    return norm.executed and norm.module and norm.role in ON_STREAMS and norm.kind in _KINDS
