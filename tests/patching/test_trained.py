"""A patched checkpoint is trained, resumed, saved, adapted and loaded with other heads as any of transformers is."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
)

import normprobe
from normprobe.errors import CheckpointError, SettingError
from normprobe.patching.options import PatchOptions
from normprobe.patching.run import patch
from normprobe.rewrites import AddQKNorm, Rewrite, ScaleResidual, ToDyT
from normprobe.targets.options import TargetOptions
from normprobe.targets.quiet import quiet
from tests.patching.checkpoints import HEADS, IDS, SIZES, gpt2, llama, logits, made, saved
from tests.patching.training import SAVED, STEPS, losses, rows, ways

Source = Callable[[str], Path]
REWRITES: list[Rewrite] = [AddQKNorm(start="calibrated"), ScaleResidual()]
WAYS = ("load", "code", "manifest")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patched Llama, which the tests only read."""
    folder = tmp_path_factory.mktemp("trained")
    return patch(str(saved(llama(), folder / "source")), folder / "out", REWRITES, PatchOptions(level=None)).out


def opened(way: str, folder: Path, **options: Any) -> Any:
    with quiet():
        return ways()[way](folder, **options)


def alike(folder: Path, wanted: Tensor) -> bool:
    return all(torch.equal(logits(opened(way, folder)), wanted) for way in WAYS)


@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(out: Path, tmp_path: Path, way: str) -> None:
    pytest.importorskip("accelerate")
    trainer, whole = losses(opened(way, out), tmp_path / "whole", rows())
    assert len(whole) == STEPS
    assert len(set(whole.values())) == STEPS
    stopped = tmp_path / "whole" / f"checkpoint-{SAVED}"
    for number, (start, other) in enumerate(itertools.product((stopped, out), WAYS)):
        _, rest = losses(opened(other, start), tmp_path / str(number), rows(), stopped)
        assert rest == {step: whole[step] for step in range(SAVED + 1, STEPS + 1)}, (start, other)
    trainer.save_model(str(tmp_path / "final"))
    assert alike(tmp_path / "final", logits(trainer.model))
    assert not torch.equal(logits(trainer.model), logits(opened(way, out)))


@pytest.mark.parametrize("way", WAYS)
def test_the_cache_changes_nothing_of_what_is_generated(out: Path, way: str) -> None:
    model = opened(way, out)
    with_cache, without = (
        model.generate(IDS[:, :4], max_new_tokens=8, do_sample=False, use_cache=use, pad_token_id=0)
        for use in (True, False)
    )
    assert torch.equal(with_cache, without)
    assert with_cache.shape[1] > 4


def test_files_of_any_size_are_saved_and_loaded(out: Path, tmp_path: Path) -> None:
    for way in WAYS:
        with quiet():
            opened(way, out).save_pretrained(tmp_path / way, max_shard_size="20KB")
        assert len(list((tmp_path / way).glob("*.safetensors"))) > 1
        assert alike(tmp_path / way, logits(opened("load", out)))


ALONE = """
import sys
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "normprobe":
            raise ImportError("normprobe is not here")
sys.meta_path.insert(0, Refusing())
import torch
from transformers import AutoModelForCausalLM
folder, again = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
model.save_pretrained(again, max_shard_size="20KB")
model = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True).eval()
with torch.no_grad():
    torch.save(model(torch.load(folder + "/../ids.pt")).logits, folder + "/../logits.pt")
assert "normprobe" not in sys.modules
"""


