"""A patched checkpoint holds what the rewrite gives in memory, loads in every way, and brings everything along."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import normprobe
from normprobe.errors import CheckpointError, NormprobeError
from normprobe.patching.options import PatchOptions
from normprobe.patching.planned import planned
from normprobe.patching.run import Patched, patch
from normprobe.rewrites import (
    AddOutputNorms,
    AddQKNorm,
    FoldGains,
    Initialise,
    QKClip,
    Rewrite,
    ScaleResidual,
    SetEps,
    StoreGains,
    ToDyT,
    ToPostNorm,
    ToRMSNorm,
)
from tests.patching.checkpoints import config, contents, in_memory, logits, shards, stored

Source = Callable[[str], Path]
FAST = PatchOptions(level=None)
WEIGHTS = {
    "fold": [FoldGains()],
    "init": [Initialise(only=("writers",), seed=5)],
    "clip": [QKClip(0.01)],
    "eps": [SetEps(1e-3)],
    "both": [FoldGains(), Initialise(seed=2)],
}
CODE = {
    "qk": [AddQKNorm(start="calibrated")],
    "dyt": [ToDyT()],
    "scale": [ScaleResidual()],
    "output": [AddOutputNorms()],
    "stored": [StoreGains("one_plus_weight")],
    "mixed": [Initialise(), AddQKNorm(), SetEps(1e-4)],
}


def patched(source: Path, rewrites: list[Rewrite], options: PatchOptions = FAST) -> Patched:
    return patch(str(source), source.parent / "out", rewrites, options)


@pytest.mark.parametrize("name", ["llama-sharded-bf16", "gpt2", "mixtral"])
@pytest.mark.parametrize("rewrites", WEIGHTS.values(), ids=WEIGHTS)
def test_weights_alone_give_a_plain_checkpoint(source: Source, name: str, rewrites: list[Rewrite]) -> None:
    folder = source(name)
    before = contents(folder)
    found = patched(folder, rewrites)
    assert contents(folder) == before
    assert found.manifest.loads == "plain"
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(found.out, dtype="auto")), logits(in_memory(folder, rewrites))
    )
    old, new = stored(folder), stored(found.out)
    assert old.keys() == new.keys()
    assert {k: (t.dtype, t.shape) for k, t in old.items()} == {k: (t.dtype, t.shape) for k, t in new.items()}
    if "sharded" in name:
        assert shards(found.out) == shards(folder)


@pytest.mark.parametrize("name", ["llama-sharded-bf16", "gpt2"])
@pytest.mark.parametrize("rewrites", CODE.values(), ids=CODE)
def test_three_ways_of_loading_give_the_same_logits(source: Source, name: str, rewrites: list[Rewrite]) -> None:
    folder = source(name)
    found = patched(folder, rewrites)
    assert found.manifest.loads == "code"
    wanted = logits(in_memory(folder, rewrites))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    ways = {
        "load": normprobe.load(found.out),
        "code": AutoModelForCausalLM.from_pretrained(found.out, trust_remote_code=True, dtype="auto"),
        "manifest": normprobe.apply_manifest(plain, found.out),
    }
    for way, model in ways.items():
        assert torch.equal(logits(model), wanted), way


def test_weights_that_are_mapped_from_the_new_files_are_right(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors share pages with their neighbours, and are written more than once."""
    monkeypatch.setattr("normprobe.checkpoints.output.WORTH_IT", 1)
    folder, rewrites = source("llama-sharded-bf16"), [FoldGains(), Initialise(seed=2), QKClip(0.01)]
    found = patched(folder, rewrites)
    expected = in_memory(folder, rewrites).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in stored(found.out).items())


