"""What `normprobe patch` tells: plans as they were made, the proof also when quiet, and refusals one can act on."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.text import Text
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from normprobe.cli.commands import app
from tests.cli.test_patch import Run, run, source
from tests.patching.checkpoints import gpt2, saved

__all__ = ["run", "source"]  # the fixtures


def test_a_plan_is_told_as_it_was_made(run: Run, source: Path) -> None:
    found = run(source, "--plan", "--fold-norms", "--qk-norm", "unit")
    assert found.exit_code == 0, found.output
    assert (found.stdout.count("planned: "), found.stdout.count("applied: ")) == (2, 0)
    told = " ".join(found.stdout.split())
    assert "model.layers.*.input_layernorm: goes into model.layers.*.self_attn.v_proj.weight," in told
    assert "model.layers.*.self_attn.q_proj.weight (2 places)" in told
    assert not {"proof", "undo"} & set(told.split())


FORMS = {"text": (), "data": ("--format", "json")}


def on_terminal(width: int, *arguments: object) -> Any:
    wide = {"COLUMNS": str(width), "FORCE_COLOR": "1"}  # by the second a pipe is a terminal
    return CliRunner().invoke(app, ["patch", *map(str, arguments), "--quiet"], env=wide)


def hanging(told: str, width: int) -> list[str]:
    """What is whole in a pipe, as a terminal has to show it."""
    whole = {"break_long_words": False, "break_on_hyphens": False}
    rows = [(row, " " * (len(row) - len(row.lstrip()) + 4)) for row in told.splitlines()]
    return [line for row, indent in rows for line in textwrap.wrap(row, width, subsequent_indent=indent, **whole)]


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_shows_plans_and_errors_with_their_indents(run: Run, source: Path, width: int) -> None:
    asked = (source, "--plan", "--fold-norms", "--rewrite", "SetEps(eps=1e-5, only='none')")
    piped, found = run(*asked), on_terminal(width, *asked)
    assert (piped.exit_code, found.exit_code) == (2, 2)
    for whole, shown in ((piped.stdout, found.stdout), (piped.stderr, found.stderr)):
        lines = [line.rstrip() for line in Text.from_ansi(shown).plain.splitlines()]
        assert lines == hanging(whole, width)
        assert len(lines) > len(whole.splitlines())


def test_a_narrow_pipe_breaks_nothing(source: Path) -> None:
    asked = ["patch", str(source), "--plan", "--fold-norms", "--rewrite", "FoldGains(expect=7)"]
    narrow, wide = (CliRunner().invoke(app, asked, env={"COLUMNS": width}) for width in ("40", "400"))
    assert (narrow.stdout, narrow.stderr) == (wide.stdout, wide.stderr)
    assert max(map(len, narrow.stdout.splitlines())) > 80


ODD = "x[bold red]y\n\x1b[31mz\x9b1m"


def test_a_name_steers_no_terminal(tmp_path: Path) -> None:
    source = saved(gpt2(), tmp_path / "source")
    path = source / "model.safetensors"
    save_file({**load_file(path), ODD: torch.ones(1)}, path, {"format": "pt"})
    (source / "optimizer\x1b[2J.pt").touch()
    found = on_terminal(400, source, tmp_path / "out", "--eps", "1e-4", "--no-audit")
    assert found.exit_code == 0, found.output
    assert "not used: x[bold red]y\\n\\x1b[31mz\\x9b1m\x1b[0m\n" in found.stdout
    assert "optimizer\\x1b[2J.pt" in found.stdout
    refused = on_terminal(400, tmp_path / "none\x1b[31m", tmp_path / "out2", "--eps", "1e-5")
    assert "none\\x1b[31m" in refused.stderr
    for raw in ("\x1b[31m", "\x1b[2J", "\x9b"):
        assert raw not in found.output + refused.output


def test_a_plan_is_data(run: Run, tmp_path: Path) -> None:
    source = saved(gpt2(), tmp_path / "source")
    found = run(source, "--plan", "--eps", "1e-4", "--fold-norms", "--format", "json")
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout)
    eps, fold = told["steps"]
    assert told["problem"] is None
    assert (eps["rewrite"]["rewrite"], eps["rewrite"]["eps"], eps["effect"]) == ("SetEps", 1e-4, "breaking")
    assert eps["sites"][0]["path"] == "transformer.h.0.ln_1"
    assert eps["sites"][0]["change"].startswith("eps 1e-05 inside sqrt becomes 0.0001")
    assert "transformer.h.0.attn.c_attn.weight" in fold["sites"][0]["touched"]
    assert [each["path"] for each in fold["refused"]] == ["transformer.ln_f"]
    assert "reads something else too" in fold["refused"][0]["why"]


def test_a_plan_that_would_be_refused_is_shown_and_refused(run: Run, source: Path) -> None:
    asked = ("--plan", "--rewrite", "SetEps(eps=1e-5)", "--rewrite", "FoldGains(expect=7)")
    found = run(source, *asked)
    assert found.exit_code == 2
    assert "5 sites, 7 expected" in found.stdout
    assert "error: FoldGains found another number of sites" in found.stderr
    found = run(source, *asked, "--format", "json")
    assert found.exit_code == 2
    told = json.loads(found.stdout)
    assert [len(step["sites"]) for step in told["steps"]] == [5, 5]
    assert told["problem"].startswith("FoldGains found another number of sites")
    nothing = run(source, "--plan", "--swap", "layernorm:rmsnorm")
    assert (nothing.exit_code, "0 sites" in nothing.stdout) == (2, True)
    assert "ToRMSNorm would change nothing" in nothing.stderr


def test_what_was_found_as_it_was_read_is_data_too(run: Run, source: Path, tmp_path: Path) -> None:
    text, data = (run(source, tmp_path / name, "--eps", "1e-5", *form) for name, form in FORMS.items())
    notes = json.loads(data.stdout)["notes"]
    assert notes
    assert notes == text.stdout.splitlines()[: len(notes)]


def test_quiet_is_without_progress_alone(run: Run, source: Path, tmp_path: Path) -> None:
    loud, quiet = (run(source, tmp_path / name, "--eps", "1e-5", *more) for name, more in (("a", ()), ("b", ("-q",))))
    assert "proof: " in quiet.stdout
    told = ["".join(each.stdout.split()) for each in (loud, quiet)]  # lines break where the path is long
    assert told[1] == told[0].replace(str(tmp_path / "a"), str(tmp_path / "b"))


def test_what_is_replaced_is_named(run: Run, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "below").mkdir(parents=True)
    (out / "below" / "thesis.txt").write_text("mine")
    (out / "other").write_text("123")
    asked = (source, out, "--eps", "1e-5", "--no-audit")
    found = run(*asked, "--overwrite")
    assert found.exit_code == 0, found.output
    assert f"replaced {out}, a folder without normprobe.json: 2 files, 7 bytes\n" in found.stdout
    held = [path for path in out.rglob("*") if path.is_file()]
    again = json.loads(run(*asked, "--overwrite", "--format", "json").stdout)["notes"]
    size = sum(path.stat().st_size for path in held)
    assert f"replaced {out}, a patched checkpoint: {len(held)} files, {size:,} bytes" in again
    assert "\nreplaced " not in run(source, tmp_path / "new", "--eps", "1e-5", "--no-audit", "--overwrite").stdout


@pytest.mark.parametrize("written", ["true", "false"])
def test_no_truth_value_is_a_number(run: Run, source: Path, tmp_path: Path, written: str) -> None:
    recipe = tmp_path / "patch.toml"
    recipe.write_text(f'[[rewrite]]\nname = "SetEps"\neps = {written}\n')
    found = run(source, "--plan", "--recipe", recipe)
    assert found.exit_code == 2
    for part in ("line 3, key eps", "expected: eps: a number or None", f"found: {written.capitalize()}"):
        assert part in found.stderr


@pytest.mark.parametrize(
    ("arguments", "said", "unsaid"),
    [
        (["", "--plan", "--eps", "1e-5"], "CHECKPOINT is empty", "ValueError"),
        (["SOURCE", "", "--eps", "1e-5"], "OUT is empty", "ValueError"),
        (["SOURCE", "--plan", "--rewrite", "SetEps("], "a rewrite cannot be read", "--debug"),
        (["SOURCE", "--plan", "--recipe", "none.toml"], "the recipe cannot be read", "--debug"),
        (["SOURCE", "--verify", "--overwrite"], "--overwrite has no effect: --verify checks a folder", "manifest"),
        (["SOURCE", "--verify", "--tokens", "3"], "--tokens has no effect: --verify checks a folder", "manifest"),
        (["SOURCE", "--verify", "--eps", "0"], "--eps has no effect: --verify checks a folder", "manifest"),
        (["SOURCE", "--verify", "--batch", "1", "-q"], "no normprobe.json", "has no effect"),
        (["SOURCE", "--plan", "--eps", "1e-5", "--text-file", "none.txt"], "none.txt: no such text file", "tokenizer"),
        (["SOURCE", "OUT", "--eps", "1e-5", "--text-file", "none.txt"], "none.txt: no such text file", "tokenizer"),
        (["SOURCE", "OUT", "--eps", "1e-50"], "no eps: it is lost in rounding", "None none"),
    ],
)
def test_a_refusal_says_what_helps(run: Run, source: Path, arguments: list[str], said: str, unsaid: str) -> None:
    named = {"SOURCE": source, "OUT": source.parent / "out"}
    found = run(*(named.get(word, word) for word in arguments))
    assert found.exit_code == 2
    assert said in found.stderr
    assert unsaid not in found.stderr
