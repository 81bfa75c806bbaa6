"""Running, listing and finding checks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from normprobe.checks import ALL, SweepCheck, documentation, explain, find, rules, run
from normprobe.checks.catalogue import ranked
from normprobe.errors import SettingError
from normprobe.records import Finding, ReportData, Severity
from tests.checks import builders as b


def test_findings_come_by_severity_code_and_place() -> None:
    outside = {"eps_placement": "outside_sqrt"}
    blocks = [b.norm(f"blocks.{i}.norm", eps=1e-5 + 1e-9 * i, **outside) for i in (10, 2)]
    misnamed = b.norm("a", class_name="LayerNorm")
    data = b.document(norms=(*blocks, misnamed), streams=(b.stream(final_norm=None),))
    found, _ = run(data)
    assert [(f.severity.value, f.code, f.where) for f in found] == [
        ("error", "NP201", "blocks"),
        ("warning", "NP101", "blocks.2.norm"),
        ("warning", "NP101", "blocks.10.norm"),
        ("note", "NP108", "a"),
    ]


def test_equal_findings_are_gathered_and_others_are_not() -> None:
    norms = [b.norm(f"blocks.{i}.norm", eps_placement="outside_sqrt", eps=e) for i, e in enumerate([1e-5, 1e-6, 1e-5])]
    found, _ = run(b.document(norms=tuple(norms)), [find("NP101")])
    assert [(f.where, f.places, f.value) for f in found] == [
        ("blocks.0.norm", ("blocks.0.norm", "blocks.2.norm"), 1e-5),
        ("blocks.1.norm", (), 1e-6),
    ]


def test_findings_of_equal_nan_are_gathered() -> None:
    nan = float("nan")
    broken = [b.residual(massive=(b.massive(nan),), stream=name) for name in ("a", "b")]
    found, _ = run(b.document(residual=tuple(broken)), checks=[find("NP303")])
    assert [len(f.places) for f in found] == [1]


def test_what_was_skipped_is_said_once() -> None:
    found, skipped = run(ReportData(), checks=[*ALL, *ALL])
    assert found == ()
    assert len({row.what for row in skipped}) == len(skipped) == sum(not isinstance(c, SweepCheck) for c in ALL)


@pytest.mark.parametrize("asked", ["NP201", "np201", "201", 201, " missing-final-norm ", "Missing_Final_Norm"])
def test_a_check_is_found_by_code_and_name(asked: str | int) -> None:
    assert find(asked).code == "NP201"


@pytest.mark.parametrize(
    ("asked", "offer"),
    [
        ("missing-norm", "did you mean NP201 missing-final-norm"),
        ("NP20", r"did you mean NP2\d\d"),
        ("zzz", "try: normprobe rules"),
    ],
)
def test_an_unknown_check_is_answered_with_close_ones(asked: str, offer: str) -> None:
    with pytest.raises(SettingError, match=rf"(?s)no check called '{asked}'.*({offer})"):
        find(asked)


def test_rules_are_plain_data_in_the_order_of_the_checks() -> None:
    rows = rules()
    assert json.loads(json.dumps(rows)) == rows
    assert [row["code"] for row in rows] == sorted(check.code for check in ALL)
    (row,) = [row for row in rows if row["code"] == "NP401"]
    assert set(row) == {"code", "name", "severity", "since", "needs", "fix", "fixes", "limits", "summary"}
    assert (row["fix"], row["fixes"]) == ("QKClip", [{"rewrite": "QKClip", "settings": {}, "at_places": False}])
    assert row["limits"] == [
        {
            "name": "max_logit",
            "value": 50.0,
            "unit": "logit",
            "source": "Gemma Team 2024 (Gemma 2), sec. 2: the cap on attention logits",
        }
    ]


def test_a_page_has_its_facts_its_text_and_its_limits() -> None:
    page = explain(401)
    assert page == documentation(find("NP401"))
    assert "Severity: warning at worst · needs: structure, forward · fix: `QKClip()` · since 0.1.0" in page
    assert "| `max_logit` | 50 logit | Gemma Team 2024" in page
    assert "| `max_abs` | 32752 | IEEE 754" in explain(304)
    assert "## Limits" not in explain("NP201")
    assert "fix: `UpcastNorms()`" in explain("NP106")
    assert 'fix: `Initialise(scheme="gpt2", only="writers")` · since' in explain("NP602")
    assert "fix: none · since" in explain("NP204")


def test_the_checks_load_without_torch(root: Path) -> None:
    code = "import sys, normprobe.checks as c; c.rules(); c.explain(201); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "False"


def told(*codes: str, severity: Severity = Severity.WARNING) -> list[Finding]:
    return [find(code).finding("a", "m", source="s", severity=severity) for code in codes]


@pytest.mark.parametrize(
    ("given", "ordered"),
    [
        (("NP103", "NP104", "NP106"), ["NP104", "NP103", "NP106"]),
        (("NP504", "NP606", "NP705"), ["NP705", "NP504", "NP606"]),
        (("NP305", "NP402", "NP605"), ["NP605", "NP305", "NP402"]),
        (("NP402", "NP404", "NP401"), ["NP404", "NP401", "NP402"]),
        (("NP305", "NP504", "NP801"), ["NP801", "NP305", "NP504"]),
        (("NP305", "NP504", "NP501"), ["NP305", "NP501", "NP504"]),
    ],
)
def test_what_explains_others_comes_before_them(given: tuple[str, ...], ordered: list[str]) -> None:
    assert [f.code for f in ranked(told(*given))] == ordered
    assert [f.code for f in ranked(told(*given[::-1]))] == ordered


def test_an_explanation_of_another_severity_keeps_its_place() -> None:
    findings = [*told("NP705", severity=Severity.WARNING), *told("NP504", severity=Severity.ERROR)]
    assert [f.code for f in ranked(findings)] == ["NP504", "NP705"]


def test_no_check_explains_itself_by_way_of_others() -> None:
    explains = {check.code: set(check.explains) for check in ALL}
    assert all(found <= set(explains) for found in explains.values())
    for code, found in explains.items():
        reached: set[str] = set()
        while more := found - reached:
            reached |= more
            found = set[str]().union(*(explains[one] for one in more))
        assert code not in reached
