"""`--as`: a model that computes what another architecture does becomes a plain checkpoint of that one; nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    MistralConfig,
    MistralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)

import normprobe
from normprobe.errors import NormprobeError, SettingError
from normprobe.patching.alike.model import alike
from normprobe.patching.alike.tensors import Side, match
from normprobe.patching.options import PatchOptions
from normprobe.patching.run import Patched, patch
from normprobe.rewrites import AddQKNorm, FoldGains, FreezeBatchNorm, Initialise, Rewrite, SetEps
from normprobe.targets.gguf import load_gguf
from normprobe.targets.options import TargetOptions
from tests.patching.checkpoints import (
    HEADS,
    IDS,
    SIZES,
    config,
    contents,
    in_memory,
    llama,
    logits,
    made,
    saved,
    shards,
    stored,
    tokenizer,
)
from tests.targets.test_gguf import write as write_gguf

Source = Callable[[str], Path]
SHARED = AddQKNorm(start="calibrated", shared=True)


def written(folder: Path, model_type: str, rewrites: list[Rewrite], out: str = "out") -> Patched:
    return patch(str(folder), folder.parent / out, rewrites, PatchOptions(level=None, as_type=model_type))


def refusal(folder: Path, model_type: str, rewrites: list[Rewrite]) -> str:
    """What is said; nothing may be left."""
    beside = sorted(folder.parent.iterdir())
    with pytest.raises(NormprobeError) as caught:
        written(folder, model_type, rewrites)
    assert sorted(folder.parent.iterdir()) == beside
    return str(caught.value)


@pytest.mark.parametrize("rewrites", [[SHARED], [SHARED, FoldGains(), Initialise(seed=3)]], ids=["qk", "more"])
def test_a_llama_with_shared_gains_on_queries_and_keys_is_a_qwen3(source: Source, rewrites: list[Rewrite]) -> None:
    folder = source("llama-sharded")
    before = contents(folder)
    found = written(folder, "qwen3", rewrites)
    assert contents(folder) == before
    model = AutoModelForCausalLM.from_pretrained(found.out)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert torch.equal(logits(model), logits(in_memory(folder, rewrites)))
    assert found.manifest.loads == "plain"
    assert found.manifest.became is not None
    assert found.manifest.became.model_type == "qwen3"
    assert found.manifest.became.proof.max_abs == 0
    assert config(found.out)["architectures"] == ["Qwen3ForCausalLM"]
    assert not {"normprobe", "auto_map"} & config(found.out).keys()
    assert stored(found.out).keys() == model.state_dict().keys()
    assert {"chat_template.jinja", "LICENSE", "sub/notes.txt"} <= contents(found.out).keys()
    old, new = shards(folder), shards(found.out)
    assert {name: file for name, file in new.items() if name in old} == old


def test_a_gguf_file_becomes_another_architecture(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = tmp_path / "source" / "tiny.gguf"
    path.parent.mkdir()
    write_gguf(path)
    found = written(path, "mistral", [], "../out")
    model, plain = AutoModelForCausalLM.from_pretrained(found.out), load_gguf(path, TargetOptions(), str(path)).model
    assert type(model) is MistralForCausalLM
    assert torch.equal(logits(model), logits(plain))
    assert found.manifest.became is not None
    assert found.manifest.became.dropped == {}


def test_half_precision_stays_and_what_rounding_does_is_said(source: Source) -> None:
    folder = source("llama-sharded-bf16")
    found = written(folder, "qwen3", [SHARED])
    assert {t.dtype for t in stored(found.out).values()} == {torch.bfloat16}
    proof = found.manifest.became.proof if found.manifest.became else None
    assert proof is not None
    assert proof.tolerance is not None
    assert 0 < proof.max_abs <= proof.tolerance
    off = logits(AutoModelForCausalLM.from_pretrained(found.out, dtype="auto")) - logits(in_memory(folder, [SHARED]))
    assert float(off.abs().max()) == pytest.approx(proof.max_abs, abs=proof.tolerance)


def test_a_llama_is_a_mistral_that_sees_every_token(source: Source) -> None:
    folder = source("llama-sharded")
    found = written(folder, "mistral", [])
    model = AutoModelForCausalLM.from_pretrained(found.out)
    assert type(model) is MistralForCausalLM
    assert torch.equal(logits(model), logits(in_memory(folder, [])))
    assert config(found.out)["sliding_window"] is None
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert sorted(path.name for path in found.out.glob("*.safetensors")) == files
    for old, new in ((load_file(folder / name), load_file(found.out / name)) for name in files):
        assert old.keys() == new.keys()
        assert all(torch.equal(old[name], new[name]) for name in old)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    folder = saved(llama(tie_word_embeddings=True), tmp_path / "source")
    found = written(folder, "qwen3", [SHARED])
    assert "lm_head.weight" not in stored(found.out)
    model = AutoModelForCausalLM.from_pretrained(found.out)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits(model), logits(in_memory(folder, [SHARED])))


def test_biases_that_one_of_them_lacks_are_zeros(source: Source) -> None:
    folder = source("llama")
    found = written(folder, "qwen2", [])
    added = stored(found.out).keys() - stored(folder).keys()
    assert {name.rpartition(".")[2] for name in added} == {"bias"}
    assert len(added) == 6
    assert not any(bool(stored(found.out)[name].any()) for name in added)
    back = written(found.out, "llama", [], "back")
    assert stored(back.out).keys() == stored(folder).keys()
    assert all(torch.equal(tensor, stored(folder)[name]) for name, tensor in stored(back.out).items())


def test_biases_that_are_not_zeros_are_not_dropped(tmp_path: Path) -> None:
    folder = saved(llama(attention_bias=True), tmp_path / "source")
    assert "self_attn.o_proj.bias (32,)" in refusal(folder, "mistral", [])


def test_a_patch_with_code_becomes_plain_later(source: Source) -> None:
    folder = source("llama")
    first = patch(str(folder), folder.parent / "first", [SHARED], PatchOptions(level=None))
    assert first.manifest.loads == "code"
    second = written(first.out, "qwen3", [])
    assert second.manifest.loads == "plain"
    assert not list(second.out.glob("*.py"))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(second.out)), logits(normprobe.load(first.out)))


def test_eps_that_was_set_goes_into_the_new_configuration(source: Source) -> None:
    folder, rewrites = source("llama"), [SHARED, SetEps(1e-3)]
    found = written(folder, "qwen3", rewrites)
    assert config(found.out)["rms_norm_eps"] == 1e-3
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(found.out)), logits(in_memory(folder, rewrites)))


def test_one_gain_for_each_head_is_no_qwen3(source: Source) -> None:
    told = refusal(source("llama"), "qwen3", [AddQKNorm()])
    assert "qwen3 has model.layers.0.self_attn.q_norm.weight (8,)" in told
    assert "llama has model.layers.0.self_attn.q_proj.q_norm.weight (4, 8)" in told


def test_another_eps_is_no_qwen3(source: Source) -> None:
    told = refusal(source("llama"), "qwen3", [AddQKNorm(shared=True, eps=1e-3)])
    assert "max |Δ|" in told
    assert "rmsnorm, weight, eps 0.001; in qwen3 rmsnorm, weight, eps 1e-06" in told


def test_a_gpt2_is_no_llama(source: Source) -> None:
    told = refusal(source("gpt2"), "llama", [])
    assert "gpt2 is no llama" in told
    assert "transformer.wpe.weight (32, 32)" in told


def test_the_same_tensors_that_compute_something_else_are_refused(source: Source) -> None:
    told = refusal(source("llama"), "gemma", [])
    assert "every tensor has a place there, but the outputs differ" in told
    assert "one_plus_weight" in told


def test_experts_are_not_taken_for_a_dense_layer(source: Source) -> None:
    assert "mlp.experts.gate_up_proj (4, 128, 32)" in refusal(source("mixtral"), "mistral", [])


def test_a_window_that_short_inputs_do_not_show_is_not_lost(tmp_path: Path) -> None:
    model = made(MistralForCausalLM, MistralConfig(**SIZES, **HEADS, sliding_window=4096))
    folder = saved(model, tmp_path / "source")
    assert "sliding_window=4096" in refusal(folder, "llama", [])


def test_an_unknown_architecture_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="qwen3"):
        patch("nowhere", tmp_path / "out", [], PatchOptions(as_type="qwn3"))


def test_what_is_alike_shares_the_memory(source: Source) -> None:
    model = in_memory(source("llama"), [SHARED])
    found = alike(model, "qwen3", {"input_ids": IDS}, {})
    held = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    assert len(found.origins) == len(found.model.state_dict())
    for name, tensor in found.model.state_dict().items():
        assert tensor.data_ptr() == held[str(found.origins[name])], name


def test_every_name_may_be_another(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_attention_heads": 4, "max_position_embeddings": 32}
    folder = saved(made(BertForMaskedLM, BertConfig(**sizes)), tmp_path / "source", "20KB")
    found = written(folder, "ernie", [Initialise(only=("writers",), seed=5)])
    model = AutoModelForMaskedLM.from_pretrained(found.out)
    assert type(model).__name__ == "ErnieForMaskedLM"
    before = AutoModelForMaskedLM.from_pretrained(folder)
    normprobe.rewrite(before, Initialise(only=("writers",), seed=5), None)
    assert torch.equal(logits(model), logits(before))
    assert len(stored(found.out)) == len(stored(folder))
    assert set(shards(found.out).values()) == set(shards(folder).values())


def test_weights_that_the_other_does_not_take_are_not_drawn_at_random(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where files name them otherwise than the model."""
    folder, lost = source("llama"), "model.layers.1.mlp.up_proj.weight"

    def without(ours: Side, theirs: Side) -> dict[str, str | None]:
        return {name: old for name, old in match(ours, theirs).items() if name != lost}

    monkeypatch.setattr("normprobe.patching.alike.model.match", without)
    told = refusal(folder, "mistral", [])
    assert "MistralForCausalLM does not take the tensors of llama" in told
    assert lost in told


