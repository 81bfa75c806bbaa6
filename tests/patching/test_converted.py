"""Weights that transformers converts as it loads them (experts stacked, projections joined or cut, casts) take no
memory that no file holds, and go back into the files as they were."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from transformers import GteConfig, GteForMaskedLM, MixtralForCausalLM

from normprobe.errors import CheckpointError
from normprobe.patching import run
from normprobe.patching.options import PatchOptions
from normprobe.patching.planned import planned
from normprobe.patching.run import Patched, patch
from normprobe.patching.scratch import Scratch
from normprobe.patching.source import opened_subject
from normprobe.patching.writing import Writing
from normprobe.rewrites import Initialise, Plan, Rewrite, SetEps, make_plan
from normprobe.targets.options import TargetOptions
from tests.patching.checkpoints import made, mixtral

Source = Callable[[str], Path]
FAST = PatchOptions(level=None, target=TargetOptions(tokens=8))
EXPERTS = Initialise(only="*experts*")
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which memory no file holds")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _tiny_tensors_are_worth_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("checkpoints.output", "patching.scratch"):
        monkeypatch.setattr(f"normprobe.{place}.WORTH_IT", 1)


def patched(folder: Path, *rewrites: Rewrite) -> Patched:
    return patch(str(folder), folder.with_name("out"), rewrites, FAST)


def stored(folder: Path) -> dict[str, dict[str, Tensor]]:
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


def replaced(folder: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Give a tensor of a checkpoint in one file other values."""
    path = folder / "model.safetensors"
    held = load_file(path)
    save_file({**held, name: change(held[name])}, path, {"format": "pt"})


def anonymous(model: nn.Module) -> set[str]:
    """The parameters in memory that no file holds."""
    rows = [row.split() for row in Path("/proc/self/maps").read_text().splitlines()]
    held = [[int(end, 16) for end in row[0].split("-")] for row in rows if row[4] != "0"]
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    return {name for name, place in places.items() if not any(start <= place < end for start, end in held)}


@linux
def test_no_parameter_is_in_memory_once_it_is_loaded(source: Source, tmp_path: Path) -> None:
    folder = source("mixtral-bf16")
    replaced(folder, "model.embed_tokens.weight", Tensor.float)  # is cast
    with opened_subject(str(folder), FAST.target, Scratch(tmp_path)) as (subject, _):
        assert anonymous(subject.model) == set()
        assert [path.name for path in tmp_path.iterdir()] == ["source"]
        wanted = MixtralForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in subject.model.state_dict().items())