def test_what_is_saved_again_loads_again(source: Source, tmp_path: Path) -> None:
    found = patched(source("llama"), [AddQKNorm(), ScaleResidual()])
    ways = (normprobe.load(found.out), AutoModelForCausalLM.from_pretrained(found.out, trust_remote_code=True))
    for number, model in enumerate(ways):
        folder = tmp_path / str(number)
        model.save_pretrained(folder)
        again = (normprobe.load(folder), AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True))
        assert all(torch.equal(logits(each), logits(model)) for each in again)


@pytest.mark.parametrize(
    "before", [AddQKNorm(), ToPostNorm()], ids=["other places", "places that have to see their output last"]
)
def test_a_patched_checkpoint_is_patched_again(source: Source, tmp_path: Path, before: Rewrite) -> None:
    folder = source("llama")
    first = patched(folder, [before])
    second = patch(str(first.out), tmp_path / "second", [AddOutputNorms(), Initialise()], FAST)
    wanted = logits(in_memory(folder, [before, AddOutputNorms(), Initialise()]))
    assert torch.equal(logits(normprobe.load(second.out)), wanted)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(second.out, trust_remote_code=True)), wanted)


def test_eps_goes_into_the_configuration(source: Source) -> None:
    folder = source("llama")
    found = patched(folder, [SetEps(1e-3)])
    assert config(found.out) == {**config(folder), "rms_norm_eps": 1e-3}


def test_eps_of_some_norms_alone_needs_code(source: Source) -> None:
    folder = source("llama")
    found = patched(folder, [SetEps(1e-2, only="model.norm")])
    assert found.manifest.loads == "code"
    assert config(found.out)["rms_norm_eps"] == 1e-6
    assert torch.equal(logits(normprobe.load(found.out)), logits(in_memory(folder, [SetEps(1e-2, only="model.norm")])))


def test_everything_else_comes_along_and_stale_weights_stay(source: Source) -> None:
    folder = source("llama")
    found = patched(folder, [FoldGains()])
    old, new = contents(folder), contents(found.out)
    assert old.keys() - new.keys() == {"optimizer.pt"}
    assert found.manifest.left_out == ("optimizer.pt",)
    assert new.keys() - old.keys() == {"normprobe.json", "normprobe-plan.txt"}
    assert [name for name in old.keys() & new.keys() if old[name] != new[name]] == ["model.safetensors"]


def test_audits_are_taken_before_and_after(source: Source) -> None:
    found = patched(source("llama"), [SetEps(1e-3)], PatchOptions(level="structure"))
    assert found.before is not None
    assert found.after is not None
    assert {n.eps for n in found.before.anatomy.norms} != {n.eps for n in found.after.anatomy.norms}
    reports = [normprobe.Report.load(found.out / f"audit-{when}.json") for when in ("before", "after")]
    assert [each.anatomy for each in reports] == [found.before.anatomy, found.after.anatomy]
    assert not [each for each in found.after.findings if each.code == "NP104"]


def test_audits_of_an_earlier_patch_stay_behind(source: Source, tmp_path: Path) -> None:
    first = patched(source("llama"), [SetEps(1e-3)], PatchOptions(level="structure"))
    assert (first.out / "audit-before.json").is_file()
    second = patch(str(first.out), tmp_path / "second", [FoldGains()], FAST)
    assert not list(second.out.glob("audit-*.json"))


def test_of_shards_none_is_told_as_left_behind(source: Source) -> None:
    assert patched(source("llama-sharded-bf16"), [FoldGains()]).manifest.left_out == ("optimizer.pt",)


def test_the_size_of_files_can_be_asked_for(source: Source) -> None:
    folder = source("llama")
    found = patched(folder, [FoldGains()], PatchOptions(level=None, max_shard_bytes=30_000))
    assert len(found.manifest.tensors) > 2
    sizes = [sum(t.numel() * t.element_size() for t in load_file(f).values()) for f in found.out.glob("*.safetensors")]
    assert max(sizes) <= 30_000
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(found.out)), logits(in_memory(folder, [FoldGains()]))
    )


