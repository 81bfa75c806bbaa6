"""What the forms for CI systems share: rules, findings as sentences, skips by check, and the file of the target."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from normprobe.checks import ALL, Check
from normprobe.records import Finding, ReportData, Skipped, Target
from normprobe.report.groups import FindingGroup

_CHECKS = {check.code: check for check in ALL}
_NAMED_FILES = (".json", ".gguf")


def check_of(code: str) -> Check | None:
    """The check with this code; None for one of another version of normprobe."""
    return _CHECKS.get(code)


def codes_that_ran(data: ReportData) -> list[str]:
    """The codes of the checks that ran; of a report that does not say which, those that said something."""
    said = [finding.code for finding in data.findings] + list(skips_by_code(data))
    return list(dict.fromkeys((*data.checks, *sorted(code for code in said if code))))


def title(code: str, findings: Iterable[Finding] = ()) -> str:
    """`NP201 missing-final-norm`; the code alone where nothing names the check."""
    check = check_of(code)
    name = check.name if check else next((one.name for one in findings if one.code == code), "")
    return f"{code} {name}".rstrip()


def sentence(finding: Finding) -> str:
    """What was found, what was measured, the limit and its source, on one line."""
    evidence = " · ".join(FindingGroup(finding, (finding,)).evidence)
    return " ".join(f"{finding.message} ({evidence})".split())


def fingerprint(finding: Finding) -> str:
    """Names a finding by its check, its places and what it is about there, whatever was measured; 32 hexadecimal
    digits."""
    return digest(finding.code, finding.about, finding.where, *sorted(finding.every_place))


def digest(*words: str) -> str:
    """32 hexadecimal digits that name `words`."""
    return hashlib.sha256("\0".join(words).encode("utf-8")).hexdigest()[:32]


def skips_by_code(data: ReportData) -> dict[str, list[Skipped]]:
    """What was skipped by the code of the check that could not look; under "" what no check asked for."""
    found: dict[str, list[Skipped]] = {}
    for one in data.skipped:
        code = one.what.partition(" ")[0]
        found.setdefault(code if code in data.checks or code in _CHECKS else "", []).append(one)
    return found


def source_file(target: Target) -> str | None:
    """The file that the name of the target begins with, in the folder of the run or below; None where it names none."""
    name = target.name.replace("\\", "/").removeprefix("./")
    python, colon, _ = name.partition(".py:")
    if colon:
        name = f"{python}.py"
    elif not name.endswith(_NAMED_FILES):
        return None
    inside = not name.startswith(("/", "~")) and ".." not in name.split("/") and ":" not in name
    return name if inside else None
