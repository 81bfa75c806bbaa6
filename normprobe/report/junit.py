"""The report as JUnit XML, the form that CI systems show as test results: a test case for each check that ran."""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from normprobe.records import Finding, ReportData, Skipped
from normprobe.report.groups import left_out
from normprobe.report.lint import check_of, codes_that_ran, sentence, skips_by_code, title

# What XML 1.0 cannot hold, not even as a character reference (W3C, Extensible Markup Language 1.0, sec. 2.2).
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def document(data: ReportData) -> str:
    """One test suite, with a newline at the end.

    A check fails where it has a finding that fails the run by the settings of the report; other findings are in its
    output. It counts as skipped where it has none and could not look at something.
    """
    suites = Element("testsuites")
    suite = SubElement(suites, "testsuite", name=legal(f"normprobe: {_name(data)}"), errors="0")
    _properties(suite, data)
    skips = skips_by_code(data)
    cases = [_case(suite, code, data, skips.get(code, [])) for code in codes_that_ran(data)]
    counts = {kind: sum(case.find(kind) is not None for case in cases) for kind in ("failure", "skipped")}
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(counts["failure"]))
    suite.set("skipped", str(counts["skipped"]))
    if others := skips.get("", []):
        SubElement(suite, "system-out").text = legal("\n".join(f"not looked at: {o.what}: {o.why}" for o in others))
    return written(suites)


def written(suites: Element) -> str:
    """A document of test suites, with a newline at the end."""
    indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(suites, encoding="unicode") + "\n"


def _name(data: ReportData) -> str:
    return data.target.name or data.target.class_name or "model"


def _properties(suite: Element, data: ReportData) -> None:
    """What was probed, the notes, and what the settings left out."""
    rows = [(key, str(value)) for key, value in data.target.model_dump(by_alias=True).items() if value]
    rows += [("note", note) for note in data.notes]
    rows += [("left out", f"{what}: {why}") for what, why in left_out(data)]
    properties(suite, rows)


def properties(suite: Element, rows: Iterable[tuple[str, str]]) -> None:
    """Names and values that belong to a whole suite."""
    held = SubElement(suite, "properties")
    for name, value in rows:
        SubElement(held, "property", name=legal(name), value=legal(value))


def _case(suite: Element, code: str, data: ReportData, skips: list[Skipped]) -> Element:
    found = [finding for finding in data.findings if finding.code == code]
    check = check_of(code)
    subject = type(check).__module__.rpartition(".")[0] if check else "normprobe.checks"
    case = SubElement(suite, "testcase", classname=subject, name=legal(title(code, data.findings)))
    failing = [finding for finding in found if finding.fails(data.settings.fail_on)]
    for finding in failing:
        kind, text = finding.severity.value, sentence(finding)
        SubElement(case, "failure", type=kind, message=legal(f"{finding.where}: {text}")).text = legal(_text(finding))
    if skips and not found:
        SubElement(case, "skipped", message=legal("; ".join(f"{one.what}: {one.why}" for one in skips)))
    output = [_text(finding) for finding in found if finding not in failing]
    output += [f"not looked at: {one.what}: {one.why}" for one in skips if found]
    if output:
        SubElement(case, "system-out").text = legal("\n".join(output))
    return case


def _text(finding: Finding) -> str:
    places = "\n".join(f"  {place}" for place in finding.every_place)
    return f"{finding.severity.value} {finding.code} {finding.name}: {sentence(finding)}\n{places}"


def legal(text: str) -> str:
    """`text` with every character that XML cannot hold written as its code."""
    return _ILLEGAL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