def test_no_normprobe_is_needed_to_load_and_save(out: Path, tmp_path: Path) -> None:
    torch.save(IDS, out.parent / "ids.pt")
    torch.save(None, out.parent / "logits.pt")
    run = [sys.executable, "-c", ALONE, str(out), str(tmp_path / "again")]
    subprocess.run(run, check=True, cwd=tmp_path, capture_output=True)
    wanted = logits(opened("load", out))
    assert torch.equal(torch.load(out.parent / "logits.pt"), wanted)
    assert alike(tmp_path / "again", wanted)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_dtype_that_is_asked_for_is_that_of_every_weight(out: Path, way: str, dtype: torch.dtype) -> None:
    model = opened(way, out, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    plain = AutoModelForCausalLM.from_pretrained(out.parent / "source", dtype=dtype)
    assert torch.equal(logits(model), logits(normprobe.apply_manifest(plain, out)))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_of_another_dtype_than_the_configuration_says(tmp_path: Path, stored: torch.dtype) -> None:
    folder = saved(llama().to(stored), tmp_path / "source")
    config = folder / "config.json"
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    (other,) = names.keys() - {stored}
    text = config.read_text()
    assert f'"{names[stored]}"' in text
    config.write_text(text.replace(names[stored], names[other]))
    found = patch(str(folder), tmp_path / "out", REWRITES, PatchOptions(level=None)).out
    for way in WAYS:
        assert {p.dtype for p in opened(way, found).parameters()} == {other}
        assert {p.dtype for p in opened(way, found, dtype=stored).parameters()} == {stored}
    assert alike(found, logits(opened("load", found)))


def test_another_dtype_to_patch_in_is_refused(out: Path, tmp_path: Path) -> None:
    options = PatchOptions(level=None, target=TargetOptions(dtype="bfloat16"))
    with pytest.raises(SettingError, match="patched in the dtype that most of its weights are stored in"):
        patch(str(out), tmp_path / "out", [AddQKNorm()], options)


@pytest.mark.parametrize("way", WAYS)
def test_it_is_placed_by_a_device_map(out: Path, way: str) -> None:
    pytest.importorskip("accelerate")
    assert torch.equal(logits(opened(way, out, device_map="cpu")), logits(opened("load", out)))


@pytest.mark.parametrize("way", WAYS)
def test_it_is_copied_pickled_and_compiled(out: Path, way: str) -> None:
    model = opened(way, out)
    wanted = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), wanted)
    assert torch.equal(logits(pickle.loads(pickle.dumps(model))), wanted)
    torch.testing.assert_close(logits(torch.compile(model, backend="eager", fullgraph=True)), wanted)


def test_the_model_below_the_head_has_the_changes_too(out: Path) -> None:
    with quiet():
        below = AutoModel.from_pretrained(out, trust_remote_code=True)
    assert isinstance(below, LlamaModel)
    whole = opened("load", out)
    with torch.no_grad():
        assert torch.equal(whole.lm_head(below(IDS).last_hidden_state), logits(whole))


def test_a_model_with_another_head_has_the_changes_too(out: Path, tmp_path: Path) -> None:
    with quiet():
        model = AutoModelForSequenceClassification.from_pretrained(out, trust_remote_code=True, pad_token_id=0)
        model.save_pretrained(tmp_path / "classes")
        again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classes", trust_remote_code=True)
    assert isinstance(model, LlamaForSequenceClassification)
    whole, ids = opened("load", out), {"input_ids": IDS}
    with torch.no_grad():
        assert torch.equal(model.model(**ids).last_hidden_state, whole.model(**ids).last_hidden_state)
    assert torch.equal(logits(again), logits(model))
    assert torch.equal(logits(normprobe.load(tmp_path / "classes")), logits(model))


def test_a_patched_model_without_a_head_is_loaded_with_one(tmp_path: Path) -> None:
    folder = saved(llama().model, tmp_path / "source")
    found = patch(str(folder), tmp_path / "out", [AddQKNorm()], PatchOptions(level=None)).out
    with quiet():
        below, model = (
            kind.from_pretrained(found, trust_remote_code=True) for kind in (AutoModel, AutoModelForCausalLM)
        )
        model.save_pretrained(tmp_path / "headed")
        again = AutoModel.from_pretrained(tmp_path / "headed", trust_remote_code=True)
    with torch.no_grad():
        wanted, *states = [each(IDS).last_hidden_state for each in (model.model, below, normprobe.load(found), again)]
    assert all(torch.equal(each, wanted) for each in states)
    assert model.model.layers[0].self_attn.q_proj.q_norm.weight.shape == (4, 8)


