"""A comparison as JUnit XML: a test case for each subject that was compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args
from xml.etree.ElementTree import Element, SubElement

from normprobe.records.diff import DiffData, Difference, Subject
from normprobe.report.diffs import content
from normprobe.report.junit import legal, properties, written

_VERDICT = "verdict"


def document(data: DiffData) -> str:
    """One test suite, with a newline at the end.

    A subject fails where it has a difference at or above `fail_on` of the document; milder ones are in its output. The
    last case is the verdict: an error where too little was compared to call the models the same.
    """
    suites = Element("testsuites")
    suite = SubElement(suites, "testsuite", name=legal(f"normprobe diff: {content.title(data)}"))
    properties(suite, _facts(data))
    cases = [_case(suite, subject, data) for subject in get_args(Subject) if subject in _compared(data)]
    cases.append(_verdict(suite, data, any(case.find("failure") is not None for case in cases)))
    for name, kind in (("failures", "failure"), ("errors", "error")):
        suite.set(name, str(sum(case.find(kind) is not None for case in cases)))
    suite.set("tests", str(len(cases)))
    if data.skipped:
        told = "\n".join(f"not compared: {one.what}: {one.why}" for one in data.skipped)
        SubElement(suite, "system-out").text = legal(told)
    return written(suites)


def _facts(data: DiffData) -> Iterator[tuple[str, str]]:
    for side, target in (("A", data.a), ("B", data.b)):
        yield side, " · ".join((content.name_of(target), *content.model_facts(target)))
    yield "inputs", data.inputs
    yield "compared", ", ".join(content.compared(data))
    yield from (("note", note) for note in data.notes)


def _compared(data: DiffData) -> set[str]:
    parts = {"weights": data.weights, "signal": data.signal, "output": data.output}
    found = {name for name, part in parts.items() if part}
    return found | {one.subject for one in data.matched} | {one.subject for one in data.differences}


def _case(suite: Element, subject: str, data: DiffData) -> Element:
    case = SubElement(suite, "testcase", classname="normprobe.diff", name=subject)
    found = [one for one in data.differences if one.subject == subject]
    for one in found:
        if one.fails(data.fail_on):
            message = legal(f"{content.heading(one)}: {one.message}")
            SubElement(case, "failure", type=one.severity.value, message=message).text = legal(_text(one))
    milder = [_text(one) for one in found if not one.fails(data.fail_on)]
    if milder:
        SubElement(case, "system-out").text = legal("\n".join(milder))
    return case


def _verdict(suite: Element, data: DiffData, failed: bool) -> Element:
    """A success, but where nothing failed for want of a comparison."""
    case = SubElement(suite, "testcase", classname="normprobe.diff", name=_VERDICT)
    told = legal(content.verdict_text(data))
    if not data.complete and not failed and data.fail_on != "never":
        SubElement(case, "error", type="incomplete", message=told)
    else:
        SubElement(case, "system-out").text = told
    return case


def _text(one: Difference) -> str:
    places = "\n".join(f"  {a or '(none)'} | {b or '(none)'}" for a, b in one.where)
    return f"{one.severity.value} {content.heading(one)}: {one.message}\n{places}"