def test_tensors_are_told_by_their_place_where_names_do_not_say_it(source: Source) -> None:
    """Queries' norms and keys' norms have one shape, and every layer has them."""
    model = in_memory(source("llama"), [SHARED])
    found = alike(model, "qwen3", {"input_ids": IDS}, {}).origins
    for layer in (0, 1):
        for part in "qk":
            at = f"model.layers.{layer}.self_attn."
            assert found[f"{at}{part}_norm.weight"] == f"{at}{part}_proj.{part}_norm.weight"


def test_the_tokeniser_comes_along_and_gives_the_same_tokens(source: Source) -> None:
    folder = source("llama")
    tokenizer(folder)
    found = written(folder, "qwen3", [SHARED])
    had, has = (AutoTokenizer.from_pretrained(each)("abc 123")["input_ids"] for each in (folder, found.out))
    assert had == has == [1, 2, 3, 0, 28, 29, 30]


def test_a_tokeniser_that_would_give_other_tokens_is_refused(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = source("llama")
    tokenizer(folder)
    other = lambda path, trust: (lambda text: {"input_ids": [7]}, ())  # noqa: E731
    monkeypatch.setattr("normprobe.patching.alike.tokens.read_tokenizer", other)
    assert "gives other tokens" in refusal(folder, "qwen3", [SHARED])


def test_frozen_statistics_which_training_alone_shows_are_not_lost(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3}
    folder = saved(made(ResNetForImageClassification, ResNetConfig(**sizes)), tmp_path / "source")
    assert "in training the outputs differ" in refusal(folder, "resnet", [FreezeBatchNorm()])


def test_dropout_that_the_other_has_by_default_is_seen(source: Source) -> None:
    assert "llama is no seed_oss: in training the outputs differ" in refusal(source("llama"), "seed_oss", [])
