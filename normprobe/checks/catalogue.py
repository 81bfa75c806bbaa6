"""All checks by name: run them, list them, look one up, print its page."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from normprobe.checks import attention, batchnorm, gradients, norms, placement, residual
from normprobe.checks.base import Check, Limit, Unit
from normprobe.errors import SettingError
from normprobe.records import Finding, ReportData, Skipped

ALL: tuple[Check, ...] = (
    *norms.ALL,
    *placement.ALL,
    *residual.ALL,
    *attention.ALL,
    *gradients.ALL,
    *batchnorm.ALL,
)


def run(data: ReportData, checks: Iterable[Check] = ALL) -> tuple[tuple[Finding, ...], tuple[Skipped, ...]]:
    """Judge `data` by every check.

    Args:
        data: target, level, anatomy and measurements; its own findings and skips are not read.
        checks: the checks to run.

    Returns:
        The findings by severity, code and place, those that differ only in their place gathered into one with
        `places`; and what was skipped, in the order of the checks.
    """
    findings: list[Finding] = []
    skipped: list[Skipped] = []
    for check in checks:
        for outcome in check.run(data):
            (findings if isinstance(outcome, Finding) else skipped).append(outcome)  # type: ignore[arg-type]
    ranked = sorted(_gathered(findings), key=lambda f: (f.severity.rank, f.code, _natural(f.where)))
    return tuple(ranked), tuple(dict.fromkeys(skipped))


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
        Rows with code, name, severity (the worst it raises), since, needs, fix, limits (name, value, unit,
        source) and summary.
    """
    return [
        {
            "code": check.code,
            "name": check.name,
            "severity": check.severity.value,
            "since": check.since,
            "needs": check.needs.words(),
            "fix": check.fix,
            "limits": [
                {"name": item.name, "value": item.value, "unit": item.unit, "source": item.source}
                for item in check.limits()
            ],
            "summary": check.summary(),
        }
        for check in checks
    ]


def find(code_or_name: str | int, checks: Iterable[Check] = ALL) -> Check:
    """The check called "NP201", "201" or "missing-final-norm", in any case.

    Args:
        code_or_name: code with or without NP, or the name.
        checks: the checks to look through.

    Raises:
        SettingError: if there is no such check; the message offers close ones.
    """
    known = {key: check for check in checks for key in (check.code.lower(), check.name)}
    asked = str(code_or_name).strip().lower().replace("_", "-").replace(" ", "-")
    asked = f"np{asked}" if asked.isdigit() else asked
    if asked in known:
        return known[asked]
    close = [known[key] for key in difflib.get_close_matches(asked, known, n=5, cutoff=0.5)]
    names = list(dict.fromkeys(f"{check.code} {check.name}" for check in close))
    raise SettingError(
        f"there is no check called {str(code_or_name)!r}",
        expected="a code such as NP201 or a name such as missing-final-norm",
        hint=("did you mean " + " or ".join(names[:3]) + "?") if names else "normprobe rules",
    )


def documentation(check: Check) -> str:
    """The page of `check` in Markdown: facts, the docstring's text, and the limits with their sources."""
    needs = ", ".join(check.needs.words())
    fix = f"`{check.fix}`" if check.fix else "none yet"
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
