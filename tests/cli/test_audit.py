"""What the commands do with what the loader and the probe give: both are stood in for, the rest is real."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from normprobe.cli.commands import app
from normprobe.errors import TargetError
from normprobe.records import Anatomy, Finding, Head, ReportData, Severity, Target
from normprobe.report.report import Report

Run = Callable[..., Any]
FINDING = {"code": "NP999", "name": "test", "where": "m", "message": "m", "source": "choice"}


class Stage:
    """Stands in for the loader and the probe, and keeps what they were called with."""

    def __init__(self) -> None:
        self.severity: Severity | None = None
        self.raises: BaseException | None = None
        self.class_name = ""
        self.readable = True
        self.calls: dict[str, Any] = {}

    def resolve(self, name: str, options: Any) -> Any:
        self.calls |= {"name": name, "options": options}
        print("loader noise")
        if self.raises:
            raise self.raises
        target = Target(name=name, inputs="seeded ids", class_name=self.class_name)
        return SimpleNamespace(
            model="model",
            inputs=("ids",),
            tokenizer="tok",
            target=target,
            notes=("random weights",),
            skipped=(),
        )

    def probe(self, model: Any, inputs: Any, **more: Any) -> Report:
        self.calls |= {"model": model, "inputs": inputs, **more}
        findings = (Finding.model_validate(FINDING | {"severity": self.severity}),) if self.severity else ()
        described = Target(name="by the probe", class_name="Net", inputs="given by the caller")
        anatomy = Anatomy(head=Head(path="head")) if self.readable else Anatomy()
        facts = {"findings": findings, "notes": ("measured",), "settings": more["settings"], "anatomy": anatomy}
        return Report(ReportData(target=described, **facts))


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    import normprobe.targets

    one = Stage()
    probing = ModuleType("normprobe.probing")
    probing.probe = one.probe  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "normprobe.probing", probing)
    monkeypatch.setattr(normprobe.targets, "resolve", one.resolve)
    return one


@pytest.fixture
def run() -> Run:
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("severity", "limit", "code"),
    [
        (None, "note", 0),
        (Severity.NOTE, "error", 0),
        (Severity.NOTE, "warning", 0),
        (Severity.NOTE, "note", 1),
        (Severity.WARNING, "error", 0),
        (Severity.WARNING, "warning", 1),
        (Severity.ERROR, "error", 1),
        (Severity.ERROR, "note", 1),
        (Severity.ERROR, "never", 0),
    ],
)
def test_the_exit_code_follows_the_worst_finding(
    stage: Stage, run: Run, severity: Severity | None, limit: str, code: int
) -> None:
    stage.severity = severity
    assert run("audit", "net", "--fail-on", limit).exit_code == code


@pytest.mark.parametrize(("severity", "limit", "code"), [(None, "error", 2), (None, "never", 0), ("error", "error", 1)])
def test_a_model_of_which_nothing_could_be_read_is_no_success(
    stage: Stage, run: Run, severity: str | None, limit: str, code: int
) -> None:
    stage.readable, stage.severity = False, Severity(severity) if severity else None
    assert run("audit", "net", "--fail-on", limit).exit_code == code


def test_an_error_fails_by_default(stage: Stage, run: Run) -> None:
    stage.severity = Severity.ERROR
    assert run("audit", "net").exit_code == 1


def test_json_on_stdout_is_nothing_but_json(stage: Stage, run: Run) -> None:
    result = run("audit", "net", "--format", "json")
    assert json.loads(result.stdout)["target"]["class"] == "Net"
    assert "loader noise" in result.stderr


def test_the_loader_knows_the_target_and_the_notes_of_both_are_kept(stage: Stage, run: Run) -> None:
    document = json.loads(run("audit", "net", "--format", "json").stdout)
    assert document["target"]["name"] == "net"
    assert document["target"]["inputs"] == "seeded ids"
    assert document["notes"] == ["random weights", "measured"]
    stage.class_name = "Loaded"
    document = json.loads(run("audit", "net", "--format", "json").stdout)
    assert document["target"]["class"] == "Loaded"


def test_every_option_arrives(stage: Stage, run: Run, tmp_path: Path) -> None:
    words = (
        "audit org/net --revision v2 --config-only --device cuda:1 --dtype bfloat16 --allow-pickle "
        "--trust-remote-code --text-file t.txt --tokens 99 --batch 3 --seed 7 --backward --exact --autocast float16 "
        "--quiet"
    )
    assert run(*words.split()).exit_code == 0
    options = stage.calls["options"]
    assert (stage.calls["name"], options.revision, options.device, options.dtype) == (
        "org/net",
        "v2",
        "cuda:1",
        "bfloat16",
    )
    assert options.config_only
    assert options.allow_pickle
    assert options.trust_remote_code
    assert (options.text, options.text_file, options.tokens, options.batch, options.seed) == (
        None,
        "t.txt",
        99,
        3,
        7,
    )
    assert (stage.calls["level"], stage.calls["autocast"], stage.calls["seed"]) == ("backward", "float16", 7)
    assert stage.calls["exact"]
    assert (stage.calls["model"], stage.calls["inputs"], stage.calls["tokenizer"]) == (
        "model",
        ("ids",),
        "tok",
    )


def test_meta_arrives_and_excludes_backward(stage: Stage, run: Run) -> None:
    assert run("audit", "net", "--meta").exit_code == 0
    assert stage.calls["options"].meta
    result = run("audit", "net", "--meta", "--backward")
    assert result.exit_code == 2
    assert "--backward needs weights" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--meta --deep", "--deep needs weights"),
        ("--meta --measures gain", "--measures needs weights"),
        ("--level structure --exact", "--exact needs a signal"),
        ("--lr 0.1", "add --backward"),
    ],
)
def test_options_without_use_are_refused_in_the_words_of_the_command_line(
    stage: Stage, run: Run, words: str, said: str
) -> None:
    result = run("audit", "net", *words.split())
    assert (result.exit_code, stage.calls) == (2, {})
    assert said in result.stderr


@pytest.mark.parametrize("name", ["", "  "])
def test_a_target_without_a_name_is_an_error(stage: Stage, run: Run, name: str) -> None:
    result = run("audit", name)
    assert (result.exit_code, stage.calls) == (2, {})
    assert "no target is named" in result.stderr


def test_a_suffix_that_names_no_format_is_said_before_the_work(stage: Stage, run: Run, tmp_path: Path) -> None:
    result = run("audit", "net", "--out", str(tmp_path / "r.pdf"))
    assert (result.exit_code, stage.calls) == (2, {})
    assert "expected: .json, .html, .htm, .md, .txt" in result.stderr
    assert run("audit", "net", "--out", str(tmp_path / "r.pdf"), "--format", "html").exit_code == 0


def test_debug_is_offered_where_there_is_a_cause(stage: Stage, run: Run) -> None:
    stage.raises = TargetError("no")
    assert "--debug" not in run("audit", "net").stderr
    stage.raises.__cause__ = ValueError("deep")
    assert "--debug" in run("audit", "net").stderr
    assert "run again" not in run("audit", "net", "--debug").stderr


def test_nothing_is_asked_for_by_default(stage: Stage, run: Run) -> None:
    run("audit", "net")
    from normprobe.targets import TargetOptions

    assert stage.calls["options"] == TargetOptions()
    assert (stage.calls["level"], stage.calls["autocast"], stage.calls["exact"]) == ("forward", None, False)
    assert stage.calls["progress"] is None  # standard error is no terminal here


def test_structure_level_arrives_and_excludes_backward(stage: Stage, run: Run) -> None:
    run("audit", "net", "--level", "structure")
    assert stage.calls["level"] == "structure"
    result = run("audit", "net", "--level", "structure", "--backward")
    assert result.exit_code == 2
    assert "exclude each other" in result.stderr


@pytest.mark.parametrize(
    ("file", "format", "start"),
    [
        ("r.json", None, "{"),
        ("r.html", None, "<!DOCTYPE html>"),
        ("r.md", None, "# net"),
        ("r.txt", None, "✗ 1 error"),
        ("r", None, "✗ 1 error"),
        ("r.txt", "json", "{"),
    ],
)
def test_out_names_file_and_format(
    stage: Stage, run: Run, tmp_path: Path, file: str, format: str | None, start: str
) -> None:
    stage.severity = Severity.ERROR
    chosen = ["--format", format] if format else []
    result = run("audit", "net", "--out", str(tmp_path / file), *chosen)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "1 error, 0 warnings, 0 notes" in result.stderr
    assert (tmp_path / file).read_text(encoding="utf-8").startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_an_impossible_out_is_said_before_the_work(stage: Stage, run: Run, tmp_path: Path) -> None:
    result = run("audit", "net", "--out", str(tmp_path / "no" / "r.json"))
    assert result.exit_code == 2
    assert "expected: an existing folder" in result.stderr
    assert stage.calls == {}


def test_an_error_teaches_and_shows_no_traceback(stage: Stage, run: Run) -> None:
    stage.raises = TargetError("no such model `net`", expected="a hub id", found="nothing", hint="gpt2")
    result = run("audit", "net")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.endswith("error: no such model `net`\n  expected: a hub id\n  found: nothing\n  try: gpt2\n")
    assert "Traceback" not in result.stderr


def test_debug_shows_where_it_came_from(stage: Stage, run: Run) -> None:
    stage.raises = TargetError("no such model")
    result = run("audit", "net", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "in resolve" in result.stderr
    assert "error: no such model" in result.stderr


def test_an_unexpected_error_is_one_line(stage: Stage, run: Run) -> None:
    stage.raises = RuntimeError("CUDA [bold]error[/]\nsecond line")
    result = run("audit", "net")
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr
    told = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert told == ["error: RuntimeError: CUDA [bold]error[/] second line (run again with --debug to see where)"]


@pytest.mark.parametrize("code", [0, 3, "bye"])
def test_a_target_that_ends_the_process_is_no_clean_audit(stage: Stage, run: Run, code: int | str) -> None:
    stage.raises = SystemExit(code)
    result = run("audit", "net")
    assert result.exit_code == 2
    assert f"ended the process with {code!r}" in result.stderr


def test_an_interrupt_exits_with_130(stage: Stage, run: Run) -> None:
    stage.raises = KeyboardInterrupt()
    result = run("audit", "net")
    assert result.exit_code == 130
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["audit"],
        ["audit", "net", "--format", "pdf"],
        ["audit", "net", "--nonsense"],
        ["audit", "net", "--tokens", "many"],
        ["audit", "net", "--tokens", "0"],
        ["audit", "net", "--level", "backward"],
        ["nonsense"],
        ["explain"],
    ],
)
def test_usage_errors_exit_with_2(stage: Stage, run: Run, words: list[str]) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr


def test_the_demo_exits_with_0_and_says_why(stage: Stage, run: Run) -> None:
    stage.severity = Severity.ERROR
    result = run("demo")
    assert result.exit_code == 0
    assert stage.calls["name"] == "normprobe.demo.model:build"
    assert "NP999" in result.stdout
    assert "exit code 0 all the same" in result.stderr
    assert "exits with 1" in result.stderr
