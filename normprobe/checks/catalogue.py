"""All checks by name: run them, list them, look one up, print its page."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from normprobe.checks import attention, batchnorm, gradients, initialisation, norm_free, norms, placement, residual
from normprobe.checks.base import Check, Limit, Unit
from normprobe.errors import SettingError
from normprobe.records import Finding, ReportData, Skipped

ALL: tuple[Check, ...] = (
    *norms.ALL,
    *placement.ALL,
    *residual.ALL,
    *attention.ALL,
    *gradients.ALL,
    *initialisation.ALL,
    *batchnorm.ALL,
    *norm_free.ALL,
)


def run(data: ReportData, checks: Iterable[Check] = ALL) -> tuple[tuple[Finding, ...], tuple[Skipped, ...]]:
    """Judge `data` by every check.

    Args:
        data: target, level, anatomy and measurements; its own findings and skips are not read.
        checks: the checks to run.

    Returns:
        The findings as `ranked` gives them, and what was skipped, in the order of the checks.
    """
    checks = tuple(checks)
    outcomes = [outcome for check in checks for outcome in check.run(data)]
    skipped = (outcome for outcome in outcomes if isinstance(outcome, Skipped))
    found = (outcome for outcome in outcomes if isinstance(outcome, Finding))
    return ranked(unless_said(found, checks), checks), tuple(dict.fromkeys(skipped))


def unless_said(findings: Iterable[Finding], checks: Iterable[Check]) -> list[Finding]:
    """The findings without those of checks that give way to one that found something."""
    every = list(findings)
    said = {finding.code for finding in every}
    silent = {check.code for check in checks if said.intersection(check.gives_way)}
    return [finding for finding in every if finding.code not in silent]


def ranked(findings: Iterable[Finding], checks: Iterable[Check] = ALL) -> tuple[Finding, ...]:
    """By severity; then what explains others before these, else by code; then by place. Those that differ only in their
    place are gathered into one with `places`."""
    gathered, explains = _gathered(findings), {check.code: check.explains for check in checks}
    codes: dict[int, set[str]] = {}
    for finding in gathered:
        codes.setdefault(finding.severity.rank, set()).add(finding.code)
    order = {rank: _causes_first(found, explains) for rank, found in codes.items()}
    ranks = {(rank, code): place for rank, found in order.items() for place, code in enumerate(found)}
    return tuple(sorted(gathered, key=lambda f: (f.severity.rank, ranks[f.severity.rank, f.code], _natural(f.where))))


def _causes_first(codes: set[str], explains: Mapping[str, Sequence[str]]) -> list[str]:
    """Codes in order, but each right behind those that explain it."""
    ordered, left = list[str](), set(codes)

    def place(code: str) -> None:
        if code in left:
            left.remove(code)
            for cause in sorted(left):
                if code in explains.get(cause, ()):
                    place(cause)
            ordered.append(code)

    for code in sorted(codes):
        place(code)
    return ordered


def _gathered(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that differ in their place alone, as one; `where` is the first place."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        key = finding.model_dump_json(exclude={"where", "places"})
        groups.setdefault(key, []).append(finding)
    return [_together(group) for group in groups.values()]


def _together(group: list[Finding]) -> Finding:
    if len(group) == 1:
        return group[0]
    places = dict.fromkeys(place for finding in group for place in (finding.where, *finding.places))
    return group[0].model_copy(update={"places": tuple(places)})


def _natural(path: str) -> list[tuple[int, str]]:
    """A sort key that puts `layers.2` before `layers.10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]


def rules(checks: Iterable[Check] = ALL) -> list[dict[str, Any]]:
    """One row a check, made of strings, numbers and lists alone.

    Args:
        checks: the checks to list.

    Returns:
        Rows with code, name, severity (the worst it raises), since, needs, fix, fixes (rewrite, settings, at_places),
        limits (name, value, unit, source) and summary.
    """
    return [
        {
            "code": check.code,
            "name": check.name,
            "severity": check.severity.value,
            "since": check.since,
            "needs": check.needs.words(),
            "fix": check.fix,
            "fixes": [each.model_dump(mode="json") for each in check.fixes],
            "limits": [
                {"name": item.name, "value": item.value, "unit": item.unit, "source": item.source}
                for item in check.limits()
            ],
            "summary": check.summary(),
        }
        for check in checks
    ]


def find(code_or_name: str | int, checks: Iterable[Check] = ALL, also: Iterable[str] = ()) -> Check:
    """The check called "NP201", "201" or "missing-final-norm", in any case.

    Args:
        code_or_name: code with or without NP, or the name.
        checks: the checks to look through.
        also: other words that may have been meant, where it names no check.

    Raises:
        SettingError: if there is no such check; the message offers close ones.
    """
    checks = tuple(checks)
    asked = _key(code_or_name)
    for check in checks:
        if asked in (check.code.lower(), check.name):
            return check
    expected = "a code such as NP201 or a name such as missing-final-norm"
    raise SettingError(
        f"there is no check called {str(code_or_name)!r}", expected=expected, hint=_near(asked, checks, also)
    )


def matching(word: str, checks: Iterable[Check] = ALL) -> tuple[Check, ...]:
    """The checks that `word` names: one by its code or name, or all whose code begins with it (NP2, 2, NP); "all".

    Args:
        word: as above, in any case.
        checks: the checks to look through.

    Raises:
        SettingError: if it names none; the message offers close ones.
    """
    checks = tuple(checks)
    asked = _key(word)
    begins = "np" if asked == "all" else asked
    found = tuple(check for check in checks if check.name == asked or (asked and check.code.lower().startswith(begins)))
    if found:
        return found
    expected = "a code such as NP201, the start of codes such as NP2, or a name such as missing-final-norm"
    raise SettingError(f"no check is called {word!r}", expected=expected, hint=_near(asked, checks))


def _key(word: str | int) -> str:
    asked = str(word).strip().lower().replace("_", "-").replace(" ", "-")
    return f"np{asked}" if asked.isdigit() else asked


def _near(asked: str, checks: Iterable[Check], also: Iterable[str] = ()) -> str:
    """What to try in place of `asked`: checks whose code, name or a word of it is like it, and words of `also`."""
    known: dict[str, list[str]] = {word: [word] for word in also}
    for check in checks:
        for key in dict.fromkeys((check.code.lower(), check.name, *check.name.split("-"))):
            known.setdefault(key, []).append(f"{check.code} {check.name}")
    close = difflib.get_close_matches(asked, known, n=5, cutoff=0.65)
    names = list(dict.fromkeys(name for key in close for name in known[key]))
    return ("did you mean " + " or ".join(names[:3]) + "?") if names else "normprobe rules"


def documentation(check: Check) -> str:
    """The page of `check` in Markdown: facts, the docstring's text, and the limits with their sources."""
    needs = ", ".join(check.needs.words())
    fix = " and ".join(f"`{each.call()}`" for each in check.fixes) or "none"
    facts = f"Severity: {check.severity.value} at worst · needs: {needs} · fix: {fix} · since {check.since}"
    summary, _, body = check.page().partition("\n")
    parts = [f"# {check.code} {check.name}", summary, facts, body.strip()]
    if check.limits():
        rows = [f"| `{item.name}` | {_amount(item)} | {item.source} |" for item in check.limits()]
        parts.append("\n".join(["## Limits\n", "| limit | value | source |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _amount(item: Limit) -> str:
    return f"{item.value:g}" + (f" {item.unit}" if item.unit != Unit.ONE.value else "")


def explain(code_or_name: str | int) -> str:
    """The page of the check called `code_or_name`.

    Args:
        code_or_name: as in `find`.

    Raises:
        SettingError: if there is no such check.
    """
    return documentation(find(code_or_name))
