"""One rewrite after another: tried, judged by a new report, and kept or taken back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from normprobe.capture.invoke import Inputs
from normprobe.errors import NormprobeError
from normprobe.mending.probed import Probed
from normprobe.mending.verdict import Key, keys, mended, unlooked, verdict
from normprobe.records import Finding, Fix
from normprobe.report.report import Report
from normprobe.rewrites import Effect, Plan, Rewrite, find, load, make_plan


@dataclass(frozen=True)
class Attempt:
    """Rewrites that findings ask for, to be applied together."""

    fixes: tuple[Fix, ...]
    findings: tuple[Finding, ...]

    @property
    def places(self) -> tuple[str, ...]:
        """Every place of the findings once."""
        return tuple(dict.fromkeys(place for finding in self.findings for place in finding.every_place))

    @property
    def placed(self) -> bool:
        """Whether the rewrites change these places alone."""
        return any(fix.at_places for fix in self.fixes)

    @property
    def said(self) -> str:
        """The rewrites as they are called."""
        return " and ".join(fix.rewrite for fix in self.fixes)

    def rewrites(self) -> list[Rewrite]:
        """The rewrites themselves.

        Raises:
            RewriteError: there is none of this name, or it has no such setting.
        """
        return [load({"rewrite": fix.rewrite, **fix.given(self.places)}) for fix in self.fixes]

    def same(self, other: Attempt) -> bool:
        """Whether the same rewrites would be made."""
        return self.fixes == other.fixes and (not self.placed or set(self.places) == set(other.places))


class Attempts:
    """Tries what the findings ask for, and keeps the last report."""

    def __init__(self, model: nn.Module, inputs: Inputs, allowed: Effect, probed: Probed) -> None:
        self.model, self.inputs, self.allowed, self.probed = model, inputs, allowed, probed
        self.report: Report = probed.report
        self.applied: list[tuple[Plan, tuple[Finding, ...]]] = []
        self._tried: list[Attempt] = []
        self._not_applied: list[Attempt] = []  # of those tried: another mend may make them possible
        self._unseen: list[Finding] = []  # found before, and not looked at since
        self._earlier: list[tuple[Finding, ...]] = []  # what was open at each report that stood
        self._reasons: dict[Key, str] = {}
        self._refused: dict[str, str] = {}  # by place, of the last plan

    @property
    def open(self) -> tuple[Finding, ...]:
        """What is not mended: the findings of the last report, and those that it did not look for."""
        return (*self.report.findings, *self._unseen)

    def run(self) -> None:
        """Try until no finding asks for anything new; what breaks in on that leaves the model as it was."""
        try:
            while (attempt := self._next()) is not None:
                self._attempt(attempt)
        except BaseException:
            for made, _ in reversed(self.applied):
                made.undo()
            raise

    def why(self, finding: Finding) -> str:
        """Why a finding is left."""
        if finding in self._unseen:
            skip = unlooked(next(iter(keys([finding]))), self.report)
            return f"not looked at again: {'its check did not run' if skip is None else skip.why}"
        told = (self._reasons.get(key) for key in sorted(keys([finding])))
        known = next((why for why in told if why is not None), None)
        return known or f"no rewrite mends it; `normprobe explain {finding.code}` says what to do"

    def _next(self) -> Attempt | None:
        for finding in sorted(self.open, key=lambda one: one.severity.rank):
            if not finding.mends:
                continue
            alike = tuple(one for one in self.open if one.mends == finding.mends)
            attempt = Attempt(finding.mends, alike)
            if not any(attempt.same(one) for one in self._tried):
                return attempt
        return None

    def _attempt(self, attempt: Attempt) -> None:
        """All of its findings together; where that fails, each by itself."""
        self._tried.append(attempt)
        why = self._failed(attempt)
        if why is None:
            self._tried = [one for one in self._tried if one not in self._not_applied]
            self._not_applied = []
            self._note(attempt.findings, f"still there after {attempt.said}")
            return
        self._note(attempt.findings, why)
        alone = [Attempt(attempt.fixes, (finding,)) for finding in attempt.findings]
        if attempt.placed and len(alone) > 1 and self._allowed(attempt):
            for one in alone:
                if not any(one.same(other) for other in self._tried):
                    self._attempt(one)

    def _note(self, findings: Iterable[Finding], why: str) -> None:
        """Why findings are still there, those that a rewrite refused by their own reason."""
        self._reasons |= {(code, place): self._refused.get(place, why) for code, place in keys(findings)}

    def _allowed(self, attempt: Attempt) -> bool:
        return self._beyond(attempt, [rewrite.mildest for rewrite in attempt.rewrites()]) is None

    def _beyond(self, attempt: Attempt, effects: Iterable[Effect]) -> str | None:
        """Why the worst of these effects is more than is allowed; None where it is not."""
        worst = max(effects, key=lambda effect: effect.rank)
        if worst.rank <= self.allowed.rank:
            return None
        return f"{attempt.said} is {worst.value} ({worst.meaning}); allowed: {self.allowed.value}"

    def _failed(self, attempt: Attempt) -> str | None:
        """Why it was not applied, or not kept; None where it mended something."""
        self._refused = {}
        missing = [fix.rewrite for fix in attempt.fixes if find(fix.rewrite) is None]
        if missing:
            return f"its mend {missing[0]} does not exist"
        try:
            rewrites = attempt.rewrites()
        except NormprobeError as error:
            return f"{attempt.said} was not applied: {_line(error)}"
        if (why := self._beyond(attempt, [rewrite.mildest for rewrite in rewrites])) is not None:
            return why
        try:
            made = make_plan(self.model, rewrites, self.inputs)
            if (why := self._beyond(attempt, [made.effect])) is not None:
                return why
            for rewrite, found in made.steps:
                self._refused |= {each.path: f"{rewrite.name} refused it: {each.why}" for each in found.refused}
            made.apply()
        except Exception as error:  # the model may refuse what was made of it in any way; the reason is told
            self._not_applied.append(attempt)
            return f"{attempt.said} was not applied: {_line(error)}"
        return self._judged(attempt, made)

    def _judged(self, attempt: Attempt, made: Plan) -> str | None:
        """Keep what was applied, or take it back and say why."""
        try:
            after = self.probed.again(attempt.findings)
            against = verdict(attempt.findings, [*self._earlier, self.open], after)
        except Exception as error:  # the same
            against = f"the model could not be probed again: {_line(error)}"
        except BaseException:
            made.undo()
            raise
        if against is not None:
            made.undo()
            return f"{attempt.said} was applied and taken back: {against}"
        gone = mended(attempt.findings, after)
        self.applied.append((made, tuple(one for one in attempt.findings if keys([one]) & gone)))
        known = keys(after.findings)
        self._earlier.append(self.open)
        self._unseen = [one for one in self.open if any(_unseen(key, known, after) for key in keys([one]))]
        self.report = after
        return None


def _unseen(key: Key, known: set[Key], after: Report) -> bool:
    return key not in known and unlooked(key, after) is not None


def _line(error: Exception) -> str:
    """What an error says, in one line."""
    if not isinstance(error, NormprobeError):
        return " ".join(f"{type(error).__name__}: {error}".split())
    return f"{error.message}{f' ({error.found})' if error.found else ''}"
