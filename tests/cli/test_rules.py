from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from typer.testing import CliRunner

import normprobe
from normprobe import checks
from normprobe.cli.commands import app
from normprobe.measures.recipes import ORTHOGONAL, RECIPES
from normprobe.records.extras import EXTRA_NAMES
from normprobe.rewrites import ALL as REWRITES
from normprobe.rewrites import Rewrite, ToRMSNorm
from normprobe.rewrites.initialise.schemes import SCHEMES
from normprobe.version import __version__


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_rules_lists_every_check() -> None:
    result = run("rules")
    assert result.exit_code == 0
    for check in checks.ALL:
        assert check.code in result.stdout
        assert check.name in result.stdout


def test_rules_as_json_is_nothing_but_json() -> None:
    listed = json.loads(run("rules", "--format", "json").stdout)
    assert [rule["code"] for rule in listed] == [check.code for check in checks.ALL]


@pytest.mark.parametrize("word", ["NP201", "np201", "201", "missing-final-norm"])
def test_explain_takes_code_number_and_name(word: str) -> None:
    result = run("explain", word)
    assert result.exit_code == 0
    assert "NP201 missing-final-norm" in result.stdout
    assert "Why it matters" in result.stdout
    assert result.stdout.endswith("Also in docs/checks/NP201.md\n")


def test_explain_measures_tells_the_passes_of_each() -> None:
    result = run("explain", "measures")
    words = " ".join(result.stdout.split())
    assert result.exit_code == 0
    for name in EXTRA_NAMES:
        assert f"\n{name} " in result.stdout
    assert "5 forwards, 5 backwards" in words
    assert "`normprobe explain measures`" in " ".join(run("audit", "--help").stdout.replace("│", " ").split())


@pytest.mark.parametrize("name", EXTRA_NAMES)
def test_explain_tells_of_one_measure(name: str) -> None:
    result = run("explain", name)
    words = " ".join(result.stdout.split())
    assert result.exit_code == 0
    assert f"\n{name} " in result.stdout
    assert f"--measures {name}" in words
    assert not any(f"\n{other} " in result.stdout for other in EXTRA_NAMES if other != name)


def test_explain_recipes_tells_formula_and_source_of_each_that_a_report_may_name() -> None:
    result = run("explain", "recipes")
    assert result.exit_code == 0
    for recipe in (*RECIPES, *ORTHOGONAL):
        assert f"\n{recipe.name} " in result.stdout
    assert "0.02 / √N" in result.stdout
    assert "Radford et al. 2019, sec. 2.3" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("word", "meant"),
    [("growht", "NP301 growth-above-sqrt"), ("jacobain", "jacobian"), ("recipe", "recipes"), ("measure", "measures")],
)
def test_a_slip_is_answered_with_what_may_be_meant(word: str, meant: str) -> None:
    result = run("explain", word)
    assert result.exit_code == 2
    assert meant in " ".join(result.stderr.split())


@pytest.mark.parametrize("word", ["NP999", "missing-final-nrm", "", "[bold]"])
def test_an_unknown_check_is_refused(word: str) -> None:
    result = run("explain", word)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    if word == "NP999":  # codes that are spelt alike have nothing in common
        assert "did you mean" not in result.stderr
    if word == "missing-final-nrm":
        assert "NP201 missing-final-norm" in result.stderr


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"normprobe {__version__}\n")


def test_rules_name_the_rewrites_that_mend() -> None:
    said = " ".join(run("rules").stdout.split())
    for check in checks.ALL:
        names = " and ".join(fix.rewrite for fix in check.fixes)
        assert not names or f"Mended by {names}." in said
    assert said.count("Mended by") == sum(bool(check.fixes) for check in checks.ALL)


@pytest.mark.parametrize("kind", REWRITES, ids=lambda kind: kind.name)
def test_explain_tells_of_a_rewrite_by_its_docstring(kind: type[Rewrite]) -> None:
    result = run("explain", kind.name.lower())
    assert result.exit_code == 0
    words = "".join(result.stdout.split())
    assert "".join((kind.__doc__ or "").split("\n")[0].split()).replace("`", "").replace("*", "")[:60] in words
    assert f"[normprobe.{kind.name}(" in result.stdout
    assert "Attributes:" not in result.stdout


@pytest.mark.parametrize("name", ["decay_groups", "mend", "AdaptiveClipping", "parameter_groups", "plan"])
def test_explain_tells_of_what_is_offered_in_python(name: str) -> None:
    result = run("explain", name.upper())
    assert result.exit_code == 0
    doc = inspect.getdoc(getattr(normprobe, name)) or ""
    words = "".join(result.stdout.split())
    assert "".join(doc.split("\n")[0].replace("`", "").split())[:60] in words
    assert "•model:" in words
    assert all(title not in result.stdout for title in ("Args:", "Raises:", "Returns:"))
    assert f"normprobe.{name}, in Python" in result.stdout


def test_explain_answers_a_slip_in_any_name() -> None:
    assert "did you mean decay_groups?" in run("explain", "decay_group").output


def test_explain_answers_a_slip_in_the_name_of_a_rewrite() -> None:
    done = run("explain", "SetEp")
    assert done.exit_code == 2
    assert "did you mean SetEps?" in done.output


def test_explain_lists_all_rewrites_in_a_line_each() -> None:
    words = run("explain", "rewrites").stdout
    assert [kind.name for kind in REWRITES if f"\n{kind.name} " not in words] == []
    assert "".join((ToRMSNorm.__doc__ or "").split("\n")[0].split()) in "".join(words.split()).replace("exact", "")
    (row,) = [line for line in words.splitlines() if line.startswith("QKClip ")]
    assert row.rstrip().endswith("calibrated")


def test_explain_tells_formula_and_source_of_each_scheme_and_a_pattern_as_it_is_written() -> None:
    done = CliRunner().invoke(app, ["explain", "Initialise"], env={"COLUMNS": "200"})
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert [s.name for s in SCHEMES.values() if f"{s.name} {s.about} {s.source}" not in lines] == []
    assert '"h.*.mlp.*"' in done.stdout
