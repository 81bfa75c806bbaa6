"""Judging by settings: which checks run, with which limits, and where they are silent."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

from normprobe.checks.base import Check, Outcome, SweepCheck
from normprobe.checks.catalogue import ALL, find, matching, ranked, unless_said
from normprobe.checks.silence import Again, heard, idle, silences, thinned, without
from normprobe.checks.toml_lines import dotted
from normprobe.errors import SettingError
from normprobe.records import Finding, Ignored, ReportData, Settings, Skipped
from normprobe.records.sweep import SweepReport

_MOST = 4  # codes that a message names
Line: TypeAlias = Callable[[Sequence[str | int]], str]


def judged(data: ReportData, settings: Settings, checks: Iterable[Check] = ALL) -> ReportData:
    """`data` with what the checks say of it under `settings`, in place of what was said of it before.

    Args:
        data: target, level, anatomy and measurements; of its skips, those of the checks are made anew.
        settings: which checks run, where they speak, and their limits.
        checks: all the checks there are.

    Raises:
        SettingError: the settings name a check or a limit that does not exist.
    """
    checks = tuple(checks)
    chosen, ignored = chosen_checks(settings, checks)
    asked = [check for check in chosen if not isinstance(check, SweepCheck)]
    outcomes = [(partial(_again, check, data), outcome) for check in asked for outcome in check.run(data)]
    findings, silenced = _heard(outcomes, silences(settings, checks))
    others = (one for one in data.skipped if not _of_check(one))
    skipped = (*others, *(one for _, one in outcomes if isinstance(one, Skipped)))
    before = idle(data.settings, data)
    said = {
        "settings": settings,
        "checks": tuple(check.code for check in asked),
        "findings": ranked(unless_said(findings, asked), checks),
        "ignored": (*ignored, *silenced),
        "skipped": tuple(dict.fromkeys(skipped)),
        "notes": (*(note for note in data.notes if note not in before), *idle(settings, data)),
    }
    return data.model_copy(update=said)


def _again(check: Check, data: ReportData, places: Collection[str]) -> Outcome:
    """What `check` says without what was measured at `places`."""
    return check.run(without(data, places))


def judged_sweep(sweep: SweepReport, settings: Settings, checks: Iterable[Check] = ALL) -> SweepReport:
    """`sweep` with what the checks of sweeps say of it under `settings`, in place of what was said of it before.

    Raises:
        SettingError: the settings name a check or a limit that does not exist.
    """
    checks = tuple(checks)
    chosen, ignored = chosen_checks(settings, checks)
    asked = [check for check in chosen if isinstance(check, SweepCheck)]
    outcomes = [(partial(_again_in_sweep, check, sweep), outcome) for check in asked for outcome in check.judge(sweep)]
    findings, silenced = _heard(outcomes, silences(settings, checks))
    own = {check.code for check in checks if isinstance(check, SweepCheck)}
    said = {
        "checks": tuple(check.code for check in asked),
        "findings": ranked(findings, checks),
        "ignored": (*(one for one in ignored if one.code in own), *silenced),
        "skipped": tuple(one for _, one in outcomes if isinstance(one, Skipped)),
    }
    return sweep.model_copy(update=said)


def _again_in_sweep(check: SweepCheck, sweep: SweepReport, places: Collection[str]) -> Outcome:
    return check.judge(thinned(sweep, places))


def _heard(
    outcomes: Iterable[tuple[Again, Finding | Skipped]], silent: Sequence[tuple[str, set[str]]]
) -> tuple[list[Finding], list[Ignored]]:
    """What is left of the findings, and a count of those that are silenced wholly or at some of their places."""
    kept: list[Finding] = []
    counts = Counter[tuple[str, str, str]]()
    for again, one in outcomes:
        if isinstance(one, Finding):
            left = heard(one, silent, again)
            kept += left.findings
            if left.patterns:
                counts[one.code, one.name, f"in per-path-ignores of {', '.join(left.patterns)}"] += 1
    rows = counts.items()
    return kept, [Ignored(code=code, name=name, why=why, findings=count) for (code, name, why), count in rows]


def chosen_checks(
    settings: Settings, checks: Iterable[Check] = ALL, line: Line = lambda path: ""
) -> tuple[tuple[Check, ...], tuple[Ignored, ...]]:
    """The checks that run under `settings`, with their limits, and those that do not.

    Args:
        settings: which checks run, where they speak, and by which limits.
        checks: all the checks there are.
        line: where a key stands in the file of the settings, ready to follow its name.

    Raises:
        SettingError: these are no settings, or they name a check or a limit that does not exist; the message names the
            place.
    """
    _check_kind(settings)
    checks, keys = tuple(checks), _Keys(settings.source, line)
    for pattern, words in settings.per_path_ignores.items():
        _named(words, keys.name("per-path-ignores", pattern), checks)
    limits = _limits(settings, keys, checks)
    selected = _named(settings.select, keys.name("select"), checks) if settings.select else {c.code for c in checks}
    dropped = _named(settings.ignore, keys.name("ignore"), checks)
    why = {check.code: "not in select" for check in checks if check.code not in selected}
    why |= {code: "in ignore" for code in selected & dropped}
    chosen = (dataclasses.replace(c, **limits.get(c.code, {})) for c in checks if c.code not in why)
    left_out = (Ignored(code=c.code, name=c.name, why=why[c.code]) for c in checks if c.code in why)
    return tuple(chosen), tuple(left_out)


def refuse_none(settings: Settings, *, sweep: bool, checks: Iterable[Check] = ALL) -> None:
    """Refuses settings by which a command asks no check, so that any model would be clean.

    Args:
        settings: which checks run.
        sweep: whether the command judges a sweep, else one model.
        checks: all the checks there are.

    Raises:
        SettingError: none of the checks that are left is one of this command; the message says who asks those.
    """
    chosen, _ = chosen_checks(settings, checks)
    if any(isinstance(check, SweepCheck) is sweep for check in chosen):
        return
    judge = "a sweep" if sweep else "one model"
    other = "one model: normprobe audit TARGET" if sweep else "a sweep: normprobe sweep TARGET --widths SIZES"
    more = f" and {len(chosen) - _MOST} more" if len(chosen) > _MOST else ""
    left = ", ".join(check.code for check in chosen[:_MOST]) + more
    raise SettingError(
        f"no check is left that judges {judge}",
        expected="one that is selected and not ignored",
        found=f"select: {', '.join(settings.select) or 'all'}; ignore: {', '.join(settings.ignore) or 'none'}"
        + (f" in {settings.source}" if settings.source else ""),
        hint=f"{left} judge{'s' if len(chosen) == 1 else ''} {other}" if chosen else None,
    )


def _check_kind(settings: object) -> None:
    if not isinstance(settings, Settings):
        raise SettingError(
            "settings= takes settings",
            expected="normprobe.Settings(...)",
            found=f"{type(settings).__name__}: {settings!r}",
            hint="normprobe.load_settings(path) reads a file",
        )


@dataclasses.dataclass(frozen=True)
class _Keys:
    """How messages name the settings of one file, or of none."""

    source: str
    line: Line

    def name(self, *path: str) -> str:
        """A setting with the file, and its line where that is known."""
        return f"`{dotted(path)}`" + (f" in {self.source}{self.line(path)}" if self.source else " of the settings")


def _named(words: Iterable[str], key: str, checks: tuple[Check, ...]) -> set[str]:
    """The codes of the checks that `words` name."""
    with placed(key):
        return {check.code for word in words for check in matching(word, checks)}


def _limits(settings: Settings, keys: _Keys, checks: tuple[Check, ...]) -> dict[str, dict[str, float]]:
    """The limits of the settings by the code of their check."""
    found: dict[str, dict[str, float]] = {}
    called: dict[str, str] = {}
    for word, values in settings.limits.items():
        with placed(keys.name("limits", word)):
            check = find(word, checks)
            if check.code in called:
                raise SettingError(
                    f"{check.code} {check.name} has limits under two names",
                    expected="one of them",
                    found=f"{called[check.code]} and {word}",
                )
        for name, value in values.items():
            with placed(keys.name("limits", word, name)):
                _check_limit(name, value, check)
        found[check.code], called[check.code] = dict(values), word
    return found


def _check_limit(name: str, value: float, check: Check) -> None:
    limits = {limit.name: limit for limit in check.limits()}
    if name in limits and value >= limits[name].least:
        return
    if name in limits:
        why = ": what is smaller is not kept when it is measured" if limits[name].least > 0 else ""
        raise SettingError(
            f"{check.code} {check.name} cannot judge by a {name} of {value:g}",
            expected=f"{limits[name].least:g} or more{why}",
            found=f"{value:g}",
        )
    known = list(limits)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    raise SettingError(
        f"{check.code} {check.name} has no limit {name!r}",
        expected=" or ".join(known) if known else "no limits at all: this check has none",
        found=name,
        hint=f"did you mean {near[0]}?" if near else f"normprobe explain {check.code}",
    )


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Says in a SettingError that is raised inside which setting it is about.

    Args:
        place: name of the setting as its author wrote it.
    """
    try:
        yield
    except SettingError as error:
        message = f"{place}: {error.message}"
        raise SettingError(message, expected=error.expected, found=error.found, hint=error.hint) from None


def _of_check(skipped: Skipped) -> bool:
    return re.match(r"NP\d{3} ", skipped.what) is not None