def test_a_tied_table_stays_tied(source: Source, tmp_path: Path) -> None:
    folder = source("gpt2")
    assert "lm_head.weight" not in stored(folder)
    found = patched(folder, [Initialise()])
    assert stored(found.out).keys() == stored(folder).keys()
    untied = patch(str(folder), tmp_path / "untied", [ToRMSNorm(tied="untie")], FAST)
    assert "lm_head.weight" in stored(untied.out)
    assert torch.equal(logits(normprobe.load(untied.out)), logits(in_memory(folder, [ToRMSNorm(tied="untie")])))


def test_the_plan_is_shown_and_nothing_is_written(source: Source) -> None:
    folder = source("llama")
    before = contents(folder.parent)
    found = planned(str(folder), [FoldGains(), AddQKNorm()])
    assert [len(sites.sites) for plan in found.plans for _, sites in plan.steps] == [5, 4]
    assert [plan.state for plan in found.plans] == ["applied", "planned"]
    assert [plan.rows(planned=True)[0].partition(":")[0] for plan in found.plans] == ["planned", "planned"]
    assert contents(folder.parent) == before


@pytest.mark.parametrize("rewrites", [[ToRMSNorm()], [AddQKNorm(), AddQKNorm()]])
def test_a_rewrite_that_is_refused_leaves_nothing(source: Source, rewrites: list[Rewrite]) -> None:
    folder = source("llama")
    with pytest.raises(NormprobeError):
        patched(folder, rewrites)
    assert [path.name for path in folder.parent.iterdir()] == ["source"]


def test_what_does_not_load_as_it_should_is_not_kept(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = source("llama")
    monkeypatch.setattr("normprobe.patching.folder.add_code", lambda part, model, changes: False)
    with pytest.raises(CheckpointError, match="other numbers than the rewritten model"):
        patched(folder, [StoreGains("one_plus_weight")])
    assert [path.name for path in folder.parent.iterdir()] == ["source"]


@pytest.mark.parametrize("rewrites", [[FoldGains()], [FoldGains(), Initialise()]], ids=["one", "two"])
def test_a_model_runs_no_more_often_than_it_has_to(
    source: Source, monkeypatch: pytest.MonkeyPatch, rewrites: list[Rewrite]
) -> None:
    """As it was, after each rewrite, and as it is loaded; of a large one each forward reads all weights."""
    run, runs = LlamaForCausalLM.forward, []

    @functools.wraps(run)
    def counted(model: LlamaForCausalLM, *args: Any, **kwargs: Any) -> Any:
        runs.append(model)
        return run(model, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", counted)
    monkeypatch.setattr("normprobe.patching.rewriting.room", lambda: 0)  # for no wider copy
    patched(source("llama"), rewrites)
    of_each = [len(list(same)) for _, same in itertools.groupby(runs, id)]
    assert of_each == {1: [2, 1], 2: [5, 1]}[len(rewrites)], "the patched model, then the loaded one"


def test_one_rewrite_that_is_not_exact_makes_the_whole_so(source: Source, tmp_path: Path) -> None:
    folder = source("llama")
    exact, mixed = (
        patch(str(folder), tmp_path / name, rewrites, FAST).manifest.proof
        for name, rewrites in (("a", [FoldGains(), StoreGains("one_plus_weight")]), ("b", [FoldGains(), SetEps(1e-2)]))
    )
    assert exact is not None
    assert mixed is not None
    assert exact.holds
    assert (mixed.holds, mixed.tolerance) == (None, None)


def test_the_manifest_says_what_was_done(source: Source) -> None:
    folder = source("llama")
    manifest = patched(folder, [Initialise(seed=7)]).manifest
    assert [step.rewrite for step in manifest.steps] == [Initialise(seed=7).to_dict()]
    assert manifest.proof is not None
    assert manifest.versions.keys() >= {"normprobe", "torch", "transformers", "python"}
    assert manifest.source.name == str(folder)
    assert len(manifest.source.xxh3_128) == 32
