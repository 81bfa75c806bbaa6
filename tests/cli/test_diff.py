"""`normprobe diff`: exit codes, forms, and what both targets are loaded with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from normprobe.cli.commands import app
from tests.targets.checkpoints import gpt2

Run = Callable[..., Any]
FACTORY = """
import sys
import torch
sys.path.insert(0, {root!r})
from tests.diffing.models import decoder, tokens

def plain():
    return decoder(), (tokens(),)

def late():
    model = decoder(norm={{"late_gain": True}})
    model.load_state_dict(decoder().state_dict())
    return model, (tokens(),)

def eps():
    model = decoder()
    model.blocks[1].second.eps = 1e-3
    return model, (tokens(),)

class Chosen(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = decoder()
    def forward(self, ids):
        return self.inner(ids).argmax(-1)

def chosen():
    return Chosen().eval(), (tokens(),)

def fails():
    raise RuntimeError("no such weights")
"""


@pytest.fixture
def models(tmp_path: Path, root: Path) -> str:
    path = tmp_path / "models.py"
    path.write_text(FACTORY.format(root=str(root)), encoding="utf-8")
    return str(path)


@pytest.fixture
def run() -> Run:
    return lambda *arguments: CliRunner().invoke(app, ["diff", *arguments])


@pytest.mark.parametrize(
    ("other", "fail_on", "code"),
    [
        ("plain", "note", 0),
        ("eps", "error", 1),
        ("eps", "never", 0),
        ("late", "warning", 1),
        ("late", "error", 0),
        ("fails", "never", 2),
    ],
)
def test_exit_codes(run: Run, models: str, other: str, fail_on: str, code: int) -> None:
    assert run(f"{models}:plain", f"{models}:{other}", "--fail-on", fail_on).exit_code == code


def test_by_default_other_rounding_differs(run: Run, models: str) -> None:
    assert run(f"{models}:plain", f"{models}:late").exit_code == 1
    assert run(f"{models}:plain", f"{models}:plain").exit_code == 0


def test_json_alone_on_standard_output(run: Run, models: str) -> None:
    document = json.loads(run(f"{models}:plain", f"{models}:eps", "--format", "json", "--quiet").stdout)
    assert document["schema"] == "normprobe-diff/1"
    assert document["verdict"] == "differs"
    assert document["a"]["name"].endswith("models.py:plain")
    assert document["b"]["name"].endswith("models.py:eps")
    assert document["inputs"] == "given by the factory"
    assert document["differences"][0]["fact"] == "eps"


def test_to_a_file_by_its_suffix(run: Run, models: str, tmp_path: Path) -> None:
    done = run(f"{models}:plain", f"{models}:eps", "--out", str(tmp_path / "diff.md"))
    assert done.exit_code == 1
    assert done.stdout == ""
    assert "3 errors" in done.stderr
    assert (tmp_path / "diff.md").read_text(encoding="utf-8").startswith("# A ")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--format github", "::error file="),
        ("--format junit", 'failures="3"'),
        ("--format junit --fail-on never", 'failures="0"'),
        ("--format sarif", '"diff/norm/eps"'),
    ],
)
def test_the_forms_for_ci_systems(
    run: Run, models: str, words: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(models).parent)
    done = run("models.py:plain", "models.py:eps", *words.split(), "--quiet")
    assert done.exit_code == ("never" not in words)
    assert told in done.stdout


def test_dtype_of_b_alone(run: Run, models: str) -> None:
    done = run(f"{models}:plain", f"{models}:plain", "--dtype-b", "bfloat16", "--fail-on", "error", "--format", "json")
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    assert [document[side]["dtype"] for side in "ab"] == ["float32", "bfloat16"]


@pytest.mark.parametrize(("fail_on", "code"), [("error", 2), ("warning", 1), ("never", 0)])
def test_no_values_compared_is_no_success(run: Run, models: str, fail_on: str, code: int) -> None:
    """Both give whole numbers, and one is in another dtype, which is a warning."""
    done = run(f"{models}:chosen", f"{models}:chosen", "--dtype-b", "bfloat16", "--fail-on", fail_on)
    assert done.exit_code == code
    assert "not enough was compared to tell more" in " ".join(done.stdout.split())


def test_structure_alone(run: Run, models: str) -> None:
    document = json.loads(run(f"{models}:plain", f"{models}:eps", "--level", "structure", "--format", "json").stdout)
    assert document["signal"] is None
    assert [one["fact"] for one in document["differences"]] == ["eps"]


def test_an_empty_name_is_refused(run: Run, models: str) -> None:
    done = run(f"{models}:plain", " ")
    assert done.exit_code == 2
    assert "no target B is named" in done.stderr


def test_two_configurations(run: Run, tmp_path: Path) -> None:
    fields = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32, "bos_token_id": 1}
    for name, more in (("a", {"vocab_size": 96}), ("b", {"vocab_size": 64, "layer_norm_epsilon": 1e-3})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(fields | {"eos_token_id": 2} | more), encoding="utf-8")
    done = run(*(str(tmp_path / name / "config.json") for name in "ab"), "--tokens", "8", "--format", "json")
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert {"eps", "size"} <= {one["fact"] for one in document["differences"]}
    assert any("all ids were taken modulo 64" in note for note in document["notes"])


def test_drawn_weights_are_not_held_against_those_of_a_checkpoint(run: Run, tmp_path: Path) -> None:
    gpt2(tmp_path / "whole")
    (tmp_path / "bare").mkdir()
    text = (tmp_path / "whole" / "config.json").read_text(encoding="utf-8")
    (tmp_path / "bare" / "config.json").write_text(text, encoding="utf-8")
    pair = [str(tmp_path / name) for name in ("whole", "bare")]
    done = run(*pair, "--tokens", "8")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "B has no weights to compare" in done.stderr
    assert run(*pair, "--tokens", "8", "--level", "structure").exit_code == 0
    assert run(*pair, "--tokens", "8", "--config-only").exit_code == 0
    assert run(pair[0], f"{pair[1]}/config.json", "--tokens", "8", "--config-only").exit_code == 0
    assert "A has no weights" in run(*pair[::-1], "--tokens", "8").stderr
