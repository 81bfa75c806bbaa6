"""`normprobe patch --plan` says what the run would: of findings and architectures too, and on which inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_patch import Run, run, source
from tests.patching.checkpoints import contents, tokenizer

__all__ = ["run", "source"]  # the fixtures

QWEN3 = ("--eps", "1e-5", "--qk-norm", "calibrated:shared", "--as", "qwen3")


def steps(told: dict[str, Any]) -> list[tuple[str, int]]:
    return [(each["rewrite"]["rewrite"], len(each["sites"])) for each in told["steps"]]


def test_another_architecture_is_foretold(run: Run, source: Path, tmp_path: Path) -> None:
    before = contents(source.parent)
    planned = run(source, "--plan", *QWEN3)
    data = json.loads(run(source, "--plan", *QWEN3, "--format", "json").stdout)
    assert (planned.exit_code, contents(source.parent)) == (0, before)
    done = run(source, tmp_path / "out", *QWEN3, "--no-audit")
    (said,) = (line for line in done.stdout.splitlines() if line.startswith("as qwen3: "))
    assert planned.stdout.splitlines()[-1] == said
    assert steps(data) == [("SetEps", 5), ("AddQKNorm", 4)]
    assert data["became"] == json.loads((tmp_path / "out" / "normprobe.json").read_text())["became"]


def test_no_such_architecture_is_foretold_after_the_plans(run: Run, source: Path) -> None:
    asked = (source, "--plan", "--eps", "1e-5", "--as", "gemma")
    found, data = run(*asked), json.loads(run(*asked, "--format", "json").stdout)
    assert found.exit_code == 2
    assert "planned: SetEps" in found.stdout
    assert "llama is no gemma: every tensor has a place there" in found.stderr
    assert (steps(data), data["became"]) == ([("SetEps", 5)], None)
    assert data["problem"].startswith("llama is no gemma")


def test_other_tokens_are_foretold(run: Run, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer(source)
    assert run(source, "--plan", "--as", "mistral").exit_code == 0
    monkeypatch.setattr("normprobe.patching.alike.tokens.read_tokenizer", lambda folder, trust: (None, ("unread",)))
    found = run(source, "--plan", "--as", "mistral")
    assert (found.exit_code, "the tokeniser of the new folder gives other tokens" in found.stderr) == (2, True)


MENDED = ("--eps", "0.3", "--mend", "breaking")


def test_what_is_mended_is_foretold(run: Run, source: Path, tmp_path: Path) -> None:
    before = contents(source)
    text = run(source, "--plan", *MENDED)
    data = json.loads(run(source, "--plan", *MENDED, "--format", "json").stdout)
    assert (text.exit_code, contents(source)) == (0, before)
    assert (text.stdout.count("planned: "), "applied: " in text.stdout, "proof: " in text.stdout) == (2, False, False)
    assert steps(data) == [("SetEps", 5), ("SetEps", 5)]
    done = json.loads(run(source, tmp_path / "out", *MENDED, "--format", "json", "--no-audit").stdout)
    assert [each["rewrite"] for each in data["steps"]] == [each["rewrite"] for each in done["steps"]]
    nothing = run(source, "--plan", "--mend", "exact")
    assert (nothing.exit_code, "nothing could be mended" in nothing.stderr) == (2, True)


def test_notes_and_inputs_are_those_of_the_run(run: Run, source: Path, tmp_path: Path) -> None:
    planned, data = run(source, "--plan", "--eps", "1e-5"), run(source, "--plan", "--eps", "1e-5", "--format", "json")
    done = json.loads(run(source, tmp_path / "out", "--eps", "1e-5", "--format", "json").stdout)
    told = json.loads(data.stdout)
    assert (told["notes"], told["inputs"]) == (done["notes"], done["inputs"])
    assert planned.stdout.splitlines()[: len(done["notes"])] == done["notes"]
    assert "seeded random ids" in told["inputs"]
