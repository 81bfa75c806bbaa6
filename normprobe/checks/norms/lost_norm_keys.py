"""NP113."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, final

from normprobe.checks.base import Needs, Outcome
from normprobe.checks.norms.gains import GainCheck, Stored, looks_trained, unset
from normprobe.records import Elements, Finding, ReportData, Severity

Part = Literal["gain", "offset"]
_START: dict[Part, float] = {"gain": 1.0, "offset": 0.0}
_SOURCE = "Ba et al. 2016: gains start at 1, offsets at 0, and both are trained"


@final
@dataclass(frozen=True)
class LostNormKeys(GainCheck):
    """Norms of a trained model hold gains or offsets as they were constructed.

    ## What it measures

    In a model whose weights look trained (they fit no distribution that one draws from): gains that are
    exactly 1, and offsets that are exactly 0, in every element. Where other norms of the same kind have moved
    from there, that is a warning, unless the gain may have been folded into the weights that follow on purpose:
    where weights alone read the norm, and every other norm of which that is so stands at 1 and 0 too. Then only
    gains have moved that can be folded nowhere, as those of a final norm before a tied head or of norms on
    queries and keys, and it is a note: the weights do not show whether they hold a gain. Where no norm has moved,
    or only norms on queries and keys, it depends on the placement: behind a norm that the next block adds to as
    well (post-norm) the gain cannot have been folded away, and it is a warning; else it is a note.

    ## Why it matters

    A checkpoint whose norms are called gamma and beta, or carry another prefix, loads without them where keys
    are not checked. The model runs at about the right scale, since 1 and 0 are good values to start from, and
    is worse than it was.

    ## What to do

    Load with strict keys, and look for the norms among the keys that were missing or unexpected. Rename them
    in the file, or in the loader.

    ## When to ignore it

    Where the norm was added after training, by other means than a rewrite (one that a rewrite added, in this
    process or in the patched checkpoint that was loaded, is not judged before its gain has moved; a copy of the
    model in memory does not know), or its gains were folded (of some norms alone too, which looks as if they were
    lost) or never trained (NP115 tells when half-precision updates are lost). Offsets of norms on keys are not
    judged, since the softmax cancels them.

    ## References

    Ba et al. 2016, sec. 3; Ashkboos et al. 2024 (SliceGPT, sec. 3: gains folded into what follows).
    """

    code, name, severity, since = "NP113", "lost-norm-keys", Severity.WARNING, "0.1.0"
    needs = Needs.STRUCTURE | Needs.WEIGHTS | Needs.FORWARD

    def judge(self, norms: Sequence[Stored], data: ReportData) -> Outcome:
        """Yield findings for what stands at its start in a trained model."""
        if data.measurements.init is None:
            yield self.skip("no weight was read that tells whether the model is trained")
        if not looks_trained(data):
            return
        norms = [norm for norm in norms if not _as_added(norm)]
        if any(unset(held) for norm in norms for _, held in norm.parts):
            yield self.skip("gains or offsets hold what nobody sets (NP109), so that others may not be lost but unset")
            return
        along = [norm for norm in norms if not _of_attention(norm)]
        if _none_moved(along):
            alone = not _none_moved(norms)
            yield self._all(along if alone else norms, data, ", but on queries and keys" if alone else "")
            norms = [norm for norm in norms if _of_attention(norm)]
        folded = _may_be_folded(norms)
        for kind in dict.fromkeys(norm.site.kind for norm in norms):
            for part in _START:
                yield from self._some([norm for norm in norms if norm.site.kind == kind], part, folded)

    def _some(self, norms: Sequence[Stored], part: Part, folded: Collection[str]) -> Outcome:
        """Those of one kind that stand at the start, where others have moved."""
        held = [(norm, one) for norm in norms for name, one in norm.parts if name == part and one.count > 1]
        moved = sum(one.constant is None for _, one in held)
        for norm, one in held:
            path, judged = norm.site.path, part == "gain" or norm.site.role != "key"
            if moved and judged and one.constant == _START[part]:
                text = f"the {part} is {_START[part]:g} throughout, as constructed, in a model that looks trained: "
                others = f"the {part}s of {moved} other norm{'s' if moved > 1 else ''} have moved"
                severity = self.severity
                if path in folded:
                    severity, text = Severity.NOTE, f"{text}lost in loading, or folded into the weights that follow; "
                    others += ", of none that weights alone read"
                yield self.finding(path, text + others, value=_START[part], source=_SOURCE, severity=severity)

    def _all(self, norms: Sequence[Stored], data: ReportData, apart: str = "") -> Finding:
        held = [norm for norm in norms if any(one.count > 1 for _, one in norm.parts)]
        stands = {branch.post_norm for stream in data.anatomy.streams for branch in stream.branches}
        post = any(norm.site.path in stands for norm in held)
        why = "lost in loading" if post else "lost in loading, or folded into the weights that follow"
        return self.finding(
            held[0].site.path,
            f"every gain is 1 and every offset 0{apart}, as constructed, in a model that looks trained: {why}",
            value=len(held),
            source=_SOURCE,
            severity=Severity.WARNING if post else Severity.NOTE,
            places=[norm.site.path for norm in held],
        )


def _as_added(norm: Stored) -> bool:
    """Whether a rewrite added it, and its gain is the number that it was given then."""
    return norm.known.began is not None and norm.known.gain is not None and norm.known.gain.constant == norm.known.began


def _of_attention(norm: Stored) -> bool:
    """Whether it norms queries or keys: those are added to trained models, and their gains can be folded nowhere."""
    return norm.site.role in ("query", "key")


def _may_be_folded(norms: Sequence[Stored]) -> frozenset[str]:
    """The norms whose gains may be in the weights that follow: all that could be there, if none of them has moved."""
    able = [norm for norm in norms if norm.known.foldable]
    stands = all(_at_start(name, one) for norm in able for name, one in norm.parts if one.count > 1)
    return frozenset(norm.site.path for norm in able) if stands else frozenset()


def _none_moved(norms: Sequence[Stored]) -> bool:
    """Whether there is a gain, and every gain and offset with more than one element stands at its start."""
    parts = [(name, one) for norm in norms for name, one in norm.parts if one.count > 1]
    return any(name == "gain" for name, _ in parts) and all(_at_start(name, one) for name, one in parts)


def _at_start(part: Part, held: Elements) -> bool:
    return held.constant == _START[part]
