"""What a file and the command line say to judge by, together; the loader and the probe are the real ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from normprobe.checks import ALL
from normprobe.cli import options as opt
from normprobe.cli.commands import app
from normprobe.cli.request import Request
from normprobe.errors import SettingError
from normprobe.records import Settings

DEMO = "normprobe.demo.model:build"  # its final norm is missing: NP201, an error
Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def asked(folder: Path, text: str, **more: Any) -> Settings:
    """The settings that a request has beside a file with `text`."""
    (folder / "n.toml").write_text(text, encoding="utf-8")
    return Request("net", config=folder / "n.toml", **more).settings().model_copy(update={"source": ""})


def test_the_command_line_goes_over_the_file(tmp_path: Path) -> None:
    text = 'select = ["NP1", "NP2"]\nignore = ["NP101"]\nfail-on = "note"\n[limits.NP401]\nmax_logit = 60\n'
    file = asked(tmp_path, text)
    assert (file.select, file.ignore, file.fail_on) == (("NP1", "NP2"), ("NP101",), "note")
    more = asked(tmp_path, text, ignore=["NP102, NP108"])
    assert (more.select, more.ignore) == (("NP1", "NP2"), ("NP101", "NP102", "NP108"))
    other = asked(tmp_path, text, select=["101,NP4"], fail_on=opt.FailChoice.WARNING)
    assert (other.select, other.ignore, other.fail_on) == (("101", "NP4"), (), "warning")
    assert asked(tmp_path, text, select=["NP4"], ignore=["NP401"]).ignore == ("NP401",)
    assert file.limits == more.limits == other.limits == {"NP401": {"max_logit": 60.0}}


def test_without_a_file_and_options_all_is_as_it_was(run: Run) -> None:
    assert Request("net").settings() == Settings()
    Path("normprobe.toml").write_text("ignore = ['NP201']")
    assert Request("net").settings().ignore == ("NP201",)
    assert Request("net", isolated=True).settings() == Settings()
    with pytest.raises(SettingError, match="--config and --isolated exclude each other"):
        Request("net", isolated=True, config=Path("normprobe.toml")).settings()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--select NP99", "error: --select: no check is called 'NP99'"),
        ("--select ,", "error: --select: no check is named"),
        ("--ignore missing-fnal-norm", "did you mean NP201 missing-final-norm"),
        ("--config none.toml", "cannot read the settings in none.toml"),
        ("--fail-on fatal", "--fail-on"),
    ],
)
def test_what_does_not_exist_is_refused_before_the_work(run: Run, words: str, said: str) -> None:
    result = run("audit", "no/such/model.py:build", *words.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def test_a_broken_file_is_no_clean_run(run: Run) -> None:
    Path("normprobe.toml").write_text("fail-on = 'fatal'")
    result = run("audit", DEMO)
    assert result.exit_code == 2
    assert "`fail-on` in normprobe.toml" in result.stderr


def test_what_is_ignored_neither_fails_nor_disappears(run: Run) -> None:
    Path("normprobe.toml").write_text("ignore = ['missing-final-norm']\nselect = ['NP201', 'NP208']")
    result = run("audit", DEMO, "--level", "structure", "--format", "json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert (document["findings"], document["checks"]) == ([], ["NP208"])
    assert document["settings"]["source"] == "normprobe.toml"
    assert {one["code"] for one in document["ignored"]} == {check.code for check in ALL} - {"NP208"}
    told = " ".join(run("audit", DEMO, "--level", "structure").stdout.split())
    assert f"{len(ALL) - 1} checks left out · settings of normprobe.toml" in told
    assert "Left out by the settings" in told
    assert "NP201 missing-final-norm: in ignore" in told
    assert run("audit", DEMO, "--level", "structure", "--isolated").exit_code == 1
    assert run("audit", DEMO, "--level", "structure", "--select", "NP2").exit_code == 1


def test_the_file_says_what_fails_and_an_option_over_it(run: Run) -> None:
    Path("normprobe.toml").write_text("fail-on = 'never'")
    assert run("audit", DEMO, "--level", "structure").exit_code == 0
    assert run("audit", DEMO, "--level", "structure", "--fail-on", "error").exit_code == 1


def test_the_demo_is_the_same_whatever_file_is_there(run: Run) -> None:
    Path("normprobe.toml").write_text("ignore = ['NP201']")
    told = run("demo").stdout
    assert "✗ 1 error" in told
    assert "Left out" not in told


def test_a_baseline_is_written_and_then_only_new_findings_fail(run: Run) -> None:
    quick = ("audit", DEMO, "--level", "structure", "--select", "NP201,NP208")
    written = run(*quick, "--write-baseline", "known.json")
    assert written.exit_code == 0
    assert "nothing new, 1 finding known" in written.stdout
    (entry,) = json.loads(Path("known.json").read_text())["findings"]
    assert (entry["code"], entry["where"], entry["severity"]) == ("NP201", "blocks", "error")
    assert run(*quick).exit_code == 1
    assert run(*quick, "--baseline", "known.json", "--fail-on", "note").exit_code == 0
    kept = Path("known.json").read_text()
    Path("empty.json").write_text('{"schema": "normprobe-baseline/1", "findings": []}')
    assert run(*quick, "--baseline", "empty.json", "--write-baseline", "known.json").exit_code == 1
    assert Path("known.json").read_text() == kept


def test_a_run_by_a_few_checks_takes_nothing_from_a_baseline(run: Run) -> None:
    known = '{"code": "NP401", "name": "unresolved-logits", "severity": "warning", "where": "blocks.0"}'
    model = json.loads(run("audit", DEMO, "--level", "structure", "--format", "json").stdout)["target"]["class"]
    Path("known.json").write_text(f'{{"schema": "normprobe-baseline/1", "model": "{model}", "findings": [{known}]}}')
    run("audit", DEMO, "--level", "structure", "--select", "NP2", "--write-baseline", "known.json")
    assert [one["code"] for one in json.loads(Path("known.json").read_text())["findings"]] == ["NP201", "NP401"]


def test_an_option_given_twice_counts_twice(run: Run) -> None:
    quick = ("audit", DEMO, "--level", "structure", "--format", "json")
    both = run(*quick, "--select", "NP201", "--select", "NP208,NP202", "--ignore", "NP202", "--ignore", "NP208")
    assert json.loads(both.stdout)["checks"] == ["NP201"]
    told = run("audit", DEMO, "--measures", "cost", "--measures", "nonsense")
    assert (told.exit_code, "nonsense" in told.stderr) == (2, True)


@pytest.mark.parametrize("option", ["--baseline", "--write-baseline"])
def test_a_report_does_not_take_the_place_of_a_baseline(run: Run, option: str) -> None:
    known = '{"schema": "normprobe-baseline/1", "findings": []}'
    Path("known.json").write_text(known)
    result = run("audit", DEMO, option, "known.json", "--out", "./known.json")
    assert (result.exit_code, Path("known.json").read_text()) == (2, known)
    assert f"--out and {option} name one file" in result.stderr


def test_an_audit_by_no_check_is_refused(run: Run) -> None:
    result = run("audit", DEMO, "--select", "NP2", "--ignore", "NP2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no check is left" in result.stderr
    assert "select: NP2; ignore: NP2" in result.stderr
    swept = run("audit", DEMO, "--select", "width-dependent")
    assert (swept.exit_code, swept.stdout) == (2, "")
    assert "NP607 judges a sweep: normprobe sweep TARGET --widths SIZES" in swept.stderr


@pytest.mark.parametrize("words", ["--baseline none.json", "--write-baseline no/b.json"])
def test_a_baseline_that_cannot_be_is_told_before_the_work(run: Run, words: str) -> None:
    result = run("audit", "no/such/model.py:build", *words.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert words.split()[1] in result.stderr
