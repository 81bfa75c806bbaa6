"""NP105."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from normprobe.checks.base import Check, Outcome, Unit, limit, number
from normprobe.records import Finding, Fix, NormSite, ReportData, Severity, Stream

_SOURCE = "the other norms of the model"


@final
@dataclass(frozen=True)
class MixedEps(Check):
    """Norms that do the same in different blocks have different eps.

    ## What it measures

    The eps in force, as found by shrinking the input of a copy of every norm. Norms of one kind and one place
    along a stream are compared: those before branches, those on their outputs, those behind the adds, and
    those on queries and keys. A few that differ from most are a warning; a note, where they do so in every
    block alike, or in every stream. A note as well where no value holds for most, and for a final norm that
    differs from those before the branches.

    ## Why it matters

    Eps is not in the weights. A constructor that is called without it in one place takes a default, and a
    converted model then gives other numbers there, most where the signal is small. Nothing fails.

    ## What to do

    Compare with the configuration, and give every norm the same eps from it. In a trained model keep what it
    was trained with.

    ## When to ignore it

    When the model was trained so.

    ## References

    The defaults differ: torch.nn.LayerNorm 1e-5, BERT 1e-12, torch.nn.RMSNorm the epsilon of the dtype.
    """

    code, name, severity, since = "NP105", "mixed-eps", Severity.WARNING, "0.1.0"
    fixes = (Fix(rewrite="SetEps", at_places=True),)
    explains = ("NP103",)

    alike: float = limit(1.5, unit=Unit.RATIO, source="choice: factor within which recovered values are one constant")

    def check(self, data: ReportData) -> Outcome:
        """Yield one finding for each norm that differs from most, or one for a group without a majority."""
        if not data.anatomy.norms:
            yield self.skip("no norm was found")
        unknown = [norm.path for norm in data.anatomy.norms if norm.executed and norm.eps_placement == "unknown"]
        if unknown:
            yield self.skip("eps could not be told", unknown)
        found = {norm.path: norm for norm in data.anatomy.norms if _known(norm)}
        for streams in _places(data):
            outcomes = [
                list(self._judged([found[path] for path in blocks if path in found], blocks)) for blocks in streams
            ]
            alike = len(outcomes) > 1 and all(outcomes)
            for one in (one for outcome in outcomes for one in outcome):
                yield one.model_copy(update={"severity": Severity.NOTE}) if alike else one
        for stream in data.anatomy.streams:
            yield from self._final(stream, found)

    def _clusters(self, norms: Sequence[NormSite]) -> list[list[NormSite]]:
        """Norms with one eps in one placement, the largest group first."""
        groups: list[list[NormSite]] = []
        for norm in norms:
            group = next((g for g in groups if self._same(g[0], norm)), None)
            groups.append([norm]) if group is None else group.append(norm)
        return sorted(groups, key=len, reverse=True)

    def _same(self, one: NormSite, other: NormSite) -> bool:
        small, large = sorted((one.eps or 0.0, other.eps or 0.0))
        return one.eps_placement == other.eps_placement and (small == large or large <= self.alike * small)

    def _judged(self, norms: Sequence[NormSite], blocks: Mapping[str, str]) -> Iterator[Finding]:
        """What is found among norms of one place, kind by kind."""
        for kind in dict.fromkeys(norm.kind for norm in norms):
            yield from self._compared([norm for norm in norms if norm.kind == kind], blocks)

    def _compared(self, norms: Sequence[NormSite], blocks: Mapping[str, str]) -> Iterator[Finding]:
        most, *rest = self._clusters(norms) or [[]]
        if rest and 2 * len(most) > len(norms):
            others = [norm for group in rest for norm in group]
            alike = {blocks[norm.path] for norm in others} == {blocks[norm.path] for norm in norms}
            severity = Severity.NOTE if alike else Severity.WARNING
            for norm in others:
                text = (
                    f"{_eps(norm)}, and {_eps(most[0])} in {len(most)} of the {len(norms)} norms of its kind and place"
                )
                yield self._differs(norm, most[0], text, severity)
        elif rest:
            counts = ", ".join(f"{len(group)} have {_eps(group[0])}" for group in (most, *rest))
            yield self.finding(
                rest[0][0].path,
                f"of {len(norms)} norms of one kind and place {counts}",
                value=rest[0][0].eps,
                bound=most[0].eps,
                source=_SOURCE,
                severity=Severity.NOTE,
                places=[norm.path for group in rest for norm in group],
                fixes=(),
            )

    def _final(self, stream: Stream, found: dict[str, NormSite]) -> Iterator[Finding]:
        """A final norm that differs from all those before the branches."""
        final = found.get(stream.final_norm or "")
        before = [found[branch.pre_norm] for branch in stream.branches if branch.pre_norm in found]
        before = [norm for norm in before if final is not None and norm.kind == final.kind]
        if final is not None and before and len(self._clusters([*before, final])) == 2:
            (most, *rest) = self._clusters([*before, final])
            if rest == [[final]] and len(most) > 1:
                text = f"the final norm has {_eps(final)}, and those before the {len(most)} branches {_eps(most[0])}"
                yield self._differs(final, most[0], text, Severity.NOTE)

    def _differs(self, norm: NormSite, usual: NormSite, text: str, severity: Severity) -> Finding:
        """That one norm differs from others, and the fix by which it becomes like them."""
        return self.finding(
            norm.path,
            text,
            value=norm.eps,
            bound=usual.eps,
            source=_SOURCE,
            severity=severity,
            fixes=_usual(usual),
        )


def _known(norm: NormSite) -> bool:
    return norm.executed and (norm.eps_placement == "none" or norm.eps is not None)


def _usual(norm: NormSite) -> tuple[Fix, ...]:
    """Sets the eps of most; nothing where that stands elsewhere than inside the root."""
    if norm.eps_placement == "none":
        return (Fix(rewrite="SetEps", settings={"eps": 0.0}, at_places=True),)
    if norm.eps is None or norm.eps_placement != "inside_sqrt":
        return ()
    return (Fix(rewrite="SetEps", settings={"eps": float(f"{norm.eps:.4g}")}, at_places=True),)


def _eps(norm: NormSite) -> str:
    if norm.eps is None:
        return "no eps"
    place = {"inside_sqrt": "", "outside_sqrt": " outside the root", "clamp": " as a clamp"}.get(norm.eps_placement, "")
    return f"eps {number(norm.eps)}{place}"


def _places(data: ReportData) -> Iterator[list[dict[str, str]]]:
    """The block of each norm by its path, of norms that do the same: for each stream that has some."""
    streams = data.anatomy.streams
    yield [found for s in streams if (found := {b.pre_norm: b.block for b in s.branches if b.pre_norm})]
    yield [found for s in streams if (found := {b.output_norm: b.block for b in s.branches if b.output_norm})]
    yield [found for s in streams if (found := {b.post_norm: b.block for b in s.branches if b.post_norm})]
    pairs = [(site.path, site.qk_norm) for site in data.anatomy.attention if site.qk_norm is not None]
    yield [{path: at for at, pair in pairs for path in (pair.query, pair.key) if path is not None}]
