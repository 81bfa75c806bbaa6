"""`normprobe patch`: options become rewrites, refusals name the option, and what was written can be checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from normprobe.cli.commands import app
from normprobe.errors import SettingError
from normprobe.patching.asked import SWAPS, Asked
from normprobe.patching.manifest import read_manifest
from normprobe.rewrites import (
    AddFinalNorm,
    AddOutputNorms,
    AddQKNorm,
    FoldGains,
    Initialise,
    QKClip,
    Rewrite,
    ScaleResidual,
    SetEps,
    ToDyT,
    ToRMSNorm,
    UpcastNorms,
)
from tests.patching.checkpoints import contents, llama, saved

Run = Callable[..., Any]


@pytest.fixture
def run() -> Run:
    wide = {"COLUMNS": "400"}  # however long the paths are, none is broken
    return lambda *arguments: CliRunner().invoke(app, ["patch", *map(str, arguments)], env=wide)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved(llama(), tmp_path / "source")


@pytest.mark.parametrize(
    ("asked", "rewrites"),
    [
        (Asked(upcast_norms=True), [UpcastNorms()]),
        (Asked(eps=1e-5), [SetEps(1e-5)]),
        (Asked(swap=["LayerNorm:RMSNorm", "norm:dyt"]), [ToRMSNorm(), ToDyT()]),
        (Asked(fold_norms=True, final_norm=True), [FoldGains(), AddFinalNorm()]),
        (Asked(output_norms="calibrated"), [AddOutputNorms(start="calibrated")]),
        (Asked(qk_norm="calibrated"), [AddQKNorm(start="calibrated")]),
        (Asked(qk_norm="unit:l2norm"), [AddQKNorm("l2norm", start="unit")]),
        (Asked(qk_norm="unit:shared", eps=1e-5), [SetEps(1e-5), AddQKNorm(shared=True, eps=1e-5)]),
        (Asked(qk_norm="distilled:shared:layernorm"), [AddQKNorm("layernorm", start="distilled", shared=True)]),
        (Asked(qk_clip=50.0, residual="rezero"), [ScaleResidual("rezero"), QKClip(50.0)]),
        (Asked(init="gpt2", only=["writers"], seed=3), [Initialise("gpt2", seed=3, only=("writers",))]),
        (Asked(rewrite=["ToDyT(start='unit')"], eps=1e-6), [SetEps(1e-6), ToDyT("unit")]),
        (Asked(further=(ToDyT(),), init="gpt2"), [ToDyT(), Initialise("gpt2")]),
    ],
)
def test_options_become_rewrites(asked: Asked, rewrites: list[Rewrite]) -> None:
    assert asked.rewrites() == tuple(rewrites)


@pytest.mark.parametrize("words", SWAPS)
def test_every_exchange_is_a_rewrite(words: str) -> None:
    assert len(Asked(swap=[words]).rewrites()) == 1


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Asked(swap=["layernorm:batchnorm"]), "--swap names no exchange"),
        (Asked(qk_norm="calibratd"), "AddQKNorm cannot be made"),
        (Asked(qk_norm="unit:rmsnorm:l2norm"), "--qk-norm cannot be read"),
        (Asked(init="gpt3"), "Initialise cannot be made"),
        (Asked(only=["h.*"]), "--only belongs to one rewrite"),
        (Asked(only=["h.*"], eps=1e-5, init="gpt2"), "--only belongs to one rewrite"),
        (Asked(only=["h.*"], upcast_norms=True), "--only belongs to one rewrite"),
        (Asked(seed=1, eps=1e-5), "--seed has no effect"),
        (Asked(rewrite=["SetEpss"]), "there is no rewrite SetEpss"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(asked: Asked, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        asked.rewrites()


def test_a_checkpoint_is_patched_and_checked(run: Run, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = run(source, out, "--qk-norm", "calibrated")
    assert found.exit_code == 0, found.output
    for part in ("before: ", "AddQKNorm, breaking", "proof: ", "after: ", f"wrote {out}", "normprobe.load"):
        assert part in found.output
    assert {path.name for path in out.iterdir()} >= {"normprobe.json", "audit-before.json", "audit-after.json"}
    checked = run(out, "--verify")
    assert (checked.exit_code, "as written" in checked.output.replace("\n", " ")) == (0, True)


def test_what_was_changed_since_is_told(run: Run, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(source, out, "--eps", "1e-5", "--no-audit").exit_code == 0
    (out / "config.json").write_text("{}")
    (out / "LICENSE").unlink()
    (out / "more.txt").write_text("")
    weights = out / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(bytes(data))
    found = run(out, "--verify", "--format", "json")
    assert found.exit_code == 1
    problems = json.loads(found.output)["problems"]
    assert sorted(problem.rpartition(": ")[0].partition(":")[0] for problem in problems) == [
        "LICENSE",
        "config.json",
        "model.safetensors",
        "more.txt",
    ]
    assert len([problem for problem in problems if problem.endswith("other values")]) == 1


def test_a_recipe_is_followed(run: Run, source: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "patch.toml"
    recipe.write_text('[[rewrite]]\nname = "FoldGains"\n\n[[rewrite]]\nname = "Initialise"\nseed = 4\n')
    found = run(source, tmp_path / "out", "--recipe", recipe, "--no-audit", "--format", "json")
    assert found.exit_code == 0, found.output
    told = json.loads(found.output)
    assert [step["rewrite"]["rewrite"] for step in told["steps"]] == ["FoldGains", "Initialise"]
    assert told == {**read_manifest(tmp_path / "out").model_dump(mode="json"), "notes": told["notes"]}


def test_it_is_written_as_another_architecture(run: Run, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = run(source, out, "--eps", "1e-5", "--qk-norm", "calibrated:shared", "--as", "qwen3")
    assert found.exit_code == 0, found.output
    for part in ("as qwen3: max |Δ| 0 ", "after: ", 'load it with from_pretrained("/'):
        assert part in found.output.replace("\n", " ")
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen3"
    alone = run(source, tmp_path / "alone", "--as", "mistral", "--no-audit", "--format", "json")
    assert alone.exit_code == 0, alone.output
    assert json.loads(alone.output)["became"]["model_type"] == "mistral"
    assert json.loads(alone.output)["steps"] == []


def test_the_plan_writes_nothing(run: Run, source: Path) -> None:
    before = contents(source.parent)
    found = run(source, "--plan", "--fold-norms")
    assert found.exit_code == 0
    assert "planned: FoldGains" in found.output
    assert contents(source.parent) == before


def test_findings_are_mended(run: Run, tmp_path: Path) -> None:
    model = llama(rms_norm_eps=1e-1)
    source = saved(model, tmp_path / "source")
    found = run(source, tmp_path / "out", "--mend", "exact")
    assert found.exit_code == 2
    assert "nothing could be mended" in found.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["SOURCE"], "no folder to write to"),
        (["SOURCE", "OUT"], "no rewrite is named"),
        (["SOURCE", "OUT", "--plan", "--eps", "1e-5"], "OUT has no effect: --plan writes nothing"),
        (
            ["SOURCE", "--plan", "--eps", "1e-5", "--max-shard-size", "2GB"],
            "--max-shard-size has no effect: --plan",
        ),
        (["SOURCE", "OUT", "--as", "qwn3"], "--as names no architecture"),
        (["SOURCE", "OUT", "--as", "gemma"], "llama is no gemma"),
        (["SOURCE", "OUT", "--qk-norm", "unit", "--as", "llama"], "the rewritten llama is no llama"),
        (["SOURCE", "--verify", "--eps", "1e-5"], "--eps has no effect: --verify checks a folder alone"),
        (["SOURCE", "OUT", "--eps", "1e-5", "--max-shard-size", "2 apples"], "--max-shard-size is no size"),
        (["SOURCE", "OUT", "--eps", "1e-5", "--mend", "all"], "mend names no effect"),
        (["SOURCE", "OUT", "--recipe", "none.toml"], "the recipe cannot be read"),
        (["SOURCE", "--verify"], "no normprobe.json"),
        (["none", "OUT", "--eps", "1e-5"], "none: not found"),
        (["SOURCE", "OUT", "--eps", "1e-5", "--revision", "main"], "--revision has no effect"),
        (["SOURCE", "OUT", "--eps", "2"], "SetEps cannot be made"),
        (["SOURCE", "OUT", "--swap", "layernorm:rmsnorm"], "ToRMSNorm would change nothing"),
    ],
)
def test_errors_are_told_and_leave_nothing(run: Run, source: Path, arguments: list[str], said: str) -> None:
    out = source.parent / "out"
    named = {"SOURCE": source, "OUT": out}
    found = run(*(named.get(word, word) for word in arguments))
    assert found.exit_code == 2, found.output
    assert said in found.output
    assert [path.name for path in source.parent.iterdir()] == ["source"]
