"""NP208."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Outcome
from normprobe.records import Anatomy, Finding, Fix, NormSite, ReportData, Severity


@final
@dataclass(frozen=True)
class UnusedNorm(Check):
    """A norm was built, and nothing called it although the module around it ran.

    ## What it measures

    Norm modules that were never executed in the recorded forward. A norm is reported when the module that
    holds it did run: another norm, an attention operation, a branch or one of the parameters of a branch
    inside it was used. Where nothing inside that module was seen to run (a tower that got no input, a skipped
    block), the norm is skipped with that reason, since the data flow cannot tell a fault from a part that was
    not needed. It is a note where another module with parameters, or a parameter, beside the norm was not used
    either, as the cross-attention of a decoder that is given no encoder, or the tower of a model that is given
    text alone: an optional part was left out, and its norm with it.

    ## Why it matters

    Its gain is trained by nothing, appears in the checkpoint, and misleads whoever ports the model from the
    list of its modules. Often it is the trace of a fault: a final norm that the forward forgot, or query and
    key norms that were built and never applied.

    ## What to do

    Call it where it belongs, or delete it (`RemoveNorms`).

    ## When to ignore it

    When the module has modes and the recorded inputs ran another one: a norm for generation, for images, for
    training alone.

    ## References

    None; this is a statement about the recorded forward.
    """

    code, name, severity, since = "NP208", "unused-norm", Severity.WARNING, "0.1.0"
    fixes = (Fix(rewrite="RemoveNorms", at_places=True),)

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for every norm that was not executed inside a module that ran."""
        if not data.anatomy.norms:
            yield self.skip("no norm was found")
        used = tuple(_used(data.anatomy))
        idle = []
        for norm in data.anatomy.norms:
            if norm.executed and norm.role != "unused":
                continue
            parent = norm.path.rpartition(".")[0]
            if not parent or any(path.startswith(f"{parent}.") or path == parent for path in used):
                yield self._found(norm)
            else:
                idle.append(norm.path)
        if idle:
            yield self.skip("not called, and nothing else was seen to run in the module around it", idle)

    def _found(self, norm: NormSite) -> Finding:
        text = "built but not called in the recorded forward, although the module around it ran"
        beside = ", ".join(path.rpartition(".")[2] for path in norm.idle_beside)
        return self.finding(
            norm.path,
            f"{text}; nor was {beside} beside it" if beside else text,
            source="the recorded data flow",
            severity=Severity.NOTE if beside else None,
            fixes=() if beside else None,
        )


def _used(anatomy: Anatomy) -> Iterator[str]:
    """Paths of modules and parameters that the recorded forward is known to have used."""
    for norm in anatomy.norms:
        if norm.executed and norm.role != "unused":
            yield norm.path
    for site in anatomy.attention:
        yield site.path
        yield from (rows.parameter for rows in site.columns.values())
    for stream in anatomy.streams:
        for branch in stream.branches:
            yield from (branch.path, branch.add.path, *branch.readers, *branch.writers, *branch.parameters)
    if anatomy.head is not None:
        yield anatomy.head.path