@linux
def test_what_a_plan_changes_for_the_next_is_not_held_in_memory(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[set[str]] = []

    def made(model: nn.Module, *args: Any) -> Plan:
        found.append(anonymous(model))
        return make_plan(model, *args)

    monkeypatch.setattr("normprobe.patching.planned.make_plan", made)
    assert len(planned(str(source("mixtral-bf16")), [EXPERTS, SetEps(eps=1e-4)], FAST).plans) == 2
    assert found == [set(), set()]


@linux
def test_what_changes_goes_back_to_the_disk(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    found, finish = [], Writing.finish

    def finished(self: Writing) -> dict[str, dict[str, str]]:
        found.append(anonymous(self.model))
        return finish(self)

    monkeypatch.setattr(Writing, "finish", finished)
    patched(source("mixtral-bf16"), Initialise())
    assert found == [set()]


def test_the_model_that_is_loaded_again_shares_the_memory_of_the_first(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart, same = [], run.same_model

    def compared(loaded: nn.Module, model: nn.Module, *further: Any) -> bool:
        pairs = zip(loaded.parameters(), model.parameters(), strict=True)
        apart.append([tuple(a.shape) for a, b in pairs if a.data_ptr() != b.data_ptr()])
        return same(loaded, model, *further)

    monkeypatch.setattr(run, "same_model", compared)
    patched(source("mixtral-sharded-bf16"), EXPERTS)
    assert apart == [[]]


def test_a_parameter_shares_memory_only_with_the_same_bits(tmp_path: Path) -> None:
    like = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        like.weight[0, :2] = torch.tensor([float("nan"), 0.0])
    same, other = like.weight.detach().clone(), like.weight.detach().clone()
    other[0, 1] = -0.0
    found = []
    with Scratch(tmp_path).placing(like=like):
        for values in (same, other):
            holder = nn.Module()
            holder.weight = nn.Parameter(values)
            found.append(holder.weight.data_ptr() == like.weight.data_ptr())
    assert found == [True, False]


def test_experts_that_nothing_changed_are_copied_bit_for_bit(source: Source) -> None:
    """Also where the model holds them in a narrower dtype than the file."""
    folder = source("mixtral-bf16")
    names = [f"model.layers.0.block_sparse_moe.experts.{expert}.w2.weight" for expert in range(4)]
    for name in names:
        replaced(folder, name, lambda values: values.float() * 1.0001)
    out = patched(folder, Initialise(only="*gate_up_proj*")).out
    old, new = stored(folder)["model.safetensors"], stored(out)["model.safetensors"]
    assert old.keys() == new.keys()
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert all(new[name].dtype is torch.float32 for name in names)
    assert changed == {name for name in old if name.endswith((".w1.weight", ".w3.weight"))}


def test_shards_hold_the_experts_that_they_held(source: Source) -> None:
    folder = source("mixtral-sharded-bf16")
    out = patched(folder, EXPERTS).out
    assert {f: held.keys() for f, held in stored(out).items()} == {f: held.keys() for f, held in stored(folder).items()}


def test_what_was_cut_on_its_way_in_is_joined_again(tmp_path: Path) -> None:
    """The file has one tensor for queries, keys and values, the model three, of which one changes."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 32}
    model = made(GteForMaskedLM, GteConfig(**sizes, num_hidden_layers=2, num_attention_heads=4))
    model.save_pretrained(tmp_path / "in")
    out = patched(tmp_path / "in", Initialise(only="*.0.self_attn.q_proj.weight")).out
    old, new = stored(tmp_path / "in")["model.safetensors"], stored(out)["model.safetensors"]
    names = {f"gte.encoder.layer.0.attention.qkv_proj.{each}" for each in ("weight", "bias")}
    assert {name for name in old if not torch.equal(old[name], new[name])} == names
    for name in names:
        assert torch.equal(old[name][32:], new[name][32:])
        assert not (old[name][:32] == new[name][:32]).any()


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (
            "checkpoints.disk.shutil.disk_usage",
            r"expected: [\d,]+ bytes: [\d,]+ for the next of them, 119,616 for the new files",
        ),
        ("patching.scratch.torch.from_file", r"found: cannot map"),
    ],
)
def test_a_disk_that_has_no_place_for_them_is_told_before_the_work(
    source: Source, monkeypatch: pytest.MonkeyPatch, place: str, told: str
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if place.endswith("from_file"):
            raise RuntimeError("cannot map")
        return type("Usage", (), {"free": 100_000})

    folder = source("mixtral-bf16")
    monkeypatch.setattr(f"normprobe.{place}", refuse)
    with pytest.raises(CheckpointError, match=rf"no place for weights that are converted[^\n]*\n(.|\n)*{told}"):
        patched(folder, EXPERTS)
    assert [path.name for path in folder.parent.iterdir()] == ["source"]
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ
    assert not hooks._global_parameter_registration_hooks


def test_a_plan_needs_no_room_for_new_files(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 100_000})
    monkeypatch.setattr("normprobe.checkpoints.disk.shutil.disk_usage", lambda folder: usage)
    (plan,) = planned(str(source("mixtral-bf16")), [EXPERTS], FAST).plans
    assert plan.steps[0][1].sites


def test_a_plan_leaves_nothing_among_temporary_files(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    assert len(planned(str(source("mixtral-bf16")), [EXPERTS, SetEps(eps=1e-4)], FAST).plans) == 2
    assert list((tmp_path / "temporary").iterdir()) == []


CHILD = """
import sys, threading, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from normprobe.patching.options import PatchOptions
from normprobe.patching.run import patch
from normprobe.rewrites import Initialise
from normprobe.targets.options import TargetOptions

def anonymous():
    return next(int(row.split()[1]) for row in open("/proc/self/status") if row.startswith("RssAnon")) * 1024

def watch():
    global most
    while not over:
        most = max(most, anonymous())
        time.sleep(0.002)

def patched(folder):
    options = PatchOptions(level=None, target=TargetOptions(tokens=4))
    patch(folder, Path(folder + "-out"), [Initialise(scheme="gpt2", only="*0.mlp.experts*")], options)

patched(sys.argv[1])
before, most, over = anonymous(), 0, False
thread = threading.Thread(target=watch)
thread.start()
patched(sys.argv[2])
over = True
thread.join()
print(most - before)
"""


@linux
def test_a_mixture_takes_less_memory_than_the_experts_of_two_layers(tmp_path: Path) -> None:
    """48 MB of experts a layer, in four layers."""
    mixtral().to(torch.bfloat16).save_pretrained(tmp_path / "tiny")
    sizes = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 4096, "num_local_experts": 8}
    mixtral(**sizes).to(torch.bfloat16).save_pretrained(tmp_path / "large")
    command = [sys.executable, "-c", CHILD, str(tmp_path / "tiny"), str(tmp_path / "large")]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert int(ran.stdout) < 96e6