def test_weights_lie_where_memory_begins(tmp_path: Path) -> None:
    """Elsewhere kernels sum in another order, and the ways to load would differ in the last bits."""
    sizes = {**SIZES, "num_attention_heads": 4, "max_position_embeddings": 32}
    source = saved(made(BertModel, BertConfig(**sizes)), tmp_path / "source")
    found = patch(str(source), tmp_path / "out", [ToDyT()], PatchOptions(level=None)).out
    model = opened("load", found)
    assert {p.data_ptr() % 64 for p in model.parameters() if p.numel() % 16 == 0} == {0}
    plain = AutoModel.from_pretrained(source)
    with torch.no_grad():
        wanted = model(IDS[:1]).pooler_output
        for each in (AutoModel.from_pretrained(found, trust_remote_code=True), normprobe.apply_manifest(plain, found)):
            assert torch.equal(each.eval()(IDS[:1]).pooler_output, wanted)


def test_single_numbers_do_not_push_other_weights_off(tmp_path: Path) -> None:
    source = saved(llama(), tmp_path / "source")
    model = opened("load", patch(str(source), tmp_path / "out", [ToDyT()], PatchOptions(level=None)).out)
    assert {p.data_ptr() % 64 for p in model.parameters() if p.numel() % 16 == 0} == {0}
    assert {p.numel() for p in model.parameters()} & {1}


def test_changes_are_put_where_the_model_is(out: Path) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **HEADS})).to(torch.bfloat16)
    normprobe.apply_manifest(model, out)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}


def test_what_shares_memory_with_another_stays_where_it_is(tmp_path: Path) -> None:
    found = patch(
        str(saved(llama(tie_word_embeddings=True), tmp_path / "source")),
        tmp_path / "out",
        [AddQKNorm()],
        PatchOptions(level=None),
    )
    model = llama(tie_word_embeddings=True)
    aligned = model.model.norm.weight.data_ptr()
    for name, parameter in model.named_parameters():
        if name != "model.norm.weight":
            parameter.data = torch.empty(parameter.numel() + 1)[1:].view(parameter.shape)
    model.lm_head.weight = torch.nn.Parameter(model.model.embed_tokens.weight.data)
    normprobe.apply_manifest(model, found.out)
    places = {parameter.data_ptr() for parameter in model.parameters() if parameter.data_ptr() % 64}
    assert places == {model.model.embed_tokens.weight.data_ptr()} == {model.lm_head.weight.data_ptr()}
    assert model.model.norm.weight.data_ptr() == aligned
    assert torch.equal(logits(model), logits(normprobe.load(found.out)))


def test_weights_with_other_names_in_the_files_fill_a_model(source: Source, tmp_path: Path) -> None:
    """The experts of a Mixtral lie apart in the files, and are one tensor in the model."""
    folder = source("mixtral")
    found = patch(str(folder), tmp_path / "patched", [AddQKNorm()], PatchOptions(level=None)).out
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(normprobe.apply_manifest(model, found)), logits(opened("load", found)))


@pytest.mark.parametrize("other", [lambda: llama().model, lambda: llama(intermediate_size=128), gpt2])
def test_another_model_is_refused_and_stays_as_it_was(out: Path, other: Callable[[], Any]) -> None:
    model = other()
    before, text = copy.deepcopy(model.state_dict()), str(model)
    with pytest.raises(CheckpointError, match="is not what was patched"):
        normprobe.apply_manifest(model, out)
    assert str(model) == text
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*is_gradient_checkpointing")
@pytest.mark.parametrize("way", WAYS)
def test_adapters_are_trained_on_top_saved_and_loaded(out: Path, tmp_path: Path, way: str) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    before = logits(opened(way, out))
    trainer, _ = losses(peft.get_peft_model(opened(way, out), config), tmp_path / "run", rows())
    wanted = logits(trainer.model)
    assert not torch.equal(wanted, before)
    trainer.model.save_pretrained(tmp_path / "adapter")
    for other in WAYS:
        model = peft.PeftModel.from_pretrained(opened(other, out), tmp_path / "adapter")
        assert torch.equal(logits(model), wanted)
        assert torch.equal(logits(model.unload()), before)
