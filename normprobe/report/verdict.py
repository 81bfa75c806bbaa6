"""The one sentence that a report begins with, the same in every form."""

from __future__ import annotations

from dataclasses import dataclass

from normprobe.checks.placement.missing_final_norm import undecided
from normprobe.records import Anatomy, ReportData, Severity
from normprobe.report.wording import plural, tally


@dataclass(frozen=True)
class Verdict:
    """The verdict on one model; findings that a baseline knows are counted, and no more.

    Attributes:
        text: the counts by severity, "clean" where nothing was found and the model could be read.
        worst: the worst severity among the new findings, None when there are none.
        read: whether the model's parts were read, so that the absence of findings says something.
        blind: whether nothing at all was read and nothing found, or no check was asked, which is no success.
    """

    text: str
    worst: Severity | None
    read: bool
    blind: bool = False

    @property
    def mark(self) -> str:
        """✗ for errors, ! for warnings, ? where nothing was found for want of reading, else ✓."""
        if self.worst in (Severity.ERROR, Severity.WARNING):
            return "✗" if self.worst is Severity.ERROR else "!"
        return "✓" if self.read else "?"

    @property
    def level(self) -> str:
        """The worst severity, else "clean" or "unread"."""
        return self.worst.value if self.worst else "clean" if self.read else "unread"


def verdict(data: ReportData) -> Verdict:
    """The counts; where no error or warning was found, also what could not be read at all."""
    if not data.checks and any(one.findings is None for one in data.ignored):
        return Verdict("judged by no check: the settings leave none", None, read=False, blind=True)
    new = [one.severity for one in data.findings if not one.known]
    worst = min(new, key=lambda severity: severity.rank, default=None)
    counts, gap = _counts(new, len(data.findings) - len(new)), _unread(data.anatomy)
    if worst in (Severity.ERROR, Severity.WARNING) or not gap:
        return Verdict(counts, worst, not gap)
    if worst is None and data.anatomy == Anatomy():
        return Verdict(f"nothing could be read; {gap}", worst, read=False, blind=True)
    return Verdict(f"{counts if data.findings else 'nothing found wrong'}; {gap}", worst, read=False)


def _counts(new: list[Severity], known: int) -> str:
    if not known:
        return tally(new)
    return f"{tally(new) if new else 'nothing new'}, {plural(known, 'finding')} known"


def _unread(anatomy: Anatomy) -> str:
    """What a clean verdict would hide; empty where the build of the model was read."""
    if not anatomy.streams:
        return "no residual stream was found" if anatomy.norms else "no norm and no residual stream was found"
    if all(map(undecided, anatomy.streams)):
        return "whether a final norm is missing could not be decided"
    return ""
